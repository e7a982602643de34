"""A second replica is asked when the first is late; the slower one is ended, whatever happens to the request."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.base import Load
from gateway.attempts.hedge_timing import NUM_NEEDED, HedgeTiming
from gateway.config import HedgeConfig
from gateway.records.ledger_files import FOLDER
from gateway.records.ledger_reader import LedgerReader
from gateway.records.record import detail_of
from tests.gateway.attempts.hedging_simulation import percentile, run
from tests.gateway.rig import HELLO, Gateway, Reply, Script, Start, Upstream, model, until
from tests.gateway.test_cancellation import at_rest

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
HEDGE = {"after": 50, "budget": 1.0}


async def whole(reply: Reply) -> None:
    await reply.answer("a", "b")


async def silent(reply: Reply) -> None:
    await reply.begin()
    await reply.until_left()


async def failing_late(reply: Reply) -> None:
    await asyncio.sleep(0.15)
    await reply.status(500, b'{"error":{"message":"no"}}', "Connection: close")


def pair(first: Upstream, second: Upstream, **fields: Any) -> dict[str, Any]:
    return model(first.replica("a"), second.replica("b"), routing="round_robin", **{"hedge": HEDGE, **fields})


async def samples(gateway: Gateway, series: str) -> dict[str, float]:
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        text = await response.text()
    return {label: float(value) for label, value in re.findall(rf"^{series} (\S+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_replica_that_is_late_loses_to_another_and_its_connection_is_closed(
    start: Start, upstream_of: UpstreamOf, is_stream: bool
) -> None:
    slow, good = await upstream_of(silent), await upstream_of(whole)
    gateway = await start(pair(slow, good))
    async with gateway.client.post(
        f"{gateway.url}/v1/chat/completions", json={**HELLO, "stream": is_stream}
    ) as response:
        assert (response.status, response.headers["x-goodgate-replica"]) == (200, "b")
        await response.read()
    await until(lambda: slow.num_closed == 1)
    assert (slow.num_generations, good.num_generations) == (1, 1)
    assert await samples(gateway, r'goodgate_hedges_total\{model="m",winner="(\w+)"\}') == {"hedge": 1}
    assert await samples(gateway, r'goodgate_attempts_total\{.*outcome="(\w+)".*\}') == {"ok": 1, "lost": 1}
    assert await samples(gateway, r'goodgate_in_flight\{.*replica="(\w)"\}') == {"a": 0, "b": 0}


async def test_a_first_replica_that_answers_after_all_wins_and_the_hedge_is_closed(
    start: Start, upstream_of: UpstreamOf
) -> None:
    async def late(reply: Reply) -> None:
        await asyncio.sleep(0.2)
        await reply.answer("a", "b")

    first, second = await upstream_of(late), await upstream_of(silent)
    gateway = await start(pair(first, second))
    status, _, headers = await gateway.chat()
    assert (status, headers["x-goodgate-replica"]) == (200, "a")
    await until(lambda: second.num_closed == 1)


async def test_it_is_off_unless_a_model_asks_for_it(start: Start, upstream_of: UpstreamOf) -> None:
    async def late(reply: Reply) -> None:
        await asyncio.sleep(0.2)
        await reply.answer("a", "b")

    first, second = await upstream_of(late), await upstream_of(whole)
    gateway = await start(pair(first, second, hedge=None))
    assert (await gateway.chat())[2]["x-goodgate-replica"] == "a"
    assert second.num_generations == 0


@pytest.mark.replay("F14")
async def test_f14_a_client_that_leaves_during_the_race_ends_both(start: Start, upstream_of: UpstreamOf) -> None:
    first, second = await upstream_of(silent), await upstream_of(silent)
    gateway = await start(pair(first, second))
    request = asyncio.ensure_future(gateway.chat())
    await until(lambda: second.num_generations == 1)
    request.cancel()
    await until(lambda: (first.num_closed, second.num_closed) == (1, 1))
    await until(lambda: at_rest(gateway))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_where_both_fail_the_client_is_told_once(start: Start, upstream_of: UpstreamOf, is_stream: bool) -> None:
    first, second = await upstream_of(failing_late), await upstream_of(failing_late)
    gateway = await start(pair(first, second, max_attempts=1))
    status, body, _ = await gateway.chat(stream=is_stream)
    assert (status, body["error"]["code"]) == (502, "engine_failed")
    assert (first.num_generations, second.num_generations) == (1, 1)


async def test_a_loser_that_fails_late_changes_nothing(start: Start, upstream_of: UpstreamOf) -> None:
    first, second = await upstream_of(failing_late), await upstream_of(whole)
    gateway = await start(pair(first, second))
    assert (await gateway.events())[-1] == "[DONE]"
    await asyncio.sleep(0.2)
    assert await samples(gateway, r'goodgate_attempts_total\{.*outcome="(\w+)".*\}') == {"ok": 1, "lost": 1}


async def test_an_answer_that_breaks_after_a_won_race_is_told(start: Start, upstream_of: UpstreamOf) -> None:
    async def half(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("half")
        await asyncio.sleep(0.05)
        reply.reset()

    slow, bad = await upstream_of(silent), await upstream_of(half)
    gateway = await start(pair(slow, bad))
    events = await gateway.events()
    assert json.loads(events[-1])["error"]["code"] == "stream_interrupted"
    outcomes = await samples(gateway, r'goodgate_attempts_total\{.*outcome="(\w+)".*\}')
    assert outcomes == {"lost": 1, "stream_interrupted": 1}


async def test_extra_load_keeps_to_its_share(start: Start, upstream_of: UpstreamOf) -> None:
    async def late(reply: Reply) -> None:
        await asyncio.sleep(0.15)
        await reply.answer("a", "b")

    first, second = await upstream_of(late), await upstream_of(late)
    gateway = await start(pair(first, second, hedge={"after": 20, "budget": 0.1}))
    await asyncio.gather(*(gateway.chat() for _ in range(30)))
    assert 30 < first.num_generations + second.num_generations <= 33


async def late_answer(reply: Reply) -> None:
    await asyncio.sleep(0.2)
    await reply.answer("a", "b")


async def test_an_engine_with_a_queue_of_its_own_is_not_asked_beside_the_first(
    start: Start, upstream_of: UpstreamOf
) -> None:
    first, second = await upstream_of(late_answer), await upstream_of(whole)
    gateway = await start(pair(first, second))
    gateway.fleet.replicas[1].load = Load(waiting=1)
    assert (await gateway.chat())[2]["x-goodgate-replica"] == "a"
    assert second.num_generations == 0


async def test_a_replica_whose_places_are_all_taken_is_not_asked_beside_the_first(
    start: Start, upstream_of: UpstreamOf
) -> None:
    first, second = await upstream_of(late_answer), await upstream_of(silent)
    replicas = first.replica("a"), {**second.replica("b"), "max_in_flight": 1}
    gateway = await start(model(*replicas, routing="round_robin", hedge={"after": 20, "budget": 1.0}))
    gateway.fleet.replicas[1].in_flight = 1
    assert (await gateway.chat())[2]["x-goodgate-replica"] == "a"
    assert second.num_generations == 0


async def test_nobody_is_asked_twice_while_others_wait_for_their_turn(start: Start, upstream_of: UpstreamOf) -> None:
    first, second = await upstream_of(late_answer), await upstream_of(whole)
    gateway = await start(pair(first, second, admission={"max_running": 1}))
    running = asyncio.ensure_future(gateway.chat())
    await until(lambda: first.num_generations == 1)
    waiting = asyncio.ensure_future(gateway.chat())
    assert (await running)[2]["x-goodgate-replica"] == "a"
    assert (await waiting)[2]["x-goodgate-replica"] == "b"
    assert (first.num_generations, second.num_generations) == (1, 1)


async def test_the_ledger_names_both_of_a_race_and_counts_the_tokens_of_both(
    start: Start, upstream_of: UpstreamOf, tmp_path: Path
) -> None:
    """What the loser has read is estimated: it was cut off before it could tell."""
    slow, good = await upstream_of(silent), await upstream_of(whole)
    gateway = await start(pair(slow, good))
    _, body, headers = await gateway.chat()
    reader = LedgerReader(tmp_path / FOLDER)
    await until(lambda: reader.find(headers["x-request-id"]) is not None)
    found = reader.find(headers["x-request-id"])
    assert found is not None
    lost, won = detail_of(found.record).attempts
    assert (lost.replica, lost.why, lost.outcome) == ("a", "", "lost")
    assert (won.replica, won.why, won.outcome) == ("b", "hedge", "ok")
    assert lost.prompt_tokens > 0
    assert (won.prompt_tokens, won.completion_tokens) == (3, 2)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 2)  # the caller pays for one
    assert (found.record.prompt_tokens, found.record.completion_tokens) == (3, 2)


async def test_two_hundred_requests_with_a_slow_replica_keep_to_the_budget(
    start: Start, upstream_of: UpstreamOf
) -> None:
    first, second = await upstream_of(late_answer), await upstream_of(whole)
    gateway = await start(pair(first, second, hedge={"after": 20, "budget": 0.1}))
    for _ in range(4):
        answers = await asyncio.gather(*(gateway.chat() for _ in range(50)))
        assert {status for status, _, _ in answers} == {200}
    races = await samples(gateway, r'goodgate_hedges_total\{model="m",winner="(\w+)"\}')
    assert 10 <= sum(races.values()) <= 20
    # One that has lost before its request was on its way never came to an engine.
    assert 200 + races["hedge"] <= first.num_generations + second.num_generations <= 200 + sum(races.values())
    await until(lambda: gateway.open_requests.in_flight == 0)
    assert await samples(gateway, r'goodgate_in_flight\{.*replica="(\w)"\}') == {"a": 0, "b": 0}


def test_where_a_few_first_tokens_are_slow_hedging_takes_the_long_waits_away() -> None:
    """In virtual time; the figures are in docs/lab-log.md."""
    alone, _ = run(None)
    hedged, num_hedges = run(HedgeConfig(budget=0.1))
    assert percentile(hedged, 0.99) < percentile(alone, 0.99) / 2
    assert num_hedges <= 0.1 * len(hedged)


def test_the_delay_is_what_nearly_all_first_tokens_took() -> None:
    timing = HedgeTiming(HedgeConfig())
    for number in range(NUM_NEEDED - 1):
        timing.answered(number / 100)
    assert timing.delay_s() is None  # too little is known
    timing.answered(5.0)
    assert timing.delay_s() == 5.0
    for _ in range(200):
        timing.answered(0.1)
    assert timing.delay_s() == 0.1  # what is long ago is forgotten


@given(st.floats(0.01, 1), st.lists(st.floats(0, 30), min_size=1, max_size=200))
def test_hedges_are_a_share_of_what_is_recent(budget: float, times: list[float]) -> None:
    timing = HedgeTiming(HedgeConfig(budget=budget))
    hedged: list[float] = []
    begun: list[float] = []
    for now in sorted(times):
        timing.opened(now)
        begun.append(now)
        if timing.may_hedge(now):
            timing.hedged(now)
            hedged.append(now)
        recent = [at for at in begun if at > now - 10]
        assert len([at for at in hedged if at > now - 9]) <= max(1, budget * (len(recent) + len(begun)))
