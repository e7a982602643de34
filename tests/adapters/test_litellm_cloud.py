"""The cloud adapter with the real litellm in its real process; only the providers at the other end are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from adapters.conformance import chat as _chat
from adapters.conformance import check_order, completion
from adapters.errors import (
    ContextLengthExceeded,
    EngineError,
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
    UnsupportedOperation,
    UnsupportedParameter,
)
from adapters.litellm_cloud import Adapter, CloudOptions, capabilities
from adapters.servers import litellm_process, litellm_worker
from adapters.servers.litellm_process import CallFailed, Facts
from adapters.servers.litellm_worker import HOW, MALICIOUS, PINNED, WINDOW, Unusable, describe, import_litellm
from adapters.types import ChatRequest, Chunk, EmbeddingRequest, GenerateRequest
from gateway.config import adapter_options, parse_config
from gateway.config import describe as describe_config
from tests.adapters.cloud import NO_CLOUD, ROOT, cloud_python
from tests.contract.twin import Reply, Twin, event, events

CHAT, COMPLETIONS, MESSAGES, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"
KEY = "sk-very-secret-0123456789"
PYTHON = cloud_python()
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}

needs_litellm = pytest.mark.skipif(PYTHON is None, reason=NO_CLOUD)
shared = pytest.mark.asyncio(loop_scope="module")  # one worker for many tests: its import takes seconds


def chat(**fields: Any) -> ChatRequest:
    return _chat(max_tokens=50, **fields)


def options(model: str, base: str, **more: Any) -> CloudOptions:
    return msgspec.convert(
        {"model": model, "api_base": base, "api_key": KEY, "python": PYTHON or "", **more}, CloudOptions
    )


async def collect(adapter: Adapter, request: GenerateRequest) -> list[Chunk]:
    async with asyncio.timeout(30):
        return [chunk async for chunk in adapter.generate(request, request_id="r")]


def text(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


class Provider:
    """A provider's end, and the adapter that reaches it."""

    def __init__(self, twin: Twin, adapter: Adapter) -> None:
        self.twin = twin
        self.adapter = adapter

    def forget(self) -> None:
        self.twin.requests.clear()
        self.twin._left.clear()
        self.twin._asked.clear()


@contextlib.asynccontextmanager
async def provider(model: str, base: str = "", **more: Any) -> AsyncIterator[Provider]:
    async with Twin() as twin:
        adapter = Adapter(options(model, twin.url + base, **more))
        try:
            await adapter.start()
            yield Provider(twin, adapter)
        finally:
            await adapter.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def openai_once() -> AsyncIterator[Provider]:
    async with provider("openai/small", "/v1") as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def anthropic_once() -> AsyncIterator[Provider]:
    async with provider("anthropic/claude-x") as made:
        yield made


@pytest.fixture
def openai(openai_once: Provider) -> Provider:
    openai_once.forget()
    return openai_once


@pytest.fixture
def anthropic(anthropic_once: Provider) -> Provider:
    anthropic_once.forget()
    return anthropic_once


# ------------------------------------------------------------------------------------------------------ what they say


def openai_chunk(delta: dict[str, Any] | None = None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "small", "choices": choices, **more}


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 4}}
HELLO = [openai_chunk({"content": "Hel"}), openai_chunk({"content": "lo"}, "stop"), openai_chunk(usage=USAGE)]


def said(kind: str, **fields: Any) -> bytes:
    return b"event: %b\n" % kind.encode() + event({"type": kind, **fields})


def delta(index: int, kind: str, **fields: Any) -> bytes:
    return said("content_block_delta", index=index, delta={"type": kind, **fields})


OPENING = said(
    "message_start",
    message={
        "id": "m", "type": "message", "role": "assistant", "model": "claude-x", "content": [], "stop_reason": None,
        "usage": {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 1},
    },
)  # fmt: skip
SAYS_HELLO = (
    said("content_block_start", index=0, content_block={"type": "text", "text": ""})
    + said("ping")
    + delta(0, "text_delta", text="Hel")
    + delta(0, "text_delta", text="lo")
    + said("content_block_stop", index=0)
)
CALLS_A_TOOL = (
    said("content_block_start", index=1, content_block={"type": "tool_use", "id": "t1", "name": "weather", "input": {}})
    + delta(1, "input_json_delta", partial_json='{"city": ')
    + delta(1, "input_json_delta", partial_json='"Rome"}')
    + said("content_block_stop", index=1)
)


def closing(reason: str) -> bytes:
    return said("message_delta", delta={"stop_reason": reason}, usage={"output_tokens": 12}) + said("message_stop")


# ---------------------------------------------------------------------------------------------------------- answers


@needs_litellm
@shared
async def test_anthropic_is_spoken_to_in_its_own_words_and_answers_in_ours(anthropic: Provider) -> None:
    anthropic.twin.reply(MESSAGES, Reply.stream(OPENING, SAYS_HELLO, CALLS_A_TOOL, closing("tool_use")))
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    chunks = await collect(
        anthropic.adapter, chat(messages=messages, tools=[TOOL], tool_choice="required", stop=["END"], temperature=0.5)
    )

    check_order(chunks, 1)
    assert text(chunks) == "Hello"
    assert chunks[-2].finish_reason == "tool_calls"
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (9, 12)
    assert chunks[-1].usage.cached_tokens == 4
    deltas = [call for chunk in chunks if chunk.tool_calls for call in msgspec.json.decode(chunk.tool_calls)]
    assert deltas[0]["function"]["name"] == "weather"
    assert (deltas[0]["index"], deltas[0]["id"], deltas[0]["type"]) == (0, "t1", "function")
    assert "".join(each["function"].get("arguments", "") for each in deltas) == '{"city": "Rome"}'
    assert not any("id" in each or "name" in each["function"] for each in deltas[1:])

    request = anthropic.twin.requests[-1]
    body = anthropic.twin.bodies[-1]
    assert request.headers["x-api-key"] == KEY
    assert body["model"] == "claude-x"
    assert body["system"] == [{"type": "text", "text": "Be brief."}]
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    assert [block["type"] for block in body["messages"][1]["content"]] == ["tool_use"]  # no text of litellm's beside it
    assert body["messages"][2]["content"][0] == {"type": "tool_result", "tool_use_id": "c1", "content": "4"}
    assert (body["max_tokens"], body["stop_sequences"], body["temperature"]) == (50, ["END"], 0.5)
    assert (body["tools"][0]["name"], body["tool_choice"]) == ("weather", {"type": "any"})


@needs_litellm
@shared
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("end_turn", "stop"), ("stop_sequence", "stop"), ("max_tokens", "length"), ("refusal", "content_filter")],
)
async def test_stop_reasons_of_anthropic(anthropic: Provider, theirs: str, ours: str) -> None:
    anthropic.twin.reply(MESSAGES, Reply.stream(OPENING, SAYS_HELLO, closing(theirs)))
    chunks = await collect(anthropic.adapter, chat())
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [ours]


@needs_litellm
@shared
async def test_thinking_comes_as_reasoning(anthropic: Provider) -> None:
    thinks = said("content_block_start", index=0, content_block={"type": "thinking", "thinking": ""}) + delta(
        0, "thinking_delta", thinking="hm"
    )
    anthropic.twin.reply(MESSAGES, Reply.stream(OPENING, thinks, closing("end_turn")))
    chunks = await collect(anthropic.adapter, chat())
    assert "".join(chunk.reasoning for chunk in chunks) == "hm"


@needs_litellm
@shared
async def test_log_probabilities_and_every_sampling_field_pass_through(openai: Provider) -> None:
    logprobs = {"content": [{"token": "A", "logprob": -0.5, "bytes": [65], "top_logprobs": []}]}
    first = openai_chunk({"content": "A"})
    first["choices"][0]["logprobs"] = logprobs
    openai.twin.reply(CHAT, Reply.stream(events([first, openai_chunk({}, "stop"), openai_chunk(usage=USAGE)])))
    fields = {
        "temperature": 0.3, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "logit_bias": {"5": 1.0}, "stop": ["END"], "logprobs": True, "top_logprobs": 2,
        "response_format": {"type": "json_object"},
    }  # fmt: skip
    chunks = await collect(openai.adapter, chat(**fields))
    assert msgspec.json.decode(chunks[0].logprobs or b"null") == logprobs
    sent = openai.twin.bodies[-1]
    assert {name: sent[name] for name in fields} == fields
    assert set(sent) == {*fields, "model", "messages", "max_tokens", "stream", "stream_options"}


@needs_litellm
@shared
async def test_a_stream_that_breaks_off_is_no_success_though_litellm_says_stop(
    openai: Provider, anthropic: Provider
) -> None:
    openai.twin.reply(CHAT, Reply.stream(events(HELLO[:1], done=False)))
    anthropic.twin.reply(MESSAGES, Reply.stream(OPENING, SAYS_HELLO))
    for adapter in (openai.adapter, anthropic.adapter):
        with pytest.raises(StreamInterrupted, match="before its finish reason"):
            await collect(adapter, chat())
    openai.twin.reply(COMPLETIONS, Reply.stream(event({"choices": [{"index": 0, "text": "Hel"}]})))
    with pytest.raises(StreamInterrupted, match="before its finish reason"):
        await collect(openai.adapter, completion())


@needs_litellm
@shared
async def test_an_account_that_the_provider_did_not_give_is_not_invented(openai: Provider) -> None:
    """litellm would estimate 8 prompt tokens here, with a tokenizer that is not the model's."""
    openai.twin.reply(CHAT, Reply.stream(events(HELLO[:2])))
    usage = (await collect(openai.adapter, chat()))[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (0, 2, None)


@needs_litellm
@shared
async def test_a_piece_that_is_repeated_for_long_is_an_answer_like_any_other(openai: Provider) -> None:
    """litellm would end it at the 100th."""
    again = [openai_chunk({"content": "again"})] * 150
    openai.twin.reply(CHAT, Reply.stream(events([*again, openai_chunk({}, "stop"), openai_chunk(usage=USAGE)])))
    assert text(await collect(openai.adapter, chat())) == "again" * 150


@needs_litellm
@shared
async def test_vectors_and_the_fields_that_they_need(openai: Provider) -> None:
    data = [{"object": "embedding", "index": index, "embedding": [index + 0.5, 1.0]} for index in (1, 0)]
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    openai.twin.reply(EMBEDDINGS, Reply.plain(200, {"object": "list", "data": data, "model": "small", "usage": usage}))
    for inputs in (["a", "b"], [[5, 6], [7]]):
        found = await openai.adapter.embed(EmbeddingRequest(model="small", input=inputs))
        assert (found.vectors, found.prompt_tokens) == ([[0.5, 1.0], [1.5, 1.0]], 3)
        assert openai.twin.bodies[-1] == {"model": "small", "input": inputs, "encoding_format": "float"}
    with pytest.raises(UnsupportedParameter, match="dimensions"):
        await openai.adapter.embed(EmbeddingRequest(model="small", input=["a"], dimensions=5))
    with pytest.raises(GoodgateError, match="one vector"):
        await openai.adapter.embed(EmbeddingRequest(model="small", input=["a", "b", "c"]))
    data[0]["embedding"].append(2.0)
    openai.twin.reply(EMBEDDINGS, Reply.plain(200, {"object": "list", "data": data, "model": "small", "usage": usage}))
    with pytest.raises(EngineProtocolError, match="not of the length asked for"):
        await openai.adapter.embed(EmbeddingRequest(model="small", input=["a", "b"]))


@needs_litellm
async def test_a_star_in_the_name_is_what_the_caller_asked_for() -> None:
    vectors = {"object": "list", "data": [{"index": 0, "embedding": [1.0]}], "model": "x", "usage": USAGE}
    async with provider("openai/*", "/v1") as made:
        stream = [openai_chunk({"content": "A"}), openai_chunk({}, "stop"), openai_chunk(usage=USAGE)]
        made.twin.reply(CHAT, Reply.stream(events(stream)))
        made.twin.reply(EMBEDDINGS, Reply.plain(200, vectors))
        for name in ("gpt-4o", "o3-mini"):
            assert text(await collect(made.adapter, chat(model=name))) == "A"
            assert made.twin.bodies[-1]["model"] == name
        await made.adapter.embed(EmbeddingRequest(model="text-embedding-3-small", input=["a"]))
        assert made.twin.bodies[-1]["model"] == "text-embedding-3-small"


@pytest.mark.parametrize("name", ["*", "openai*", "openai/*/*"])
def test_a_star_stands_for_one_model_of_one_provider(name: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="PROVIDER/"):
        msgspec.convert({"model": name}, CloudOptions)


# --------------------------------------------------------------------------------------------- leaving, slow readers


@needs_litellm
@shared
async def test_leaving_stops_a_provider_whose_connection_litellm_would_leave_open(anthropic: Provider) -> None:
    anthropic.twin.reply(MESSAGES, Reply.stream(OPENING, SAYS_HELLO, "hold"))
    async with contextlib.aclosing(anthropic.adapter.generate(chat(), request_id="r")) as chunks:
        assert (await anext(chunks)).text == "Hel"
    await anthropic.twin.client_left(within_s=1)
    assert (await anthropic.adapter.load()).running == 0


@needs_litellm
@shared
@pytest.mark.parametrize("make", [chat, completion, lambda: chat(n=2)])
async def test_leaving_before_the_first_token_stops_the_provider(
    openai: Provider, make: Callable[[], GenerateRequest]
) -> None:
    for path in (CHAT, COMPLETIONS):
        openai.twin.reply(path, Reply.silent())
    task = asyncio.create_task(collect(openai.adapter, make()))
    await openai.twin.asked()
    assert (await openai.adapter.load()).running == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await openai.twin.client_left(within_s=1)


@needs_litellm
@shared
async def test_leaving_a_completion_stops_the_provider(openai: Provider) -> None:
    openai.twin.reply(COMPLETIONS, Reply.stream(event({"choices": [{"index": 0, "text": "Hel"}]}), "hold"))
    async with contextlib.aclosing(openai.adapter.generate(completion(), request_id="r")) as chunks:
        assert (await anext(chunks)).text == "Hel"
    await openai.twin.client_left(within_s=1)


@needs_litellm
@shared
async def test_a_slow_reader_stops_its_own_stream_and_no_other(openai: Provider) -> None:
    piece = event(openai_chunk({"content": "x" * 2000}))
    openai.twin.reply(CHAT, Reply.stream(*[piece * 100] * 100), Reply.stream(events(HELLO)))
    async with contextlib.aclosing(openai.adapter.generate(_chat(), request_id="slow")) as slow:
        await anext(slow)
        await asyncio.sleep(0.5)
        running = openai.adapter._started()[0]._running
        assert running is not None
        [waiting] = running._calls.values()
        assert waiting.frames.qsize() <= WINDOW
        assert text(await collect(openai.adapter, chat())) == "Hello"  # meanwhile, through the same channel
        num_read = 1
        async for chunk in slow:
            num_read += bool(chunk.text)
            if num_read == 1000:
                break
    await openai.twin.client_left(within_s=1)


@needs_litellm
@shared
async def test_a_silent_provider_meets_our_deadlines(openai: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the first token, and one between tokens, each the shorter of the two here in its turn."""
    for reply, limits in (
        (Reply.silent(), {"first_token_timeout_s": 0.3, "token_timeout_s": 20.0}),
        (Reply.stream(events(HELLO[:1], done=False), "hold"), {"first_token_timeout_s": 20.0, "token_timeout_s": 0.3}),
    ):
        openai.forget()
        openai.twin.reply(CHAT, reply)
        monkeypatch.setattr(openai.adapter, "options", msgspec.structs.replace(openai.adapter.options, **limits))
        async with asyncio.timeout(10):
            with pytest.raises(EngineTimeout, match="silent"):
                await collect(openai.adapter, chat())
        await openai.twin.client_left(within_s=1)


# --------------------------------------------------------------------------------------------------------------- errors

ERRORS = [
    (400, "This model's maximum context length is 8 tokens.", ContextLengthExceeded),
    (400, "temperature is out of range", InvalidRequest),
    (401, f"Incorrect API key provided: {KEY}", EngineKeyRefused),
    (403, "You may not use this model", EngineKeyRefused),
    (404, "The model does not exist", ModelNotFound),
    (429, "Slow down", Overloaded),
    (500, "Oops", EngineFailed),
    (502, "Bad gateway", EngineFailed),
    (503, "Busy", Overloaded),
    (529, "Overloaded", Overloaded),
]


@needs_litellm
@shared
@pytest.mark.parametrize("wire", ["openai", "anthropic"])
@pytest.mark.parametrize(("status", "message", "error"), ERRORS)
async def test_what_a_provider_refuses_becomes_our_error_without_the_key(
    request: pytest.FixtureRequest,
    openai: Provider,
    anthropic: Provider,
    wire: str,
    status: int,
    message: str,
    error: type[GoodgateError],
) -> None:
    made = openai if wire == "openai" else anthropic
    if wire == "anthropic" and error is ContextLengthExceeded:
        message = "prompt is too long: 9 tokens > 5 maximum"
    reply = Reply.plain(status, {"type": "error", "error": {"type": "x", "message": message}}, Retry_After="7")
    made.twin.reply(CHAT, reply)
    made.twin.reply(MESSAGES, reply)
    with pytest.raises(error) as caught:
        await collect(made.adapter, chat())
    assert KEY not in caught.value.message
    assert caught.value.status != 401
    assert "litellm." not in caught.value.message
    if error is not EngineKeyRefused:
        assert message in caught.value.message
    if error is Overloaded:
        assert caught.value.retry_after_s == 7
    assert len(made.twin.requests) == 1  # no other try of litellm's or of an SDK's


@needs_litellm
@shared
async def test_a_key_that_a_provider_repeats_is_taken_out(openai: Provider) -> None:
    openai.twin.reply(CHAT, Reply.plain(400, {"error": {"message": f"Bad header: Bearer {KEY}"}}))
    with pytest.raises(InvalidRequest, match=r"Bearer \[key\]"):
        await collect(openai.adapter, chat())


@needs_litellm
@shared
@pytest.mark.parametrize("status", [302, 307, 308])
@pytest.mark.parametrize("wire", ["openai", "anthropic"])
async def test_a_redirect_takes_neither_the_prompt_nor_the_key_to_another_address(
    openai: Provider, anthropic: Provider, wire: str, status: int
) -> None:
    made = openai if wire == "openai" else anthropic
    async with Twin(otherwise=Reply.plain(200, {})) as stranger:
        reply = Reply.plain(status, b"", Location=f"{stranger.url}/elsewhere")
        made.twin.reply(CHAT, reply)
        made.twin.reply(MESSAGES, reply)
        with pytest.raises(EngineError, match=str(status)):
            await collect(made.adapter, chat())
        assert len(made.twin.requests) == 1
        assert not stranger.requests


@needs_litellm
@shared
async def test_a_connection_that_breaks_in_an_answer_and_an_error_event_are_told_apart(
    openai: Provider, anthropic: Provider
) -> None:
    openai.twin.reply(CHAT, Reply.stream(event(HELLO[0]), 0.05, "reset"))
    with pytest.raises(StreamInterrupted, match="dropped the connection"):
        await collect(openai.adapter, chat())
    openai.twin.reply(CHAT, Reply.stream(events([HELLO[0], {"error": {"message": "boom", "type": "server_error"}}])))
    with pytest.raises(EngineFailed, match="boom"):
        await collect(openai.adapter, chat())
    overloaded = said("error", error={"type": "overloaded_error", "message": "Overloaded"})
    anthropic.twin.reply(MESSAGES, Reply.stream(OPENING, SAYS_HELLO, overloaded))
    with pytest.raises(EngineFailed, match="Overloaded"):
        await collect(anthropic.adapter, chat())


@needs_litellm
@shared
async def test_a_connection_that_is_dropped_before_an_answer_may_be_tried_elsewhere(openai: Provider) -> None:
    openai.twin.reply(CHAT, Reply.dropped())
    with pytest.raises(EngineUnavailable) as caught:
        await collect(openai.adapter, chat())
    assert caught.value.retryable


def test_an_error_is_described_by_its_classes_its_first_status_and_its_own_words() -> None:
    class Timeout(Exception):
        status_code = 408

    Timeout.__module__ = "litellm.exceptions"
    told = describe(Timeout(f"litellm.Timeout: APITimeoutError - it took too long, with {KEY}"), (KEY,))
    assert (told["kind"], told["status"], told["message"]) == ("timeout", 408, "it took too long, with [key]")
    assert describe(ValueError("one\ntwo"), ())["message"] == "one"
    assert len(describe(ValueError("x" * 9000), ())["message"]) == 500


# ------------------------------------------------------------------------------------------- what a caller may ask for


@needs_litellm
@shared
async def test_what_the_provider_does_not_have_is_refused_by_name(anthropic: Provider) -> None:
    fields = {"seed": 3, "n": 2, "logprobs": True, "presence_penalty": 1.0, "top_k": 5}
    for field, value in fields.items():
        with pytest.raises(UnsupportedParameter) as caught:
            await collect(anthropic.adapter, chat(**{field: value}))
        assert caught.value.param == field
    with pytest.raises(UnsupportedParameter, match="prompt"):
        await collect(anthropic.adapter, completion())
    assert not anthropic.twin.requests


@needs_litellm
@shared
async def test_tools_that_would_make_others_connect_are_refused(openai: Provider) -> None:
    openai.twin.reply(CHAT, Reply.stream(events(HELLO)))
    for tool in ({"type": "mcp", "server_url": "http://127.0.0.1:9"}, {"type": "web_search_20250305", "name": "w"}):
        with pytest.raises(InvalidRequest, match="function"):
            await collect(openai.adapter, chat(tools=[tool]))
    assert not openai.twin.requests


@needs_litellm
@shared
@pytest.mark.parametrize(
    "field",
    ["model", "api_base", "base_url", "api_key", "extra_headers", "extra_body", "custom_llm_provider", "mock_response"],
)
async def test_the_worker_passes_on_no_field_but_those_it_knows(openai: Provider, field: str) -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}], field: "http://127.0.0.1:9"}
    events = await openai.adapter._started()[0].ask("chat", fields)
    with pytest.raises(CallFailed, match=field):
        await anext(events)
    assert not openai.twin.requests


def test_capabilities_follow_from_what_litellm_knows() -> None:
    def of(provider: str, *parameters: str, mode: str = "", text: bool = False) -> Any:
        return capabilities(Facts("1", provider, mode, frozenset(parameters), frozenset(), text))

    claude = of("anthropic", "max_tokens", "temperature", "tools", "user", mode="chat")
    assert claude.parameters == {"max_tokens", "max_completion_tokens", "temperature", "tools"}
    assert (claude.chat, claude.completions, claude.embeddings, claude.token_prompts) == (True, False, False, False)
    vectors = of("cohere", mode="embedding")
    assert (vectors.chat, vectors.completions, vectors.embeddings) == (False, False, True)
    old = of("text-completion-openai", "max_tokens", "logprobs", mode="completion", text=True)
    assert (old.chat, old.completions, old.token_prompts) == (False, True, True)
    assert "logprobs" not in old.parameters


async def test_an_engine_without_vectors_says_so() -> None:
    adapter = Adapter(options("anthropic/x", "http://127.0.0.1:9"))
    adapter.capabilities = msgspec.structs.replace(adapter.capabilities, embeddings=False)
    with pytest.raises(UnsupportedOperation, match="embeddings"):
        adapter.check_embedding(EmbeddingRequest(model="x", input=["a"]))


# -------------------------------------------------------------------------------------------- the process, its life


def worker_pid(adapter: Adapter) -> int:
    running = adapter._started()[0]._running
    assert running is not None
    supervisor = running._process.pid
    return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def read_off(pid: int) -> tuple[bytes, Path]:
    """Environment and command line of a process, and its working folder."""
    process = Path(f"/proc/{pid}")
    return (process / "environ").read_bytes() + (process / "cmdline").read_bytes(), (process / "cwd").readlink()


@needs_litellm
async def test_neither_our_environment_nor_the_key_can_be_read_off_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTHER_API_KEY", "an-unrelated-secret")
    monkeypatch.setenv("OPENAI_API_KEY", "an-unrelated-secret")
    monkeypatch.chdir(tmp_path)
    async with provider("openai/small", "/v1") as made:
        pid = worker_pid(made.adapter)
        seen, folder = read_off(pid)
        assert b"unrelated" not in seen
        assert KEY.encode() not in seen
        assert (folder.stat().st_mode & 0o777, str(tmp_path) in str(folder)) == (0o700, False)
        assert await made.adapter.version() == PINNED
        assert [model.id for model in await made.adapter.models()] == ["openai/small"]
        await made.adapter.close()
        assert not is_alive(pid)
        assert not folder.exists()
    assert not [task for task in asyncio.all_tasks() if "litellm" in task.get_name()]


@needs_litellm
async def test_a_worker_that_dies_fails_what_is_open_and_is_started_again_with_a_pause() -> None:
    async with provider("openai/small", "/v1") as made:
        made.twin.reply(CHAT, Reply.stream(event(HELLO[0]), "hold"))
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in made.adapter.generate(chat(), request_id="r"):
                begun.set()

        reading = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), 10)
        first = worker_pid(made.adapter)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(StreamInterrupted, match="ended in the middle"):
            await reading
        health = await made.adapter.health()
        assert (health.ready, "started again" in health.reason) == (False, True)
        with pytest.raises(EngineUnavailable) as caught:
            await collect(made.adapter, chat())
        assert caught.value.retryable

        await asyncio.sleep(1.1)
        made.twin.reply(CHAT, Reply.stream(events(HELLO)))
        both = await asyncio.gather(collect(made.adapter, chat()), collect(made.adapter, chat()))
        assert [text(chunks) for chunks in both] == ["Hello", "Hello"]  # by one new worker
        assert (await made.adapter.health()).ready
        assert worker_pid(made.adapter) != first


@needs_litellm
async def test_a_frozen_worker_is_not_ready_until_it_thaws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litellm_process, "PING_TIMEOUT_S", 0.3)
    async with provider("openai/small", "/v1") as made:
        pid = worker_pid(made.adapter)
        os.kill(pid, signal.SIGSTOP)
        health = await made.adapter.health()
        assert (health.ready, "has not answered" in health.reason) == (False, True)
        os.kill(pid, signal.SIGCONT)
        monkeypatch.undo()
        assert (await made.adapter.health()).ready
        assert worker_pid(made.adapter) == pid


@needs_litellm
async def test_who_leaves_while_a_dead_worker_is_removed_does_not_end_the_removal() -> None:
    async with provider("openai/small", "/v1") as made:
        running = made.adapter._started()[0]._running
        assert running is not None
        os.kill(worker_pid(made.adapter), signal.SIGKILL)
        async with asyncio.timeout(5):
            while running.is_open:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.001)
        asking = asyncio.create_task(collect(made.adapter, chat()))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
    assert not os.path.exists(running._folder)  # noqa: ASYNC240 - one look, at the end
    assert not [task for task in asyncio.all_tasks() if "litellm" in task.get_name()]


@needs_litellm
async def test_a_worker_that_says_what_none_would_is_no_start_that_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litellm_process, "START_TIMEOUT_S", 1.0)
    python = tmp_path / "python"
    babbler = "import os, sys, time; os.write(int(sys.argv[-1]), b'\\xff' * 9); time.sleep(60)"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{babbler}" "$@"\n')
    python.chmod(0o755)
    assert "was not ready" in await start_failure(python=str(python))


@needs_litellm
def test_the_worker_does_not_outlive_us_though_we_are_killed(tmp_path: Path) -> None:
    code = """
import asyncio
from tests.adapters.test_litellm_cloud import Adapter, options, worker_pid
async def main():
    adapter = Adapter(options("openai/small", "http://127.0.0.1:9"))
    await adapter.start()
    print(worker_pid(adapter), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # nobody is left to remove the worker's empty home
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as us:
        assert us.stdout is not None
        pid = int(us.stdout.readline())
        assert is_alive(pid)
        us.kill()
    deadline = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)


@needs_litellm
async def test_nothing_is_started_after_a_close() -> None:
    async with provider("openai/small", "/v1") as made:
        worker, _ = made.adapter._started()
        os.kill(worker_pid(made.adapter), signal.SIGKILL)
        asking = [asyncio.create_task(worker.facts()) for _ in range(3)]
        await worker.close()
        for task in asking:
            with contextlib.suppress(EngineUnavailable):  # those that were quicker than the news of its end
                await task
        with pytest.raises(EngineUnavailable, match="closed"):
            await worker.facts()


@needs_litellm
async def test_close_while_it_starts_leaves_nothing() -> None:
    adapter = Adapter(options("openai/small", "http://127.0.0.1:9"))
    starting = asyncio.create_task(adapter.start())
    await asyncio.sleep(0.3)
    await adapter.close()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not (await adapter.health()).ready


# ------------------------------------------------------------------------------------------------ offline, and pinned

SPY = """
import importlib.util, json, os, sys
seen = []
def spy(event, arguments):
    if event in {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"}:
        seen.append((event, str(arguments[1:])))
sys.addaudithook(spy)
spec = importlib.util.spec_from_file_location("litellm_worker", sys.argv[1])
litellm_worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(litellm_worker)
litellm = litellm_worker.import_litellm()
model = litellm_worker.Model(
    litellm, {"model": "anthropic/claude-x", "connection": {}, "silence_timeout_s": 1, "connect_timeout_s": 1}
)
print(json.dumps({
    "seen": seen, "provider": model.facts()["provider"], "stray": os.environ.get("GOODGATE_STRAY"),
    "telemetry": getattr(litellm, "telemetry", None), "callbacks": litellm.callbacks, "drops": litellm.drop_params,
    "home": os.listdir(os.environ["HOME"]),
}))
"""


@needs_litellm
def test_importing_litellm_reads_no_stray_file_and_connects_to_nobody(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    for place in (home, folder, tmp_path):
        (place / ".env").write_text("GOODGATE_STRAY=1\n")
    (home / ".env").unlink()
    result = subprocess.run(
        [str(PYTHON), "-I", "-c", SPY, str(litellm_worker.__file__)],
        cwd=folder, env={"PATH": os.environ["PATH"], "HOME": str(home)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = json.loads(result.stdout)
    assert told == {
        "seen": [], "provider": "anthropic", "stray": None, "telemetry": None, "callbacks": [], "drops": False,
        "home": [],
    }  # fmt: skip


@pytest.mark.parametrize("version", ["1.82.7", "1.82.8", "1.107.0", "1.107.3"])
def test_a_malicious_release_is_refused_before_it_is_imported(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(Unusable, match=f"{version}.*malicious.*{PINNED}"):
        import_litellm()
    assert "litellm" not in sys.modules


@pytest.mark.parametrize("version", ["1.82.6", "1.106.11", "1.110.2"])
def test_any_other_version_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    assert not version.startswith(MALICIOUS)
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(Unusable, match=f"only {PINNED} is used. Install it with: pip install") as caught:
        import_litellm()
    assert "malicious" not in str(caught.value)


def test_the_pin_is_the_same_everywhere() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["cloud"] == [f"litellm=={PINNED}"]
    assert f"litellm=={PINNED}" in (ROOT / "constraints-cloud.txt").read_text().splitlines()
    assert PINNED in HOW


async def start_failure(**given: Any) -> str:
    adapter = Adapter(options("openai/small", "http://127.0.0.1:9", **given))
    try:
        with pytest.raises(EngineUnavailable) as caught:
            await adapter.start()
        assert not (await adapter.health()).ready
        with pytest.raises(EngineUnavailable, match="not started"):
            await collect(adapter, chat())
        with pytest.raises(EngineUnavailable, match="not started"):
            await adapter.embed(EmbeddingRequest(model="small", input=["a"]))
        return caught.value.message
    finally:
        await adapter.close()


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    return str(tmp_path / "bare" / "bin" / "python")


async def test_a_python_without_litellm_says_what_to_install(bare_python: str) -> None:
    message = await start_failure(python=bare_python)
    assert "pip install 'goodgate[cloud]'" in message


async def test_a_python_may_be_named_from_our_working_folder(
    bare_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "pip install" in await start_failure(python=bare_python.removeprefix(f"{tmp_path}/"))


async def test_a_python_that_is_not_there_says_so() -> None:
    message = await start_failure(python="/nowhere/python")
    assert "/nowhere/python" in message


@needs_litellm
async def test_a_model_without_a_provider_says_how_to_write_it() -> None:
    adapter = Adapter(options("small", "http://127.0.0.1:9"))
    with pytest.raises(EngineUnavailable, match="PROVIDER/MODEL"):
        await adapter.start()
    await adapter.close()


def test_secrets_are_named_in_the_configuration_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUD_KEY", KEY)
    monkeypatch.setenv("AWS_KEY", "aws-secret")
    given = {
        "model": "bedrock/anthropic.claude-x", "api_key_env": "CLOUD_KEY", "aws_region_name": "eu-west-1",
        "aws_secret_access_key_env": "AWS_KEY",
    }  # fmt: skip
    config = parse_config({"models": [{"name": "m", "replicas": [{"engine": "litellm_cloud", "options": given}]}]})
    resolved = adapter_options(config.models[0].replicas[0], Adapter)
    setup = Adapter(msgspec.convert(resolved, CloudOptions))._setup()
    assert setup["connection"] == {
        "api_key": KEY, "aws_region_name": "eu-west-1", "aws_secret_access_key": "aws-secret",
    }  # fmt: skip
    assert setup["secrets"] == [KEY, "aws-secret"]
    shown = describe_config(config)
    assert KEY not in shown
    assert "aws-secret" not in shown


def test_the_frames_of_the_channel_are_bounded() -> None:
    async def read(data: bytes) -> litellm_worker.Frame | None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await litellm_worker.read_frame(reader)

    whole = litellm_worker.frame(7, litellm_worker.EVENT, json.dumps({"a": 1}).encode())
    assert asyncio.run(read(whole)) == (7, litellm_worker.EVENT, b'{"a": 1}')
    assert asyncio.run(read(whole[:-1])) is None
    assert asyncio.run(read(litellm_worker.HEAD.pack(litellm_worker.MAX_FRAME + 1, 1, b"E") + b"x")) is None
