"""What a gateway adds, on cells whose difference is known."""

from __future__ import annotations

import numpy as np
import pytest

from arena.judging.cells import CellResult, Sample
from arena.judging.gateway_cost import Added, added
from arena.judging.stats import Verdict
from arena.race.scenario import SLO

LIMITS = SLO(ttft_ms=200, tpot_ms=30)
REQUESTS = 200


def cell(name: str, replicate: int, *, later_ms: float = 0.0, noise: int = 0, lost: int = 0) -> CellResult:
    """Both arms of a replicate have one schedule and one course of load (`common`), and noise of their own."""
    common = np.random.default_rng([7, replicate]).gamma(2, 40, REQUESTS)
    own = np.random.default_rng([noise, replicate]).exponential(1.0, REQUESTS)
    samples = tuple(
        Sample(
            scheduled_s=place / 10,
            ttft_ms=float(common[place] + own[place] + later_ms),
            tpot_ms=20.0 + later_ms / 100,
            ok=place >= lost,
        )
        for place in range(REQUESTS)
    )
    return CellResult(
        cell_id=f"{name}-{replicate}",
        engine_id=name,
        rung=4,
        rate_rps=10.0,
        replicate=replicate,
        slot=1,
        status="ok",
        reason=None,
        samples=samples,
        misses=0,
        design_effect=1.0,
        verdict=Verdict.PASS,
        findings=(),
        plan_sha256="ab",
    )


def rows(*, later_ms: float = 0.0, lost: int = 0, pairs: int = 4, seed: int = 1) -> dict[str, Added]:
    direct = [cell("one", number, noise=10 * seed) for number in range(pairs)]
    through = [
        cell("one-via-gateway", number, noise=10 * seed + 1, later_ms=later_ms, lost=lost) for number in range(pairs)
    ]
    return {row.metric: row for row in added(direct, through, LIMITS, confidence=0.95)}


def test_two_milliseconds_are_found_in_latencies_that_vary_by_fifty() -> None:
    """Chance that both arms share cancels: two medians side by side would drown it."""
    row = rows(later_ms=2.0)["TTFT, median"]
    assert row.requests == 800
    assert row.lo is not None
    assert row.hi is not None
    assert 1.6 < row.lo < 2.0 < row.hi < 2.4
    assert rows(later_ms=2.0)["TPOT, median"].difference == pytest.approx(0.02)


def test_an_engine_beside_itself_is_mostly_not_told_apart() -> None:
    """A/A: of fifteen intervals of 95 %, hardly any may leave zero out."""
    found = [rows(seed=seed)["TTFT, median"] for seed in range(1, 16)]
    apart = [row for row in found if row.lo is not None and row.hi is not None and not row.lo <= 0 <= row.hi]
    assert len(apart) <= 3


def test_requests_that_fail_behind_the_gateway_are_lost_goodput_and_no_latency() -> None:
    found = rows(lost=20)
    in_time = found["in time"]
    assert (in_time.direct, in_time.through) == (pytest.approx(9.8, abs=0.3), pytest.approx(8.8, abs=0.3))
    assert in_time.hi is not None
    assert in_time.hi < 0
    assert found["TTFT, median"].difference == pytest.approx(0, abs=0.3)


def test_one_pair_has_a_difference_and_ten_blocks_an_interval_and_none_has_nothing() -> None:
    short = added([cell("one", 0)], [cell("two", 1)], LIMITS, confidence=0.95)
    assert {(row.requests, row.difference, row.lo) for row in short} == {(0, None, None)}
    (one,) = {row.requests for row in rows(pairs=1).values()}
    assert one == REQUESTS
    assert rows(pairs=1)["TTFT, median"].lo is not None
