"""Paired differences on equal plans: what chance puts into a plan cancels, and the client's error is no difference."""

import numpy as np
import pytest

from arena.judging.cells import CellResult, Sample
from arena.judging.differences import Paired, paired
from arena.judging.stats import Verdict
from arena.race.scenario import SLO

LIMITS = SLO(ttft_ms=1000, tpot_ms=60)


def cell(engine: str, replicate: int, *, extra_ms: float = 0.0, seed: int = 0, plan: str = "p") -> CellResult:
    shared, own = np.random.default_rng([1, replicate]), np.random.default_rng([2, replicate, seed])
    due = np.sort(shared.uniform(0, 30, 200))
    ttft = 300 + 500 * np.sin(due) ** 2 + own.normal(0, 5, due.size) + extra_ms
    samples = tuple(
        Sample(scheduled_s=float(at), ttft_ms=float(late), tpot_ms=20.0, ok=True)
        for at, late in zip(due, ttft, strict=True)
    )
    return CellResult(
        cell_id=f"{engine}-{replicate}", engine_id=engine, rung=4, rate_rps=6.7, replicate=replicate, slot=replicate,
        status="ok", reason=None, samples=samples, misses=0, design_effect=1.0, verdict=Verdict.UNKNOWN, findings=(),
        plan_sha256=f"{plan}{replicate}",
    )  # fmt: skip


def compare(extra_ms: float, *, cells: int = 2, floor_ms: float = 0.0, plan: str = "p") -> dict[str, Paired]:
    mine = [cell("a", replicate, extra_ms=extra_ms, seed=1) for replicate in range(cells)]
    theirs = [cell("b", replicate, seed=2, plan=plan) for replicate in range(cells)]
    return {row.metric: row for row in paired("a", mine, "b", theirs, LIMITS, floor_ms=floor_ms)}


def test_a_small_difference_shows_through_a_latency_that_swings_by_half_a_second() -> None:
    row = compare(10.0)["ttft_ms"]
    assert row.apart
    assert row.lo is not None
    assert row.hi is not None
    assert row.lo < 10 < row.hi < 15


def test_equal_engines_are_not_told_apart() -> None:
    told = [compare(0.0)[metric].apart for metric in ("ttft_ms", "tpot_ms", "in_time")]
    assert told == [False, False, False]


def test_a_difference_below_the_clients_floor_is_no_claim() -> None:
    assert compare(10.0)["ttft_ms"].apart
    assert not compare(10.0, floor_ms=12.0)["ttft_ms"].apart


def test_one_cell_has_too_few_blocks_for_an_interval() -> None:
    row = compare(10.0, cells=1)["ttft_ms"]
    assert row.difference == pytest.approx(10, abs=3)
    assert (row.lo, row.hi, row.apart) == (None, None, False)


def test_cells_of_different_plans_are_never_paired() -> None:
    row = compare(10.0, plan="other")["ttft_ms"]
    assert (row.requests, row.difference) == (0, None)
