"""The self-audit of arrivals: honest schedules of every kind pass, each fault that a generator can have is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from arena.judging.arrival_audit import arrivals_drawn, asked_prompts
from arena.judging.audit import Finding
from arena.load.arrivals import SECOND_NS, Drawn, Offsets, Span, draw, seed_sequence
from arena.load.plan import build_plan
from arena.load.spec import (
    Arrivals,
    Constant,
    ConversationWorkload,
    Fixed,
    Gamma,
    Poisson,
    Ramp,
    Steps,
    TraceArrivals,
)
from arena.load.traces import parse_trace
from arena.load.workload import CellKey, prompt_source
from tests.arena.judging.test_audit import row

SPAN = Span(5 * SECOND_NS, 30 * SECOND_NS, 5 * SECOND_NS)
RATE = 12.0
BURSTS = "Timestamp,Request tokens,Response tokens\n" + "\n".join(
    f"{second},10,5" for second in np.cumsum(np.random.default_rng(1).choice([0, 1, 7], size=900))
)
TRACE = parse_trace(BURSTS, "bursts.csv")
KINDS: dict[str, Arrivals] = {
    "poisson": Poisson(),
    "smooth": Gamma(cv=0.4),
    "bursts": Gamma(cv=3.0),
    "sub-nanosecond bursts": Gamma(cv=8.0),
    "constant": Constant(),
    "ramp": Ramp(from_=1, to=4),
    "steps": Steps(levels=(1, 5, 1)),
    "trace": TraceArrivals(),
}


def schedule(kind: str, run: int = 1, rate: float = RATE) -> tuple[Drawn, Offsets]:
    return draw(KINDS[kind], rate_rps=rate, span=SPAN, seed=seed_sequence(run=run, cell=0, replicate=0), trace=TRACE)


def failed(drawn: Drawn, offsets: Sequence[int] | Offsets) -> list[Finding]:
    return [finding for finding in arrivals_drawn(drawn, [int(at) for at in offsets]) if not finding.ok]


@pytest.mark.parametrize("kind", KINDS)
def test_honest_schedules_pass(kind: str) -> None:
    """At most three tests of one in 2000 each: of 150 schedules, hardly ever one is wronged."""
    assert sum(bool(failed(*schedule(kind, run))) for run in range(150)) <= 2


def twice(offsets: Offsets) -> Offsets:
    return np.repeat(offsets, 2)


def stretched(offsets: Offsets) -> Offsets:
    slower = (offsets * 1.6).astype(np.int64)
    return slower[slower < SPAN.total_ns]


def without_a_part(offsets: Offsets) -> Offsets:
    return offsets[(offsets < 10 * SECOND_NS) | (offsets > 16 * SECOND_NS)]


# What long gaps and short ones do by chance: with a variation of 3, 480 arrivals in 40 s say little of their rate.
BURSTY = ("bursts", "sub-nanosecond bursts")


@pytest.mark.replay("R37", "R38")
@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, twice) for kind in KINDS]
    + [(kind, fault) for kind in KINDS if kind not in BURSTY for fault in (stretched, without_a_part)],
)
def test_a_schedule_that_is_not_what_was_drawn_is_found_out(kind: str, fault: Callable[[Offsets], Offsets]) -> None:
    """Processes in lock-step, another rate, a pause."""
    found = sum(bool(failed(drawn, fault(offsets))) for drawn, offsets in (schedule(kind, run) for run in range(10)))
    assert found >= 8


def test_bursts_at_another_rate_are_found_out_when_there_are_enough_of_them() -> None:
    drawn, offsets = schedule("bursts", rate=2_000)
    assert not failed(drawn, offsets)
    assert {finding.check for finding in failed(drawn, stretched(offsets))} == {"arrival_gaps_p", "arrival_count_p"}


@pytest.mark.replay("R39")
@pytest.mark.parametrize(
    ("claimed", "real"),
    [
        ("constant", "poisson"),
        ("poisson", "constant"),
        ("smooth", "poisson"),
        ("poisson", "smooth"),
        ("bursts", "poisson"),
        ("poisson", "bursts"),
        ("ramp", "poisson"),
        ("steps", "poisson"),
        ("poisson", "steps"),
        ("trace", "poisson"),
    ],
)
def test_one_kind_does_not_pass_for_another(claimed: str, real: str) -> None:
    found = sum(bool(failed(schedule(claimed, run)[0], schedule(real, run)[1])) for run in range(10))
    assert found >= 9


def test_a_replay_that_left_a_row_out_or_moved_one_is_found_out() -> None:
    drawn, offsets = schedule("trace")
    assert failed(drawn, offsets[:-1])
    moved = offsets.copy()
    moved[50] += 2_000
    (finding,) = failed(drawn, moved)
    assert finding.words == "Arrivals are not where the trace has them, by up to 0.002 ms."
    assert finding.effect == "invalid_client"


def test_few_arrivals_of_a_process_of_chance_say_nothing() -> None:
    drawn, offsets = schedule("bursts", rate=0.2)
    (finding,) = arrivals_drawn(drawn, [int(at) for at in offsets])
    assert finding.ok
    assert finding.effect == "note"


def test_of_conversations_the_beginnings_are_tested_and_not_the_turns() -> None:
    """Turns follow each other, so their merged arrivals are no Poisson process and would be called faulty."""
    workload = ConversationWorkload(
        min_turns=3, max_turns=3, min_think_s=0.01, max_think_s=0.01, prompt=Fixed(tokens=3), output=Fixed(tokens=2)
    )
    wronged = 0
    for run in range(20):
        key = CellKey(run, 0, 0)
        plan = build_plan(
            "c",
            rate_rps=24,
            duration_s=20,
            warmup_s=0,
            cooldown_s=0,
            prompts=prompt_source(workload, key),
            seed=key.schedule_seed(),
        )
        assert plan.drawn is not None
        due = [request.scheduled_ns for request in plan.requests]
        wronged += bool(failed(plan.drawn, due))
        assert failed(msgspec.structs.replace(plan.drawn, starts_ns=None, rate_rps=24.0), due)
    assert wronged <= 1


def test_what_a_plan_was_drawn_from_survives_its_way_through_the_store() -> None:
    for kind in KINDS:
        drawn, _ = schedule(kind)
        assert msgspec.json.decode(msgspec.json.encode(drawn), type=Drawn) == drawn


@pytest.mark.replay("R36")
def test_prompts_that_the_engine_counts_longer_than_asked_are_told() -> None:
    rows = [row(seq, seq / 10, in_tokens=130) for seq in range(20)]
    finding = asked_prompts(rows, dict.fromkeys(range(20), 100))
    assert finding.value == pytest.approx(0.3)
    assert finding.words.startswith("The engine counts +30% tokens")
    assert finding.effect == "note"
    assert asked_prompts(rows, {}).value is None
