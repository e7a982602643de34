"""The probe against engines that refuse things: what it gives up, what it remembers, what it says when it must stop."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from adapters.errors import EngineError, EngineFailed, EngineProtocolError, EngineUnavailable
from adapters.launching.launch import free_port
from arena.load.plan import Prompt, Target
from arena.race.probe import PROBE_TOKENS, is_alive, probe, warm_up

PROMPT = Prompt("p", {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}, 8)
Judge = Callable[[dict[str, Any]], str | None]


@asynccontextmanager
async def engine(
    *, refuses: Judge = lambda body: None, models: tuple[str, ...] = ("m",), events: list[str] | None = None
) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A small OpenAI-speaking engine. `refuses` gives the text of a 400 for a body, or None."""
    seen: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append(body)
        if reason := refuses(body):
            return web.json_response({"error": {"message": reason}}, status=400)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        usage = {"completion_tokens": body["max_tokens"]} if "stream_options" in body else None
        lines = events or [
            json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
            json.dumps({"choices": [{"delta": {"content": "hello"}}]}),
            json.dumps({"choices": [], "usage": usage}),
            "[DONE]",
        ]
        await response.write("".join(f"data: {line}\n\n" for line in lines).encode())
        return response

    async def listing(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in models]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", listing)])
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}", seen
    finally:
        await runner.cleanup()


async def test_an_obliging_engine_is_asked_once_and_found_exact() -> None:
    async with engine() as (url, seen):
        found = await probe(url, model=None, prompt=PROMPT)
    assert len(seen) == 1
    assert seen[0]["max_tokens"] == PROBE_TOKENS
    assert (found.model, found.refused, found.exact_length, found.counts_tokens) == ("m", (), True, True)
    assert found.target("x").fields == {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}


@pytest.mark.replay("R15", "R17")
async def test_what_an_engine_refuses_by_name_is_given_up_and_the_rest_is_kept() -> None:
    def strict(body: dict[str, Any]) -> str | None:
        return "unexpected field stream_options" if "stream_options" in body else None

    async with engine(refuses=strict) as (url, seen):
        found = await probe(url, model="m", prompt=PROMPT)
    assert found.refused == ("stream_options",)
    assert found.fields == {"stream": True, "ignore_eos": True}
    assert not found.counts_tokens
    assert len(seen) == 2


@pytest.mark.replay("R17")
async def test_an_engine_that_refuses_without_saying_what_is_stripped_down_step_by_step() -> None:
    def terse(body: dict[str, Any]) -> str | None:
        return "no" if "ignore_eos" in body or "stream_options" in body else None

    async with engine(refuses=terse) as (url, seen):
        found = await probe(url, model="m", prompt=PROMPT)
    assert found.refused == ("ignore_eos", "stream_options")
    assert len(seen) == 3


async def test_an_engine_that_refuses_everything_is_out() -> None:
    async with engine(refuses=lambda body: "no such model") as (url, _):
        with pytest.raises(EngineFailed, match=r"refuses a plain chat request.*no such model"):
            await probe(url, model="m", prompt=PROMPT)


async def test_a_choice_of_models_must_be_made_by_name() -> None:
    async with engine(models=("a", "b")) as (url, _):
        with pytest.raises(EngineUnavailable, match=r"serves a, b; choose one"):
            await probe(url, model=None, prompt=PROMPT)


async def test_an_error_inside_a_stream_is_an_error_and_silence_is_no_answer() -> None:
    async with engine(events=[json.dumps({"error": {"message": "out of memory"}})]) as (url, _):
        with pytest.raises(EngineFailed, match="out of memory"):
            await probe(url, model="m", prompt=PROMPT)
    async with engine(events=["[DONE]"]) as (url, _):
        with pytest.raises(EngineProtocolError, match="without any text"):
            await probe(url, model="m", prompt=PROMPT)


@pytest.mark.parametrize("event", ["{", "nonsense"])
async def test_a_stream_that_cannot_be_read_is_told(event: str) -> None:
    async with engine(events=[event]) as (url, _):
        with pytest.raises(EngineProtocolError, match="not "):
            await probe(url, model="m", prompt=PROMPT)


async def test_a_burst_that_nobody_answers_is_an_error_and_one_that_some_answer_is_a_rate() -> None:
    async with engine() as (url, _):
        target = (await probe(url, model="m", prompt=PROMPT)).target("x")
        assert await warm_up(target, lambda seq: PROMPT, 4, timeout_s=5) > 4
        assert await is_alive(target)
    assert not await is_alive(target)
    with pytest.raises(EngineError, match="None of 3 simultaneous requests"):
        await warm_up(target, lambda seq: PROMPT, 3, timeout_s=5)


@pytest.mark.parametrize(
    "event",
    [
        '{"choices": ["text"]}',
        '{"choices": {"delta": 1}}',
        '{"choices": [{"delta": "hello"}]}',
        '{"choices": [], "usage": {"completion_tokens": "8"}}',
        "[1]",
        "null",
        '"[DONE]"',
    ],
)
async def test_an_event_of_another_shape_is_an_error_of_the_engine_and_not_a_crash_of_the_race(event: str) -> None:
    async with engine(events=[event]) as (url, _):
        with pytest.raises(EngineProtocolError, match="not OpenAI's"):
            await probe(url, model="m", prompt=PROMPT)


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (401, '{"error": "no key"}', 'answered HTTP 401: {"error": "no key"}'),
        (404, "<html>\n<h1>Not Found</h1>", "answered HTTP 404: <html> <h1>Not Found</h1>"),
        (200, "<html>", "is not an OpenAI list of models"),
        (200, '{"data": null}', "is not an OpenAI list of models"),
        (200, '{"data": []}', "serves no model"),
    ],
)
async def test_what_is_no_engine_is_told_in_its_own_words(status: int, body: str, told: str) -> None:
    async def listing(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    app = web.Application()
    app.add_routes([web.get("/v1/models", listing)])
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        with pytest.raises(EngineError) as caught:
            await probe(f"http://127.0.0.1:{port}", model=None, prompt=PROMPT)
    finally:
        await runner.cleanup()
    assert told in caught.value.message


async def test_an_answer_that_just_stops_is_told_before_the_race_and_not_counted_in_a_burst() -> None:
    """Each of its answers would be a miss; the burst would still put the first rate far too high."""
    torn = [json.dumps({"choices": [{"delta": {"content": "hello"}}]})]
    async with engine(events=torn) as (url, _):
        with pytest.raises(EngineProtocolError, match="without a finish reason"):
            await probe(url, model="m", prompt=PROMPT)
        with pytest.raises(EngineError, match="None of 2 simultaneous requests"):
            await warm_up(Target(url, "m", "x"), lambda seq: PROMPT, 2, timeout_s=5)
