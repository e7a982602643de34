"""A client that leaves stops the engine's work, at every point of a request's life, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from gateway.app import PARTS
from tests.gateway.rig import HELLO, Gateway, Reply, Script, Start, Upstream, fake_model, model, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
NOTICED_WITHIN_S = 0.5
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


async def ask_and_leave(
    gateway: Gateway, after: Callable[[asyncio.StreamReader], Awaitable[object]], **fields: object
) -> None:
    """Send a request on a socket of its own, and close that when `after` has returned."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = json.dumps({**HELLO, **fields}).encode()
    writer.write(HEAD % len(body) + body)
    await after(reader)
    writer.close()


async def silent(reply: Reply) -> None:
    await reply.until_left()


async def headers_only(reply: Reply) -> None:
    await reply.begin()
    await reply.until_left()


async def three_pieces(reply: Reply) -> None:
    await reply.begin()
    for text in ("a", "b", "c"):
        await reply.piece(text)
    await reply.until_left()


@pytest.mark.replay("W14", "G01", "G02", "G03")
@pytest.mark.parametrize(
    ("symptom", "script", "fields"),
    [
        ("G01 a whole answer is awaited", silent, {}),
        ("G01 a whole answer is half done", three_pieces, {}),
        ("G02 the engine has sent headers only", headers_only, {"stream": True}),
        ("G02 the engine is silent", silent, {"stream": True}),
        ("G03 the stream is under way", three_pieces, {"stream": True}),
    ],
)
async def test_a_client_that_leaves_closes_the_engines_connection(
    start: Start, upstream_of: UpstreamOf, symptom: str, script: Script, fields: dict[str, object]
) -> None:
    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))

    async def under_way(reader: asyncio.StreamReader) -> None:
        await until(lambda: upstream.num_generations == 1)
        if symptom.startswith("G03"):
            await reader.readuntil(b'"c"')
        else:
            await asyncio.sleep(0.05)

    await ask_and_leave(gateway, under_way, **fields)
    await until(lambda: upstream.num_closed == 1, timeout_s=NOTICED_WITHIN_S)
    await until(lambda: gateway.open_requests.in_flight == 0, timeout_s=NOTICED_WITHIN_S)
    assert gateway.fleet.replicas[0].in_flight == 0


DIALECTS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"model": "m", "prompt": "Hello"},
    "/v1/messages": {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"model": "m", "input": "Hello"},
}
RESET = struct.pack("ii", 1, 0)


async def amid_tokens(reply: Reply) -> None:
    await reply.begin()
    for _ in range(3):
        await reply.event(b'{"choices":[{"index":0,"delta":{"content":"a"},"text":"a","finish_reason":null}]}')
    await reply.until_left()


async def leave(
    gateway: Gateway, path: str, body: dict[str, object], delay_s: float, *, is_reset: bool, **headers: str
) -> None:
    """Ask, and go after a moment: with a goodbye (FIN), or with a reset."""
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    data = json.dumps(body).encode()
    named = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    head = HEAD.replace(b"/v1/chat/completions", path.encode()) % len(data)
    writer.write(head.replace(b"\r\n", b"\r\n" + named, 1) + data)
    await asyncio.sleep(delay_s)
    if is_reset:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
    else:
        writer.close()


@pytest.mark.replay("F14")
@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [silent, headers_only, amid_tokens])
@pytest.mark.parametrize("path", DIALECTS)
async def test_f14_a_client_that_vanishes_stops_its_engine_in_every_dialect_and_phase(
    start: Start, upstream_of: UpstreamOf, path: str, script: Script, stream: bool, is_reset: bool
) -> None:
    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    leaving = leave(gateway, path, {**DIALECTS[path], "stream": stream}, 0.05, is_reset=is_reset)
    await asyncio.gather(leaving, until(lambda: upstream.num_generations == 1))
    await until(lambda: upstream.num_closed == 1, timeout_s=NOTICED_WITHIN_S)
    await until(lambda: at_rest(gateway), timeout_s=NOTICED_WITHIN_S)


@pytest.mark.replay("F14")
@pytest.mark.parametrize("is_reset", [False, True])
async def test_f14_a_client_that_vanishes_while_it_waits_for_its_turn_never_reaches_an_engine(
    start: Start, upstream_of: UpstreamOf, is_reset: bool
) -> None:
    upstream = await upstream_of(silent)
    gateway = await start(model(upstream.replica(), admission={"max_running": 1}))
    first = asyncio.create_task(leave(gateway, "/v1/chat/completions", HELLO, 0.5, is_reset=is_reset))
    await until(lambda: upstream.num_generations == 1)
    await leave(gateway, "/v1/chat/completions", HELLO, 0.1, is_reset=is_reset)
    await until(lambda: gateway.open_requests.in_flight == 1, timeout_s=NOTICED_WITHIN_S)
    await first
    await until(lambda: at_rest(gateway), timeout_s=NOTICED_WITHIN_S)
    assert upstream.num_generations == 1


@pytest.mark.replay("F14")
async def test_f14_a_client_that_vanishes_between_two_tries_ends_them(start: Start, upstream_of: UpstreamOf) -> None:
    async def fail(reply: Reply) -> None:
        await reply.status(500, b'{"error": {"message": "no"}}')

    upstream = await upstream_of(fail)
    gateway = await start(model(upstream.replica(), max_attempts=10), breaker={"failures": 1000, "min_requests": 1000})
    leaving = asyncio.create_task(leave(gateway, "/v1/chat/completions", HELLO, 0.3, is_reset=False))
    await until(lambda: upstream.num_generations >= 2)
    await leaving
    await until(lambda: at_rest(gateway), timeout_s=NOTICED_WITHIN_S)
    num_tries = upstream.num_generations
    await asyncio.sleep(0.5)
    assert upstream.num_generations == num_tries


def num_sockets() -> int:
    """Of this process, which is both the gateway and its clients."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return found


def at_rest(gateway: Gateway) -> bool:
    """Nothing is counted as open any more, by whoever counts."""
    gates = gateway.app[PARTS].gates
    return (
        gateway.open_requests.in_flight == 0
        and gates.num_waiting() == 0
        and all(replica.in_flight == 0 and replica.open_tokens == 0 for replica in gateway.fleet.replicas)
        and all(not replica.standing._waiting for replica in gateway.fleet.replicas)
    )


@pytest.mark.replay("G07")
async def test_g07_three_thousand_requests_leave_no_object_behind(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Hours of the same are for a soak: `make bench-gateway`."""
    caplog.set_level(logging.WARNING, "goodgate")  # pytest keeps every line of the log, which are objects too
    gateway = await start(fake_model(tokens=3))
    num_tasks = len(asyncio.all_tasks())

    async def num_objects_after(num: int) -> int:
        for _ in range(num // 50):
            await asyncio.gather(*(gateway.chat() for _ in range(50)))
        gc.collect()
        return len(gc.get_objects())

    await num_objects_after(500)
    before = await num_objects_after(1000)
    after = await num_objects_after(1500)
    assert after - before < 1500  # less than an object a request, which anything that is kept would be
    assert len(asyncio.all_tasks()) <= num_tasks + 200  # the client's connections


@pytest.mark.replay("W14")
async def test_a_client_that_leaves_a_fanned_out_request_stops_every_part(
    start: Start, upstream_of: UpstreamOf
) -> None:
    upstream = await upstream_of(three_pieces)
    gateway = await start(model(upstream.replica()))
    request = gateway.client.post(
        f"{gateway.url}/v1/completions", json={"model": "m", "prompt": ["a", "b", "c"], "stream": True}
    )
    async with request as response:
        await response.content.readany()
        await until(lambda: upstream.num_generations == 3)
        response.close()
    await until(lambda: upstream.num_closed == 3, timeout_s=NOTICED_WITHIN_S)
    await until(lambda: gateway.open_requests.in_flight == 0)


@pytest.mark.replay("G04")
async def test_g04_aborted_requests_give_their_places_back_at_once(start: Start, upstream_of: UpstreamOf) -> None:
    async def script(reply: Reply) -> None:
        await (silent(reply) if reply.number <= 2 else reply.answer("ok"))

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()), server={"max_in_flight": 2})
    for number in (1, 2):
        await ask_and_leave(gateway, lambda _, n=number: until(lambda: upstream.num_generations == n))
    await until(lambda: gateway.open_requests.in_flight == 0, timeout_s=NOTICED_WITHIN_S)
    status, body, _ = await gateway.chat()
    assert status == 200
    assert body["choices"][0]["message"]["content"] == "ok"


@pytest.mark.replay("G40")
async def test_a_full_gateway_says_503_and_when_to_come_back(start: Start) -> None:
    gateway = await start(fake_model(ttft_ms=2000), server={"max_in_flight": 1})
    waiting = asyncio.create_task(gateway.chat())
    await until(lambda: gateway.open_requests.in_flight == 1)
    status, body, headers = await gateway.chat()
    assert status == 503
    assert body["error"]["code"] == "overloaded"
    assert int(headers["Retry-After"]) >= 1
    assert (await gateway.get("/health"))[0] == 200  # no priority inversion: questions pass a full gateway
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: gateway.open_requests.in_flight == 0)


def num_connections(gateway: Gateway) -> int:
    """Open TCP connections of this process to the gateway's port, both ends."""
    with open("/proc/net/tcp") as table:
        port = f":{gateway.port:04X}"
        return sum(port in line and line.split()[3] == "01" for line in table)


async def test_200_streams_at_once_leave_nothing_behind(start: Start) -> None:
    gateway = await start(fake_model(ttft_ms=20, itl_ms=2, tokens=10))
    await gateway.events()
    num_tasks = len(asyncio.all_tasks())
    answers = await asyncio.gather(*(gateway.events() for _ in range(200)))
    assert all(len(answer) == 13 and answer[-1] == "[DONE]" for answer in answers)
    assert gateway.open_requests.in_flight == 0
    assert gateway.fleet.replicas[0].in_flight == 0
    await gateway.client.close()
    await until(lambda: num_connections(gateway) == 0)
    await until(lambda: len(asyncio.all_tasks()) <= num_tasks)


@pytest.mark.replay("F13")
async def test_f13_a_client_that_reads_nothing_is_cut_off_and_the_engine_stops(
    start: Start, upstream_of: UpstreamOf
) -> None:
    async def flood(reply: Reply) -> None:
        await reply.begin()
        while True:
            await reply.piece("x" * 60_000)

    upstream = await upstream_of(flood)
    gateway = await start(model(upstream.replica()), server={"write_timeout_s": 0.3})
    body = json.dumps({**HELLO, "stream": True}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", gateway.port))
        await asyncio.get_running_loop().sock_sendall(client, HEAD % len(body) + body)
        await until(lambda: upstream.num_generations == 1)
        await until(lambda: upstream.num_closed == 1)
    await until(lambda: gateway.open_requests.in_flight == 0)


@pytest.mark.replay("W18")
async def test_a_silent_stream_is_kept_open_by_comments(start: Start, upstream_of: UpstreamOf) -> None:
    async def pause(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("a")
        await asyncio.sleep(0.35)
        await reply.piece("b")
        await reply.finish()
        await reply.done()

    upstream = await upstream_of(pause)
    gateway = await start(model(upstream.replica()), server={"heartbeat_s": 0.1})
    async with gateway.client.post(f"{gateway.url}/v1/chat/completions", json={**HELLO, "stream": True}) as response:
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Cache-Control"] == "no-cache"
        assert "Content-Length" not in response.headers
        text = await response.text()
    assert text.count(": keep-alive\n\n") >= 2
    stream = await gateway.openai.chat.completions.create(**HELLO, stream=True)  # and the official client skips them
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "ab"
