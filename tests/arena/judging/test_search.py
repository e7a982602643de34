"""The search on queues whose capacity is known: does it find it, does it say how sure it is, and does it stop?"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena.judging.knee import Knee, probability_better
from arena.judging.ladder import (
    Outcome,
    SearchSettings,
    bracket,
    crossing,
    monotone_rates,
    pool,
    with_shared_effects,
)
from arena.judging.ranking import SURE
from arena.judging.search import estimate, next_probe
from arena.judging.stats import Verdict, design_effect

SETTINGS = SearchSettings(start_rps=1.0, step=2**0.25, max_replicates=3)


def outcome(rung: int, misses: int, requests: int = 100, *, stable: bool = True) -> Outcome:
    return Outcome(rung, SETTINGS.rate(rung), requests, misses, stable)


def test_the_first_cell_is_the_hinted_rung() -> None:
    probe = next_probe([], SETTINGS, first_rung=6)
    assert probe is not None
    assert (probe.rung, probe.replicate) == (6, 0)
    assert probe.rate_rps == pytest.approx(2**1.5, abs=1e-4)


def test_a_rung_that_holds_sends_the_search_up_by_a_stride_and_one_that_fails_down() -> None:
    up, down = next_probe([outcome(4, 0)], SETTINGS), next_probe([outcome(4, 50)], SETTINGS)
    assert up is not None
    assert down is not None
    assert (up.rung, down.rung) == (8, 0)


def test_a_bracket_is_halved_until_its_ends_are_neighbours_and_then_both_are_repeated() -> None:
    tried = [outcome(4, 0), outcome(8, 90)]
    probe = next_probe(tried, SETTINGS)
    assert probe is not None
    assert probe.rung == 6
    tried += [outcome(6, 0), outcome(7, 3)]
    repeats = []
    while probe := next_probe(tried, SETTINGS):
        repeats.append((probe.rung, probe.replicate))
        tried.append(outcome(probe.rung, 0 if probe.rung == 6 else 3))
    assert repeats[0] == (6, 1)
    assert set(repeats) == {(6, 1), (6, 2), (7, 1)}  # 6 of 200 missed: rung 7 is a proven fail and rests


def test_an_engine_that_never_fails_ends_at_the_top_of_the_ladder_and_its_goodput_is_open_above() -> None:
    settings = SearchSettings(max_rung=6, max_replicates=1)
    tried: list[Outcome] = []
    while probe := next_probe(tried, settings):
        tried.append(Outcome(probe.rung, probe.rate_rps, 400, 0))
    goodput = estimate(tried, settings)
    assert goodput.rate_rps == settings.rate(6)
    assert goodput.hi is None
    assert goodput.lowest_fail_rps is None
    assert goodput.proven


def test_an_engine_that_never_holds_has_a_goodput_of_zero_and_says_where_it_failed() -> None:
    settings = SearchSettings(min_rung=-4, max_replicates=1)
    tried: list[Outcome] = []
    while probe := next_probe(tried, settings):
        tried.append(Outcome(probe.rung, probe.rate_rps, 30, 30))
    goodput = estimate(tried, settings)
    assert goodput.rate_rps == 0
    assert goodput.lo == 0
    assert goodput.lowest_fail_rps == settings.rate(-4)
    assert goodput.fail_proven


def test_no_measurement_is_no_goodput_and_not_a_crash() -> None:
    goodput = estimate([], SETTINGS)
    assert (goodput.rate_rps, goodput.lo, goodput.hi) == (0.0, 0.0, None)


def test_a_growing_backlog_fails_a_rate_whose_percentiles_still_look_fine() -> None:
    goodput = estimate([outcome(4, 0), outcome(5, 0, stable=False)], SETTINGS)
    assert goodput.rate_rps == SETTINGS.rate(4)
    assert goodput.fail_proven


def test_one_lucky_cell_above_a_failing_rate_does_not_become_the_answer() -> None:
    tried = [outcome(4, 0), outcome(5, 30), outcome(6, 0)]
    assert monotone_rates(pool(tried, SETTINGS)) == [0.0, 0.15, 0.15]
    assert estimate(tried, SETTINGS).rate_rps == SETTINGS.rate(4)


def test_replicates_of_a_rate_are_judged_together() -> None:
    pooled = pool([outcome(4, 0, 210), outcome(4, 0, 210)], SETTINGS)
    assert (pooled[0].replicates, pooled[0].verdict) == (2, Verdict.PASS)
    clumped = pool([Outcome(4, 2.0, 210, 0, design_effect=3.0)] * 2, SETTINGS)
    assert clumped[0].verdict is Verdict.UNKNOWN


def test_each_look_at_a_rate_is_paid_for() -> None:
    """299 requests without a miss prove a p99 to whoever looks once; who may look three times needs 408."""
    assert pool([outcome(4, 0, 299)], SETTINGS)[0].verdict is Verdict.UNKNOWN
    assert pool([outcome(4, 0, 408)], SETTINGS)[0].verdict is Verdict.PASS
    once = SearchSettings(start_rps=1.0, step=2**0.25, max_replicates=1)
    assert pool([outcome(4, 0, 299)], once)[0].verdict is Verdict.PASS


def test_a_proof_stands_when_a_later_cell_would_blur_it() -> None:
    assert pool([outcome(4, 0, 410), outcome(4, 8, 410)], SETTINGS)[0].verdict is Verdict.PASS


def test_peeking_at_a_rate_on_the_edge_proves_a_pass_no_more_often_than_promised() -> None:
    """Independent requests, of which just over 1 % miss: any proven pass is false."""
    rng = np.random.default_rng(5)
    false = 0
    for _ in range(600):
        cells: list[Outcome] = []
        while len(cells) < 3 and (not cells or pool(cells, SETTINGS)[0].verdict is Verdict.UNKNOWN):
            cells.append(outcome(4, int(rng.binomial(600, 0.0101)), 600))
        false += pool(cells, SETTINGS)[0].verdict is Verdict.PASS
    assert false / 600 <= 0.05


def test_cells_that_a_lucky_stretch_made_look_independent_share_the_others_design_effect() -> None:
    cells = [Outcome(4, 2.0, 300, 0, design_effect=effect) for effect in (1.0, 9.0)]
    shared = with_shared_effects([*cells, Outcome(8, 4.0, 300, 300, design_effect=300.0)])
    assert [cell.design_effect for cell in shared] == pytest.approx([3, 3, 6])


def test_a_fail_within_the_clients_own_error_is_not_proven_and_a_pass_is_not_helped_by_it() -> None:
    late = Outcome(4, 2.0, 500, 60, sure_misses=0)
    assert pool([late], SETTINGS)[0].verdict is Verdict.UNKNOWN
    assert pool([Outcome(4, 2.0, 500, 60)], SETTINGS)[0].verdict is Verdict.FAIL


def test_the_crossing_of_the_fit_lies_between_its_rungs_and_errs_downward() -> None:
    """A miss rate that grows tenfold a rung, 0.3 % and 3 %, crosses 1 % at half way; a straight line does before."""
    found = crossing(pool([outcome(4, 3, 1000), outcome(8, 30, 1000)], SETTINGS), SETTINGS)
    assert found is not None
    assert 2.0 < found < 2.0 * 2**0.5


def test_proofs_that_contradict_each_other_claim_the_less() -> None:
    """A proven fail at 2/s takes back the proven pass at 4/s."""
    goodput = estimate([outcome(4, 100, 500), outcome(8, 0, 900)], SETTINGS)
    assert (goodput.proven_pass_rps, goodput.proven_fail_rps, goodput.cliff_ratio) == (None, 2.0, None)


def test_the_cliff_is_the_gap_between_the_proofs() -> None:
    goodput = estimate([outcome(4, 0, 900), outcome(5, 90, 900)], SETTINGS)
    assert goodput.cliff_ratio == pytest.approx(2**0.25, rel=1e-4)
    assert goodput.proven_pass_rps == 2.0


@given(st.lists(st.tuples(st.integers(-8, 20), st.integers(0, 40)), max_size=12))
def test_the_search_never_leaves_its_ladder_and_the_interval_holds_the_goodput(cells: list[tuple[int, int]]) -> None:
    settings = SearchSettings(min_rung=-8, max_rung=20)
    tried = [Outcome(rung, settings.rate(rung), 40, misses) for rung, misses in cells]
    probe = next_probe(tried, settings)
    assert probe is None or -8 <= probe.rung <= 20
    goodput = estimate(tried, settings)
    assert goodput.lo <= goodput.rate_rps
    assert goodput.hi is None or goodput.rate_rps <= goodput.hi
    assert goodput.lowest_fail_rps is None or goodput.rate_rps < goodput.lowest_fail_rps


@given(st.integers(-8, 20), st.integers(-8, 20), st.integers(1, 6))
def test_the_search_ends_for_every_engine_with_a_sharp_limit(first: int, limit: int, replicates: int) -> None:
    settings = SearchSettings(min_rung=-8, max_rung=20, max_replicates=replicates)
    tried: list[Outcome] = []
    while probe := next_probe(tried, settings, first_rung=first):
        tried.append(Outcome(probe.rung, probe.rate_rps, 10, 0 if probe.rung <= limit else 1))
        assert len(tried) < 16 + 2 * replicates
    low, _ = bracket(pool(tried, settings), settings)
    assert low is not None
    assert low.rung == limit


# --- queues of known capacity -----------------------------------------------------------------------------------------


def mm1_misses(rng: np.random.Generator, rate: float, service_rate: float, duration_s: float) -> list[float]:
    """Sojourn times of the arrivals in a window of `duration_s` after 2 s of warm-up, from an empty queue."""
    arrivals = np.sort(rng.uniform(0, duration_s + 2, rng.poisson(rate * (duration_s + 2))))
    wait, before, sojourns = 0.0, 0.0, []
    for arrival, service in zip(arrivals, rng.exponential(1 / service_rate, arrivals.size), strict=True):
        wait = max(0.0, wait - (arrival - before)) + service
        before = arrival
        if arrival >= 2:
            sojourns.append(wait)
    return sojourns


def simulated_search(
    rng: np.random.Generator, service_rate: float, *, duration_s: float = 30, max_cells: int = 10, limit_s: float = 1.0
) -> list[Outcome]:
    tried: list[Outcome] = []
    first = SETTINGS.rung_below(0.75 * service_rate)
    while len(tried) < max_cells and (probe := next_probe(tried, SETTINGS, first_rung=first)):
        latencies = mm1_misses(rng, probe.rate_rps, service_rate, duration_s)
        missed = [latency > limit_s for latency in latencies]
        effect = design_effect(missed, latencies)
        tried.append(Outcome(probe.rung, probe.rate_rps, len(missed), sum(missed), True, effect))
    return tried


@pytest.mark.parametrize(("service_rate", "load"), [(10.0, 0.54), (23.0, 0.80)])
def test_the_interval_covers_the_true_goodput_of_a_queue_and_false_proofs_are_rare(
    service_rate: float, load: float
) -> None:
    truth = service_rate - math.log(100)  # P(sojourn > 1 s) = exp(-(mu - lambda)) = 1 %
    assert truth / service_rate == pytest.approx(load, abs=0.01)
    rng = np.random.default_rng(1)
    found = [estimate(simulated_search(rng, service_rate), SETTINGS) for _ in range(100)]
    covered = sum(goodput.lo <= truth and (goodput.hi is None or truth <= goodput.hi) for goodput in found)
    assert covered >= 88  # 95 to 99 % are covered in the long run; 88 is three standard errors below
    assert sum(goodput.proven and goodput.rate_rps > truth for goodput in found) <= 5
    estimated = [goodput.estimate_rps / truth for goodput in found if goodput.estimate_rps is not None]
    assert 0.9 < np.median(estimated) < 1.1


def test_equal_queues_with_different_arrivals_are_hardly_ever_called_different() -> None:
    rng = np.random.default_rng(2)
    knees = [Knee(simulated_search(rng, 15.0), SETTINGS) for _ in range(100)]
    better = [probability_better(a, b) for a, b in zip(knees[::2], knees[1::2], strict=True)]
    assert sum(not 1 - SURE < probability < SURE for probability in better) <= 5


def test_a_queue_of_twice_the_capacity_is_told_from_the_other() -> None:
    rng = np.random.default_rng(3)
    slow, fast = (Knee(simulated_search(rng, rate), SETTINGS) for rate in (12.0, 24.0))
    assert probability_better(fast, slow) > SURE
    assert probability_better(fast, slow) + probability_better(slow, fast) == pytest.approx(1, abs=0.01)
    assert probability_better(slow, slow) == pytest.approx(0.5, abs=0.02)


def test_a_cell_far_beyond_the_knee_does_not_drag_the_knee_below_rates_that_held() -> None:
    """An engine that batches goes from no miss to half of them between two rungs; no exponential does that from below.

    The cells are those of a real race.
    """
    cells = [(5.6569, 171, 0, 5.0), (8.0, 449, 0, 10.0), (9.5137, 301, 158, 26.7), (11.3137, 321, 282, 18.3)]
    outcomes = [Outcome(SETTINGS.nearest_rung(rate), rate, n, misses, True, de) for rate, n, misses, de in cells]
    low, high = Knee(outcomes, SETTINGS).interval()
    assert low < 8.0 < high < 9.5137
