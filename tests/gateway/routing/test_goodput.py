"""Routing by proven goodput: pure decisions, a fleet in virtual time, and a gateway with a race's own file."""

from __future__ import annotations

import doctest
import logging
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.app import PARTS
from gateway.config import ConfigError, SloConfig, parse_config
from gateway.records.trace import CANCELLED, Attempt
from gateway.replicas import attainment, rate
from gateway.replicas.attainment import Attainment, Promise, missed
from gateway.replicas.rate import Rate
from gateway.replicas.replica import OFFERED_S
from gateway.routing import goodput as goodput_module
from gateway.routing.ask import Ask
from gateway.routing.evidence import Entry, Limits
from gateway.routing.goodput import goodput
from gateway.routing.policies import round_robin
from gateway.routing.proof import BROKEN, DAY_S, Here, Proof, judged, promised
from gateway.routing.views import ReplicaView, least_load
from tests.gateway.rig import Gateway, Start, fake, model, until
from tests.gateway.routing.test_evidence import NATIVE, document, write

ASK = Ask(prompt_tokens=100, completion_tokens=100)
RACED = datetime(2026, 11, 1, tzinfo=UTC)
NOW = RACED.timestamp() + 10 * DAY_S


# ------------------------------------------------------------------------------------------ the order of replicas

views = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([0.0, 2.0, 8.0, 16.0]), st.integers(0, 900)), max_size=8
).map(
    lambda rows: [
        ReplicaView(f"r{n}", offered_rps=offered, proven_rps=proven, open_tokens=tokens)
        for n, (offered, proven, tokens) in enumerate(rows)
    ]
)


@given(views, st.integers(0, 1000))
def test_every_replica_has_its_place_and_none_with_room_comes_behind_one_without(
    given_views: list[ReplicaView], turn: int
) -> None:
    order = goodput(given_views, ASK, turn)
    assert sorted(order, key=lambda view: view.name) == given_views
    if any(view.proven_rps for view in given_views):
        has_room = [view.proven_rps > 0 and view.offered_rps < view.proven_rps for view in order]
        assert has_room == sorted(has_room, reverse=True)


@given(views, st.integers(0, 1000))
def test_where_nothing_is_proven_it_is_least_load(given_views: list[ReplicaView], turn: int) -> None:
    unproven = [msgspec.structs.replace(view, proven_rps=0.0) for view in given_views]
    assert goodput(unproven, ASK, turn) == least_load(unproven, ASK, turn)


def test_one_that_nothing_is_proven_of_takes_what_the_others_have_no_room_for_and_no_more_than_they() -> None:
    full, unknown = ReplicaView("full", offered_rps=8.0, proven_rps=8.0), ReplicaView("unknown", offered_rps=7.9)
    assert goodput([full, unknown], ASK, 0)[0].name == "unknown"
    busy = msgspec.structs.replace(unknown, offered_rps=8.1)
    assert goodput([full, busy], ASK, 0)[0].name == "full"


def test_the_cheaper_one_is_filled_up_before_the_dearer_one_gets_anything() -> None:
    own, rented = ReplicaView("own", proven_rps=8.0, cost=1.0), ReplicaView("rented", proven_rps=80.0, cost=9.0)
    busy = msgspec.structs.replace(own, offered_rps=7.9)
    full = msgspec.structs.replace(own, offered_rps=8.0)
    assert goodput([rented, busy], ASK, 0)[0].name == "own"
    assert goodput([rented, full], ASK, 0)[0].name == "rented"


def test_one_that_fares_badly_counts_as_smaller() -> None:
    well = ReplicaView("well", offered_rps=6.0, proven_rps=8.0)
    ill = ReplicaView("ill", offered_rps=1.5, proven_rps=8.0, trust=0.2)
    assert [view.name for view in goodput([ill, well], ASK, 0)] == ["well", "ill"]


def test_the_examples_are_true() -> None:
    for each in (goodput_module, rate, attainment):
        assert doctest.testmod(each).failed == 0


# ------------------------------------------------------------------------------------------------ what is trusted

ENTRY = Entry(
    engine="fake",
    model="m",
    goodput_rps=8.0,
    ci=(6.3, 8.9),
    proven=True,
    measured_utc=RACED,
    version="b11434",
    slo=Limits(ttft_ms=500, tpot_ms=50),
    settings={"threads": 2},
    expires_utc=RACED + timedelta(days=85),
)


def verdict(*entries: Entry, **known: Any) -> Proof:
    here = Here(**{"slo": SloConfig(), "version": "", "settings": None, "now": NOW, "max_age_s": 90 * DAY_S, **known})
    return judged(entries, here)


@pytest.mark.parametrize(
    "slo", [SloConfig(), SloConfig(ttft_ms=500), SloConfig(ttft_ms=500, tpot_ms=50), SloConfig(ttft_ms=900)]
)
def test_a_race_for_the_same_limits_or_stricter_ones_is_trusted(slo: SloConfig) -> None:
    assert verdict(ENTRY, slo=slo).trusted_rps == 8.0


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"slo": SloConfig(ttft_ms=400)}, "looser `ttft_ms`: 500, and `slo` promises 400"),
        ({"slo": SloConfig(ttft_ms=500, tpot_ms=20)}, "looser `tpot_ms`: 50, and `slo` promises 20"),
        ({"now": NOW + 75 * DAY_S}, "evidence of the race of 2026-11-01 expired on 2027-01-25"),
        ({"max_age_s": 9 * DAY_S}, "race of 2026-11-01 is older than `goodput.max_age_days`"),
        ({"version": "b11500"}, "version b11434, and b11500 runs"),
        ({"settings": {}}, "raced with `threads: 2`, and is launched with no options"),
    ],
)
def test_evidence_that_proves_nothing_here_is_not_trusted_and_says_why(changes: dict[str, Any], doubt: str) -> None:
    proof = verdict(ENTRY, **changes)
    assert proof.trusted_rps == 0
    assert doubt in proof.doubt


def test_no_race_and_a_race_without_a_rate_prove_nothing() -> None:
    assert "does not speak of it" in verdict().doubt
    assert "proven no rate" in verdict(msgspec.structs.replace(ENTRY, proven=False, ci=(0.0, 9.0))).doubt


def test_a_launched_engine_with_the_settings_that_were_raced_is_trusted() -> None:
    assert verdict(ENTRY, settings={"threads": 2}).trusted_rps == 8.0


def test_of_several_races_the_lowest_rate_that_can_be_trusted_counts() -> None:
    """An expired race, one of looser limits and one of other settings say nothing, however low or high they are."""
    long_documents = msgspec.structs.replace(ENTRY, goodput_rps=3.0)
    useless = [
        msgspec.structs.replace(ENTRY, goodput_rps=1.0, expires_utc=RACED),
        msgspec.structs.replace(ENTRY, goodput_rps=0.5, slo=Limits(ttft_ms=900, tpot_ms=50)),
        msgspec.structs.replace(ENTRY, goodput_rps=99.0, settings={"threads": 1}),
    ]
    slo = SloConfig(ttft_ms=500)
    proof = verdict(*useless, ENTRY, long_documents, slo=slo, settings={"threads": 2})
    assert (proof.trusted_rps, proof.raced) == (3.0, ENTRY.slo)
    newest = msgspec.structs.replace(useless[1], measured_utc=RACED + timedelta(days=1))
    assert "looser `ttft_ms`" in verdict(useless[0], newest, useless[2], slo=slo, settings={}).doubt


@pytest.mark.parametrize("version", ["b11434", "b11434-a1b2c3d", "vb11434", ""])
def test_a_build_of_the_same_version_is_the_same(version: str) -> None:
    assert verdict(ENTRY, version=version).trusted_rps == 8.0


def test_what_is_promised_goes_before_what_was_raced_for() -> None:
    assert promised(SloConfig(), Limits(ttft_ms=500)) == SloConfig(ttft_ms=500)
    assert promised(SloConfig(ttft_ms=900), Limits(ttft_ms=500)) == SloConfig(ttft_ms=900)


# ------------------------------------------------------------------------------------------- is the promise kept, live?


@pytest.mark.parametrize(
    ("changes", "has_failed", "is_missed"),
    [
        ({"first_token": 0.4, "ended": 1.0}, False, False),
        ({"first_token": 0.6, "ended": 1.0}, False, True),
        ({"ended": 0.1, "outcome": "engine_failed"}, True, True),
        ({"ended": 0.4, "outcome": CANCELLED}, False, None),
        ({"ended": 0.6, "outcome": CANCELLED}, False, True),
        ({"ended": 9.0}, False, None),
    ],
)
def test_an_attempt_is_judged_by_what_it_tells(
    changes: dict[str, Any], has_failed: bool, is_missed: bool | None
) -> None:
    attempt = Attempt(**{"model": "m", "engine": "e", "replica": "r", "started": 0.0, "outcome": "ok", **changes})
    assert missed(attempt, SloConfig(ttft_ms=500, tpot_ms=50), has_failed=has_failed) is is_missed


def test_one_late_answer_contradicts_nothing() -> None:
    kept = Attainment()
    for second in range(100):
        kept.note(second == 50, float(second), float(second))
        assert not kept.is_broken(float(second))


def test_what_comes_late_while_too_much_is_asked_says_nothing() -> None:
    overfull = Attainment()
    for second in range(20):
        overfull.asked(9.0, Promise(8.0, SloConfig()), float(second))
        overfull.note(True, float(second), second + 5.0)
    assert not overfull.is_broken(25.0)


# ------------------------------------------------------------------------------------------------- in virtual time

LIMIT_S = 1.0


@dataclass(eq=False)
class Server:
    """A replica that serves one request after the other, and what the gateway knows of it."""

    name: str
    capacity_rps: float
    proven_rps: float
    slowdown: float = 1.0
    free_at: float = 0.0
    offered: Rate = field(default_factory=lambda: Rate(OFFERED_S))
    attainment: Attainment = field(default_factory=Attainment)
    ends: deque[tuple[float, Attempt]] = field(default_factory=deque)
    num_given: int = 0

    def view(self, now: float) -> ReplicaView:
        trusted = 0.0 if self.attainment.is_broken(now) else self.proven_rps
        return ReplicaView(
            self.name, open_tokens=200 * len(self.ends), offered_rps=self.offered.at(now), proven_rps=trusted
        )

    def give(self, now: float) -> float:
        """The time to the first token of a request that comes now."""
        promise = Promise(self.proven_rps, SloConfig(ttft_ms=LIMIT_S * 1000))
        self.num_given += 1
        self.offered.note(now)
        self.attainment.asked(self.offered.at(now), promise, now)
        self.free_at = max(self.free_at, now) + self.slowdown / self.capacity_rps
        done = Attempt(model="m", engine="e", replica=self.name, started=now, first_token=self.free_at)
        done.ended, done.outcome = self.free_at, "ok"
        self.ends.append((self.free_at, done))
        return self.free_at - now

    def settle(self, now: float) -> None:
        while self.ends and self.ends[0][0] <= now:
            at, attempt = self.ends.popleft()
            self.attainment.note(
                missed(attempt, SloConfig(ttft_ms=LIMIT_S * 1000), has_failed=False), attempt.started, at
            )


def simulate(
    servers: list[Server], rate_rps: float, *, policy: Any, begin: float = 0.0, lasts_s: float = 300.0
) -> float:
    """The share of requests that have their first token in time; arrivals are Poisson's."""
    chance = random.Random(7)
    now, num, num_good = begin, 0, 0
    while (now := now + chance.expovariate(rate_rps)) < begin + lasts_s:
        for server in servers:
            server.settle(now)
        order = policy([server.view(now) for server in servers], ASK, num)
        chosen = next(server for server in servers if server.name == order[0].name)
        num += 1
        num_good += chosen.give(now) <= LIMIT_S
    return num_good / num


def fleet() -> list[Server]:
    return [Server("small", 5, 4), Server("middle", 10, 8), Server("large", 20, 16)]


def test_unequal_replicas_fill_to_what_is_proven_and_keep_the_limits() -> None:
    servers = fleet()
    attained = simulate(servers, 25.0, policy=goodput)
    shares = {server.name: server.num_given / 300 / server.proven_rps for server in servers}
    assert attained > 0.99, attained
    assert max(shares.values()) < 1.0
    assert max(shares.values()) - min(shares.values()) < 0.1, shares
    assert simulate(fleet(), 25.0, policy=round_robin) < 0.7, "the small one drowns"


def test_beyond_what_is_proven_all_get_more_in_proportion() -> None:
    servers = fleet()
    simulate(servers, 40.0, policy=goodput)
    shares = [server.num_given / 300 / server.proven_rps for server in servers]
    assert min(shares) > 1.3
    assert max(shares) - min(shares) < 0.1, shares


def test_a_replica_that_breaks_its_promise_loses_its_load_and_gets_it_back_when_it_keeps_it_again() -> None:
    servers = fleet()
    large = servers[2]
    large.slowdown = 20.0  # one request a second instead of twenty
    simulate(servers, 8.0, policy=goodput, lasts_s=30.0)
    assert large.attainment.is_broken(30.0)
    before = large.num_given
    simulate(servers, 8.0, policy=goodput, begin=30.0, lasts_s=20.0)
    assert large.num_given - before < 0.05 * 8.0 * 20.0, "the others have room for nearly all of it"
    large.slowdown, large.free_at = 1.0, 50.0
    attained = simulate(servers, 8.0, policy=goodput, begin=200.0, lasts_s=100.0)
    assert (large.num_given - before) / 100 > 3.0, "half of the load and more is its share"
    assert attained == 1.0


# ------------------------------------------------------------------------------------------ over real sockets


def evidence(path: Path, *engines: tuple[str, float], engines_of: str = "m", **fields: Any) -> str:
    """The path of a race's file: what each engine, or replica of that name, is proven to carry of a model."""
    known = {**NATIVE, "model": engines_of, "served_model": None, "proven": True, "version": None}
    entries = [{**known, "engine": name, "goodput_rps": rps} for name, rps in engines]
    raced = datetime.now(UTC) - timedelta(days=1)
    write(path, document(*entries, **{"measured_utc": raced.isoformat(), **fields}))
    return str(path)


async def answered_by(gateway: Gateway, num: int) -> Counter[str]:
    names: Counter[str] = Counter()
    for _ in range(num):
        status, _, headers = await gateway.chat()
        assert status == 200
        names[headers["X-Goodgate-Replica"]] += 1
    return names


async def status_of(gateway: Gateway) -> dict[str, Any]:
    replicas = (await gateway.get("/admin/status"))[1]["models"][0]["replicas"]
    return {replica["name"]: replica["proven"] for replica in replicas}


def look_again(gateway: Gateway) -> None:
    """As if the second after which the evidence is looked at anew had passed."""
    gateway.app[PARTS].proofs.look_at_once()


async def test_requests_go_where_a_race_has_proven_most(start: Start, tmp_path: Path) -> None:
    path = evidence(tmp_path / "evidence.json", ("small", 1.0), ("large", 9.0))
    gateway = await start(model(fake("small"), fake("large"), routing="goodput"), evidence=path)
    names = await answered_by(gateway, 20)
    assert names["large"] >= 16, names
    raced = {"ttft_ms": 1000.0, "tpot_ms": None}
    assert await status_of(gateway) == {
        "small": {"rps": 1.0, "doubt": "", "raced": raced},
        "large": {"rps": 9.0, "doubt": "", "raced": raced},
    }


async def test_without_evidence_it_says_so_once_and_routes_by_load_until_it_comes(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "evidence.json"
    with caplog.at_level(logging.INFO, "goodgate"):
        gateway = await start(model(fake("a"), fake("b"), routing="goodput"), evidence=str(path))
        assert await answered_by(gateway, 10) == {"a": 5, "b": 5}
        look_again(gateway)
        await answered_by(gateway, 2)
        assert events(caplog).count("routing by least load until evidence can be trusted") == 1
        assert "cannot be read" in (await status_of(gateway))["a"]["doubt"]
        evidence(path, ("a", 500.0))
        look_again(gateway)
        assert await answered_by(gateway, 5) == {"a": 5}
    assert events(caplog).count("routing by proven goodput") == 1


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


async def test_a_race_for_looser_limits_than_are_promised_is_not_followed(start: Start, tmp_path: Path) -> None:
    path = evidence(tmp_path / "evidence.json", ("a", 500.0), slo={"ttft_ms": 1000.0})
    gateway = await start(model(fake("a"), fake("b"), routing="goodput", slo={"ttft_ms": 300}), evidence=path)
    assert await answered_by(gateway, 4) == {"a": 2, "b": 2}
    assert "looser" in (await status_of(gateway))["a"]["doubt"]
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        assert 'goodgate_evidence_trusted{engine="fake",model="m",replica="a"} 0.0' in await response.text()


async def test_the_engines_version_is_compared_with_the_one_that_was_raced(start: Start, tmp_path: Path) -> None:
    raced = {**NATIVE, "engine": "a", "version": "9.9"}
    write(tmp_path / "evidence.json", document(raced, measured_utc=datetime.now(UTC).isoformat()))
    gateway = await start(model(fake("a"), routing="goodput"), evidence=str(tmp_path / "evidence.json"))
    await until(lambda: gateway.fleet.replicas[0].version != "")
    look_again(gateway)
    assert "version 9.9" in (await status_of(gateway))["a"]["doubt"]


async def test_a_replica_that_fails_its_limits_live_loses_its_lead_and_why_says_so(
    start: Start, tmp_path: Path
) -> None:
    path = evidence(tmp_path / "evidence.json", ("slow", 900.0), ("fast", 100.0), slo={"ttft_ms": 20.0})
    gateway = await start(model(fake("slow", ttft_ms=40), fake("fast"), routing="goodput"), evidence=path)
    names = await answered_by(gateway, 12)
    assert names["slow"] in (3, 4), names
    slow = (await status_of(gateway))["slow"]
    assert (slow["rps"], slow["doubt"]) == (900.0, BROKEN)


def test_routing_by_goodput_without_the_path_of_evidence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`routing: goodput` needs `evidence:`.*'m'"):
        parse_config({"models": [model(fake(), routing="goodput")]})


def test_a_proof_of_next_to_nothing_is_no_division_by_zero() -> None:
    views = [ReplicaView("hardly", proven_rps=5e-324, trust=0.1, offered_rps=1), ReplicaView("well", proven_rps=4.0)]
    assert [view.name for view in goodput(views, Ask(prompt_tokens=1), 0)] == ["well", "hardly"]
