"""Faults that other gateways were reported for, which show under way: counters, the event loop, health. Each test is
named after what was seen."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.replicas.replica import State
from tests.gateway.bad_input import CHAT
from tests.gateway.rig import HELLO, Reply, Script, Start, Upstream, fake_model, model, raw, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]


class Pulse:
    """How long, at worst, the event loop let somebody wait."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def beat(self) -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.005)
            self.worst_s = max(self.worst_s, time.perf_counter() - begun - 0.005)


@pytest.mark.replay("G05")
async def test_g05_a_replica_that_goes_and_comes_back_never_has_less_than_nothing_open(
    start: Start, upstream_of: UpstreamOf
) -> None:
    """llm-d-router#1739: it began to count anew, and the ends of its old requests were subtracted."""
    go_on = asyncio.Event()

    async def script(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("a")
        await go_on.wait()
        await reply.finish()
        await reply.done()

    gateway = await start(model((await upstream_of(script)).replica()))
    [replica] = gateway.fleet.replicas
    seen: list[int] = []
    asked = [asyncio.create_task(gateway.chat()) for _ in range(5)]
    await until(lambda: replica.in_flight == 5)
    for state in (State.UNHEALTHY, State.READY):
        replica.state = state
        seen.append(replica.in_flight)
    asked += [asyncio.create_task(gateway.chat()) for _ in range(5)]
    await until(lambda: replica.in_flight == 10)
    go_on.set()
    while not all(each.done() for each in asked):
        seen.append(replica.in_flight)
        await asyncio.sleep(0)
    assert [(await each)[0] for each in asked] == [200] * 10
    assert min(seen) >= 0
    assert max(seen) <= 10
    assert (replica.in_flight, gateway.open_requests.in_flight) == (0, 0)


@pytest.mark.replay("G10")
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_g10_an_error_amid_a_stream_is_told_once_and_costs_nothing_more(
    start: Start, upstream_of: UpstreamOf, status: int
) -> None:
    """litellm#26015: a 429 in mid-stream, without a fallback, kept a processor busy for ever."""

    async def script(reply: Reply) -> None:
        await reply.begin()
        for text in "abcde":
            await reply.piece(text)
        await reply.event(json.dumps({"error": {"message": "too many", "type": "x", "code": status}}).encode())
        await reply.until_left()

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    events = await gateway.events()
    assert [json.loads(event).get("error") is not None for event in events].count(True) == 1
    assert "error" in json.loads(events[-1])
    await until(lambda: gateway.open_requests.in_flight == 0)
    begun = time.process_time()
    await asyncio.sleep(0.2)
    assert time.process_time() - begun < 0.1  # idle
    assert upstream.num_generations == 1


@pytest.mark.replay("G11")
async def test_g11_large_bodies_do_not_hold_up_the_event_loop(start: Start, upstream_of: UpstreamOf) -> None:
    """litellm#20268, #13546: the streams of others stuttered while bodies of megabytes were parsed."""

    async def script(reply: Reply) -> None:
        await reply.answer("a")

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica(content_parts=["image_url"])))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (4 << 20)}}
    body = json.dumps({**HELLO, "messages": [{"role": "user", "content": [image]}]}).encode()
    await gateway.post(CHAT, body)
    pulse = Pulse()
    beating = asyncio.create_task(pulse.beat())
    for _ in range(8):
        assert (await gateway.post(CHAT, body))[0] == 200
    beating.cancel()
    assert pulse.worst_s < 0.25  # far less; client, gateway and engine share this loop and a busy machine


@pytest.mark.replay("G12", "R34")
async def test_g12_each_chunk_of_a_hundred_streams_passes_at_once_and_costs_no_timer_and_no_task(
    start: Start, upstream_of: UpstreamOf
) -> None:
    """litellm#21046, gpustack#1842, ray#59681: chunks waited for each other, or for a timer. Here an engine says its
    next word only when the client has the last one."""
    num_streams, num_words = 100, 40
    seen: dict[str, asyncio.Semaphore] = {}

    async def in_step(reply: Reply) -> None:
        mine = seen[json.loads(reply.request.body)["messages"][0]["content"]]
        await reply.begin()
        for _ in range(num_words):
            await reply.piece("word ")
            await mine.acquire()
        await reply.finish()
        await reply.done()

    async def read(name: str) -> None:
        seen[name] = asyncio.Semaphore(0)
        body = {**HELLO, "messages": [{"role": "user", "content": name}], "stream": True}
        async with gateway.client.post(gateway.url + CHAT, json=body) as response:
            async for line in response.content:
                if b"word" in line:
                    seen[name].release()

    gateway = await start(model((await upstream_of(in_step)).replica()))
    await read("warm")
    loop = asyncio.get_running_loop()
    with Counted(loop) as counted:
        await asyncio.gather(*(read(f"{number}") for number in range(num_streams)))
    per_stream = num_words / 2  # far below one a word: some are for the stream as a whole
    assert counted.num_timers < num_streams * per_stream
    assert counted.num_tasks < num_streams * per_stream
    begun = time.perf_counter()
    for number in range(5):
        await read(f"alone {number}")
    assert (time.perf_counter() - begun) / (5 * num_words) < 0.01  # a gathering timer alone would take that


class Counted:
    """How many timers and tasks an event loop was given."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._call_at = loop.call_at
        self.num_timers = self.num_tasks = 0

    def __enter__(self) -> Counted:
        def call_at(*args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            self.num_timers += 1
            return self._call_at(*args, **kwargs)

        def task_factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
            self.num_tasks += 1
            return asyncio.Task(coroutine, loop=loop, **kwargs)

        self._loop.call_at = call_at  # type: ignore[method-assign]
        self._loop.set_task_factory(task_factory)
        return self

    def __exit__(self, *_: object) -> None:
        del self._loop.call_at
        self._loop.set_task_factory(None)


@pytest.mark.replay("G30")
async def test_g30_bad_requests_of_one_tenant_do_not_take_the_engine_from_others(
    start: Start, upstream_of: UpstreamOf
) -> None:
    """sglang#25811: refusals with 4xx opened the breaker."""

    async def script(reply: Reply) -> None:
        if b'"seed":13' in reply.request.body:
            await reply.status(
                400, b'{"error":{"message":"no","type":"BadRequestError","code":400}}', "Connection: close"
            )
        else:
            await reply.answer("ok")

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    [replica] = gateway.fleet.replicas
    for _ in range(100):
        assert (await gateway.chat(seed=13))[0] == 400
        assert replica.is_ready
    assert upstream.num_generations == 100  # asked once each
    assert (await gateway.chat())[0] == 200


@pytest.mark.replay("G36")
async def test_g36_a_health_check_generates_nothing(start: Start, upstream_of: UpstreamOf) -> None:
    """litellm#26987, #9584: it asked for a token, which some models cannot give, and which costs."""

    async def script(reply: Reply) -> None:
        await reply.answer("ok")

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()), health={"interval_s": 0.02})
    await asyncio.sleep(0.3)
    assert gateway.fleet.replicas[0].is_ready
    assert upstream.num_generations == 0


@pytest.mark.replay("A09")
@pytest.mark.parametrize("size", [1, 6])
async def test_a09_a_body_in_tiny_chunks_is_read_without_holding_up_the_loop(start: Start, size: int) -> None:
    gateway = await start(fake_model())
    body = json.dumps({**HELLO, "messages": [{"role": "user", "content": "x" * 1_000_000}]}).encode()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    pulse = Pulse()
    beating = asyncio.create_task(pulse.beat())
    answer = await raw(gateway, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, wait_s=10)
    beating.cancel()
    assert answer.startswith(b"HTTP/1.1 200")
    assert pulse.worst_s < 0.5


@pytest.mark.replay("A11")
async def test_a11_requests_sent_ahead_of_an_answer_are_not_all_read_and_hide_no_client_that_leaves(
    start: Start, upstream_of: UpstreamOf
) -> None:
    upstream = await upstream_of(_silent)
    gateway = await start(model(upstream.replica()))
    body = json.dumps(HELLO).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    first = head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    many = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 600_000
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(first + many)
    await until(lambda: upstream.num_generations == 1)
    await asyncio.sleep(0.3)
    assert writer.transport.get_write_buffer_size() > len(many) / 2  # most of them are still with the client
    assert (await gateway.get("/health"))[0] == 200
    await until(lambda: gateway.open_requests.in_flight == 0)  # nobody could notice that this client leaves
    await until(lambda: upstream.num_closed == 1)
    writer.transport.abort()


async def _silent(reply: Reply) -> None:
    await reply.until_left()
