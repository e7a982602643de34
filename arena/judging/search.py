"""Which rate to try next, and what the tried rates say about goodput. Pure: no clock, no sockets, no randomness.

Goodput is the highest offered rate at which the latency targets hold. The search walks a ladder of rates that all
engines share (arena/judging/ladder.py), so that every engine meets the same plan at the same rung:

    bracket   climb or descend by growing strides until one rung holds and a higher one does not
    refine    halve the gap (in log rate) until the two are neighbours
    confirm   repeat both neighbours with fresh plans until they are proven or the repeats are used up

    >>> settings = SearchSettings(start_rps=1, step=2 ** 0.5)
    >>> next_probe([], settings, first_rung=4)
    Probe(rung=4, rate_rps=4.0, replicate=0)

The answer has parts that deserve different trust: an estimate with its interval (a fit over all cells), the highest
rate that is proven to pass, and the lowest that is proven to fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arena.judging.knee import Knee
from arena.judging.ladder import Outcome, Rung, SearchSettings, bracket, crossing, pool
from arena.judging.stats import Verdict


@dataclass(frozen=True, slots=True)
class Probe:
    """Run this rung next. A higher `replicate` means a fresh plan at the same rate."""

    rung: int
    rate_rps: float
    replicate: int


@dataclass(frozen=True, slots=True)
class Goodput:
    """What the search found. None means: no tested rate says so."""

    rate_rps: float  # highest tested rate that held and is not above the estimate; 0 where none held
    proven: bool  # the verdict there is a proven pass, not only an observed one
    lowest_fail_rps: float | None  # lowest tested rate that did not hold
    fail_proven: bool
    lo: float
    hi: float | None  # None: no rate failed, so nothing bounds it from above
    estimate_rps: float | None = None  # where the fit meets the limit; None: no rate held, or none failed
    proven_pass_rps: float | None = None  # highest rate proven to pass
    proven_fail_rps: float | None = None  # lowest rate proven to fail

    @property
    def cliff_ratio(self) -> float | None:
        """How far apart the proofs are: lowest proven fail over highest proven pass. Near 1: goodput is pinned down."""
        if not self.proven_pass_rps or self.proven_fail_rps is None:
            return None
        return self.proven_fail_rps / self.proven_pass_rps


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
    """What all cells say. The estimate is the smaller of two readings of them, for cheap searches err upward: where the
    isotonic fit crosses the limit, and the median of the knee's posterior.
    """
    rungs = pool(outcomes, settings)
    low, high = bracket(rungs, settings)
    knee = Knee(outcomes, settings)
    lo, hi = knee.interval()
    crossed = crossing(rungs, settings)
    estimated = min(crossed, knee.quantile(0.5)) if crossed is not None else None
    held = _held(rungs, low, estimated)
    rate = held.rate_rps if held else 0.0
    passed, failed = proofs(rungs)
    return Goodput(
        rate_rps=rate,
        proven=held is not None and held.verdict is Verdict.PASS,
        lowest_fail_rps=high.rate_rps if high else None,
        fail_proven=high is not None and high.verdict is Verdict.FAIL,
        lo=min(lo, rate) if low else 0.0,
        hi=max(hi, low.rate_rps if low else 0.0) if high else None,
        estimate_rps=estimated,
        proven_pass_rps=passed,
        proven_fail_rps=failed,
    )


def _held(rungs: Sequence[Rung], low: Rung | None, estimated: float | None) -> Rung | None:
    """The highest rung that held and is not above the estimate: one that held in a cell or two may have been lucky.
    Where all that held are above it, the lowest of them.
    """
    held = [rung for rung in rungs if low is not None and rung.rung <= low.rung]
    likely = [rung for rung in held if estimated is None or rung.rate_rps <= estimated]
    return likely[-1] if likely else held[0] if held else None


def proofs(rungs: Sequence[Rung]) -> tuple[float | None, float | None]:
    """The highest proven pass below the lowest proven fail, and that fail: of two proofs that contradict each other,
    the one that claims less counts.
    """
    failed = min((rung.rate_rps for rung in rungs if rung.verdict is Verdict.FAIL), default=None)
    passed = [rung.rate_rps for rung in rungs if rung.verdict is Verdict.PASS]
    return max((rate for rate in passed if failed is None or rate < failed), default=None), failed
