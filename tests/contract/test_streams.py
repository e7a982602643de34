"""Streams as they come from the field: whatever their shape, the same chunks leave. Nothing is lost, nothing leaks."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from adapters.errors import (
    EngineFailed,
    EngineProtocolError,
    StreamInterrupted,
)
from adapters.registry import adapter_class
from adapters.types import Chunk, Usage
from adapters.wire.openai_wire import StreamReader
from tests.contract import sglang_transcripts, tensorrt_transcripts
from tests.contract.conftest import (
    CHAT,
    FANS_OUT,
    HTTP_ENGINES,
    GenerateSubject,
    HTTPSubject,
    chat,
    collect,
    completion,
)
from tests.contract.replay import HELLO, answer, delta, engine, failure, reasons_of, text_of
from tests.contract.twin import Reply, event, events

# ------------------------------ engines that speak OpenAI


@pytest.mark.parametrize("engine", HTTP_ENGINES)
@pytest.mark.parametrize("name", ["CHAT", "CHAT_TWO", "COMPLETION"])
def test_a_recorded_stream_reads_the_same_cut_at_every_byte(engine: str, name: str) -> None:
    stream = HTTPSubject(engine).transcript(name)
    request = (
        completion() if name == "COMPLETION" else chat(n=2 if name == "CHAT_TWO" and engine not in FANS_OUT else 1)
    )
    dialect = adapter_class(engine).dialect  # type: ignore[attr-defined]

    def read(*pieces: bytes) -> list[Chunk]:
        reader = StreamReader(engine, request, dialect)
        chunks = [chunk for piece in pieces for chunk in reader.feed(piece)]
        assert reader.is_done
        return chunks + reader.finish()

    whole = read(stream)
    for index in range(request.num_choices):
        assert "".join(chunk.text for chunk in whole if chunk.index == index) == "Hello world"
    assert read(*(stream[i : i + 1] for i in range(len(stream)))) == whole
    for cut in range(1, len(stream)):
        assert read(stream[:cut], stream[cut:]) == whole


@pytest.mark.replay("W01")
async def test_no_space_after_data_and_crlf_cut_between_two_reads(http_subject: HTTPSubject) -> None:
    stream = events(HELLO).replace(b"data: ", b"data:").replace(b"\n", b"\r\n")
    cut = stream.index(b"\r\n") + 1
    assert text_of(await answer(http_subject, stream[:cut], 0.01, stream[cut:])) == "Hello world"


@pytest.mark.replay("W02")
async def test_one_event_of_300_kb_passes(http_subject: HTTPSubject) -> None:
    long = "x" * 300_000
    assert text_of(await answer(http_subject, events([delta(long, "stop")]))) == long


@pytest.mark.replay("W02")
async def test_one_event_of_more_than_8_mib_is_a_clean_error(http_subject: HTTPSubject) -> None:
    error = await failure(http_subject, Reply.stream(event(delta("x" * (8 << 20)))))
    assert type(error) is EngineProtocolError


@pytest.mark.replay("W03")
async def test_a_stream_without_done_is_complete_after_its_finish_reason(http_subject: HTTPSubject) -> None:
    chunks = await answer(http_subject, events(HELLO, done=False))
    assert reasons_of(chunks) == ["stop"]
    assert chunks[-1].usage is not None


@pytest.mark.replay("W03")
async def test_a_last_event_without_its_blank_line_still_counts(http_subject: HTTPSubject) -> None:
    assert reasons_of(await answer(http_subject, events(HELLO[:2], done=False)[:-1])) == ["stop"]


async def test_a_stream_that_ends_before_its_finish_reason_is_no_success(http_subject: HTTPSubject) -> None:
    error = await failure(http_subject, Reply.stream(events(HELLO[:1], done=False)))
    assert type(error) is StreamInterrupted
    error = await failure(http_subject, Reply.stream(events(HELLO[:1], done=True)))
    assert type(error) is StreamInterrupted


@pytest.mark.replay("W04")
@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("eos_token", "stop"), ("eos", "stop"), ("end", "stop"), ("stop_sequence", "stop"), ("repetition", "stop"),
        ("limit", "length"), ("max_tokens", "length"), ("tool_use", "tool_calls"), ("refusal", "content_filter"),
        ("something new", "stop"),
    ],
)  # fmt: skip
async def test_foreign_finish_reasons_become_those_of_openai(reason: str, meaning: str) -> None:
    async with engine("vllm", model="small") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(events([delta("a", reason)])))
        chunks = await collect(adapter, chat())
        assert reasons_of(chunks) == [meaning]
        assert adapter.unknown_finish_reasons == (1 if reason == "something new" else 0)


@pytest.mark.parametrize("reason", ["abort", "error", "timeout"])
async def test_a_finish_reason_that_means_failure_is_an_error(http_subject: HTTPSubject, reason: str) -> None:
    assert type(await failure(http_subject, Reply.stream(events([delta("a"), delta(None, reason)])))) is EngineFailed


@pytest.mark.replay("W08")
@pytest.mark.parametrize("end", ["event", "flat event", "reset", "close"])
async def test_an_error_after_the_first_tokens_is_seen_after_them(http_subject: HTTPSubject, end: str) -> None:
    body = {"message": "CUDA out of memory", "type": "server_error", "code": 500}
    steps: dict[str, list[Any]] = {
        "event": [event({"error": body})],
        "flat event": [event({"object": "error", **body})],
        "reset": [0.02, "reset"],
        "close": ["end"],
    }
    http_subject.twin.reply(CHAT, Reply.stream(events(HELLO[:1], done=False), *steps[end]))
    seen: list[Chunk] = []

    async def read() -> None:
        async for chunk in http_subject.adapter.generate(chat(), request_id="r"):
            seen.append(chunk)

    with pytest.raises(EngineFailed if "event" in end else StreamInterrupted):
        await read()
    assert text_of(seen) == "Hello"
    assert reasons_of(seen) == []


@pytest.mark.replay("W16")
async def test_empty_choices_first_middle_and_last_say_nothing(http_subject: HTTPSubject) -> None:
    empty = {"choices": [], "object": "chat.completion.chunk"}
    chunks = await answer(http_subject, events([empty, HELLO[0], empty, {"choices": None}, HELLO[1], empty]))
    assert text_of(chunks) == "Hello world"


@pytest.mark.replay("W17")
@pytest.mark.parametrize("form", ["last", "null", "every", "absent"])
async def test_usage_is_right_as_null_on_every_chunk_and_absent(http_subject: HTTPSubject, form: str) -> None:
    def usage(completion_tokens: int) -> dict[str, int]:
        return {"prompt_tokens": 3, "completion_tokens": completion_tokens}

    streams = {
        "last": [delta("a"), delta("b", "stop"), {"choices": [], "usage": usage(2)}],
        "null": [delta("a", usage=None), delta("b", "stop", usage=None), {"choices": [], "usage": usage(2)}],
        "every": [delta("a", usage=usage(1)), delta("b", "stop", usage=usage(2))],
        "absent": [delta("a"), delta("b", "stop")],
    }
    chunks = await answer(http_subject, events(streams[form]))
    assert [chunk.usage for chunk in chunks[:-1]] == [None, None]
    last = chunks[-1].usage
    assert last is not None
    assert (last.prompt_tokens, last.completion_tokens) == (0 if form == "absent" else 3, 2)


@pytest.mark.replay("W17")
async def test_cached_tokens_are_told_where_the_engine_tells_them(http_subject: HTTPSubject) -> None:
    last = (await collect(http_subject.adapter, chat()))[-1].usage
    assert last is not None
    assert last.cached_tokens == (None if http_subject.engine in {"openvino", "tgi"} else 4)


@pytest.mark.replay("W18")
async def test_comments_and_odd_pings_are_ignored(http_subject: HTTPSubject) -> None:
    noise = b": keep-alive\n\n:\n\ndata: : keepalive\n\nevent: ping\ndata: {}\n\nid: 7\n\ndata:\n\n"
    stream = noise + event(HELLO[0]) + noise + event(HELLO[1]) + noise + b"data: [DONE]\n\n"
    assert text_of(await answer(http_subject, stream)) == "Hello world"


@pytest.mark.replay("W13")
async def test_reasoning_is_read_under_either_name(http_subject: HTTPSubject) -> None:
    for name in ("reasoning", "reasoning_content"):
        thought = {"choices": [{"index": 0, "delta": {name: "hm", "content": None}}]}
        chunks = await answer(http_subject, events([thought, *HELLO]))
        assert [chunk.reasoning for chunk in chunks if chunk.reasoning] == ["hm"]
        assert text_of(chunks) == "Hello world"


@pytest.mark.replay("W13")
async def test_history_with_reasoning_under_either_name_is_accepted(http_subject: HTTPSubject) -> None:
    history = [{"role": "assistant", "content": "4", name: "hm"} for name in ("reasoning", "reasoning_content")]
    await answer(http_subject, events(HELLO), messages=[*history, {"role": "user", "content": "Sure?"}])
    *answers, _ = http_subject.twin.bodies[-1]["messages"]
    told = [{name: text for name, text in each.items() if name not in ("role", "content")} for each in answers]
    assert told[0] == told[1]
    assert told[0] in ({}, {"reasoning": "hm"}, {"reasoning_content": "hm"})


async def test_unknown_fields_at_every_level_are_ignored(http_subject: HTTPSubject) -> None:
    odd = {"choices": [{"index": 0, "delta": {"content": "a", "x": [1]}, "y": {}, "finish_reason": "stop"}], "z": "z"}
    assert text_of(await answer(http_subject, events([odd]))) == "a"


async def test_tool_calls_and_logprobs_are_carried_as_they_came(http_subject: HTTPSubject) -> None:
    calls = [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}]
    logprobs = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]}
    stream = [
        {"choices": [{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": logprobs, "finish_reason": "tool_calls"}]},
    ]
    first, second, _ = await answer(http_subject, events(stream))
    assert first.tool_calls is not None
    assert json.loads(bytes(first.tool_calls)) == calls
    assert second.logprobs is not None
    assert json.loads(bytes(second.logprobs)) == logprobs


async def test_a_choice_that_was_not_asked_for_is_a_clean_error(http_subject: HTTPSubject) -> None:
    odd = {"choices": [{"index": 3, "delta": {"content": "a"}, "finish_reason": "stop"}]}
    assert type(await failure(http_subject, Reply.stream(events([odd])))) is EngineProtocolError


@pytest.mark.parametrize(
    "nonsense", [b"<html>", b'{"choices": [{"index": "x"}]}', b"[" * 100_000, b'{"choices": 5}', b"\xff"]
)
async def test_nonsense_in_a_stream_is_a_clean_error_that_does_not_repeat_it(
    http_subject: HTTPSubject, nonsense: bytes
) -> None:
    error = await failure(http_subject, Reply.stream(b"data: " + nonsense + b"\n\n"))
    assert type(error) is EngineProtocolError
    assert nonsense[:4].decode("latin-1") not in error.message


async def test_nothing_is_read_after_done(http_subject: HTTPSubject) -> None:
    assert (
        text_of(await answer(http_subject, events(HELLO) + event(delta("late")) + b"data: {broken\n\n"))
        == "Hello world"
    )


async def test_text_after_a_finish_reason_is_dropped(http_subject: HTTPSubject) -> None:
    chunks = await answer(http_subject, events([*HELLO[:2], delta("late"), delta(None, "length")]))
    assert (text_of(chunks), reasons_of(chunks)) == ("Hello world", ["stop"])


@pytest.mark.replay("W23")
async def test_a_compressed_stream_is_read(http_subject: HTTPSubject) -> None:
    http_subject.twin.reply(CHAT, Reply.stream(gzip.compress(events(HELLO)), Content_Encoding="gzip"))
    assert text_of(await collect(http_subject.adapter, chat())) == "Hello world"
    assert http_subject.twin.requests[-1].headers["accept-encoding"] == "identity"


# ------------------------------ answers in one piece


def piece(message: dict[str, Any], reason: str | None = "stop", **more: Any) -> Reply:
    return Reply.plain(200, {"choices": [{"index": 0, "message": message, "finish_reason": reason}], **more})


USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


async def test_an_engine_that_answers_in_one_piece_is_read_where_the_client_does_not_stream() -> None:
    """Some do so whatever they are asked for, and what stands before them may."""
    async with engine("vllm", model="small") as (adapter, twin):
        twin.reply(CHAT, piece({"role": "assistant", "content": "Hello world"}, usage=USAGE))
        chunks = await collect(adapter, chat())
        assert (text_of(chunks), reasons_of(chunks), chunks[-1].usage) == ("Hello world", ["stop"], Usage(3, 2))
        with pytest.raises(EngineProtocolError, match="answered application/json, not a stream"):
            await collect(adapter, chat(stream=True))


async def test_tool_calls_of_an_answer_in_one_piece_have_openais_form() -> None:
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in "ab"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with engine("vllm", model="small") as (adapter, twin):
        twin.reply(CHAT, piece({"content": None, "tool_calls": calls}, "tool_calls", usage=USAGE))
        first, _ = await collect(adapter, chat(tools=tools))
        assert first.finish_reason == "tool_calls"
        told = json.loads(bytes(first.tool_calls or b""))
        assert [(call["index"], call["function"]) for call in told] == [(n, calls[0]["function"]) for n in range(2)]
        assert [call["id"] for call in told] == ["a", "b"]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (piece({"content": "Hello"}, reason=None), StreamInterrupted),
        (piece({"content": ""}, reason=None), EngineProtocolError),
        (Reply.plain(200, b'{"choices": [{"message"'), EngineProtocolError),
        (Reply.plain(200, {"choices": []}), EngineProtocolError),
        (Reply.plain(200, {"error": {"message": "CUDA out of memory", "code": 500}}), EngineFailed),
    ],
)
async def test_an_answer_in_one_piece_is_whole_or_none(reply: Reply, kind: type[Exception]) -> None:
    async with engine("vllm", model="small") as (adapter, twin):
        twin.reply(CHAT, reply)
        with pytest.raises(kind):
            await collect(adapter, chat())


async def test_an_answer_in_one_piece_without_an_account_is_not_counted_as_one_token() -> None:
    async with engine("vllm", model="small") as (adapter, twin):
        twin.reply(CHAT, piece({"content": "word " * 100}))
        assert (await collect(adapter, chat()))[-1].usage == Usage(0, 126)


@pytest.mark.replay("W17", "A34")
@pytest.mark.parametrize(
    "usage",
    [{"prompt_tokens": -1, "completion_tokens": 2}, {"prompt_tokens": 10**30, "completion_tokens": 2}, "many", [1]],
)
async def test_a34_a_usage_that_cannot_be_true_does_not_spoil_the_answer(
    http_subject: HTTPSubject, usage: object
) -> None:
    chunks = await answer(http_subject, events([*HELLO[:2], {"choices": [], "usage": usage}]))
    assert text_of(chunks) == "Hello world"
    assert chunks[-1].usage == Usage(0, 2)


async def test_a_usage_whose_prompt_is_null_still_counts(http_subject: HTTPSubject) -> None:
    usage = {"prompt_tokens": None, "completion_tokens": 5}
    chunks = await answer(http_subject, events([*HELLO[:2], {"choices": [], "usage": usage}]))
    assert chunks[-1].usage == Usage(0, 5)


@pytest.mark.replay("A34")
async def test_a34_a_tool_call_over_several_lines_cannot_end_our_event(http_subject: HTTPSubject) -> None:
    lines = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[\ndata: {"index":0,"function":{"name":"f",'
    lines += b'"arguments":\ndata: {"x":\ndata: 1}}}\ndata: ]}}]}\n\n'
    chunks = await answer(http_subject, lines + events([delta(None, "tool_calls")]))
    told = bytes(chunks[0].tool_calls or b"")
    assert b"\n" not in told
    assert json.loads(json.loads(told)[0]["function"]["arguments"]) == {"x": 1}


# ------------------------------ engines with a text route of their own


@pytest.mark.replay("W01")
async def test_no_space_after_data_and_crlf_cut_on_text_routes(generate_subject: GenerateSubject) -> None:
    stream = generate_subject.stream("Hello", " world").replace(b"data: ", b"data:").replace(b"\n", b"\r\n")
    cut = stream.index(b"\r\n") + 1
    assert text_of(await answer(generate_subject, stream[:cut], 0.01, stream[cut:])) == "Hello world"


async def test_a_last_event_without_its_blank_line_still_counts_on_text_routes(
    generate_subject: GenerateSubject,
) -> None:
    chunks = await answer(generate_subject, generate_subject.stream("Hello", " world")[:-1])
    assert (text_of(chunks), reasons_of(chunks)) == ("Hello world", ["stop"])


async def test_a_character_cut_between_two_reads_is_whole(generate_subject: GenerateSubject) -> None:
    stream = generate_subject.stream("é").replace(rb"\u00e9", "é".encode())
    cut = stream.index("é".encode()) + 1
    assert text_of(await answer(generate_subject, stream[:cut], 0.01, stream[cut:])) == "é"


@pytest.mark.replay("W26")
async def test_what_grows_or_what_is_new_both_come_out_as_what_is_new(generate_subject: GenerateSubject) -> None:
    chunks = await answer(generate_subject, generate_subject.stream("a", "b", "c"))
    assert [chunk.text for chunk in chunks if chunk.text] == ["a", "b", "c"]
    assert reasons_of(chunks) == ["stop"]


@pytest.mark.replay("W05")
@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["see E", "ND x", " y"], "see "),
        (["see E", "ND"], "see "),
        (["E", "N", "D"], ""),
        (["E", "N", "d"], "ENd"),
        (["a END b END c"], "a "),
        (["aEEND"], "aE"),
        (["E"], "E"),
    ],
)
async def test_nothing_of_a_stop_string_leaks(generate_subject: GenerateSubject, pieces: list[str], text: str) -> None:
    chunks = await answer(generate_subject, generate_subject.stream(*pieces), stop=["END", "never"])
    assert (text_of(chunks), reasons_of(chunks)) == (text, ["stop"])


@pytest.mark.replay("W05")
async def test_an_engine_that_does_not_see_the_stop_string_is_left(generate_subject: GenerateSubject) -> None:
    stream = generate_subject.stream("Hello", " wEND x", " on", " and", " on", reason=None)
    generate_subject.says(stream, "hold")
    generate_subject.twin.reply("/tokenize", Reply.plain(200, [{"id": n} for n in range(9)]))
    chunks = await collect(generate_subject.adapter, chat(stop="END"))
    await generate_subject.twin.client_left(within_s=1)
    assert (text_of(chunks), reasons_of(chunks)) == ("Hello w", ["stop"])
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens == 2


@pytest.mark.replay("W26")
async def test_half_a_character_waits_for_its_other_half() -> None:
    """An engine that sends all text so far may still repair its end."""
    async with engine("triton_server") as (adapter, twin):
        pieces = [tensorrt_transcripts.triton(text, finish_reason="None") for text in ("a", "a\ufffd", "aé")]
        last = tensorrt_transcripts.triton("aé\ufffd", finish_reason="stop")
        twin.reply("/v2/models/tensorrt_llm/generate_stream", Reply.stream(events([*pieces, last], done=False)))
        chunks = await collect(adapter, completion())
        assert [chunk.text for chunk in chunks[:-1]] == ["a", "é", "\ufffd"]


async def test_a_stream_that_ends_before_its_reason_is_no_success(generate_subject: GenerateSubject) -> None:
    broken_off = b":\n\n" if generate_subject.is_ensemble else generate_subject.stream("Hello", reason=None)
    assert type(await failure(generate_subject, Reply.stream(broken_off))) is StreamInterrupted


@pytest.mark.replay("W04")
async def test_an_unknown_reason_means_stop_and_is_counted(generate_subject: GenerateSubject) -> None:
    if generate_subject.is_ensemble:
        pytest.skip("it tells no reason")
    chunks = await answer(generate_subject, generate_subject.stream("a", reason="something new"))
    assert reasons_of(chunks) == ["stop"]
    assert generate_subject.adapter.unknown_finish_reasons == 1  # type: ignore[attr-defined]


@pytest.mark.replay("W17")
async def test_the_account_is_the_engines_or_counted(generate_subject: GenerateSubject) -> None:
    usage = (await collect(generate_subject.adapter, completion(max_tokens=2)))[-1].usage
    assert usage is not None
    counted = 2 if generate_subject.engine == "triton_server" and not generate_subject.is_ensemble else 9
    assert (usage.prompt_tokens, usage.completion_tokens) == (counted, 2)  # "Once", and the token put before it
    assert usage.cached_tokens == (4 if generate_subject.engine == "sglang" else None)


async def test_an_account_that_cannot_be_true_does_not_spoil_the_answer(generate_subject: GenerateSubject) -> None:
    stream = generate_subject.stream("Hello", " world")
    for told in (b": 9", b': "9"'):  # in each accent, the number of prompt tokens
        stream = stream.replace(told, b": -9")
    chunks = await answer(generate_subject, stream)
    assert text_of(chunks) == "Hello world"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens >= 0


async def test_a_choice_that_was_not_asked_for_is_a_clean_error_on_text_routes() -> None:
    async with engine("sglang", model="small", route="native") as (adapter, twin):
        twin.reply("/generate", Reply.stream(event(sglang_transcripts.native("a", 1, index=3))))
        with pytest.raises(EngineProtocolError):
            await collect(adapter, completion())
