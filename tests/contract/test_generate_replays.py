"""Failures met in the field, replayed against engines with a text route of their own, and what is theirs alone.

The numbers W05.. are those of the project's list of wire bugs, as in test_wire_replays.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.base import Load
from adapters.errors import (
    EngineFailed,
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    GoodgateError,
    InvalidRequest,
    Overloaded,
    StreamInterrupted,
    UnsupportedParameter,
)
from adapters.registry import adapter_class
from adapters.types import INFORMATIONAL, Chunk
from tests.contract import sglang_transcripts, tensorrt_transcripts, tgi_transcripts
from tests.contract.conftest import CHAT, COMPLETIONS, GenerateSubject, chat, collect, completion
from tests.contract.test_wire_replays import CHAT_FIELDS, HELLO, delta, reasons_of, text_of
from tests.contract.twin import Reply, Twin, event, events


@asynccontextmanager
async def engine(name: str, **options: Any) -> AsyncIterator[tuple[Any, Twin]]:
    """A started adapter and the twin that it speaks to."""
    async with Twin() as twin:
        cls = adapter_class(name)
        adapter = cls(msgspec.convert({"url": twin.url, **options}, cls.Options))
        await adapter.start()
        try:
            yield adapter, twin
        finally:
            await adapter.close()


async def answer(subject: GenerateSubject, *steps: Any, **fields: Any) -> list[Chunk]:
    subject.says(*steps)
    return await collect(subject.adapter, chat(**fields))


async def failure(subject: GenerateSubject, reply: Reply, **fields: Any) -> GoodgateError:
    subject.twin.reply(subject.path, reply)
    with pytest.raises(GoodgateError) as caught:
        await collect(subject.adapter, chat(**fields))
    return caught.value


def generations(subject: GenerateSubject) -> list[dict[str, Any]]:
    """The bodies of generations; farewells go elsewhere."""
    return [json.loads(each.body) for each in subject.twin.requests if each.path == subject.path]


# ------------------------------ streams


async def test_w01_no_space_after_data_and_crlf_cut_between_two_reads(generate_subject: GenerateSubject) -> None:
    stream = generate_subject.stream("Hello", " world").replace(b"data: ", b"data:").replace(b"\n", b"\r\n")
    cut = stream.index(b"\r\n") + 1
    assert text_of(await answer(generate_subject, stream[:cut], 0.01, stream[cut:])) == "Hello world"


async def test_a_last_event_without_its_blank_line_still_counts(generate_subject: GenerateSubject) -> None:
    chunks = await answer(generate_subject, generate_subject.stream("Hello", " world")[:-1])
    assert (text_of(chunks), reasons_of(chunks)) == ("Hello world", ["stop"])


async def test_a_character_cut_between_two_reads_is_whole(generate_subject: GenerateSubject) -> None:
    stream = generate_subject.stream("é").replace(rb"\u00e9", "é".encode())
    cut = stream.index("é".encode()) + 1
    assert text_of(await answer(generate_subject, stream[:cut], 0.01, stream[cut:])) == "é"


async def test_w26_what_grows_or_what_is_new_both_come_out_as_what_is_new(generate_subject: GenerateSubject) -> None:
    chunks = await answer(generate_subject, generate_subject.stream("a", "b", "c"))
    assert [chunk.text for chunk in chunks if chunk.text] == ["a", "b", "c"]
    assert reasons_of(chunks) == ["stop"]


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
async def test_w05_nothing_of_a_stop_string_leaks(
    generate_subject: GenerateSubject, pieces: list[str], text: str
) -> None:
    chunks = await answer(generate_subject, generate_subject.stream(*pieces), stop=["END", "never"])
    assert (text_of(chunks), reasons_of(chunks)) == (text, ["stop"])


async def test_w05_an_engine_that_does_not_see_the_stop_string_is_left(generate_subject: GenerateSubject) -> None:
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


async def test_half_a_character_waits_for_its_other_half() -> None:
    """An engine that sends all text so far may still repair its end."""
    async with engine("triton_server") as (adapter, twin):
        pieces = [tensorrt_transcripts.triton(text, finish_reason="None") for text in ("a", "a\ufffd", "aé")]
        last = tensorrt_transcripts.triton("aé\ufffd", finish_reason="stop")
        twin.reply("/v2/models/tensorrt_llm/generate_stream", Reply.stream(events([*pieces, last], done=False)))
        chunks = await collect(adapter, completion())
        assert [chunk.text for chunk in chunks[:-1]] == ["a", "é", "\ufffd"]


async def test_w07_an_error_under_status_200_keeps_its_meaning(generate_subject: GenerateSubject) -> None:
    for word, kind in (("validation", InvalidRequest), ("overloaded", Overloaded), ("generation", EngineFailed)):
        body = {"error": "Input validation error: `best_of` is bad", "error_type": word}
        assert type(await failure(generate_subject, Reply.stream(event(body)))) is kind


@pytest.mark.parametrize("end", ["event", "nested", "reset", "close"])
async def test_w08_an_error_after_the_first_tokens_is_seen_after_them(
    generate_subject: GenerateSubject, end: str
) -> None:
    steps: dict[str, list[Any]] = {
        "event": [event({"error": "CUDA out of memory", "error_type": "validation"})],
        "nested": [event({"error": {"message": "CUDA out of memory", "code": 400, "retryable": False}})],
        "reset": [0.02, "reset"],
        "close": ["end"],
    }
    generate_subject.says(generate_subject.stream("Hello", reason=None), *steps[end])
    seen: list[Chunk] = []

    async def read() -> None:
        async for chunk in generate_subject.adapter.generate(chat(), request_id="r"):
            seen.append(chunk)

    with pytest.raises(StreamInterrupted if end in {"reset", "close"} else EngineFailed):
        await read()
    assert text_of(seen) == "Hello"
    assert reasons_of(seen) == []


async def test_a_stream_that_ends_before_its_reason_is_no_success(generate_subject: GenerateSubject) -> None:
    broken_off = b":\n\n" if generate_subject.is_ensemble else generate_subject.stream("Hello", reason=None)
    assert type(await failure(generate_subject, Reply.stream(broken_off))) is StreamInterrupted


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"object": "error", "message": "bad top_p", "type": "BadRequest", "code": 400}', "bad top_p"),
        (400, b'{"error": "bad top_p"}', "bad top_p"),
        (401, b"", "refused the key"),
        (422, b'{"error": "bad top_p", "error_type": "validation"}', "bad top_p"),
        (422, b"Failed to deserialize the JSON body", "Failed to deserialize"),
        (502, b"<html><h1>502 Bad Gateway</h1></html>", "HTTP 502 without saying why"),
    ],
)
async def test_w09_error_bodies_of_every_shape_give_one_message(
    generate_subject: GenerateSubject, status: int, body: bytes, message: str
) -> None:
    error = await failure(generate_subject, Reply.plain(status, body))
    assert message in error.message
    assert error.status == {401: 502, 422: 400}.get(status, status)


@pytest.mark.parametrize("reason", ["abort", "timeout", "cancelled"])
async def test_a_reason_that_means_failure_is_an_error(generate_subject: GenerateSubject, reason: str) -> None:
    if generate_subject.is_ensemble:
        pytest.skip("it tells no reason")
    error = await failure(generate_subject, Reply.stream(generate_subject.stream("a", "b", reason=reason)))
    assert type(error) is EngineFailed


async def test_w04_an_unknown_reason_means_stop_and_is_counted(generate_subject: GenerateSubject) -> None:
    if generate_subject.is_ensemble:
        pytest.skip("it tells no reason")
    chunks = await answer(generate_subject, generate_subject.stream("a", reason="something new"))
    assert reasons_of(chunks) == ["stop"]
    assert generate_subject.adapter.unknown_finish_reasons == 1  # type: ignore[attr-defined]


async def test_w17_the_account_is_the_engines_or_counted(generate_subject: GenerateSubject) -> None:
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


async def test_silence_between_tokens_ends_at_its_deadline(generate_subject: GenerateSubject) -> None:
    generate_subject.adapter.options.token_timeout_s = 0.1
    generate_subject.says(generate_subject.stream("a", reason=None), b":\n\n", "hold")
    with pytest.raises(EngineTimeout, match="between tokens"):
        await collect(generate_subject.adapter, chat())
    await generate_subject.twin.client_left(within_s=1)


async def test_a_connection_is_used_again_after_a_stream_that_ended(generate_subject: GenerateSubject) -> None:
    for _ in range(3):
        await collect(generate_subject.adapter, chat())
    assert generate_subject.twin.num_connections == 1


async def test_a_choice_that_was_not_asked_for_is_a_clean_error() -> None:
    async with engine("sglang", model="small", route="native") as (adapter, twin):
        twin.reply("/generate", Reply.stream(event(sglang_transcripts.native("a", 1, index=3))))
        with pytest.raises(EngineProtocolError):
            await collect(adapter, completion())


# ------------------------------ requests

KNOWN = {
    "sglang-native": {
        "text", "sampling_params", "stream", "rid", "max_new_tokens", "min_new_tokens", "temperature", "top_p",
        "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop", "n", "json_schema",
        "ignore_eos", "logit_bias", "sampling_seed",
    },
    "tgi-generate": {
        "inputs", "parameters", "temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p",
        "do_sample", "max_new_tokens", "stop", "details", "seed", "top_n_tokens", "grammar",
    },
    "triton-llmapi": {
        "text_input", "streaming", "return_finish_reason",
        *(
            f"sampling_param_{name}"
            for name in (
                "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "stop", "seed",
                "exclude_input_from_output",
            )
        ),
    },
    "triton-ensemble": {
        "text_input", "max_tokens", "stop_words", "temperature", "top_k", "top_p", "repetition_penalty", "min_tokens",
        "presence_penalty", "frequency_penalty", "seed", "exclude_input_in_output", "stream",
        "return_num_input_tokens", "return_num_output_tokens",
    },
}  # fmt: skip


def flat(body: dict[str, Any]) -> dict[str, Any]:
    nested = [value for value in body.values() if isinstance(value, dict)]
    return {**body, **{key: value for each in nested for key, value in each.items()}}


@pytest.mark.parametrize("field", CHAT_FIELDS)
async def test_w19_every_field_reaches_the_engine_under_a_name_it_knows_or_is_refused(
    generate_subject: GenerateSubject, field: str, request: pytest.FixtureRequest
) -> None:
    value = CHAT_FIELDS[field]
    if field == "response_format":
        value = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    fields = {"logprobs": True} if field == "top_logprobs" else {}
    fields[field] = value
    if field == "parallel_tool_calls":
        fields["tools"] = CHAT_FIELDS["tools"]
    if field == "n":
        generate_subject.answers(num_choices=2)
    if field in generate_subject.adapter.capabilities.parameters | INFORMATIONAL:
        await collect(generate_subject.adapter, chat(**fields))
        body, *others = (flat(each) for each in generations(generate_subject))
        name = request.node.callspec.params["generate_subject"]
        assert set(body) <= KNOWN[name]
        fans_out = field == "n" and name != "sglang-native"
        assert len(others) == fans_out
        changes_form = field in {"response_format", "logprobs", "top_logprobs", "n"} | INFORMATIONAL
        assert changes_form or any(sent == value and type(sent) is type(value) for sent in body.values())
    else:
        with pytest.raises(UnsupportedParameter) as caught:
            await collect(generate_subject.adapter, chat(**fields))
        assert caught.value.param in fields
        assert generate_subject.twin.bodies == []


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6), ({"max_tokens": 5, "max_completion_tokens": 6}, 6)],
)
async def test_w20_either_name_of_the_limit_arrives_under_the_engines_own(
    generate_subject: GenerateSubject, fields: dict[str, Any], limit: int
) -> None:
    await collect(generate_subject.adapter, chat(**fields))
    body = flat(generations(generate_subject)[-1])
    names = {"max_tokens", "max_new_tokens", "sampling_param_max_tokens"} & set(body)
    assert [body[name] for name in names] == [limit]


async def test_without_a_limit_the_engines_own_short_default_never_applies(generate_subject: GenerateSubject) -> None:
    await collect(generate_subject.adapter, chat())
    body = flat(generations(generate_subject)[-1])
    if generate_subject.engine == "triton_server":
        assert 1024 in {body.get("max_tokens"), body.get("sampling_param_max_tokens")}
    else:
        assert body["max_new_tokens"] is None  # not absent: both read null as "until the context ends"


async def test_messages_become_the_models_own_prompt(generate_subject: GenerateSubject) -> None:
    """W10, W11, W12: parts are joined, absent content is empty, tool arguments are an object to the template."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": 2}}}]},
        {"role": "assistant", "content": []},
    ]
    await collect(generate_subject.adapter, chat(messages=messages))
    body = generations(generate_subject)[-1]
    prompt = body.get("text") or body.get("inputs") or body.get("text_input")
    # Engines put the beginning-of-sequence token in front themselves, so the template's is left out.
    assert prompt == ('[system]Be brief.[user]Hi there[assistant]{"x": 1}[assistant]{"x": 2}[assistant][assistant]')


async def test_a_text_route_without_a_template_refuses_chats_and_serves_completions() -> None:
    for name, options in (("tgi", {"route": "generate"}), ("sglang", {"route": "native"}), ("triton_server", {})):
        async with engine(name, model="small", **options) as (adapter, twin):
            with pytest.raises(UnsupportedParameter, match="messages"):
                await collect(adapter, chat())
            assert twin.bodies == []
            assert not adapter.capabilities.chat


async def test_choices_that_are_generations_of_their_own_get_seeds_of_their_own(
    generate_subject: GenerateSubject,
) -> None:
    generate_subject.answers(num_choices=2)
    await collect(generate_subject.adapter, chat(n=2, seed=7, max_tokens=2))
    bodies = [flat(body) for body in generations(generate_subject)]
    seeds = [body.get("seed", body.get("sampling_param_seed", body.get("sampling_seed"))) for body in bodies]
    assert sorted(seeds) == ([7] if generate_subject.engine == "sglang" else [7, 8])


async def test_one_failing_choice_ends_them_all(generate_subject: GenerateSubject) -> None:
    if generate_subject.engine == "sglang":
        pytest.skip("it has `n` itself")
    going_on = Reply.stream(generate_subject.stream("Hello", reason=None), "hold")
    generate_subject.twin.reply(generate_subject.path, going_on, Reply.plain(500, {"error": "boom"}))
    with pytest.raises(EngineFailed, match="boom"):
        await collect(generate_subject.adapter, chat(n=2))
    await generate_subject.twin.client_left(within_s=1)


# ------------------------------ leaving


async def leave(adapter: Any, request_id: str) -> None:
    async with contextlib.aclosing(adapter.generate(chat(), request_id=request_id)) as chunks:
        await anext(chunks)


async def farewells(twin: Twin, path: str, number: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(1):
        while len(found := [each for each in twin.requests if each.path == path]) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return [json.loads(each.body) for each in found]


@pytest.mark.parametrize("route", ["openai", "native"])
async def test_w14_sglang_is_told_which_request_was_left(route: str, text_model: Path) -> None:
    """By itself it notices a closed socket after about two seconds."""
    async with engine("sglang", model="small", route=route, chat_template=str(text_model)) as (adapter, twin):
        first = event(HELLO[0]) if route == "openai" else event(sglang_transcripts.native("Hello", 1))
        path = CHAT if route == "openai" else "/generate"
        twin.reply(path, Reply.stream(first, "hold"))
        twin.reply("/abort_request", Reply.plain(200, b""))
        await leave(adapter, "req-1")
        assert await farewells(twin, "/abort_request", 1) == [{"rid": "req-1"}]
        assert twin.bodies[0]["rid"] == "req-1"


async def test_w14_sglang_is_told_when_a_request_is_cancelled_before_its_first_token() -> None:
    async with engine("sglang", model="small") as (adapter, twin):
        twin.reply(CHAT, Reply.silent())
        task = asyncio.create_task(collect(adapter, chat(), "req-2"))
        await twin.asked()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await farewells(twin, "/abort_request", 1) == [{"rid": "req-2"}]


async def test_a_finished_request_is_not_aborted() -> None:
    async with engine("sglang", model="small") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(sglang_transcripts.CHAT))
        await collect(adapter, chat())
        await adapter.close()  # waits for whatever was still to be said
        assert [each.path for each in twin.requests] == [CHAT]


async def test_an_engine_that_does_not_answer_the_farewell_holds_nobody_up() -> None:
    async with engine("sglang", model="small") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(event(HELLO[0]), "hold"))
        twin.reply("/abort_request", Reply.dropped())
        begun = asyncio.get_running_loop().time()
        await leave(adapter, "req-3")
        assert asyncio.get_running_loop().time() - begun < 0.5
        await farewells(twin, "/abort_request", 1)


@pytest.mark.parametrize("dialect", ["llmapi", "ensemble"])
async def test_w14_triton_is_asked_to_cancel_under_the_same_id(dialect: str, text_model: Path) -> None:
    options = {"model": "m", "dialect": dialect, "chat_template": str(text_model)}
    async with engine("triton_server", **options) as (adapter, twin):
        twin.reply("/v2/models/m/generate_stream", Reply.stream(event({"text_output": "Hello"}), "hold"))
        twin.reply("/v2/models/m/generate", Reply.plain(500, {"error": "Request cancelled by client"}))
        await leave(adapter, "req-4")
        (cancel,) = await farewells(twin, "/v2/models/m/generate", 1)
        assert (cancel["text_input"], cancel["stop"]) == ("", True)
        assert [each.headers["triton-request-id"] for each in twin.requests] == ["req-4", "req-4"]


# ------------------------------ SGLang alone


async def test_sglang_tells_only_what_is_new_where_it_was_started_so() -> None:
    async with engine("sglang", model="small", route="native", incremental_output=True) as (adapter, twin):
        new = [sglang_transcripts.native("a", 1), sglang_transcripts.native("b", 2, {"type": "stop", "matched": 2})]
        twin.reply("/generate", Reply.stream(events(new)))
        assert text_of(await collect(adapter, completion())) == "ab"


async def test_sglang_takes_token_ids_and_a_schema_on_its_own_route(text_model: Path) -> None:
    options = {"model": "small", "route": "native", "chat_template": str(text_model)}
    async with engine("sglang", **options) as (adapter, twin):
        twin.reply("/generate", Reply.stream(sglang_transcripts.NATIVE))
        await collect(adapter, completion(prompt=[5, 6], top_k=0))
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
        await collect(adapter, chat(response_format=schema))
        await collect(adapter, chat(response_format={"type": "json_object"}))
        ids, with_schema, with_object = twin.bodies
        assert (ids["input_ids"], ids["sampling_params"]["top_k"]) == ([5, 6], -1)
        assert with_schema["sampling_params"]["json_schema"] == '{"type":"integer"}'
        assert with_object["sampling_params"]["json_schema"] == '{"type":"object"}'
        with pytest.raises(UnsupportedParameter, match="response_format"):
            await collect(adapter, chat(response_format={"type": "grammar"}))


async def test_sglang_gives_up_with_the_status_that_it_names() -> None:
    async with engine("sglang", model="small", route="native") as (adapter, twin):
        full = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
        twin.reply("/generate", Reply.stream(event(sglang_transcripts.native("", 0, full))))
        with pytest.raises(Overloaded, match="queue is full"):
            await collect(adapter, completion())


async def test_a_text_that_loses_its_stop_string_at_the_end_never_showed_it() -> None:
    """SGLang streams what may become a stop string, and trims it from the last event."""
    async with engine("sglang", model="small", route="native") as (adapter, twin):
        grown = [sglang_transcripts.native(text, n) for n, text in enumerate(("see", "see E", "see EN"), 1)]
        last = sglang_transcripts.native("see ", 4, {"type": "stop", "matched": "END"})
        twin.reply("/generate", Reply.stream(events([*grown, last])))
        chunks = await collect(adapter, completion(stop="END"))
        assert (text_of(chunks), reasons_of(chunks)) == ("see ", ["stop"])


# ------------------------------ TGI alone


async def tgi_body(text_model: Path, route: str, **fields: Any) -> dict[str, Any]:
    async with engine("tgi", route=route, chat_template=str(text_model)) as (adapter, twin):
        twin.reply(CHAT, Reply.stream(tgi_transcripts.CHAT))
        twin.reply("/generate_stream", Reply.stream(tgi_transcripts.NATIVE))
        await collect(adapter, chat(**fields))
        return flat(twin.bodies[-1])


@pytest.mark.parametrize("route", ["generate", "openai"])
async def test_w06_top_p_of_one_and_temperature_zero_are_never_sent_to_tgi(route: str, text_model: Path) -> None:
    greedy = await tgi_body(text_model, route, top_p=1, temperature=0, seed=3)
    assert not {"top_p", "seed"} & set(greedy)
    assert greedy.get("do_sample") is False if route == "generate" else greedy["temperature"] == 0
    assert ("temperature" in greedy) == (route == "openai")  # its OpenAI route reads 0 as greedy
    sampled = await tgi_body(text_model, route, top_p=0.9, temperature=0.7, seed=-1)
    assert (sampled["top_p"], sampled["temperature"], sampled["seed"]) == (0.9, 0.7, 2**64 - 1)
    assert "top_p" not in await tgi_body(text_model, route, temperature=0, top_p=0.5)  # it would sample again


async def test_tgi_samples_unless_it_is_asked_not_to(text_model: Path) -> None:
    assert (await tgi_body(text_model, "generate"))["do_sample"] is True
    assert "top_k" not in await tgi_body(text_model, "generate", top_k=-1)


@pytest.mark.parametrize("route", ["generate", "openai"])
async def test_w27_a_presence_penalty_never_reaches_tgi(route: str, text_model: Path) -> None:
    with pytest.raises(UnsupportedParameter, match=r"tgi.*presence_penalty"):
        await tgi_body(text_model, route, presence_penalty=0.5)
    assert "presence_penalty" not in await tgi_body(text_model, route, presence_penalty=0)


async def test_tgis_openai_route_gets_a_list_of_stops_and_never_our_models_name(text_model: Path) -> None:
    body = await tgi_body(text_model, "openai", stop="END")
    assert (body["stop"], body["model"]) == (["END"], "tgi")
    async with engine("tgi", model="small", adapter_id="poems") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(tgi_transcripts.CHAT))
        await collect(adapter, chat())
        assert twin.bodies[-1]["model"] == "poems"


async def test_tgi_is_asked_on_its_own_route_as_soon_as_there_is_a_template(text_model: Path) -> None:
    for options, path in (({}, CHAT), ({"chat_template": str(text_model)}, "/generate_stream")):
        async with engine("tgi", **options) as (adapter, twin):
            twin.reply(CHAT, Reply.stream(tgi_transcripts.CHAT))
            twin.reply("/generate_stream", Reply.stream(tgi_transcripts.NATIVE))
            await collect(adapter, chat())
            assert twin.requests[-1].path == path


async def test_w05_tgis_openai_route_leaks_no_stop_string_and_is_left_when_it_misses_one() -> None:
    async with engine("tgi") as (adapter, twin):
        twin.reply("/chat_tokenize", Reply.plain(200, {"tokenize_response": [{"id": 1}] * 9, "templated_text": "x"}))
        twin.reply(CHAT, Reply.stream(events([delta("see E"), delta("ND x"), delta("on")], done=False), "hold"))
        chunks = await collect(adapter, chat(stop=["END"]))
        await twin.client_left(within_s=1)
        assert (text_of(chunks), reasons_of(chunks)) == ("see ", ["stop"])
        assert chunks[-1].usage is not None
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (9, 2)
        twin.reply(CHAT, Reply.stream(events([delta("see END", "stop_sequence"), *HELLO[2:]])))
        chunks = await collect(adapter, chat(stop=["END"]))
        assert (text_of(chunks), reasons_of(chunks)) == ("see ", ["stop"])
        assert chunks[-1].usage is not None
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 2)


async def test_a_last_event_without_its_blank_line_is_cut_and_counted_too() -> None:
    async with engine("tgi") as (adapter, twin):
        for last, text in (("D", "see "), ("d", "see ENd")):
            stream = events([HELLO[2], delta("see EN"), delta(last, "stop")], done=False)
            twin.reply(CHAT, Reply.stream(stream[:-1]))
            chunks = await collect(adapter, chat(stop="END"))
            assert (text_of(chunks), reasons_of(chunks)) == (text, ["stop"])
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.prompt_tokens == 3


async def test_the_price_of_a_cut_answer_that_cannot_be_told_does_not_spoil_it(text_model: Path) -> None:
    async with engine("tgi", chat_template=str(text_model)) as (adapter, twin):
        twin.reply("/generate_stream", Reply.stream(event(tgi_transcripts.token("aENDb")), "hold"))
        twin.reply("/tokenize", Reply.plain(500, b""))
        chunks = await collect(adapter, chat(stop="END"))
        assert text_of(chunks) == "a"
        assert chunks[-1].usage is not None
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (0, 1)


async def test_w04_the_raw_reasons_of_tgis_completions_are_mapped() -> None:
    async with engine("tgi") as (adapter, twin):
        for reason in ("eos_token", "stop_sequence"):
            last = {"choices": [{"index": 0, "text": " world", "finish_reason": reason}], "usage": HELLO[2]["usage"]}
            first = {"choices": [{"index": 0, "text": "Hello", "finish_reason": ""}], "usage": None}
            twin.reply(COMPLETIONS, Reply.stream(events([first, last])))
            chunks = await collect(adapter, completion())
            assert (text_of(chunks), reasons_of(chunks)) == ("Hello world", ["stop"])
        assert adapter.unknown_finish_reasons == 0


async def test_special_tokens_of_tgi_are_no_text(text_model: Path) -> None:
    async with engine("tgi", chat_template=str(text_model)) as (adapter, twin):
        end = tgi_transcripts.token("</s>", 2, special=True, details=tgi_transcripts.details("eos_token"))
        twin.reply("/generate_stream", Reply.stream(events([tgi_transcripts.token("Hello"), end], done=False)))
        chunks = await collect(adapter, chat())
        assert (text_of(chunks), reasons_of(chunks)) == ("Hello", ["stop"])


async def test_w15_tgis_log_probabilities_take_the_shape_of_the_route(text_model: Path) -> None:
    other = {"id": 8, "text": "Hi", "logprob": -1.5, "special": False}
    stream = [
        tgi_transcripts.token("Hello", 1, top_tokens=[other]),
        tgi_transcripts.token(" é", 2, top_tokens=[], details=tgi_transcripts.details("length")),
    ]
    async with engine("tgi", chat_template=str(text_model)) as (adapter, twin):
        twin.reply("/generate_stream", Reply.stream(events(stream, done=False)))
        in_chat = await collect(adapter, chat(logprobs=True, top_logprobs=1))
        assert json.loads(bytes(in_chat[0].logprobs or b"")) == {
            "content": [
                {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello"), "top_logprobs": [
                    {"token": "Hi", "logprob": -1.5, "bytes": list(b"Hi")}
                ]}
            ]
        }  # fmt: skip
        in_completion = await collect(adapter, completion(logprobs=1))
        assert json.loads(bytes(in_completion[1].logprobs or b"")) == {
            "tokens": [" é"], "token_logprobs": [-0.5], "top_logprobs": [{}], "text_offset": [5],
        }  # fmt: skip
        assert [body["parameters"]["top_n_tokens"] for body in twin.bodies] == [1, 1]
        unasked = await collect(adapter, chat())
        assert [chunk.logprobs for chunk in unasked] == [None] * len(unasked)
        with pytest.raises(InvalidRequest, match="at most 5"):
            await collect(adapter, chat(logprobs=True, top_logprobs=6))


async def test_tgi_is_given_a_schema_and_refuses_what_is_none(text_model: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    body = await tgi_body(text_model, "generate", response_format=schema)
    assert body["grammar"] == {"type": "json", "value": {"type": "integer"}}
    with pytest.raises(UnsupportedParameter, match="response_format"):
        await tgi_body(text_model, "generate", response_format={"type": "json_object"})


async def test_tgi_tells_its_model_and_context() -> None:
    async with engine("tgi") as (adapter, twin):
        twin.reply("/info", Reply.plain(200, {"model_id": "org/small", "max_total_tokens": 2048, "version": "3.3.7"}))
        assert [(model.id, model.max_model_len) for model in await adapter.models()] == [("org/small", 2048)]


async def test_a_tool_call_of_tgi_has_one_head_and_the_reason_that_it_never_gives() -> None:
    def call(name: str | None, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        calls = [{"index": 0, "id": "0", "type": "function", "function": function}]
        return {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None, "tool_calls": calls}}]}

    async with engine("tgi") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(events([call("f", '{"x'), call(None, '": 1}'), delta("", "stop")])))
        chunks = await collect(adapter, chat(tools=CHAT_FIELDS["tools"]))
        first, second = (json.loads(bytes(chunk.tool_calls)) for chunk in chunks if chunk.tool_calls is not None)
        assert first[0]["function"]["name"] == "f"
        assert second == [{"index": 0, "function": {"arguments": '": 1}'}}]
        assert reasons_of(chunks) == ["tool_calls"]


# ------------------------------ TensorRT-LLM alone


async def test_a_dropped_connection_of_trtllm_serve_is_an_interruption() -> None:
    """It has no error event: an exception in the middle ends the connection."""
    async with engine("tensorrt_llm", model="small") as (adapter, twin):
        for end in ("end", "reset"):
            twin.reply(CHAT, Reply.stream(event(HELLO[0]), 0.02, end))
            with pytest.raises(StreamInterrupted):
                await collect(adapter, chat())


async def test_w21_structured_output_is_refused_where_it_would_have_no_effect() -> None:
    wanted = {"type": "json_object"}
    async with engine("tensorrt_llm", model="small") as (adapter, twin):
        with pytest.raises(UnsupportedParameter, match="response_format"):
            await collect(adapter, chat(response_format=wanted))
    async with engine("tensorrt_llm", model="small", guided_decoding=True) as (adapter, twin):
        twin.reply(CHAT, Reply.stream(tensorrt_transcripts.CHAT))
        await collect(adapter, chat(response_format=wanted))
        assert twin.bodies[-1]["response_format"] == wanted


async def test_the_statistics_that_reading_empties_are_never_read() -> None:
    async with engine("tensorrt_llm", model="small") as (adapter, twin):
        assert await adapter.load() == Load()
        assert [each.path for each in twin.requests] == ["/prometheus/metrics"]


# ------------------------------ Triton alone


async def test_tritons_switch_named_stop_is_never_thrown_by_a_stop_string(text_model: Path) -> None:
    for dialect, name in (("llmapi", "sampling_param_stop"), ("ensemble", "stop_words")):
        async with engine("triton_server", model="m", dialect=dialect, chat_template=str(text_model)) as (
            adapter,
            twin,
        ):
            twin.reply("/v2/models/m/generate_stream", Reply.stream(tensorrt_transcripts.LLMAPI))
            await collect(adapter, chat(stop="END"))
            assert "stop" not in twin.bodies[0]
            assert twin.bodies[0][name] == ["END"]


@pytest.mark.parametrize("dialect", ["llmapi", "ensemble"])
async def test_triton_never_decodes_greedily_unless_asked(dialect: str) -> None:
    async with engine("triton_server", model="m", dialect=dialect) as (adapter, twin):
        stream = tensorrt_transcripts.LLMAPI if dialect == "llmapi" else tensorrt_transcripts.ENSEMBLE
        twin.reply("/v2/models/m/generate_stream", Reply.stream(stream))
        await collect(adapter, completion())
        await collect(adapter, completion(temperature=0, top_k=5))
        await collect(adapter, completion(top_k=-1, seed=-1))
        plain, greedy, off = (
            {name.removeprefix("sampling_param_"): value for name, value in body.items()} for body in twin.bodies
        )
        assert (plain["temperature"], plain["top_p"]) == (1.0, 1.0)
        assert (greedy["top_k"], "temperature" in greedy) == (1, False)
        assert ("top_k" in off, off["seed"]) == (False, 2**64 - 1)


async def test_an_ensemble_that_ends_cleanly_is_done_and_says_which_end_it_was() -> None:
    async with engine("triton_server", dialect="ensemble") as (adapter, twin):
        twin.reply("/v2/models/ensemble/generate_stream", Reply.stream(tensorrt_transcripts.ENSEMBLE))
        assert reasons_of(await collect(adapter, completion(max_tokens=2))) == ["length"]
        assert reasons_of(await collect(adapter, completion(max_tokens=3))) == ["stop"]


async def test_without_a_tokenizer_tritons_events_are_counted() -> None:
    async with engine("triton_server", model="m") as (adapter, twin):
        twin.reply("/v2/models/m/generate_stream", Reply.stream(tensorrt_transcripts.LLMAPI))
        usage = (await collect(adapter, completion()))[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (0, 2)


async def test_tritons_load_comes_from_a_port_of_its_own() -> None:
    async with (
        Twin() as metrics,
        engine("triton_server", model="m", metrics_url=f"{metrics.url}/metrics") as (
            adapter,
            twin,
        ),
    ):
        metrics.reply("/metrics", Reply.plain(200, tensorrt_transcripts.TRITON_METRICS.encode(), "text/plain"))
        assert await adapter.load() == Load(3, 1, 0.25)
        assert adapter.capabilities.load == {"running", "waiting", "kv_usage"}
        assert twin.requests == []
    async with engine("triton_server", model="m") as (adapter, twin):
        assert await adapter.load() == Load()
        assert adapter.capabilities.load == frozenset()
        assert twin.requests == []


async def test_triton_lists_the_model_that_it_was_configured_with() -> None:
    for options, name in (({}, "tensorrt_llm"), ({"dialect": "ensemble"}, "ensemble"), ({"model": "m"}, "m")):
        async with engine("triton_server", **options) as (adapter, _):
            assert [model.id for model in await adapter.models()] == [name]


# ------------------------------ any OpenAI-compatible endpoint


async def test_a_compatible_endpoint_gets_what_its_configuration_lists_and_nothing_else() -> None:
    async with engine("openai_compatible", model="m", parameters=["max_tokens", "top_k"]) as (adapter, twin):
        twin.reply(CHAT, Reply.stream(events(HELLO)))
        await collect(adapter, chat(max_tokens=5, top_k=7))
        assert (twin.bodies[-1]["max_tokens"], twin.bodies[-1]["top_k"]) == (5, 7)
        with pytest.raises(UnsupportedParameter, match="temperature"):
            await collect(adapter, chat(temperature=0.5))


async def test_a_compatible_endpoint_may_know_the_limit_by_its_new_name() -> None:
    async with engine("openai_compatible", model="m", limit_field="max_completion_tokens") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(events(HELLO)))
        await collect(adapter, chat(max_tokens=5))
        assert twin.bodies[-1]["max_completion_tokens"] == 5


def test_a_parameter_that_is_none_is_an_error_of_the_configuration() -> None:
    options = adapter_class("openai_compatible").Options
    with pytest.raises(msgspec.ValidationError, match="'temprature' is no request field"):
        msgspec.convert({"url": "http://a", "parameters": ["temprature"]}, options)


async def test_a_compatible_endpoint_is_well_when_it_lists_its_models() -> None:
    async with engine("openai_compatible", model="m") as (adapter, twin):
        assert not (await adapter.health()).ready
        twin.reply("/v1/models", Reply.plain(200, {"data": [{"id": "m"}]}))
        assert (await adapter.health()).ready


async def test_a_template_that_is_not_there_is_told_at_the_start() -> None:
    for name in ("tgi", "triton_server"):
        with pytest.raises(EngineUnavailable, match=r"no chat template at /nowhere/x\.jinja"):
            async with engine(name, chat_template="/nowhere/x.jinja"):
                pass
