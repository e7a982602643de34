"""Failures that were met in the field, replayed against the adapters of engines that are reached over HTTP.

The numbers W01.. are those of the project's list of wire bugs; each test is named after what a user would see.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from adapters.base import Load
from adapters.errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    EngineFailed,
    EngineKeyRefused,
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    GoodgateError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    StreamInterrupted,
    UnsupportedParameter,
)
from adapters.openai_wire import StreamReader
from adapters.registry import adapter_class
from adapters.types import INFORMATIONAL, ChatRequest, Chunk, CompletionRequest, Usage
from tests.contract import sglang_transcripts, tensorrt_transcripts, tgi_transcripts
from tests.contract.conftest import (
    CHAT,
    COMPLETIONS,
    FANS_OUT,
    HTTP_ENGINES,
    HTTPSubject,
    chat,
    collect,
    completion,
)
from tests.contract.transcripts import METRICS
from tests.contract.twin import Reply, Twin, event, events


def delta(text: str | None = None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    content = {} if text is None else {"content": text}
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": content, "finish_reason": reason}],
        **more,
    }


HELLO = [
    delta("Hello"),
    delta(" world", "stop"),
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def reasons_of(chunks: list[Chunk]) -> list[str]:
    return [chunk.finish_reason for chunk in chunks if chunk.finish_reason is not None]


async def answer(subject: HTTPSubject, *steps: bytes | float | str, **fields: Any) -> list[Chunk]:
    subject.twin.reply(CHAT, Reply.stream(*steps))  # type: ignore[arg-type]
    return await collect(subject.adapter, chat(**fields))


async def failure(subject: HTTPSubject, reply: Reply, **fields: Any) -> GoodgateError:
    subject.twin.reply(CHAT, reply)
    with pytest.raises(GoodgateError) as caught:
        await collect(subject.adapter, chat(**fields))
    return caught.value


# ------------------------------ the shape of streams


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


async def test_w01_no_space_after_data_and_crlf_cut_between_two_reads(http_subject: HTTPSubject) -> None:
    stream = events(HELLO).replace(b"data: ", b"data:").replace(b"\n", b"\r\n")
    cut = stream.index(b"\r\n") + 1
    assert text_of(await answer(http_subject, stream[:cut], 0.01, stream[cut:])) == "Hello world"


async def test_w02_one_event_of_300_kb_passes(http_subject: HTTPSubject) -> None:
    long = "x" * 300_000
    assert text_of(await answer(http_subject, events([delta(long, "stop")]))) == long


async def test_w02_one_event_of_more_than_8_mib_is_a_clean_error(http_subject: HTTPSubject) -> None:
    error = await failure(http_subject, Reply.stream(event(delta("x" * (8 << 20)))))
    assert type(error) is EngineProtocolError


async def test_w03_a_stream_without_done_is_complete_after_its_finish_reason(http_subject: HTTPSubject) -> None:
    chunks = await answer(http_subject, events(HELLO, done=False))
    assert reasons_of(chunks) == ["stop"]
    assert chunks[-1].usage is not None


async def test_w03_a_last_event_without_its_blank_line_still_counts(http_subject: HTTPSubject) -> None:
    assert reasons_of(await answer(http_subject, events(HELLO[:2], done=False)[:-1])) == ["stop"]


async def test_a_stream_that_ends_before_its_finish_reason_is_no_success(http_subject: HTTPSubject) -> None:
    error = await failure(http_subject, Reply.stream(events(HELLO[:1], done=False)))
    assert type(error) is StreamInterrupted
    error = await failure(http_subject, Reply.stream(events(HELLO[:1], done=True)))
    assert type(error) is StreamInterrupted


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("eos_token", "stop"), ("eos", "stop"), ("end", "stop"), ("stop_sequence", "stop"), ("repetition", "stop"),
        ("limit", "length"), ("max_tokens", "length"), ("tool_use", "tool_calls"), ("refusal", "content_filter"),
        ("something new", "stop"),
    ],
)  # fmt: skip
async def test_w04_foreign_finish_reasons_become_those_of_openai(reason: str, meaning: str) -> None:
    async with Twin() as twin:
        adapter = await started("vllm", twin)
        twin.reply(CHAT, Reply.stream(events([delta("a", reason)])))
        chunks = await collect(adapter, chat())
        assert reasons_of(chunks) == [meaning]
        assert adapter.unknown_finish_reasons == (1 if reason == "something new" else 0)
        await adapter.close()


@pytest.mark.parametrize("reason", ["abort", "error", "timeout"])
async def test_a_finish_reason_that_means_failure_is_an_error(http_subject: HTTPSubject, reason: str) -> None:
    assert type(await failure(http_subject, Reply.stream(events([delta("a"), delta(None, reason)])))) is EngineFailed


@pytest.mark.parametrize("end", ["event", "flat event", "reset", "close"])
async def test_w08_an_error_after_the_first_tokens_is_seen_after_them(http_subject: HTTPSubject, end: str) -> None:
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


async def test_w16_empty_choices_first_middle_and_last_say_nothing(http_subject: HTTPSubject) -> None:
    empty = {"choices": [], "object": "chat.completion.chunk"}
    chunks = await answer(http_subject, events([empty, HELLO[0], empty, {"choices": None}, HELLO[1], empty]))
    assert text_of(chunks) == "Hello world"


@pytest.mark.parametrize("form", ["last", "null", "every", "absent"])
async def test_w17_usage_is_right_as_null_on_every_chunk_and_absent(http_subject: HTTPSubject, form: str) -> None:
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


async def test_cached_tokens_are_told_where_the_engine_tells_them(http_subject: HTTPSubject) -> None:
    last = (await collect(http_subject.adapter, chat()))[-1].usage
    assert last is not None
    assert last.cached_tokens == (None if http_subject.engine in {"openvino", "tgi"} else 4)


async def test_w18_comments_and_odd_pings_are_ignored(http_subject: HTTPSubject) -> None:
    noise = b": keep-alive\n\n:\n\ndata: : keepalive\n\nevent: ping\ndata: {}\n\nid: 7\n\ndata:\n\n"
    stream = noise + event(HELLO[0]) + noise + event(HELLO[1]) + noise + b"data: [DONE]\n\n"
    assert text_of(await answer(http_subject, stream)) == "Hello world"


async def test_w13_reasoning_is_read_under_either_name(http_subject: HTTPSubject) -> None:
    for name in ("reasoning", "reasoning_content"):
        thought = {"choices": [{"index": 0, "delta": {name: "hm", "content": None}}]}
        chunks = await answer(http_subject, events([thought, *HELLO]))
        assert [chunk.reasoning for chunk in chunks if chunk.reasoning] == ["hm"]
        assert text_of(chunks) == "Hello world"


async def test_w13_history_with_reasoning_under_either_name_is_accepted(http_subject: HTTPSubject) -> None:
    history = [{"role": "assistant", "content": "4", name: "hm"} for name in ("reasoning", "reasoning_content")]
    await answer(http_subject, events(HELLO), messages=[*history, {"role": "user", "content": "Sure?"}])
    assert [set(message) for message in http_subject.twin.bodies[-1]["messages"]] == [{"role", "content"}] * 3


async def test_unknown_fields_at_every_level_are_ignored(http_subject: HTTPSubject) -> None:
    odd = {"choices": [{"index": 0, "delta": {"content": "a", "x": [1]}, "y": {}, "finish_reason": "stop"}], "z": "z"}
    assert text_of(await answer(http_subject, events([odd]))) == "a"


async def test_tool_calls_and_logprobs_are_carried_as_they_came(http_subject: HTTPSubject) -> None:
    calls = [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}]
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


async def test_w23_a_compressed_stream_is_read(http_subject: HTTPSubject) -> None:
    http_subject.twin.reply(CHAT, Reply.stream(gzip.compress(events(HELLO)), Content_Encoding="gzip"))
    assert text_of(await collect(http_subject.adapter, chat())) == "Hello world"
    assert http_subject.twin.requests[-1].headers["accept-encoding"] == "identity"


# ------------------------------ errors


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest), (401, EngineKeyRefused), (403, EngineKeyRefused), (404, ModelNotFound),
        (408, EngineTimeout), (413, BodyTooLarge), (422, InvalidRequest), (424, EngineFailed), (429, Overloaded),
        (500, EngineFailed), (501, InvalidRequest), (502, EngineFailed), (503, Overloaded), (504, EngineTimeout),
        (529, Overloaded),
        (302, EngineProtocolError), (405, EngineProtocolError), (415, EngineProtocolError), (599, EngineFailed),
    ],
)  # fmt: skip
async def test_each_http_status_becomes_its_error(
    http_subject: HTTPSubject, status: int, kind: type[GoodgateError]
) -> None:
    body = {"error": {"message": "no", "type": "t", "param": "top_p", "code": status}}
    error = await failure(http_subject, Reply.plain(status, body))
    assert type(error) is kind
    assert error.param == "top_p"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"object": "error", "message": "bad top_p", "type": "BadRequest", "code": 400}', "bad top_p"),
        (400, b'{"error": {"message": "bad top_p", "code": 400}}', "bad top_p"),
        (401, b'{"error": "Unauthorized"}', "refused the key"),
        (401, b"", "refused the key"),
        (422, b'{"error": "bad top_p", "error_type": "validation"}', "bad top_p"),
        (422, b'{"detail": [{"loc": ["body", "top_p"], "msg": "bad"}]}', '"msg":"bad"'),
        (422, b"Failed to deserialize: top_p", "Failed to deserialize"),
        (502, b"<html><h1>502 Bad Gateway</h1></html>", "HTTP 502 without saying why"),
        (500, b"", "HTTP 500 without saying why"),
        (500, b"\xff\xfe", "\ufffd"),
        (500, b'"just a text"', "just a text"),
        (500, b"[1, 2]", "HTTP 500 without saying why"),
    ],
)
async def test_w09_error_bodies_of_every_shape_give_one_message(
    http_subject: HTTPSubject, status: int, body: bytes, message: str
) -> None:
    error = await failure(http_subject, Reply.plain(status, body))
    assert message in error.message
    assert "<" not in error.message
    assert error.status == {401: 502, 422: 400, 500: 502}.get(status, status)


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "This model's maximum context length is 2048 tokens.", "code": 400}},
        {"error": {"message": "Input length (9000) exceeds the limit", "type": "BadRequestError", "code": 400}},
        {"error": {"message": "request (9000) too long", "type": "exceed_context_size_error", "n_ctx": 2048}},
        {"error": {"message": "too long", "code": "context_length_exceeded"}},
    ],
)
async def test_overflow_is_recognised_in_each_engines_words(http_subject: HTTPSubject, body: dict[str, Any]) -> None:
    assert type(await failure(http_subject, Reply.plain(400, body))) is ContextLengthExceeded


async def test_w07_an_error_under_status_200_is_an_error(http_subject: HTTPSubject) -> None:
    in_stream = Reply.stream(event({"error": {"message": "top_p is out of range", "http_status_code": 422}}))
    in_json = Reply.plain(200, {"error": {"message": "top_p is out of range", "code": 422}})
    for reply in (in_stream, in_json):
        error = await failure(http_subject, reply)
        assert (type(error), error.message) == (InvalidRequest, "top_p is out of range")


@pytest.mark.parametrize(
    ("code", "kind"),
    [("context_length_exceeded", ContextLengthExceeded), ("overloaded", Overloaded), ("engine_failed", EngineFailed),
     ("unsupported_parameter", InvalidRequest), (9999, EngineFailed), ("\u00b2\u00b2\u00b2", EngineFailed)],
)  # fmt: skip
async def test_an_error_event_before_any_text_is_told_apart_by_its_code(
    http_subject: HTTPSubject, code: str | int, kind: type[GoodgateError]
) -> None:
    body = {"error": {"message": "no", "type": "t", "param": None, "code": code}}
    assert type(await failure(http_subject, Reply.stream(event(body)))) is kind


async def test_an_answer_that_is_no_stream_is_a_clean_error(http_subject: HTTPSubject) -> None:
    for reply in (Reply.plain(200, {"choices": []}), Reply.plain(200, b"<html>", "text/html")):
        assert type(await failure(http_subject, reply)) is EngineProtocolError


@pytest.mark.parametrize(("header", "wait_s"), [("7", 7), ("9999", 120), ("soon", None), ("-3", None), ("nan", None)])
async def test_a_full_engines_retry_after_is_kept_within_what_clients_accept(header: str, wait_s: float | None) -> None:
    async with Twin() as twin:
        adapter = await started("vllm", twin)
        twin.reply(CHAT, Reply.plain(503, {"error": {"message": "queue is full"}}, Retry_After=header))
        with pytest.raises(Overloaded) as caught:
            await collect(adapter, chat())
        assert caught.value.retry_after_s == wait_s
        await adapter.close()


async def test_an_engine_that_still_loads_is_unavailable_not_full(http_subject: HTTPSubject) -> None:
    body = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    assert type(await failure(http_subject, Reply.plain(503, body))) is EngineUnavailable


# ------------------------------ connections and deadlines


async def started(engine: str, twin: Twin, **options: Any) -> Any:
    cls = adapter_class(engine)
    adapter = cls(msgspec.convert({"url": twin.url, "model": "small", **options}, cls.Options))
    await adapter.start()
    return adapter


@pytest.mark.parametrize(
    ("steps", "waited_for"),
    [((), "before the first"), ((b": keep-alive\n\n",), "before the first"), ((event(HELLO[0]),), "between tokens")],
)
async def test_silence_ends_at_its_own_deadline_and_closes_the_socket(
    steps: tuple[bytes, ...], waited_for: str
) -> None:
    async with Twin() as twin:
        adapter = await started("vllm", twin, first_token_timeout_s=0.15, token_timeout_s=0.15)
        twin.reply(CHAT, Reply.stream(*steps, "hold") if steps else Reply.silent())
        begun = asyncio.get_running_loop().time()
        with pytest.raises(EngineTimeout, match=waited_for):
            await collect(adapter, chat())
        assert 0.1 < asyncio.get_running_loop().time() - begun < 1
        await twin.client_left(within_s=1)
        await adapter.close()


async def test_comments_do_not_keep_a_silent_engine_alive() -> None:
    async with Twin() as twin:
        adapter = await started("vllm", twin, first_token_timeout_s=5, token_timeout_s=0.15)
        pings = [step for _ in range(40) for step in (b": keep-alive\n\n", 0.03)]
        twin.reply(CHAT, Reply.stream(event(HELLO[0]), *pings, event(HELLO[1])))  # type: ignore[arg-type]
        with pytest.raises(EngineTimeout, match="between tokens"):
            await collect(adapter, chat())
        await adapter.close()


async def test_a_slow_reader_does_not_use_up_the_engines_deadline() -> None:
    async with Twin() as twin:
        adapter = await started("vllm", twin, token_timeout_s=0.1)
        twin.reply(CHAT, Reply.stream(event(HELLO[0]), 0.15, events(HELLO[1:])))
        text = ""
        async for chunk in adapter.generate(chat(), request_id="r"):
            text += chunk.text
            await asyncio.sleep(0.2)
        assert text == "Hello world"
        await adapter.close()


async def test_a_refused_connection_is_unavailable(http_subject: HTTPSubject) -> None:
    async with Twin() as gone:
        url = gone.url
    cls = adapter_class(http_subject.engine)
    adapter = cls(msgspec.convert({"url": url, "model": "small"}, cls.Options))
    await adapter.start()
    with pytest.raises(EngineUnavailable, match="does not accept connections"):
        await collect(adapter, chat())
    health = await adapter.health()
    assert (health.ready, bool(health.reason)) == (False, True)
    await adapter.close()


async def test_a_connection_is_used_again_after_a_stream_that_ended(http_subject: HTTPSubject) -> None:
    for _ in range(3):
        await collect(http_subject.adapter, chat())
    assert http_subject.twin.num_connections == (3 if http_subject.engine == "llama_cpp" else 1)


async def test_an_engine_that_closes_after_every_stream_is_asked_again_without_a_fault(
    http_subject: HTTPSubject,
) -> None:
    """llama.cpp does so in spite of its `Keep-Alive` header; its end may arrive in the middle of the next request."""
    http_subject.twin.reply(CHAT, replace(Reply.stream(events(HELLO)), keep_alive=False))
    for _ in range(30):
        assert text_of(await collect(http_subject.adapter, chat())) == "Hello world"
    assert len(http_subject.twin.bodies) == 30


async def test_a_pooled_connection_that_the_engine_closed_is_replaced_in_silence() -> None:
    async with Twin() as twin:
        adapter = await started("vllm", twin)
        hello = Reply.stream(events(HELLO))
        twin.reply(CHAT, hello, Reply.dropped(), hello)
        await collect(adapter, chat())
        assert text_of(await collect(adapter, chat())) == "Hello world"
        assert len(twin.bodies) == 3
        await adapter.close()


async def test_a_fresh_connection_that_the_engine_closes_is_not_tried_again(http_subject: HTTPSubject) -> None:
    error = await failure(http_subject, Reply.dropped())
    assert type(error) is EngineUnavailable
    assert len(http_subject.twin.bodies) == 1


async def test_an_engine_that_closes_a_fresh_connection_too_is_in_trouble() -> None:
    async with Twin() as twin:
        adapter = await started("vllm", twin)
        twin.reply(CHAT, Reply.stream(events(HELLO)), Reply.dropped())
        await collect(adapter, chat())
        with pytest.raises(EngineUnavailable):
            await collect(adapter, chat())
        assert len(twin.bodies) == 3
        await adapter.close()


async def test_health_tells_loading_ready_sick_and_gone(http_subject: HTTPSubject) -> None:
    loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    path = http_subject.health_path
    http_subject.twin.reply(path, Reply.plain(503, loading), Reply.plain(200, b""), Reply.plain(500, b""))
    seen = [await http_subject.adapter.health() for _ in range(3)]
    assert [health.ready for health in seen] == [False, True, False]
    assert seen[0].reason == "Loading model"


async def test_a_health_check_that_hangs_ends_after_two_seconds() -> None:
    async with Twin() as twin:
        adapter = await started("vllm", twin)
        twin.reply("/health", Reply.silent())
        begun = asyncio.get_running_loop().time()
        assert not (await adapter.health()).ready
        assert asyncio.get_running_loop().time() - begun < 3
        await adapter.close()


# ------------------------------ requests

CHAT_FIELDS: dict[str, Any] = {
    "max_tokens": 7, "max_completion_tokens": 8, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
    "min_p": 0.1, "seed": 11, "n": 2, "stop": ["END"], "presence_penalty": 0.5, "frequency_penalty": 0.25,
    "repetition_penalty": 1.1, "ignore_eos": True, "logit_bias": {"5": 1.0}, "logprobs": True, "top_logprobs": 2,
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required",
    "parallel_tool_calls": False, "response_format": {"type": "json_object"}, "reasoning_effort": "low",
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k",
    "safety_identifier": "s", "verbosity": "low", "stream": True, "stream_options": {"include_usage": False},
}  # fmt: skip

# What may be on the wire, by each engine's own documentation. The adapters' lists are checked against it, not copied.
COMMON = {
    "model", "messages", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop",
    "presence_penalty", "frequency_penalty", "ignore_eos",
}  # fmt: skip
TOOLS = {"tools", "tool_choice", "parallel_tool_calls", "response_format"}
DETAILS = {"logit_bias", "logprobs", "top_logprobs"}
KNOWN = {
    "vllm": COMMON
    | TOOLS
    | DETAILS
    | {"max_completion_tokens", "min_tokens", "repetition_penalty", "reasoning_effort"},
    "llama_cpp": COMMON | TOOLS | DETAILS | {"max_tokens", "repeat_penalty", "repeat_last_n"},
    "openvino": COMMON | {"max_tokens", "min_tokens", "repetition_penalty"},
    "goodgate_peer": (
        COMMON | TOOLS | DETAILS | {"max_tokens", "min_tokens", "repetition_penalty", "reasoning_effort"}
    ),
    "sglang": COMMON
    | TOOLS
    | DETAILS
    | {"max_completion_tokens", "min_tokens", "repetition_penalty", "reasoning_effort", "rid"},
    "tgi": {
        "model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop",
        "frequency_penalty", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format",
    },
    "tensorrt_llm": COMMON
    | DETAILS
    | {"max_completion_tokens", "min_tokens", "repetition_penalty", "reasoning_effort", "tools", "tool_choice"},
    "openai_compatible": {
        "model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "n", "stop",
        "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice",
        "parallel_tool_calls", "response_format", "reasoning_effort",
    },
}  # fmt: skip
OWN_LIMIT = dict.fromkeys(("vllm", "sglang", "tensorrt_llm"), "max_completion_tokens")


@pytest.mark.parametrize("field", CHAT_FIELDS)
async def test_w19_every_field_reaches_the_engine_under_a_name_it_knows_or_is_refused(
    http_subject: HTTPSubject, field: str
) -> None:
    fields = {field: CHAT_FIELDS[field]}
    if field in {"tool_choice", "parallel_tool_calls"}:
        fields["tools"] = CHAT_FIELDS["tools"]
    if field == "n":
        http_subject.answers(num_choices=2)
    request = chat(**fields)
    if field in http_subject.adapter.capabilities.parameters | INFORMATIONAL:
        await collect(http_subject.adapter, request)
        body, *others = http_subject.twin.bodies
        assert set(body) <= KNOWN[http_subject.engine]
        if field == "n" and http_subject.engine in FANS_OUT:
            assert len(others) == 1
        else:
            assert others == []
            assert field in INFORMATIONAL or _says(body, CHAT_FIELDS[field])
    else:
        with pytest.raises(UnsupportedParameter) as caught:
            await collect(http_subject.adapter, request)
        assert caught.value.param in fields
        assert http_subject.twin.bodies == []


def _says(body: dict[str, Any], value: Any) -> bool:
    """The value is in the body, under whatever name."""
    return any(sent == value and type(sent) is type(value) for sent in body.values())


async def test_what_was_not_asked_for_stays_absent(http_subject: HTTPSubject) -> None:
    await collect(http_subject.adapter, chat())
    defaults = (
        {"temperature", "top_p", "top_k", "min_p", "repeat_penalty"} if http_subject.engine == "llama_cpp" else set()
    )
    own = {"rid"} if http_subject.engine == "sglang" else set()
    assert set(http_subject.twin.bodies[-1]) == {"model", "messages", "stream", "stream_options"} | defaults | own


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": None}, None),
    ],
)
async def test_w20_either_name_of_the_limit_arrives_under_the_engines_own(
    http_subject: HTTPSubject, fields: dict[str, Any], limit: int | None
) -> None:
    await collect(http_subject.adapter, chat(**fields))
    body = http_subject.twin.bodies[-1]
    own = OWN_LIMIT.get(http_subject.engine, "max_tokens")
    assert body.get(own) == limit
    assert ({"max_tokens", "max_completion_tokens"} & set(body)) == ({own} if limit else set())


async def test_a_completion_asks_for_16_tokens_unless_told_otherwise(http_subject: HTTPSubject) -> None:
    await collect(http_subject.adapter, completion())
    await collect(http_subject.adapter, completion(max_tokens=3))
    assert [body["max_tokens"] for body in http_subject.twin.bodies] == [16, 3]
    assert http_subject.twin.requests[-1].path == COMPLETIONS


async def test_w11_tool_arguments_given_as_an_object_go_out_as_a_string(http_subject: HTTPSubject) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    await collect(http_subject.adapter, chat(messages=[{"role": "assistant", "tool_calls": [call]}]))
    sent = http_subject.twin.bodies[-1]["messages"][0]["tool_calls"][0]["function"]
    assert sent == {"name": "f", "arguments": '{"x":1}'}


async def test_empty_tools_are_not_sent_and_a_choice_among_none_is_refused(http_subject: HTTPSubject) -> None:
    await collect(http_subject.adapter, chat(tools=[], tool_choice="auto", parallel_tool_calls=True))
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(http_subject.twin.bodies[-1])
    with pytest.raises(GoodgateError) as caught:
        await collect(http_subject.adapter, chat(tool_choice="required"))
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


async def test_our_id_and_the_key_go_along(http_subject: HTTPSubject) -> None:
    async with Twin() as twin:
        twin.reply(CHAT, Reply.stream(events(HELLO)))
        adapter = await started(http_subject.engine, twin, api_key="sk-1")
        await collect(adapter, chat(), "our-id")
        headers = twin.requests[-1].headers
        assert headers["x-request-id"] == "our-id"
        assert headers["authorization"] == "Bearer sk-1"
        await adapter.close()


async def test_a_key_named_by_a_variable_is_read_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Twin() as twin:
        twin.reply(CHAT, Reply.stream(events(HELLO)))
        with pytest.raises(EngineUnavailable, match="ENGINE_KEY is not set"):
            await started("vllm", twin, api_key_env="ENGINE_KEY")
        monkeypatch.setenv("ENGINE_KEY", "sk-2")
        adapter = await started("vllm", twin, api_key_env="ENGINE_KEY")
        await collect(adapter, chat())
        assert twin.requests[-1].headers["authorization"] == "Bearer sk-2"
        await adapter.close()


async def test_the_only_model_of_an_engine_needs_no_name_and_a_change_behind_the_url_is_noticed() -> None:
    async with Twin() as twin:
        twin.reply(CHAT, Reply.stream(events(HELLO)), Reply.plain(404, b""), Reply.stream(events(HELLO)))
        twin.reply("/v1/models", models("a"), models("b"))
        adapter = await started("vllm", twin, model="")
        await collect(adapter, chat())
        with pytest.raises(ModelNotFound):
            await collect(adapter, chat())
        await collect(adapter, chat())
        assert [body["model"] for body in twin.bodies] == ["a", "a", "b"]
        await adapter.close()


async def test_several_models_need_a_name() -> None:
    async with Twin() as twin:
        twin.reply("/v1/models", models("a", "b"))
        adapter = await started("vllm", twin, model="")
        with pytest.raises(EngineUnavailable, match=r"set options.model to one of: a, b"):
            await collect(adapter, chat())
        await adapter.close()


def models(*names: str) -> Reply:
    return Reply.plain(200, {"data": [{"id": name, "max_model_len": 4096} for name in names]})


async def test_a_url_with_v1_at_its_end_is_the_same_engine() -> None:
    async with Twin() as twin:
        twin.reply(CHAT, Reply.stream(events(HELLO)))
        cls = adapter_class("vllm")
        adapter = cls(cls.Options(url=f"{twin.url}/v1/", model="small"))
        await adapter.start()
        assert text_of(await collect(adapter, chat())) == "Hello world"
        await adapter.close()


# ------------------------------ load and models


async def test_load_is_read_from_the_engines_own_metrics(http_subject: HTTPSubject) -> None:
    others = {
        "sglang": sglang_transcripts.METRICS,
        "tgi": tgi_transcripts.METRICS,
        "tensorrt_llm": tensorrt_transcripts.METRICS,
    }
    text = (METRICS | others).get(http_subject.engine, "")
    path = "/prometheus/metrics" if http_subject.engine == "tensorrt_llm" else "/metrics"
    http_subject.twin.reply(path, Reply.plain(200, text.encode(), "text/plain"))
    told = {
        "vllm": Load(3, 1, 0.25, 0.25),
        "llama_cpp": Load(3, 1),
        "openvino": Load(3, 1, 0.25),
        "goodgate_peer": Load(),
        "openai_compatible": Load(),
        "sglang": Load(3, 1, 0.25, 0.25),
        "tgi": Load(3, 1, 0.25),
        "tensorrt_llm": Load(3, 1, 0.25, 0.25),
    }
    load = await http_subject.adapter.load()
    assert load == told[http_subject.engine]
    declared = http_subject.adapter.capabilities.load
    assert declared == {field for field in load.__struct_fields__ if getattr(load, field) is not None}


async def test_load_is_unknown_where_the_engine_does_not_tell_or_tells_nonsense(http_subject: HTTPSubject) -> None:
    assert await http_subject.adapter.load() == Load()
    http_subject.twin.reply("/metrics", Reply.plain(200, b"vllm:num_requests_running{a=\n\xff\n nan\n", "text/plain"))
    assert await http_subject.adapter.load() == Load()


def in_two_pieces(status: int, body: bytes, content_type: str = "application/json") -> Reply:
    """A plain answer whose second half comes a moment later, as from any busy server."""
    headers = (("Content-Type", content_type), ("Content-Length", str(len(body))))
    return Reply(status, headers, (body[: len(body) // 2], 0.05, body[len(body) // 2 :]), is_chunked=False)


async def test_an_answer_in_two_pieces_is_read_whole(http_subject: HTTPSubject) -> None:
    listing = {"data": [{"id": "small", "max_model_len": 4096}]}
    http_subject.twin.reply("/v1/models", in_two_pieces(200, json.dumps(listing).encode()))
    http_subject.twin.reply("/info", in_two_pieces(200, b'{"model_id": "small", "max_total_tokens": 4096}'))
    http_subject.twin.reply("/props", Reply.plain(200, {"default_generation_settings": {"n_ctx": 4096}}))
    assert [model.id for model in await http_subject.adapter.models()] == ["small"]
    error = await failure(http_subject, in_two_pieces(400, b'{"error": {"message": "bad top_p", "param": "top_p"}}'))
    assert (error.message, error.param) == ("bad top_p", "top_p")


async def test_a33_a_redirect_is_not_followed_and_the_key_stays_here() -> None:
    async with Twin() as engine, Twin() as elsewhere:
        elsewhere.reply("/health", Reply.plain(200))
        engine.reply("/health", Reply.plain(302, Location=f"{elsewhere.url}/health"))
        adapter = await started("vllm", engine, api_key="sk-1")
        assert not (await adapter.health()).ready
        assert elsewhere.requests == []
        await adapter.close()


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


async def test_a34_a_tool_call_over_several_lines_cannot_end_our_event(http_subject: HTTPSubject) -> None:
    lines = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[\ndata: {"index":0,"function":{"name":"f",'
    lines += b'"arguments":\ndata: {"x":\ndata: 1}}}\ndata: ]}}]}\n\n'
    chunks = await answer(http_subject, lines + events([delta(None, "tool_calls")]))
    told = bytes(chunks[0].tool_calls or b"")
    assert b"\n" not in told
    assert json.loads(json.loads(told)[0]["function"]["arguments"]) == {"x": 1}


async def test_models_tell_their_context() -> None:
    async with Twin() as twin:
        twin.reply("/v1/models", models("small"))
        twin.reply("/props", Reply.plain(200, {"default_generation_settings": {"n_ctx": 1024, "x": 1}}))
        for engine, context in (("vllm", 4096), ("llama_cpp", 1024)):
            adapter = await started(engine, twin)
            assert [(model.id, model.max_model_len) for model in await adapter.models()] == [("small", context)]
            await adapter.close()


# ------------------------------ llama.cpp's quirks


def llama_body(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    cls = adapter_class("llama_cpp")
    body: dict[str, Any] = cls(cls.Options(url="http://127.0.0.1:1")).body(request, "small")  # type: ignore[attr-defined]
    return body


def test_llama_cpp_never_samples_by_its_own_defaults() -> None:
    body = llama_body(chat())
    assert {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")} == {
        "temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repeat_penalty": 1,
    }  # fmt: skip
    assert llama_body(chat(temperature=0, top_p=0.5))["temperature"] == 0


def test_llama_cpp_penalties_look_back_over_everything() -> None:
    assert "repeat_last_n" not in llama_body(chat(presence_penalty=0))
    for field in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert llama_body(chat(**{field: 1.5}))["repeat_last_n"] == 131_072
    assert llama_body(chat(repetition_penalty=1.5))["repeat_penalty"] == 1.5


@pytest.mark.parametrize(("seed", "sent"), [(7, 7), (-1, 0), (2**32 - 1, 0), (2**32 + 5, 5), (-(2**63), 0)])
def test_llama_cpp_gets_a_seed_of_32_bits_that_never_means_random(seed: int, sent: int) -> None:
    assert llama_body(chat(seed=seed))["seed"] == sent


def test_vllm_gets_a_seed_that_never_means_random() -> None:
    cls = adapter_class("vllm")
    adapter = cls(cls.Options(url="http://127.0.0.1:1"))
    assert [adapter.body(chat(seed=seed), "m")["seed"] for seed in (-1, 0, -2)] == [2**63 - 1, 0, -2]  # type: ignore[attr-defined]


def test_llama_cpp_has_top_k_off_at_zero() -> None:
    assert [llama_body(chat(top_k=top_k))["top_k"] for top_k in (-1, 0, 40)] == [0, 0, 40]


def test_llama_cpp_is_asked_for_at_least_one_alternative_so_that_logprobs_come() -> None:
    assert "logprobs" not in llama_body(chat())
    assert llama_body(chat(logprobs=True))["top_logprobs"] == 1
    assert llama_body(chat(logprobs=True, top_logprobs=3))["top_logprobs"] == 3
    assert llama_body(completion(logprobs=0))["logprobs"] == 1
    assert llama_body(completion(logprobs=4))["logprobs"] == 4


async def test_w15_llama_cpp_logprobs_of_completions_come_out_in_the_shape_of_completions() -> None:
    def piece(text: str, reason: str | None, alternatives: Any) -> dict[str, Any]:
        content = [{"token": text, "logprob": -0.5, "bytes": [1], "top_logprobs": alternatives}]
        return {"choices": [{"index": 0, "text": text, "logprobs": {"content": content}, "finish_reason": reason}]}

    async with Twin() as twin:
        adapter = await started("llama_cpp", twin)
        stream = [piece("Hel", None, [{"token": "Hel", "logprob": -0.5}]), piece("lo", "stop", None)]
        twin.reply(COMPLETIONS, Reply.stream(events(stream)))
        first, second, _ = await collect(adapter, completion(logprobs=1))
        assert [json.loads(bytes(chunk.logprobs or b"null")) for chunk in (first, second)] == [
            {"tokens": ["Hel"], "token_logprobs": [-0.5], "top_logprobs": [{"Hel": -0.5}], "text_offset": [0]},
            {"tokens": ["lo"], "token_logprobs": [-0.5], "top_logprobs": [{}], "text_offset": [3]},
        ]
        await adapter.close()
