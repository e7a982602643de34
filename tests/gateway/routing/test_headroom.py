"""The signal for autoscalers: pure properties, ramps in virtual time, and a gateway that turns requests away."""

from __future__ import annotations

import doctest
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import ceil, sin
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.replicas.rate import Rate
from gateway.replicas.replica import DEMAND_S
from gateway.routing import headroom as headroom_module
from gateway.routing.headroom import IDLE_RPS, Carrier, Headroom, Wanted, headroom
from tests.gateway.rig import HELLO, Gateway, Start, fake, model, until
from tests.gateway.routing.test_goodput import evidence
from tests.gateway.tenants.test_limits import key_in

TARGET = 0.7

rates = st.floats(0, 1000)
carriers = st.lists(st.tuples(st.sampled_from([0.0, 2.0, 8.0, 16.0]), st.booleans()), min_size=1, max_size=6).map(
    lambda rows: [Carrier(f"r{n}", proven_rps=rps, is_ready=is_ready) for n, (rps, is_ready) in enumerate(rows)]
)


def of(replicas: list[Carrier], offered_rps: float) -> Headroom:
    return headroom(replicas, offered_rps=offered_rps, target=TARGET)


@given(carriers, rates)
def test_headroom_is_what_lies_between_and_never_less_than_what_is_offered(
    replicas: list[Carrier], offered_rps: float
) -> None:
    found = of(replicas, offered_rps)
    if found.headroom_rps is not None and found.capacity_rps is not None:
        assert -found.offered_rps <= found.headroom_rps <= found.capacity_rps
        assert found.headroom_rps == pytest.approx(found.capacity_rps - found.offered_rps)
    assert (found.replicas_needed is None) == all(not each.proven_rps for each in replicas)
    assert (found.headroom_rps is not None) or found.reason


@given(carriers, rates, rates)
def test_more_demand_never_needs_fewer_replicas_and_never_leaves_more_room(
    replicas: list[Carrier], one: float, other: float
) -> None:
    less, more = of(replicas, min(one, other)), of(replicas, max(one, other))
    if less.replicas_needed is not None and more.replicas_needed is not None:
        assert less.replicas_needed <= more.replicas_needed
    if less.headroom_rps is not None and more.headroom_rps is not None:
        assert less.headroom_rps >= more.headroom_rps


@given(carriers, rates)
def test_as_many_replicas_as_are_wanted_are_at_the_target_or_below(replicas: list[Carrier], offered_rps: float) -> None:
    found = of(replicas, offered_rps)
    if found.replicas_needed and found.proven_per_replica_rps is not None:
        wanted = Wanted().at(0.0, found.replicas_needed, hold_s=0)
        assert found.offered_rps <= wanted * found.proven_per_replica_rps * TARGET * (1 + 1e-9)


@given(st.lists(st.tuples(st.floats(0, 60), st.floats(0, 50)), max_size=60), st.floats(0, 300))
def test_what_is_needed_now_is_always_wanted_and_never_more_than_was_enough_lately(
    steps: list[tuple[float, float]], hold_s: float
) -> None:
    wanted, now, seen = Wanted(), 0.0, []
    for wait_s, needed in steps:
        now += wait_s
        seen.append((now, ceil(needed * headroom_module.SLACK)))
        number = wanted.at(now, needed, hold_s=hold_s)
        assert number >= ceil(needed)
        assert number <= max(enough for at, enough in seen if at >= now - hold_s)


def test_nothing_proven_is_told_and_wants_nothing() -> None:
    found = of([Carrier("a", 0.0, is_ready=True, doubt="It is old.")], 5.0)
    assert (found.capacity_rps, found.headroom_rps, found.replicas_needed) == (None, None, None)
    assert found.reason == "Nothing is trusted of any of its replicas: It is old."


def test_a_model_with_no_replica_up_says_how_many_it_wants() -> None:
    found = of([Carrier("a", 10.0, is_ready=False)], 14.0)
    assert (found.capacity_rps, found.headroom_rps, found.utilisation) == (0, -14.0, None)
    assert found.replicas_needed == 2.0


def test_a_model_that_nobody_asks_for_wants_none() -> None:
    assert of([Carrier("a", 10.0, is_ready=True)], IDLE_RPS / 2).replicas_needed == 0


def test_the_examples_are_true() -> None:
    assert doctest.testmod(headroom_module).failed == 0


# ----------------------------------------------------------------------------------------------------- in virtual time

PROVEN_RPS = 10.0
STARTS_IN_S = 60.0  # a replica that is wanted serves so much later
SCALED_EVERY_S = 15.0


def replay(rate_rps: Callable[[float], float], *, lasts_s: float, first: int) -> Iterator[tuple[float, int, int]]:
    """An autoscaler that reads the signal now and then: the time, the replicas that are wanted, and those that are up.
    Arrivals are Poisson's."""
    chance, demand, wanted = random.Random(11), Rate(DEMAND_S), Wanted()
    now, read_at, coming, ready = 0.0, 0.0, [], first
    while now < lasts_s:
        now += chance.expovariate(max(rate_rps(now), 0.1))
        demand.note(now)
        while coming and coming[0][0] <= now:
            ready = coming.pop(0)[1]
        if now >= read_at:
            read_at += SCALED_EVERY_S
            carriers = [Carrier(f"r{n}", PROVEN_RPS, is_ready=n < ready) for n in range(20)]
            found = of(carriers, demand.at(now))
            assert found.replicas_needed is not None
            number = wanted.at(now, found.replicas_needed, hold_s=300)
            if number < ready:
                ready, coming = number, []
            elif number > ready:
                coming.append((now + STARTS_IN_S, number))
            yield now, number, ready


def test_replicas_are_wanted_and_up_before_a_ramp_is_more_than_they_are_proven_to_carry() -> None:
    def ramp(now: float) -> float:
        return 7.0 + 60.0 * max(now - 120.0, 0.0) / 1800.0  # from one replica's target to ten times as much

    for now, _, ready in replay(ramp, lasts_s=1900.0, first=1):
        assert ramp(now) <= ready * PROVEN_RPS, f"after {now:.0f} s {ready} replicas get {ramp(now):.1f} a second"


@pytest.mark.parametrize("rate_rps", [13.5, 14.0, 14.5, 21.0])
def test_a_steady_load_at_the_edge_of_one_more_replica_does_not_flap(rate_rps: float) -> None:
    numbers = [wanted for now, wanted, _ in replay(lambda _: rate_rps, lasts_s=3600.0, first=2) if now > 300]
    changes = sum(one != other for one, other in pairwise(numbers))
    assert changes <= 2, numbers


def test_a_load_that_swings_every_minute_keeps_what_its_peaks_need() -> None:
    def swinging(now: float) -> float:
        return 20.0 + 10.0 * sin(now / 10.0)

    numbers = [wanted for now, wanted, _ in replay(swinging, lasts_s=1800.0, first=3) if now > 300]
    assert max(numbers) - min(numbers) <= 1


def test_replicas_go_when_the_load_has_gone_for_long_enough() -> None:
    def falling(now: float) -> float:
        return 35.0 if now < 300.0 else 3.0

    seen = list(replay(falling, lasts_s=900.0, first=5))
    assert all(wanted >= 5 for now, wanted, _ in seen if 120 < now < 600), "not before hold_s has passed"
    assert seen[-1][1] == 1


# ---------------------------------------------------------------------------------------------------- over real sockets


async def signal(gateway: Gateway, name: str = "m") -> dict[str, Any]:
    status, body = await gateway.get(f"/admin/autoscale/{name}")
    assert status == 200
    return body


async def test_what_is_turned_away_is_demand_too(start: Start, tmp_path: Path) -> None:
    path = evidence(tmp_path / "evidence.json", ("a", 2.0))
    gateway = await start(model(fake("a", itl_ms=5000)), evidence=path, server={"max_in_flight": 1})
    async with gateway.client.post(
        f"{gateway.url}/v1/chat/completions",
        json={"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True},
    ):
        await until(lambda: gateway.open_requests.in_flight == 1)
        before = await signal(gateway)
        for _ in range(60):
            assert (await gateway.chat())[0] == 503
        after = await signal(gateway)
    assert before["replicas_wanted"] == 1
    assert after["turned_away_rps"] == pytest.approx(60 / DEMAND_S, rel=0.2)
    assert after["offered_rps"] == pytest.approx(61 / DEMAND_S, rel=0.2)
    assert after["replicas_wanted"] == 2
    assert after["headroom_rps"] == pytest.approx(2.0 - after["offered_rps"], abs=0.01)


async def test_what_a_callers_own_quota_refuses_is_no_demand(start: Start, tmp_path: Path) -> None:
    path = evidence(tmp_path / "evidence.json", ("a", 2.0))
    caller = key_in(tmp_path, requests_per_min=1)
    gateway = await start(model(fake("a")), evidence=path, auth={"loopback_is_admin": True})
    statuses = [(await gateway.post("/v1/chat/completions", HELLO, **caller))[0] for _ in range(20)]
    assert statuses == [200, *[429] * 19]
    assert (await signal(gateway))["offered_rps"] == pytest.approx(1 / DEMAND_S, rel=0.2)


async def test_without_proof_the_signal_is_null_and_says_why(start: Start) -> None:
    gateway = await start(model(fake("a")))
    assert (await gateway.chat())[0] == 200
    told = await signal(gateway)
    assert told["replicas_wanted"] is told["headroom_rps"] is told["utilisation"] is None
    assert "`evidence` in the configuration" in told["reason"]
    assert told["offered_rps"] > 0
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        assert "goodgate_replicas_wanted{" not in await response.text()


async def test_all_models_are_told_together_and_the_metrics_say_the_same(start: Start, tmp_path: Path) -> None:
    path = evidence(tmp_path / "evidence.json", ("a", 50.0))
    gateway = await start(
        model(fake("a")), model(fake("b"), name="n"), groups=[{"name": "g", "models": ["m"]}], evidence=path
    )
    assert (await gateway.chat(model="g"))[0] == 200
    both = (await gateway.get("/admin/autoscale"))[1]["models"]
    assert [each["model"] for each in both] == ["m", "n"]
    assert (await signal(gateway, "g"))["model"] == "m"
    assert both[0]["offered_rps"] > 0, "what a group is asked for, its models are"
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        text = await response.text()
    assert 'goodgate_goodput_capacity_rps{model="m"} 50.0' in text
    assert 'goodgate_replicas_wanted{model="m"} 1.0' in text
    assert (await gateway.get("/admin/autoscale/absent"))[0] == 404
