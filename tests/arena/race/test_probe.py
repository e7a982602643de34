"""The probe against engines that refuse things: what it gives up, what it remembers, what it says when it must stop."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType
from typing import Any

import pytest
from aiohttp import ClientSession, web

from adapters.errors import EngineError, EngineFailed, EngineProtocolError, EngineUnavailable
from adapters.launching.launch import free_port
from arena.load.asking import model_names
from arena.load.plan import Prompt, Target
from arena.race.engine_metrics import watched
from arena.race.own_report import own_report
from arena.race.probe import PROBE_TOKENS, Capabilities, is_alive, probe, warm_up

PROMPT = Prompt("p", {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}, 8)
Judge = Callable[[dict[str, Any]], str | None]


def obliging(body: dict[str, Any], *, per_event: int = 1, tokens: int | None = None) -> list[str]:
    """The events of an answer as long as was asked for, with usage where and how it was asked for."""
    asked = body.get("stream_options", {})
    length = tokens if tokens is not None else body["max_tokens"]
    events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    for done in range(per_event, length + 1, per_event):
        delta = {"content": "hello " * per_event}
        if body.get("tools"):
            delta = {"tool_calls": [{"index": 0, "function": {"name": "note", "arguments": "{}"}}]}  # type: ignore[dict-item]
        events.append({"choices": [{"delta": delta}]})
        if asked.get("continuous_usage_stats"):
            events[-1]["usage"] = usage(done)
    events.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
    if asked:
        events.append({"choices": [], "usage": usage(length)})
    return [*(json.dumps(event) for event in events), "[DONE]"]


def telling(told: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def tell(request: web.Request) -> web.Response:
        return web.json_response(told)

    return tell


def usage(completion_tokens: int) -> dict[str, Any]:
    details = {"cached_tokens": 0}
    return {"completion_tokens": completion_tokens, "prompt_tokens": 9, "prompt_tokens_details": details}


@asynccontextmanager
async def engine(
    *,
    refuses: Judge = lambda body: None,
    models: tuple[str, ...] = ("m",),
    events: list[str] | None = None,
    answer: Callable[[dict[str, Any]], list[str]] = lambda body: obliging(body),
    pace_s: float = 0,
    routes: Mapping[str, Any] = MappingProxyType({}),
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
        for line in events or answer(body):
            await response.write(f"data: {line}\n\n".encode())
            await asyncio.sleep(pace_s)
        return response

    async def listing(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in models]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", listing)])
    for route, told in routes.items():
        app.router.add_get(route, telling(told))
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}", seen
    finally:
        await runner.cleanup()


async def test_an_obliging_engine_is_asked_for_everything_once_and_found_able() -> None:
    async with engine(pace_s=0.002) as (url, seen):
        found = await probe(url, model=None, prompt=PROMPT)
    assert [set(body) & {"tools", "min_tokens"} for body in seen] == [set(), set(), {"tools"}]
    assert seen[0]["max_tokens"] == PROBE_TOKENS
    assert (found.model, found.refused, found.exact_length, found.counts_tokens) == ("m", (), True, True)
    assert found.target("x").fields == {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    assert found.capabilities == Capabilities(
        streams=True, min_tokens=None, counts_events=True, tells_cached=True, caches=False, reasoning=False, tools=True
    )
    assert (found.prompt_tokens, found.prompt_asked) == (9, None)


async def test_an_engine_that_sends_several_tokens_an_event_is_asked_to_count_them_in_the_cells() -> None:
    """Else its chunk gaps could not be told from gaps of tokens. One that sends them singly is spared the work."""
    async with engine(answer=lambda body: obliging(body, per_event=4)) as (url, _):
        found = await probe(url, model="m", prompt=PROMPT)
    assert found.fields["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


async def test_an_engine_that_refuses_usage_in_events_is_still_asked_whether_it_caches() -> None:
    def strict(body: dict[str, Any]) -> str | None:
        return "unknown field" if "continuous_usage_stats" in body.get("stream_options", {}) else None

    async with engine(refuses=strict) as (url, _):
        found = await probe(url, model="m", prompt=PROMPT)
    assert (found.refused, found.capabilities.counts_events, found.capabilities.caches) == ((), False, False)
    assert found.fields["stream_options"] == {"include_usage": True}


@pytest.mark.replay("R15")
async def test_an_engine_that_ends_its_answers_early_is_found_and_asked_whether_min_tokens_would_help() -> None:
    def ends_early(body: dict[str, Any]) -> list[str]:
        return obliging(body, tokens=body.get("min_tokens", 5))

    async with engine(answer=ends_early) as (url, seen):
        found = await probe(url, model="m", prompt=PROMPT)
    assert not found.exact_length
    assert found.capabilities.min_tokens
    assert "min_tokens" not in found.fields
    assert sum("min_tokens" in body for body in seen) == 1


@pytest.mark.replay("R17")
async def test_tools_that_are_refused_are_told_and_nothing_else_is_given_up_for_them() -> None:
    def no_tools(body: dict[str, Any]) -> str | None:
        return "tools are not supported" if "tools" in body else None

    async with engine(refuses=no_tools) as (url, _):
        found = await probe(url, model="m", prompt=PROMPT)
    assert found.capabilities.tools is False
    assert found.refused == ()


async def test_an_answer_in_one_piece_is_no_stream_to_the_probe() -> None:
    whole = [json.dumps({"choices": [{"delta": {"content": "all"}, "finish_reason": "length"}], "usage": usage(24)})]
    async with engine(events=whole) as (url, _):
        found = await probe(url, model="m", prompt=PROMPT)
    assert found.capabilities.streams is False


async def test_reasoning_deltas_are_told() -> None:
    thinks = [json.dumps({"choices": [{"delta": {"reasoning": "hm"}}]}), *obliging({"max_tokens": 2})]
    async with engine(events=thinks) as (url, _):
        found = await probe(url, model="m", prompt=PROMPT)
    assert found.capabilities.reasoning


async def test_an_engines_own_report_of_its_settings_is_kept_without_its_secrets() -> None:
    report: dict[str, Any] = {
        "max_num_seqs": 8,
        "api_key": "sk-1",
        "bos_token": "<s>",
        "chat_template": "x" * 1000,
        "deep": {"admin_key": 1},
    }
    async with engine(routes={"/server_info": report, "/version": ["no object"]}) as (url, _):
        found = await probe(url, model="m", prompt=PROMPT)
    told = found.settings["/server_info"]
    assert (told["max_num_seqs"], told["bos_token"], told["deep"]) == (8, "<s>", {})
    assert "api_key" not in told
    assert len(told["chat_template"]) < 300
    assert set(found.settings) == {"/server_info"}


@pytest.mark.replay("R15", "R17")
async def test_what_an_engine_refuses_by_name_is_given_up_and_the_rest_is_kept() -> None:
    def strict(body: dict[str, Any]) -> str | None:
        return "unexpected field stream_options" if "stream_options" in body else None

    async with engine(refuses=strict) as (url, seen):
        found = await probe(url, model="m", prompt=PROMPT)
    assert found.refused == ("stream_options",)
    assert found.fields == {"stream": True, "ignore_eos": True}
    assert not found.counts_tokens
    assert sum("stream_options" in body for body in seen) == 1  # and never again, in no later request


@pytest.mark.replay("R17")
async def test_an_engine_that_refuses_without_saying_what_is_stripped_down_step_by_step() -> None:
    def terse(body: dict[str, Any]) -> str | None:
        return "no" if "ignore_eos" in body or "stream_options" in body else None

    async with engine(refuses=terse) as (url, seen):
        found = await probe(url, model="m", prompt=PROMPT)
    assert found.refused == ("ignore_eos", "stream_options")
    assert sum("ignore_eos" in body or "stream_options" in body for body in seen) == 2


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


@pytest.mark.parametrize("route", ["/v1/models", "/version", "/metrics"])
async def test_an_answer_without_an_end_does_not_fill_the_memory(route: str) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while sent < 64 << 20:
                await response.write(b" " * (1 << 20))
                sent += 1 << 20
        return response

    app = web.Application()
    app.add_routes([web.get(route, endless)])
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    url = f"http://127.0.0.1:{port}"
    try:
        async with ClientSession() as client:
            if route == "/version":
                assert await own_report(client, url) == {}
            elif route == "/metrics":
                async with watched(Target(url, "m", "x"), every_s=60) as pages:
                    await asyncio.sleep(1)
                assert pages == []
            else:
                with pytest.raises(EngineProtocolError, match="answered with more than 8388608 bytes"):
                    await model_names(client, url)
    finally:
        await runner.cleanup()
    assert 0 < sent < 64 << 20


async def test_a_report_that_comes_in_pieces_is_read_whole() -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b'{"version": ', b'"1.2"}'):
            await response.write(piece)
            await asyncio.sleep(0.05)
        return response

    app = web.Application()
    app.add_routes([web.get("/version", slow)])
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with ClientSession() as client:
            assert await own_report(client, f"http://127.0.0.1:{port}") == {"/version": {"version": "1.2"}}
    finally:
        await runner.cleanup()


async def test_an_answer_that_just_stops_is_told_before_the_race_and_not_counted_in_a_burst() -> None:
    """Each of its answers would be a miss; the burst would still put the first rate far too high."""
    torn = [json.dumps({"choices": [{"delta": {"content": "hello"}}]})]
    async with engine(events=torn) as (url, _):
        with pytest.raises(EngineProtocolError, match="without a finish reason"):
            await probe(url, model="m", prompt=PROMPT)
        with pytest.raises(EngineError, match="None of 2 simultaneous requests"):
            await warm_up(Target(url, "m", "x"), lambda seq: PROMPT, 2, timeout_s=5)


async def test_an_answer_that_takes_too_long_is_told_with_its_time_and_not_as_a_nameless_break() -> None:
    async with engine(pace_s=5) as (url, _):
        with pytest.raises(EngineError, match=r"did not answer within 0\.\d s"):
            await warm_up(Target(url, "m", "e"), lambda seq: PROMPT, 2, timeout_s=0.3)
