"""A client that leaves stops the engine's work, at every point of a request's life, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable

import pytest

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


async def test_300_aborts_at_random_moments_leave_nothing_behind(start: Start) -> None:
    gateway = await start(fake_model(ttft_ms=10, itl_ms=3, tokens=20), server={"max_in_flight": 300})
    await gateway.events()
    num_tasks = len(asyncio.all_tasks())
    dice = random.Random(7)

    async def abort(number: int) -> None:
        delay_s = dice.uniform(0, 0.1)
        fields = {"stream": True} if number % 3 else {}
        await ask_and_leave(gateway, lambda _: asyncio.sleep(delay_s), **fields)

    await asyncio.gather(*(abort(number) for number in range(300)))
    await until(lambda: gateway.open_requests.in_flight == 0)
    assert gateway.fleet.replicas[0].in_flight == 0
    adapter = gateway.fleet.replicas[0].adapter
    assert adapter is not None
    assert (await adapter.load()).running == 0
    await until(lambda: num_connections(gateway) <= 2)  # the client's own pooled connection
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
