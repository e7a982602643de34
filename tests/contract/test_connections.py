"""Sockets and deadlines: silence, closed connections, engines that have to be told that their client has left."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.errors import (
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
)
from adapters.registry import adapter_class
from tests.contract import sglang_transcripts
from tests.contract.conftest import (
    CHAT,
    GenerateSubject,
    HTTPSubject,
    chat,
    collect,
)
from tests.contract.replay import HELLO, engine, failure, text_of
from tests.contract.twin import Reply, Twin, event, events

# ------------------------------ engines that speak OpenAI


@pytest.mark.replay("G33")
@pytest.mark.parametrize(
    ("steps", "waited_for"),
    [
        ((), "before the first piece"),
        ((b": keep-alive\n\n",), "before the first piece"),
        ((event(HELLO[0]),), "between tokens"),
    ],
)
async def test_silence_ends_at_its_own_deadline_and_closes_the_socket(
    steps: tuple[bytes, ...], waited_for: str
) -> None:
    async with engine("vllm", model="small", first_token_timeout_s=0.15, token_timeout_s=0.15) as (adapter, twin):
        twin.reply(CHAT, Reply.stream(*steps, "hold") if steps else Reply.silent())
        begun = asyncio.get_running_loop().time()
        with pytest.raises(EngineTimeout, match=waited_for):
            await collect(adapter, chat())
        assert 0.1 < asyncio.get_running_loop().time() - begun < 1
        await twin.client_left(within_s=1)


@pytest.mark.replay("W18", "G33")
async def test_comments_do_not_keep_a_silent_engine_alive() -> None:
    async with engine("vllm", model="small", first_token_timeout_s=5, token_timeout_s=0.15) as (adapter, twin):
        pings = [step for _ in range(40) for step in (b": keep-alive\n\n", 0.03)]
        twin.reply(CHAT, Reply.stream(event(HELLO[0]), *pings, event(HELLO[1])))  # type: ignore[arg-type]
        with pytest.raises(EngineTimeout, match="between tokens"):
            await collect(adapter, chat())


async def test_a_slow_reader_does_not_use_up_the_engines_deadline() -> None:
    async with engine("vllm", model="small", token_timeout_s=0.1) as (adapter, twin):
        twin.reply(CHAT, Reply.stream(event(HELLO[0]), 0.15, events(HELLO[1:])))
        text = ""
        async for chunk in adapter.generate(chat(), request_id="r"):
            text += chunk.text
            await asyncio.sleep(0.2)
        assert text == "Hello world"


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


async def test_an_answer_that_nobody_asked_for_is_not_the_answer_to_the_next_request() -> None:
    def raw(text: str) -> bytes:
        said = {**HELLO[0], "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
        body = events([said])
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    async with engine("vllm", model="small") as (adapter, twin):
        twice = Reply(status=-1, steps=(raw("first"), 0.05, raw("somebody else's")), is_chunked=False)
        twin.reply(CHAT, twice, Reply.stream(events(HELLO)))
        assert text_of(await collect(adapter, chat())) == "first"
        await asyncio.sleep(0.2)
        assert text_of(await collect(adapter, chat())) == "Hello world"


async def test_a_pooled_connection_that_the_engine_closed_is_replaced_in_silence() -> None:
    async with engine("vllm", model="small") as (adapter, twin):
        hello = Reply.stream(events(HELLO))
        twin.reply(CHAT, hello, Reply.dropped(), hello)
        await collect(adapter, chat())
        assert text_of(await collect(adapter, chat())) == "Hello world"
        assert len(twin.bodies) == 3


async def test_a_fresh_connection_that_the_engine_closes_is_not_tried_again(http_subject: HTTPSubject) -> None:
    error = await failure(http_subject, Reply.dropped())
    assert type(error) is EngineUnavailable
    assert len(http_subject.twin.bodies) == 1


async def test_an_engine_that_closes_a_fresh_connection_too_is_in_trouble() -> None:
    async with engine("vllm", model="small") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(events(HELLO)), Reply.dropped())
        await collect(adapter, chat())
        with pytest.raises(EngineUnavailable):
            await collect(adapter, chat())
        assert len(twin.bodies) == 3


async def test_health_tells_loading_ready_sick_and_gone(http_subject: HTTPSubject) -> None:
    loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    path = http_subject.health_path
    http_subject.twin.reply(path, Reply.plain(503, loading), Reply.plain(200, b""), Reply.plain(500, b""))
    seen = [await http_subject.adapter.health() for _ in range(3)]
    assert [health.ready for health in seen] == [False, True, False]
    assert "HTTP 503" in seen[0].reason
    assert "Loading model" not in seen[0].reason  # everybody reads it on /ready, and engines may quote prompts


async def test_a_health_check_that_hangs_ends_after_two_seconds() -> None:
    async with engine("vllm", model="small") as (adapter, twin):
        twin.reply("/health", Reply.silent())
        begun = asyncio.get_running_loop().time()
        assert not (await adapter.health()).ready
        assert asyncio.get_running_loop().time() - begun < 3


@pytest.mark.replay("A33")
async def test_a33_a_redirect_is_not_followed_and_the_key_stays_here() -> None:
    async with Twin() as elsewhere, engine("vllm", api_key="sk-1") as (adapter, twin):
        elsewhere.reply("/health", Reply.plain(200))
        twin.reply("/health", Reply.plain(302, Location=f"{elsewhere.url}/health"))
        assert not (await adapter.health()).ready
        assert elsewhere.requests == []


# ------------------------------ engines with a text route of their own


@pytest.mark.replay("G33")
async def test_silence_between_tokens_ends_at_its_deadline(generate_subject: GenerateSubject) -> None:
    generate_subject.adapter.options.token_timeout_s = 0.1
    generate_subject.says(generate_subject.stream("a", reason=None), b":\n\n", "hold")
    with pytest.raises(EngineTimeout, match="between tokens"):
        await collect(generate_subject.adapter, chat())
    await generate_subject.twin.client_left(within_s=1)


async def test_a_connection_is_used_again_after_a_stream_of_a_text_route(generate_subject: GenerateSubject) -> None:
    for _ in range(3):
        await collect(generate_subject.adapter, chat())
    assert generate_subject.twin.num_connections == 1


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


@pytest.mark.replay("W14")
@pytest.mark.parametrize("route", ["openai", "native"])
async def test_sglang_is_told_which_request_was_left(route: str, text_model: Path) -> None:
    """By itself it notices a closed socket after about two seconds."""
    async with engine("sglang", model="small", route=route, chat_template=str(text_model)) as (adapter, twin):
        first = event(HELLO[0]) if route == "openai" else event(sglang_transcripts.native("Hello", 1))
        path = CHAT if route == "openai" else "/generate"
        twin.reply(path, Reply.stream(first, "hold"))
        twin.reply("/abort_request", Reply.plain(200, b""))
        await leave(adapter, "req-1")
        assert await farewells(twin, "/abort_request", 1) == [{"rid": "req-1"}]
        assert twin.bodies[0]["rid"] == "req-1"


@pytest.mark.replay("W14")
async def test_sglang_is_told_when_a_request_is_cancelled_before_its_first_token() -> None:
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


@pytest.mark.replay("W14")
@pytest.mark.parametrize("dialect", ["llmapi", "ensemble"])
async def test_triton_is_asked_to_cancel_under_the_same_id(dialect: str, text_model: Path) -> None:
    options = {"model": "m", "dialect": dialect, "chat_template": str(text_model)}
    async with engine("triton_server", **options) as (adapter, twin):
        twin.reply("/v2/models/m/generate_stream", Reply.stream(event({"text_output": "Hello"}), "hold"))
        twin.reply("/v2/models/m/generate", Reply.plain(500, {"error": "Request cancelled by client"}))
        await leave(adapter, "req-4")
        (cancel,) = await farewells(twin, "/v2/models/m/generate", 1)
        assert (cancel["text_input"], cancel["stop"]) == ("", True)
        assert [each.headers["triton-request-id"] for each in twin.requests] == ["req-4", "req-4"]
