"""The load generator against an engine that remembers when each piece left, on a machine that does other work too.

Other work delays both sides, so what is asserted is that nearly all stamps are right and none is before its cause. The
targets (TTFT and gaps within 0.1 ms at p50, 0.5 at p99) are for a quiet machine: `goodgate arena truth` measures them.
"""

from __future__ import annotations

import pytest

from arena.load.truth import Truth, measure, percentile

BOUND_MS = 2.0
TRIES = 3  # asserted is that the load generator can, not that it was alone


def worst_p90(truth: Truth) -> float:
    return max(percentile(truth.ttft_errors_ms, 90), percentile(truth.gap_errors_ms, 90))


def best_of(tries: int) -> Truth:
    truths: list[Truth] = []
    for _ in range(tries):
        truths.append(measure(rate_rps=60, duration_s=2, ttft_ms=100, itl_ms=20, tokens=12))
        if worst_p90(truths[-1]) <= BOUND_MS:
            break
    return min(truths, key=worst_p90)


@pytest.mark.slow
@pytest.mark.replay("R46")
def test_stamps_are_those_of_the_engine_and_never_before_their_cause() -> None:
    truth = best_of(TRIES)
    assert truth.aborted is None
    assert truth.requests > 60
    assert len(truth.gap_errors_ms) == 11 * truth.requests
    assert worst_p90(truth) <= BOUND_MS, (truth.cpu, truth.foreign_cpu)
    assert min(truth.ttft_errors_ms) > 0, "a stamp before its cause: the two clocks are not one"


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(value) for value in range(1, 101)], 99) == 99.0
    assert percentile([7.0], 99) == 7.0
