"""Clients that read a kilobyte a second, or nothing: others notice nothing, little is held for them, and they are cut
off in time; and clients that send as slowly."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.reload.test_reload_processes import Serving, serving
from tests.gateway.rig import HELLO, Reply, Script, Start, Upstream, fake_model, model, until
from tests.gateway.test_cancellation import num_connections

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
MAX_HELD_KIB = 256

DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"model": "m", "max_tokens": 9999, "prompt": "Hello"},
    "/v1/messages": {"model": "m", "max_tokens": 9999, "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"model": "m", "input": "Hello"},
}


PIECE = b'{"choices":[{"index":0,"delta":{"content":"%s"},"text":"%s","finish_reason":null}]}' % ((b"x" * 8000,) * 2)


async def flood(reply: Reply) -> None:
    """An answer without end, as fast as it is taken."""
    await reply.begin()
    while True:
        await reply.event(PIECE)


async def much(reply: Reply) -> None:
    """A whole answer of 6 MB."""
    await reply.begin()
    for _ in range(750):
        await reply.event(PIECE)
    await reply.finish()
    await reply.done()


def request_of(path: str, body: dict[str, Any], **fields: Any) -> bytes:
    data = json.dumps({**body, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@asynccontextmanager
async def stalled(port: int, request: bytes) -> AsyncIterator[socket.socket]:
    """A client that has asked, and whose system takes hardly anything of the answer for it."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, request)
        yield client


@pytest.mark.replay("F13")
@pytest.mark.parametrize("path", DIALECTS)
async def test_f13_a_client_that_takes_nothing_of_a_stream_frees_its_engine_in_every_dialect(
    start: Start, upstream_of: UpstreamOf, path: str
) -> None:
    upstream = await upstream_of(flood)
    gateway = await start(model(upstream.replica()), server={"write_timeout_s": 0.3})
    async with stalled(gateway.port, request_of(path, DIALECTS[path], stream=True)):
        await until(lambda: upstream.num_generations == 1)
        await until(lambda: upstream.num_closed == 1)
        await until(lambda: gateway.open_requests.in_flight == 0)
        await until(lambda: num_connections(gateway) == 0)


@pytest.mark.replay("F13")
@pytest.mark.parametrize("path", DIALECTS)
async def test_f13_a_whole_answer_that_nobody_takes_is_given_up(
    start: Start, upstream_of: UpstreamOf, path: str
) -> None:
    upstream = await upstream_of(much)
    gateway = await start(model(upstream.replica()), server={"write_timeout_s": 0.3})
    async with stalled(gateway.port, request_of(path, DIALECTS[path])):
        await until(lambda: upstream.num_generations == 1)
        await until(lambda: num_connections(gateway) == 0, timeout_s=20)


@pytest.mark.replay("F13")
async def test_f13_vectors_that_nobody_takes_are_given_up(start: Start) -> None:
    gateway = await start(fake_model(dimensions=4096), server={"write_timeout_s": 0.3})
    request = request_of("/v1/embeddings", {"model": "m", "input": ["a"] * 200})
    async with stalled(gateway.port, request):
        await until(lambda: num_connections(gateway) > 0)
        await until(lambda: num_connections(gateway) == 0, timeout_s=20)


async def test_a_client_that_takes_its_large_answer_steadily_gets_all_of_it_however_long_it_takes(
    start: Start, upstream_of: UpstreamOf
) -> None:
    upstream = await upstream_of(much)
    gateway = await start(model(upstream.replica()), server={"write_timeout_s": 0.3})
    loop = asyncio.get_running_loop()
    async with stalled(gateway.port, request_of("/v1/chat/completions", HELLO)) as client:
        began, answer = time.monotonic(), b""
        while len(answer) < 6_000_000:
            answer += await loop.sock_recv(client, 1 << 20)
            if time.monotonic() - began < 1:
                await asyncio.sleep(0.01)
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.replay("F13")
@pytest.mark.parametrize("num", [150, pytest.param(600, marks=pytest.mark.slow)])
async def test_f13_hundreds_of_stalled_readers_cost_the_others_nothing(
    tmp_path: Path, upstream_of: UpstreamOf, num: int
) -> None:
    upstream = await upstream_of(flood)
    models = model(upstream.replica(), name="flood"), fake_model()
    request = request_of("/v1/chat/completions", {**HELLO, "model": "flood"}, stream=True)
    async with serving(tmp_path, *models, server={"write_timeout_s": 5, "max_in_flight": 1000}) as gateway:
        quiet_s = statistics.median([await chat_s(gateway) for _ in range(50)])
        port = int(gateway.url.rpartition(":")[2])
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(stalled(port, request)) for _ in range(num // 3)]
            await until(lambda: upstream.num_generations == num // 3, timeout_s=30)
            await asyncio.sleep(0.5)
            before = resident_kib(gateway)  # with what the process takes once, whoever comes
            clients += [await stack.enter_async_context(stalled(port, request)) for _ in range(num - num // 3)]
            trickle = [asyncio.create_task(read_slowly(each)) for each in clients[::10]]
            await until(lambda: upstream.num_generations == num, timeout_s=30)
            busy_s = statistics.median([await chat_s(gateway) for _ in range(50)])
            held_kib = (resident_kib(gateway) - before) / (num - num // 3)
            await until(lambda: upstream.num_closed == num, timeout_s=30)
            await asyncio.gather(*trickle)
        print(f"held {held_kib:.0f} KiB each; a request took {quiet_s * 1e3:.2f} ms, then {busy_s * 1e3:.2f} ms")
        assert held_kib <= MAX_HELD_KIB
        assert busy_s <= 2 * quiet_s + 0.02
        assert (await gateway.get("/admin/status"))[1]["in_flight"] == 0


@pytest.mark.replay("A10")
async def test_a10_a_thousand_slow_senders_are_closed_in_time_and_cost_the_others_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, fake_model(), server={"header_timeout_s": 3, "body_timeout_s": 3}) as gateway:
        quiet_s = statistics.median([await chat_s(gateway) for _ in range(50)])
        port, before = int(gateway.url.rpartition(":")[2]), resident_kib(gateway)
        head = request_of("/v1/chat/completions", HELLO).partition(b"{")[0]
        senders = [asyncio.create_task(send_slowly(port, head if n % 2 else b"")) for n in range(1000)]
        await asyncio.sleep(1)
        slowest_s = sorted([await chat_s(gateway) for _ in range(100)])[98]
        held_kib = (resident_kib(gateway) - before) / 1000
        open_s = await asyncio.gather(*senders)
        print(f"held {held_kib:.0f} KiB each; p99 {slowest_s * 1e3:.1f} ms, median before {quiet_s * 1e3:.2f} ms")
        assert max(open_s) < 15
        assert held_kib < 64
        assert slowest_s <= quiet_s + 0.25


async def send_slowly(port: int, begin: bytes) -> float:
    """A byte now and then, of headers or of a body, until it is closed: how long it could go on."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begin)
    leaving = asyncio.create_task(reader.read(1))
    with suppress(ConnectionError):
        while not leaving.done():
            writer.write(b"x")
            await asyncio.wait({leaving}, timeout=1)
        await leaving
    writer.close()
    return time.monotonic() - began


async def read_slowly(client: socket.socket) -> None:
    """A kilobyte a second, until it is cut off."""
    with suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(client, 100):  # noqa: ASYNC110 - it is the pace that matters
            await asyncio.sleep(0.1)


async def chat_s(gateway: Serving) -> float:
    began = time.perf_counter()
    assert await gateway.chat() == 200
    return time.perf_counter() - began


def resident_kib(gateway: Serving) -> int:
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1])
