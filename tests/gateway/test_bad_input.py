"""Everything in the tables of bad input gets its 4xx in its route's envelope within a second, and reaches no engine."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.gateway.bad_input import BODIES, COUNT, GOOD, HEADS, HTTP, MESSAGES, TARGETS, Bad, BadHead, num_cases, sent
from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, model, raw

UpstreamOf = Callable[[Script], Awaitable[Upstream]]

WITHIN_S = 1.0
MAX_ANSWER = 4096  # bytes: what a caller wrote does not come back by the megabyte


async def obliging(reply: Reply) -> None:
    """An engine that takes whatever it is given."""
    answers: dict[str, Any] = {
        "/tokenize": {"count": 1, "max_model_len": 10, "tokens": [1]},
        "/detokenize": {"prompt": "Hello"},
        "/v1/embeddings": {"data": [{"index": 0, "embedding": [1.0]}], "usage": {"prompt_tokens": 1}},
    }
    if (answer := answers.get(reply.request.path)) is not None:
        await reply.status(200, json.dumps(answer).encode(), "Connection: close")
    elif reply.request.path == "/v1/completions":
        await reply.begin()
        await reply.event(b'{"choices":[{"index":0,"text":"Hi","finish_reason":"stop"}]}')
        await reply.done()
    else:
        await reply.answer("Hi")


async def begin(start: Start, upstream_of: UpstreamOf) -> tuple[Gateway, Upstream]:
    engine = await upstream_of(obliging)
    vectors = engine.replica("vectors", embeddings=True)
    return await start(model(engine.replica()), model(vectors, name="e")), engine


async def check_serves(gateway: Gateway, engine: Upstream, route: str) -> None:
    """Nothing bad has reached the engine, and what is good does."""
    assert [request.path for request in engine.requests] == []
    assert gateway.open_requests.in_flight == 0
    assert (await gateway.post(route, sent(route)))[0] == 200
    assert engine.num_generations == 1


def fault_of(route: str, status: int, told: Any, bad: Bad) -> str | None:
    """What is wrong with a refusal; None for a right one."""
    if status != bad.status:
        return f"{status} instead of {bad.status}: {str(told)[:200]}"
    if route in (MESSAGES, COUNT):
        if set(told) != {"type", "error", "request_id"} or set(told["error"]) - {"details"} != {"type", "message"}:
            return f"not in Anthropic's envelope: {told}"
        is_named = bad.param is None or bad.param in told["error"]["message"]
    else:
        if set(told) != {"error"} or set(told["error"]) != {"message", "type", "param", "code"}:
            return f"not in OpenAI's envelope: {told}"
        is_named = bad.param is None or str(told["error"]["param"]).startswith(bad.param)
    if not is_named:
        return f"{bad.param!r} is not named: {told}"
    return f"an answer of {len(str(told))} characters" if len(str(told)) > MAX_ANSWER else None


async def within_a_second(ask: Callable[[], Awaitable[Any]]) -> Any:
    """A machine that is busy elsewhere gets a second chance."""
    for _ in range(2):
        begun = time.perf_counter()
        answer = await ask()
        if time.perf_counter() - begun < WITHIN_S:
            return answer
    raise AssertionError(f"it took more than {WITHIN_S:g} s twice")


@pytest.mark.replay("A15", "A17", "A18", "A19", "A21", "A22", "A23", "A26", "A27", "A29", "A31", "A33", "A39", "A46")
@pytest.mark.parametrize("route", GOOD)
async def test_a_bad_body_is_refused_by_name(start: Start, upstream_of: UpstreamOf, route: str) -> None:
    gateway, engine = await begin(start, upstream_of)
    faults = []
    for name, bad in BODIES[route].items():
        status, told, _ = await within_a_second(lambda bad=bad: gateway.post(route, bad.body))
        if fault := fault_of(route, status, told, bad):
            faults.append(f"{name}: {fault}")
    assert not faults, "\n".join(faults)
    await check_serves(gateway, engine, route)


@pytest.mark.replay("A13", "A14")
@pytest.mark.parametrize("route", GOOD)
async def test_a_body_that_is_not_what_its_headers_say_is_refused(
    start: Start, upstream_of: UpstreamOf, route: str
) -> None:
    gateway, engine = await begin(start, upstream_of)
    faults = []
    for name, bad in HEADS.items():
        answer = await within_a_second(lambda bad=bad: head_of_answer(gateway, request_of(route, bad)))
        status, told = parsed(answer)
        if fault := fault_of(route, status, told, Bad(b"", status=bad.status)):
            faults.append(f"{name}: {fault}")
    assert not faults, "\n".join(faults)
    await check_serves(gateway, engine, route)


@pytest.mark.replay("A41")
async def test_a_path_or_method_that_leads_nowhere_is_told_so(start: Start, upstream_of: UpstreamOf) -> None:
    gateway, engine = await begin(start, upstream_of)
    faults = []
    for name, bad in TARGETS.items():
        head = f"{bad.method} {bad.target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        status, told = parsed(await within_a_second(lambda head=head: raw(gateway, head.encode())))
        if fault := fault_of(bad.target, status, told, Bad(b"", status=bad.status)):
            faults.append(f"{name}: {fault}")
    assert not faults, "\n".join(faults)
    await check_serves(gateway, engine, "/v1/chat/completions")


@pytest.mark.replay("A01", "A02", "A03", "A05", "A06", "A07", "A13", "A51")
async def test_bytes_that_are_no_request_get_400_and_a_closed_connection(start: Start, upstream_of: UpstreamOf) -> None:
    """What follows them is not taken for a request of its own."""
    gateway, engine = await begin(start, upstream_of)
    faults = []
    for name, data in HTTP.items():
        answer = await raw(gateway, data + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        status, told = parsed(answer.removesuffix(b"<open>"))
        if fault := fault_of("", status, told, Bad(b"")):
            faults.append(f"{name}: {fault}")
        if answer.endswith(b"<open>") or answer.count(b"HTTP/1.") != 1:
            faults.append(f"{name}: the connection stayed open: {answer[-200:]!r}")
    assert not faults, "\n".join(faults)
    await check_serves(gateway, engine, "/v1/chat/completions")


def test_there_are_as_many_cases_as_there_should_be() -> None:
    assert num_cases() >= 300


def request_of(route: str, bad: BadHead) -> bytes:
    body = sent(route) if bad.body is None else bad.body
    length = b"" if b"Content-Length" in bad.headers else b"Content-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%b%b\r\n%b" % (route.encode(), bad.headers, length, body)


async def head_of_answer(gateway: Gateway, data: bytes) -> bytes:
    """The first answer, whether or not the connection stays open after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(data)
    try:
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"Content-Length: (\d+)", head)[1])  # type: ignore[index]
            return head + await reader.readexactly(length)
    finally:
        writer.close()


def parsed(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    try:
        return int(head.split()[1]), json.loads(body)
    except (IndexError, ValueError):
        return 0, answer[:200]
