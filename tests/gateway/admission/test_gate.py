"""A model's gate over real sockets: who waits, who is sent away, and that nothing is left of those who leave."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from gateway.admission.gate import Gates
from gateway.admission.priority import PRIORITY_HEADER, TTFT_HEADER, Priority
from gateway.app import PARTS
from gateway.config import parse_config
from gateway.tenants.keys import KeyStore, NewKey
from tests.gateway.rig import HELLO, Gateway, Reply, Start, Upstream, model, until

CHAT = "/v1/chat/completions"


def gates_of(gateway: Gateway) -> Gates:
    return gateway.app[PARTS].gates


def num_open(gateway: Gateway, name: str = "m") -> int:
    return gates_of(gateway)._gates[name].turnstile.num_open


class Held:
    """An engine that answers once it is let."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.order: list[str] = []

    async def script(self, reply: Reply) -> None:
        self.order.append(reply.request.body.decode())
        await self.go.wait()
        await reply.answer("Hi")


async def ask(gateway: Gateway, text: str = "Hello", **headers: str) -> tuple[int, Any, Any]:
    return await gateway.post(CHAT, {**HELLO, "messages": [{"role": "user", "content": text}]}, **headers)


async def waiting(gateway: Gateway, count: int) -> None:
    await until(lambda: gates_of(gateway).num_waiting("m") == count)


async def test_who_waits_is_served_by_class_and_then_in_order(start: Start, upstream_of: Any) -> None:
    held = Held()
    upstream: Upstream = await upstream_of(held.script)
    gateway = await start(model(upstream.replica(), admission={"max_running": 1}))
    asks = [asyncio.create_task(ask(gateway, "first"))]
    await until(lambda: upstream.num_generations == 1)
    for number, (text, priority) in enumerate(
        (("low", "low"), ("one", "default"), ("two", "default"), ("high", "high"))
    ):
        asks.append(asyncio.create_task(ask(gateway, text, **{PRIORITY_HEADER: priority})))
        await waiting(gateway, number + 1)
    held.go.set()
    answers = await asyncio.gather(*asks)
    assert [status for status, _, _ in answers] == [200] * 5
    said = ["first", "high", "one", "two", "low"]
    assert all(word in body for word, body in zip(said, held.order, strict=True))
    assert num_open(gateway) == gates_of(gateway).num_waiting() == gateway.open_requests.in_flight == 0


async def test_a_full_queue_refuses_at_once_and_a_higher_class_takes_a_place(start: Start, upstream_of: Any) -> None:
    held = Held()
    upstream: Upstream = await upstream_of(held.script)
    gateway = await start(model(upstream.replica(), admission={"max_running": 1, "max_waiting": 1}))
    first = asyncio.create_task(ask(gateway))
    await until(lambda: upstream.num_generations == 1)
    displaced = asyncio.create_task(ask(gateway, "displaced"))
    await waiting(gateway, 1)
    began = time.perf_counter()
    status, body, headers = await ask(gateway, "refused")
    assert (status, body["error"]["code"]) == (503, "overloaded")
    assert int(headers["Retry-After"]) >= 1
    assert time.perf_counter() - began < 1
    high = asyncio.create_task(ask(gateway, "high", **{PRIORITY_HEADER: "high"}))
    status, body, headers = await displaced
    assert (status, "higher priority" in body["error"]["message"]) == (503, True)
    assert "Retry-After" in headers
    held.go.set()
    assert [status for status, _, _ in await asyncio.gather(first, high)] == [200, 200]
    assert gates_of(gateway).num_shed("m") == 2


async def test_a_request_whose_turn_does_not_come_in_time_is_sent_away(start: Start, upstream_of: Any) -> None:
    held = Held()
    upstream: Upstream = await upstream_of(held.script)
    gateway = await start(model(upstream.replica(), admission={"max_running": 1}))
    first = asyncio.create_task(ask(gateway))
    await until(lambda: upstream.num_generations == 1)
    status, body, _ = await ask(gateway, "late", **{TTFT_HEADER: "60"})
    assert (status, "did not come in time" in body["error"]["message"]) == (503, True)
    assert upstream.num_generations == 1
    held.go.set()
    assert (await first)[0] == 200


async def test_a_stream_that_waits_can_still_be_refused_with_503(start: Start, upstream_of: Any) -> None:
    held = Held()
    upstream: Upstream = await upstream_of(held.script)
    gateway = await start(model(upstream.replica(), admission={"max_running": 1}))
    first = asyncio.create_task(ask(gateway))
    await until(lambda: upstream.num_generations == 1)
    status, _, _ = await gateway.post(CHAT, {**HELLO, "stream": True}, **{TTFT_HEADER: "60"})
    assert status == 503
    held.go.set()
    await first


async def test_a_refused_request_goes_to_the_fallback(start: Start, upstream_of: Any) -> None:
    held = Held()
    busy: Upstream = await upstream_of(held.script)
    free: Upstream = await upstream_of(lambda reply: reply.answer("from the other"))
    gateway = await start(
        model(busy.replica(), admission={"max_running": 1, "max_waiting": 0}, fallbacks=["other"]),
        model(free.replica(), name="other"),
    )
    first = asyncio.create_task(ask(gateway))
    await until(lambda: busy.num_generations == 1)
    status, body, _ = await ask(gateway, "second")
    assert (status, body["choices"][0]["message"]["content"]) == (200, "from the other")
    held.go.set()
    await first


async def test_health_models_and_cancelling_pass_by_a_full_queue(start: Start, upstream_of: Any) -> None:
    held = Held()
    upstream: Upstream = await upstream_of(held.script)
    gateway = await start(model(upstream.replica(), admission={"max_running": 1, "max_waiting": 2}))
    asks = [asyncio.create_task(ask(gateway, str(number))) for number in range(3)]
    await waiting(gateway, 2)
    for path in ("/health", "/ready", "/v1/models"):
        assert (await gateway.get(path))[0] == 200
    for each in asks:  # cancelling needs no turn either
        each.cancel()
    await asyncio.gather(*asks, return_exceptions=True)
    await until(lambda: gateway.open_requests.in_flight == 0)
    assert num_open(gateway) == gates_of(gateway).num_waiting() == 0


async def test_clients_that_leave_at_random_leave_nothing_behind(start: Start, upstream_of: Any) -> None:
    async def script(reply: Reply) -> None:
        await asyncio.sleep(0.002)
        await reply.answer("Hi")

    upstream: Upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica(), admission={"max_running": 3, "max_waiting": 40}))
    draw = random.Random(7)

    async def leaves() -> None:
        try:
            async with asyncio.timeout(draw.random() * 0.05):
                await ask(gateway, **{PRIORITY_HEADER: draw.choice(["high", "default", "low"])})
        except TimeoutError:
            pass

    for _ in range(4):
        await asyncio.gather(*(leaves() for _ in range(50)))
    await until(lambda: gateway.open_requests.in_flight == 0)
    gate = gates_of(gateway)._gates["m"]
    assert (gate.turnstile.num_open, gate.num_waiting, len(gate._tickets)) == (0, 0, 0)
    assert gateway.fleet.replicas[0].in_flight == 0
    assert (await ask(gateway))[0] == 200


async def test_a_request_of_many_prompts_takes_a_place_for_each(start: Start, upstream_of: Any) -> None:
    now = most = 0

    async def script(reply: Reply) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        body = b'{"choices":[{"index":0,"text":"Hi","finish_reason":"stop"}]}'
        await reply.begin()
        await reply.event(body)
        await reply.done()

    upstream: Upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica(), admission={"max_running": 2}))
    status, body, _ = await gateway.post("/v1/completions", {"model": "m", "prompt": ["a"] * 8})
    assert (status, len(body["choices"]), most) == (200, 8, 2)
    assert num_open(gateway) == 0


@pytest.mark.replay("G40")
@pytest.mark.parametrize("wish", ["1e308", "-1", "NaN", "", "0", "inf", "soon", "1e-400"])
async def test_g40_a_wish_that_makes_no_sense_is_refused_by_name(start: Start, upstream_of: Any, wish: str) -> None:
    upstream: Upstream = await upstream_of(lambda reply: reply.answer("Hi"))
    gateway = await start(model(upstream.replica()))
    status, body, _ = await ask(gateway, **{TTFT_HEADER: wish})
    assert (status, body["error"]["param"]) == (400, TTFT_HEADER)
    assert upstream.num_generations == 0


@pytest.mark.replay("A39")
async def test_a39_a_caller_who_calls_himself_urgent_is_refused(start: Start, upstream_of: Any, tmp_path: Any) -> None:
    store = KeyStore(tmp_path)
    plain = store.create(NewKey(name="plain"))
    urgent = store.create(NewKey(name="urgent", priority=Priority.HIGH))
    upstream: Upstream = await upstream_of(lambda reply: reply.answer("Hi"))
    gateway = await start(model(upstream.replica()))
    for key, priority, expected in (
        (plain, "high", 403),
        (plain, "low", 200),
        (urgent, "high", 200),
        (plain, "CRITICAL", 400),
    ):
        status, body, _ = await ask(gateway, Authorization=f"Bearer {key}", **{PRIORITY_HEADER: priority})
        assert status == expected, body
    assert upstream.num_generations == 2


@pytest.mark.parametrize("admission", [{"max_running": 3}, {"max_running": 1, "max_waiting": 9}, None])
async def test_another_configuration_keeps_who_waits_and_lets_in_whom_it_has_room_for(
    start: Start, upstream_of: Any, admission: dict[str, Any] | None
) -> None:
    held = Held()
    upstream: Upstream = await upstream_of(held.script)
    gateway = await start(model(upstream.replica(), admission={"max_running": 1}))
    asks = [asyncio.create_task(ask(gateway, str(number))) for number in range(3)]
    await waiting(gateway, 2)
    fields = {} if admission is None else {"admission": admission}
    gateway.app[PARTS].live.config = parse_config({"models": [model(upstream.replica(), **fields)]})
    gates_of(gateway).adopt()
    expected = 3 if admission == {"max_running": 3} else 1  # without a gate they have their turns all the same
    await until(lambda: upstream.num_generations == expected)
    held.go.set()
    assert [status for status, _, _ in await asyncio.gather(*asks)] == [200] * 3
    assert gates_of(gateway).num_waiting() == gateway.open_requests.in_flight == 0
