"""The client's own floor, measured before a race: what it allows to claim, and when it refuses."""

from __future__ import annotations

import msgspec
import pytest

from arena.load.calibration import (
    Budget,
    Calibration,
    CalibrationFailed,
    Demand,
    Floor,
    calibrate,
    floor_of,
    misses,
    worst_floor_ms,
)
from arena.load.truth import Truth

BUDGET = Budget(ttft_ms=5.0, gap_ms=5.0, lag_ms=5.0)


def floor(rate_rps: float, *, ttft: float = 0.3, gap: float | None = 0.2, lag: float = 0.2) -> Floor:
    return Floor(
        rate_rps=rate_rps, chunks_per_s=rate_rps * 32, requests=50, ttft_p50_ms=0.05, ttft_p99_ms=ttft,
        gap_p50_ms=0.02, gap_p99_ms=gap, lag_p99_ms=lag, cpu=0.5,
    )  # fmt: skip


def test_the_floor_is_that_of_the_highest_rate_within_the_budget() -> None:
    found = Calibration(asked_rps=300, budget=BUDGET, floors=(floor(300, gap=30.0), floor(75), floor(20, ttft=0.1)))
    assert found.floor.rate_rps == 75
    assert found.verdict.ok
    assert "2400 tokens/s (cells may ask for more" in found.verdict.words


def test_a_difference_within_the_clients_own_error_is_not_claimed() -> None:
    found = Calibration(asked_rps=75, budget=BUDGET, floors=(floor(75, ttft=0.4, gap=0.2),))
    assert not found.may_claim("ttft", -0.4)
    assert found.may_claim("ttft", 0.41)
    assert found.may_claim("tpot", 0.3)
    assert not found.may_claim("gap", 0.1)


def test_a_client_that_is_late_at_every_rate_is_refused_with_its_errors() -> None:
    found = Calibration(asked_rps=300, budget=BUDGET, floors=(floor(300, lag=40), floor(4, ttft=9.0, gap=6.5, lag=8)))
    assert not found.verdict.ok
    assert "even at 4 requests/s" in found.verdict.words
    for figure in ("9.00 ms, allowed 5.00", "6.50 ms, allowed 5.00", "8.00 ms, allowed 5.00"):
        assert figure in found.verdict.words


def test_answers_of_one_token_have_no_gaps_to_be_wrong_about() -> None:
    assert misses(floor(10, gap=None), BUDGET) == []


def test_it_survives_the_notes_of_a_run() -> None:
    found = Calibration(asked_rps=75, budget=BUDGET, floors=(floor(75, gap=None),))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Calibration) == found


def test_the_top_is_what_two_cores_carry() -> None:
    assert Demand(rate_rps=256, tokens=128).within_ceiling.rate_rps == pytest.approx(78.125)
    assert Demand(rate_rps=10, tokens=128).within_ceiling.rate_rps == 10


def test_a_run_that_measured_nothing_is_no_floor() -> None:
    nothing = Truth(
        requests=0, chunks_per_s=1, ttft_errors_ms=[], gap_errors_ms=[], send_lags_ms=[], cpu=0, foreign_cpu=None,
        aborted="The load process was killed by SIGKILL.",
    )  # fmt: skip
    with pytest.raises(CalibrationFailed, match="killed by SIGKILL"):
        floor_of(nothing, Demand(rate_rps=1, tokens=2))


async def test_rates_are_lowered_until_the_budget_is_met_and_each_floor_is_kept() -> None:
    """A budget that nothing meets walks all the way down; one that everything meets stops at once."""
    demand = Demand(rate_rps=40, tokens=4, ttft_ms=5, itl_ms=5)
    tried: list[float] = []
    generous = Budget(ttft_ms=1e6, gap_ms=1e6, lag_ms=1e6)
    found = await calibrate(demand, generous, window_s=0.5, on_try=lambda each: tried.append(each.rate_rps))
    assert tried == [40]
    assert found.verdict.ok
    assert found.floor.requests > 0
    assert found.floor.cpu > 0
    impossible = Budget(ttft_ms=0, gap_ms=0, lag_ms=0)
    found = await calibrate(demand, impossible, window_s=0.5)
    assert [each.rate_rps for each in found.floors] == [40, 10, 2.5]
    assert not found.verdict.ok


def test_the_floor_of_two_races_is_the_worse_and_of_none_nothing() -> None:
    calm = Calibration(asked_rps=75, budget=BUDGET, floors=(floor(75, ttft=0.3, gap=0.1),))
    busy = Calibration(asked_rps=75, budget=BUDGET, floors=(floor(75, ttft=0.4, gap=0.7),))
    assert worst_floor_ms(calm, busy) == 0.7
    assert worst_floor_ms(calm, None) == 0.3
    assert worst_floor_ms(None, None) == 0.0
