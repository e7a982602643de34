"""Which rate to try next, and what the tried rates say about goodput. Pure: no clock, no sockets, no randomness.

Goodput is the highest offered Poisson rate at which the latency targets hold. The search walks a ladder of rates that
all engines share (`start * step ** rung`), so that every engine meets the same plan at the same rung:

    bracket   climb or descend by growing strides until one rung holds and a higher one does not
    refine    halve the gap (in log rate) until the two are neighbours
    confirm   repeat both neighbours with fresh plans until they are proven or the repeats are used up

    >>> settings = SearchSettings(start_rps=1, step=2 ** 0.5)
    >>> next_probe([], settings, first_rung=4)
    Probe(rung=4, rate_rps=4.0, replicate=0)

The answer has three parts, because they deserve different trust: the highest rate that held (`goodput_rps`), whether
that was proven or only observed, and an interval (`ci`). The interval comes from a dose-response fit over all cells
(see `Knee`): it uses how hard each cell held or failed, while a single cell's verdict would only say yes or no.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from arena.judging.stats import Verdict, judge


@dataclass(frozen=True, slots=True)
class Outcome:
    """One judged cell. `misses` counts requests that missed the limits; an unstable cell (growing backlog) missed in
    the limit.
    """

    rung: int
    rate_rps: float
    requests: int
    misses: int
    stable: bool = True
    design_effect: float = 1.0

    @property
    def counted_misses(self) -> int:
        return self.misses if self.stable else self.requests


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    start_rps: float = 1.0
    step: float = 2**0.25
    stride: int = 4  # rungs per move while bracketing; a power of two, so that halving ends at neighbours
    min_rung: int = -16
    max_rung: int = 32
    max_replicates: int = 3
    percentile: float = 99.0
    confidence: float = 0.95

    def rate(self, rung: int) -> float:
        """Six digits, so that the rate reads the same in a name, a file and a report."""
        return float(f"{self.start_rps * self.step**rung:.6g}")

    def rung_below(self, rate_rps: float) -> int:
        """The highest rung whose rate does not exceed `rate_rps`, kept on the ladder."""
        return min(max(self.unclipped_rung_below(rate_rps), self.min_rung), self.max_rung)

    def nearest_rung(self, rate_rps: float) -> int:
        return round(math.log(rate_rps / self.start_rps) / math.log(self.step))

    def unclipped_rung_below(self, rate_rps: float) -> int:
        return math.floor(math.log(max(rate_rps, 1e-9) / self.start_rps) / math.log(self.step) + 1e-9)

    @property
    def allowed(self) -> float:
        return 1 - self.percentile / 100


@dataclass(frozen=True, slots=True)
class Probe:
    """Run this rung next. A higher `replicate` means a fresh plan at the same rate."""

    rung: int
    rate_rps: float
    replicate: int


@dataclass(frozen=True, slots=True)
class Rung:
    """All cells of one rate taken together."""

    rung: int
    rate_rps: float
    requests: int
    misses: int
    effective: float
    replicates: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Goodput:
    """What the search found. None means: no tested rate says so."""

    rate_rps: float  # highest tested rate that held; 0 where none did
    proven: bool  # the verdict there is a proven pass, not only an observed one
    lowest_fail_rps: float | None  # lowest tested rate above it that did not hold
    fail_proven: bool
    lo: float
    hi: float | None  # None: no rate failed, so nothing bounds it from above


def pool(outcomes: Sequence[Outcome], settings: SearchSettings) -> list[Rung]:
    """Cells of the same rung as one, in ascending rate."""
    rungs = []
    for rung in sorted({outcome.rung for outcome in outcomes}):
        cells = [outcome for outcome in outcomes if outcome.rung == rung]
        requests = sum(cell.requests for cell in cells)
        misses = sum(cell.counted_misses for cell in cells)
        effective = sum(cell.requests / cell.design_effect for cell in cells)
        share = effective / requests if requests else 0.0
        verdict = judge(effective, misses * share, percentile=settings.percentile, confidence=settings.confidence)
        rungs.append(Rung(rung, cells[0].rate_rps, requests, misses, effective, len(cells), verdict))
    return rungs


def monotone_rates(rungs: Sequence[Rung]) -> list[float]:
    """Miss rate per rung, made non-decreasing in the offered rate by pooling adjacent violators.

    More load cannot make more requests meet their limits, so a miss rate that falls is noise and is averaged away.
    This is what keeps one lucky cell above a failing one from becoming the answer.
    """
    blocks: list[list[float]] = []  # [misses, requests, rungs]
    for rung in rungs:
        blocks.append([float(rung.misses), float(rung.requests), 1.0])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] > blocks[-1][0] * blocks[-2][1]:
            last = blocks.pop()
            blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
    return [misses / requests if requests else 0.0 for misses, requests, count in blocks for _ in range(int(count))]


def bracket(rungs: Sequence[Rung], settings: SearchSettings) -> tuple[Rung | None, Rung | None]:
    """The highest rung that holds and the lowest that does not."""
    held = [rate <= settings.allowed + 1e-9 for rate in monotone_rates(rungs)]
    passing = [rung for rung, ok in zip(rungs, held, strict=True) if ok]
    failing = [rung for rung, ok in zip(rungs, held, strict=True) if not ok]
    return (passing[-1] if passing else None), (failing[0] if failing else None)


def next_probe(outcomes: Sequence[Outcome], settings: SearchSettings, *, first_rung: int = 0) -> Probe | None:
    """The cell that tells most, or None when the search is finished."""
    rungs = pool(outcomes, settings)
    low, high = bracket(rungs, settings)
    if low is None and high is None:
        return _probe(first_rung, rungs, settings)
    if low is None or high is None:
        return _extend(low, high, rungs, settings)
    if high.rung - low.rung > 1:
        return _probe((low.rung + high.rung) // 2, rungs, settings)
    return _confirm(low, high, rungs, settings)


def _extend(low: Rung | None, high: Rung | None, rungs: Sequence[Rung], settings: SearchSettings) -> Probe | None:
    """One side of the bracket is still open: move on, each time by a longer stride, or confirm the ladder's end."""
    edge = low or high
    assert edge is not None
    stride = max(
        settings.stride, rungs[-1].rung - rungs[0].rung
    )  # s, s, 2s, 4s, ...: a bad first guess costs few cells
    wanted = edge.rung + stride if low else edge.rung - stride
    target = min(max(wanted, settings.min_rung), settings.max_rung)
    if target != edge.rung:
        return _probe(target, rungs, settings)
    return _repeat(edge, rungs, settings)


def _confirm(low: Rung, high: Rung, rungs: Sequence[Rung], settings: SearchSettings) -> Probe | None:
    """Repeat the neighbour that has been tried less; on a tie the passing one, for it is the claim."""
    for rung in sorted([low, high], key=lambda rung: (rung.replicates, rung.rung)):
        probe = _repeat(rung, rungs, settings)
        if probe is not None:
            return probe
    return None


def _repeat(rung: Rung, rungs: Sequence[Rung], settings: SearchSettings) -> Probe | None:
    if rung.verdict is not Verdict.UNKNOWN or rung.replicates >= settings.max_replicates:
        return None
    return _probe(rung.rung, rungs, settings)


def _probe(rung: int, rungs: Sequence[Rung], settings: SearchSettings) -> Probe:
    tried = next((known.replicates for known in rungs if known.rung == rung), 0)
    return Probe(rung, settings.rate(rung), tried)


def estimate(outcomes: Sequence[Outcome], settings: SearchSettings) -> Goodput:
    rungs = pool(outcomes, settings)
    low, high = bracket(rungs, settings)
    lo, hi = Knee(outcomes, settings).interval()
    rate = low.rate_rps if low else 0.0
    return Goodput(
        rate_rps=rate,
        proven=low is not None and low.verdict is Verdict.PASS,
        lowest_fail_rps=high.rate_rps if high else None,
        fail_proven=high is not None and high.verdict is Verdict.FAIL,
        lo=min(lo, rate) if low else 0.0,
        hi=max(hi, rate) if high else None,
    )


class Knee:
    """Where the miss rate crosses its limit: a posterior over log rate.

    Model: -log(share that meets the limits) grows as exp(steepness * (rate / knee - 1)) and equals the allowed miss
    rate at the knee. That is the exponential tail of a queue's waiting time: exact for M/M/1, whose steepness is knee
    times TTFT limit. Flat priors over log knee and log steepness, a grid for both, and a binomial likelihood whose
    weight is divided by the design effect (at least `MIN_DESIGN_EFFECT`: short cells cannot show how their requests
    hang together). An engine that overflows has left that curve: there, a cell that missed more than `SATURATED` of its
    requests says that the miss rate is at least that, and nothing about the slope.

    The constants were set on simulated engines of known capacity; docs/arena.md has the coverage,
    tests/arena/judging/test_search.py a part of the simulations.
    """

    MIN_DESIGN_EFFECT = 8.0
    SATURATED = 0.1
    UNDERREAD = 2.0  # an autocorrelation time read off a short series comes out too small
    STEEPNESS = (2.0, 64.0)
    GRID = 400
    # The knee is looked for within this factor of the tested rates; of what lies beyond, the data say nothing.
    REACH = 3.0

    def __init__(self, outcomes: Sequence[Outcome], settings: SearchSettings) -> None:
        self._outcomes = [outcome for outcome in outcomes if outcome.requests]
        self._settings = settings

    @cached_property
    def log_rates(self) -> NDArray[np.float64]:
        rates = [outcome.rate_rps for outcome in self._outcomes] or [self._settings.start_rps]
        return np.linspace(math.log(min(rates) / self.REACH), math.log(max(rates) * self.REACH), self.GRID)

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """Posterior probability of each of `log_rates`."""
        steepness = np.geomspace(*self.STEEPNESS, 25)[:, None]
        knees = np.exp(self.log_rates)
        log_likelihood = np.zeros((steepness.size, self.GRID))
        for outcome in self._outcomes:
            hazard = -math.log1p(-self._settings.allowed) * np.exp(
                np.minimum(steepness * (outcome.rate_rps / knees - 1), 50.0)
            )
            misses, met = outcome.counted_misses, outcome.requests - outcome.counted_misses
            if misses > self.SATURATED * outcome.requests:  # how far beyond the knee, the model cannot say
                hazard = np.minimum(hazard, -math.log1p(-min(misses / outcome.requests, 1 - 1e-9)))
            weight = 1 / max(self.UNDERREAD * outcome.design_effect, self.MIN_DESIGN_EFFECT)
            log_likelihood += weight * (misses * np.log(-np.expm1(-hazard)) - met * np.minimum(hazard, 50.0))
        posterior = np.exp(log_likelihood - log_likelihood.max()).sum(axis=0)
        normalised: NDArray[np.float64] = posterior / posterior.sum()
        return normalised

    def interval(self) -> tuple[float, float]:
        """The central `confidence` interval of the knee, in requests a second."""
        tail = (1 - self._settings.confidence) / 2
        cumulative = np.cumsum(self.weights)
        low, high = np.searchsorted(cumulative, [tail, 1 - tail])
        return float(np.exp(self.log_rates[low])), float(np.exp(self.log_rates[min(high, self.GRID - 1)]))


def probability_better(a: Knee, b: Knee) -> float:
    """P(knee of a > knee of b), ties on the grid counted half."""
    low = min(a.log_rates[0], b.log_rates[0])
    high = max(a.log_rates[-1], b.log_rates[-1])
    grid = np.linspace(low, high, 2 * Knee.GRID)
    cdf_b = np.interp(grid, b.log_rates, np.cumsum(b.weights), left=0.0, right=1.0)
    density_a = np.diff(np.interp(grid, a.log_rates, np.cumsum(a.weights), left=0.0, right=1.0), prepend=0.0)
    middle = (cdf_b + np.concatenate([[0.0], cdf_b[:-1]])) / 2
    return float((density_a * middle).sum() / density_a.sum())
