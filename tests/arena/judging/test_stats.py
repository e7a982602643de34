"""The three-valued verdict against published tables, and the effective number of requests on queues that clump."""

import math

import numpy as np
import pytest

from arena.judging.stats import Verdict, attainment_interval, design_effect, holds, judge, quantile, slope


@pytest.mark.parametrize(
    ("misses", "needed"), [(0, 299), (1, 473), (2, 628), (3, 773), (4, 913), (5, 1049), (10, 1693), (20, 2902)]
)
def test_a_p99_is_proven_from_exactly_as_many_requests_as_the_binomial_tail_asks(misses: int, needed: int) -> None:
    assert judge(needed, misses) is Verdict.PASS
    assert judge(needed - 1, misses) is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("requests", "passes_at", "fails_at"), [(300, 0, 7), (1000, 4, 16), (2000, 12, 29), (5000, 38, 63)]
)
def test_between_proven_pass_and_proven_fail_the_answer_is_cannot_tell(
    requests: int, passes_at: int, fails_at: int
) -> None:
    assert judge(requests, passes_at) is Verdict.PASS
    assert judge(requests, passes_at + 1) is Verdict.UNKNOWN
    assert judge(requests, fails_at - 1) is Verdict.UNKNOWN
    assert judge(requests, fails_at) is Verdict.FAIL


def test_a_handful_of_requests_without_a_miss_proves_nothing() -> None:
    assert judge(20, 0) is Verdict.UNKNOWN
    assert holds(20, 0)


def test_no_requests_are_no_evidence() -> None:
    assert judge(0, 0) is Verdict.UNKNOWN
    assert not holds(0, 0)


def test_fractional_sizes_are_rounded_towards_proving_less() -> None:
    assert judge(299.9, 0.0) is Verdict.PASS
    assert judge(299.0, 0.2) is Verdict.UNKNOWN  # a fifth of a miss counts as one against a pass
    assert judge(20.0, 1.9) is Verdict.UNKNOWN  # and as one, not two, for a fail


def test_a_percentile_is_a_value_that_occurred_and_failures_are_infinite() -> None:
    values = [float(value) for value in range(1, 101)]
    assert quantile(values, 99) == 99
    assert quantile(values, 50) == 50
    assert quantile([*values[:-2], math.inf, math.inf], 99) == math.inf
    assert quantile([*values[:-1], math.inf], 99) == 99
    assert quantile([], 99) is None


def test_the_interval_of_attainment_is_exact_at_its_ends() -> None:
    low, high = attainment_interval(20, 0)
    assert high == 1.0
    assert low == pytest.approx(0.025 ** (1 / 20))
    assert attainment_interval(20, 20)[0] == 0.0
    assert attainment_interval(0, 0) == (0.0, 1.0)


def test_independent_requests_count_in_full() -> None:
    rng = np.random.default_rng(3)
    effects = []
    for _ in range(30):
        latencies = rng.exponential(1.0, 2000)
        effects.append(design_effect(list(latencies > 3.5), list(latencies)))
    assert np.median(effects) < 1.6


def test_requests_that_share_a_queue_count_for_less_even_while_none_misses() -> None:
    rng = np.random.default_rng(3)
    waits = mm1_sojourns(rng, arrival_rate=0.8, service_rate=1.0, count=4000)
    assert design_effect([False] * 4000, list(waits)) > 10


def test_failures_do_not_break_the_effective_size() -> None:
    latencies = [0.1, math.inf] * 50
    assert design_effect([math.isinf(value) for value in latencies], latencies) >= 1.0


def test_a_slope_is_found_and_nothing_is_found_in_nothing() -> None:
    gradient, t = slope([0, 1, 2, 3], [1, 3, 5, 7])
    assert gradient == pytest.approx(2)
    assert t > 1e6
    assert slope([1, 1, 1], [1, 2, 3]) == (0.0, 0.0)
    assert slope([1], [1]) == (0.0, 0.0)


def mm1_sojourns(rng: np.random.Generator, *, arrival_rate: float, service_rate: float, count: int) -> list[float]:
    """Time in the system of successive customers of an M/M/1 queue that starts empty (Lindley's recursion)."""
    gaps, services = rng.exponential(1 / arrival_rate, count), rng.exponential(1 / service_rate, count)
    wait, sojourns = 0.0, []
    for gap, service in zip(gaps, services, strict=True):
        wait = max(0.0, wait - gap) + service
        sojourns.append(wait)
    return sojourns
