"""Warm-up and stationarity: found where they are, not found where they are not, on queues and on made-up series."""

import numpy as np
import pytest

from arena.judging import steady
from arena.judging.queues import MM1, Batching, Cell


def test_mser_finds_where_a_series_settles() -> None:
    rng = np.random.default_rng(1)
    series = np.concatenate([rng.normal(9, 1, 60), rng.normal(1, 1, 240)])
    cut = steady.mser5(series)
    assert cut is not None
    assert 55 <= cut <= 70


def test_mser_cuts_nothing_off_a_series_that_is_steady_from_its_start() -> None:
    cuts = [steady.mser5(np.random.default_rng(seed).normal(1, 1, 300)) for seed in range(40)]
    assert float(np.median([cut for cut in cuts if cut is not None])) <= 30


def test_a_series_that_never_settles_has_no_warm_up_that_ends() -> None:
    assert steady.mser5(np.arange(200.0)) is None


def test_failures_do_not_break_it() -> None:
    assert steady.mser5([1.0, np.inf] * 50) is not None


def cold(cell: Cell, until_s: float) -> np.ndarray:
    return cell.severity * 1000 + np.where(cell.scheduled_s < until_s, 800.0, 0.0)


@pytest.mark.replay("R47")
def test_a_cold_start_beyond_the_scenarios_warm_up_moves_the_window_by_scheduled_time() -> None:
    """The first 12 s are slow, whatever the 5 s of the scenario say; they are no part of the steady state's tail."""
    cell = MM1(service_rps=40.0).cell(10.0, 35.0, np.random.default_rng(3))
    window = steady.steady_window(cell.scheduled_s, cold(cell, 12.0), warmup_s=5.0, horizon_s=35.0)
    assert window.from_s == pytest.approx(12.0, abs=1.0)
    finding = steady.warm_up(window, 5.0)
    assert not finding.ok
    assert finding.effect == "note"
    assert "instead of 5" in finding.words


def test_a_cold_start_within_the_warm_up_moves_nothing() -> None:
    cell = MM1(service_rps=40.0).cell(10.0, 35.0, np.random.default_rng(3))
    window = steady.steady_window(cell.scheduled_s, cold(cell, 4.0), warmup_s=5.0, horizon_s=35.0)
    assert (window.from_s, window.to_s) == (5.0, 35.0)


def test_an_early_burst_of_a_busy_queue_is_not_cut_away() -> None:
    """Cutting bursts would flatter the engine: over many cells at the knee, the window hardly ever moves."""
    engine = MM1(service_rps=23.0)
    moved, kept, all_of_it = 0, [], []
    for seed in range(150):
        cell = engine.cell(18.4, 35.0, np.random.default_rng([4, seed]))
        window = steady.steady_window(cell.scheduled_s, cell.severity * 1000, warmup_s=5.0, horizon_s=35.0)
        moved += window.from_s > 5.0
        kept.append(float((cell.severity[cell.scheduled_s >= window.from_s] > 1).mean()))
        all_of_it.append(float((cell.severity[cell.scheduled_s >= 5.0] > 1).mean()))
    assert moved <= 6
    assert np.mean(kept) >= 0.95 * np.mean(all_of_it)


def failed(cell: Cell, seconds: float) -> set[str]:
    window = steady.Window(5.0, seconds, 0.0)
    found = steady.findings(cell.scheduled_s, cell.ended_s, cell.severity * 1000, window, 5.0)
    return {finding.check for finding in found if finding.effect == "unstable" and not finding.ok}


@pytest.mark.parametrize(("engine", "overload_rps"), [(MM1(service_rps=10.0), 14.0), (Batching(), 10.0)])
def test_an_overloaded_engine_is_unstable_even_where_the_limit_is_far(
    engine: MM1 | Batching, overload_rps: float
) -> None:
    cell = engine.cell(overload_rps, 65.0, np.random.default_rng(5))
    assert failed(cell, 60.0) >= {"completed_share", "ttft_growth"}


def test_a_queue_at_its_goodput_is_hardly_ever_called_unstable() -> None:
    engine = MM1(service_rps=23.0)
    cells = [engine.cell(engine.goodput(99), 38.0, np.random.default_rng([6, seed])) for seed in range(150)]
    assert sum(bool(failed(cell, 35.0)) for cell in cells) <= 6


def test_littles_law_holds_for_a_steady_queue_and_sees_who_leaves_too_late() -> None:
    cell = MM1(service_rps=20.0).cell(10.0, 65.0, np.random.default_rng(7))
    window = steady.Window(5.0, 60.0, 0.0)
    assert steady.littles_law(cell.scheduled_s, cell.ended_s, window).ok
    stuck = np.where(cell.scheduled_s > 30.0, np.inf, cell.ended_s)
    finding = steady.littles_law(cell.scheduled_s, stuck, window)
    assert finding.value is not None
    assert finding.value < 1
