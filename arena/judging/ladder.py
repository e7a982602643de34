"""The ladder of rates, and what the cells on it say together. Pure.

All engines share the rungs (`start * step ** rung`), so that every engine meets the same plan at the same rung. Cells
of one rung are judged together, in the order they were run, and again after each: a rung that cannot be told yet is
given another cell, up to `max_replicates`. Looking again and again would find chance proofs, so the looks are paid for:
each has its share, (1 - confidence) / max_replicates, of the risk of a false proof. Equal shares need no assumption on
how the looks hang together (union bound), which matters here: every look reads the effective number of requests anew,
so that likelihood-ratio and martingale bounds would not hold exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import isotonic_regression

from arena.judging.stats import Verdict, judge_looks

SATURATED = 0.1  # a cell that missed more than this share has left the curve that leads up to the knee
SATURATED_EFFECT = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One judged cell. `misses` counts requests that missed the limits; an unstable cell (growing backlog) missed in
    the limit. `sure_misses` are those that missed by more than the client may be off; None: all of them.
    """

    rung: int
    rate_rps: float
    requests: int
    misses: int
    stable: bool = True
    design_effect: float = 1.0
    sure_misses: int | None = None

    @property
    def counted_misses(self) -> int:
        return self.misses if self.stable else self.requests

    @property
    def certain_misses(self) -> int:
        """The misses that are the engine's whatever the client's error: all that a fail may be proven with."""
        return self.sure_misses if self.stable and self.sure_misses is not None else self.counted_misses

    @property
    def effective(self) -> float:
        return self.requests / self.design_effect

    @property
    def is_saturated(self) -> bool:
        return self.counted_misses > SATURATED * self.requests


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    start_rps: float = 1.0
    step: float = 2**0.25
    stride: int = 4  # rungs per move while bracketing; a power of two, so that halving ends at neighbours
    min_rung: int = -16
    max_rung: int = 32
    max_replicates: int = 3  # cells at one rung, and so the looks at it
    percentile: float = 99.0
    confidence: float = 0.95

    def rate(self, rung: int) -> float:
        """Six digits, so that the rate reads the same in a name, a file and a report."""
        return float(f"{self.start_rps * self.step**rung:.6g}")

    def rung_below(self, rate_rps: float) -> int:
        """The highest rung whose rate does not exceed `rate_rps`, kept on the ladder."""
        return min(max(self.unclipped_rung_below(rate_rps), self.min_rung), self.max_rung)

    def nearest_rung(self, rate_rps: float) -> int:
        return round(math.log(max(rate_rps, 1e-9) / self.start_rps) / math.log(self.step))

    def unclipped_rung_below(self, rate_rps: float) -> int:
        return math.floor(math.log(max(rate_rps, 1e-9) / self.start_rps) / math.log(self.step) + 1e-9)

    @property
    def allowed(self) -> float:
        return 1 - self.percentile / 100


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


def with_shared_effects(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Each cell with the design effect that all cells of the engine say together, instead of the one it read itself.

    A short cell reads its own badly: too small where chance spared it the queue. Busier queues clump more, so the
    readings are made non-decreasing in the rate (isotonic, over their logarithms). A saturated cell reads the length of
    its one long overload, which says nothing about how requests clump at the knee: it counts with at most twice the
    effect of the rates below it.
    """
    known: dict[float, list[Outcome]] = {}
    for cell in sorted(outcomes, key=lambda cell: cell.rate_rps):
        if cell.requests and not cell.is_saturated:
            known.setdefault(cell.rate_rps, []).append(cell)
    if not known:
        return list(outcomes)
    weights = [sum(cell.requests for cell in cells) for cells in known.values()]
    logs = [
        sum(cell.requests * math.log(cell.design_effect) for cell in cells) / weight
        for cells, weight in zip(known.values(), weights, strict=True)
    ]
    fitted = np.exp(isotonic_regression(logs, weights=weights).x)
    rates = list(known)

    def shared(cell: Outcome) -> float:
        below = float(fitted[max(0, int(np.searchsorted(rates, cell.rate_rps, side="right")) - 1)])
        return min(cell.design_effect, SATURATED_EFFECT * below) if cell.is_saturated else below

    return [replace(cell, design_effect=max(1.0, shared(cell))) for cell in outcomes]


def pool(outcomes: Sequence[Outcome], settings: SearchSettings) -> list[Rung]:
    """Cells of the same rung as one, in ascending rate; `outcomes` in the order they were run."""
    rungs = []
    shared = with_shared_effects(outcomes)
    for rung in sorted({outcome.rung for outcome in shared}):
        cells = [outcome for outcome in shared if outcome.rung == rung]
        rungs.append(
            Rung(
                rung,
                cells[0].rate_rps,
                requests=sum(cell.requests for cell in cells),
                misses=sum(cell.counted_misses for cell in cells),
                effective=sum(cell.effective for cell in cells),
                replicates=len(cells),
                verdict=_verdict(cells, settings),
            )
        )
    return rungs


def _verdict(cells: Sequence[Outcome], settings: SearchSettings) -> Verdict:
    return judge_looks(
        [(cell.requests, cell.counted_misses, cell.certain_misses, cell.design_effect) for cell in cells],
        max_looks=settings.max_replicates,
        percentile=settings.percentile,
        confidence=settings.confidence,
    )


def monotone_rates(rungs: Sequence[Rung]) -> list[float]:
    """Miss rate per rung, made non-decreasing in the offered rate by pooling adjacent violators (isotonic regression).

    More load cannot make more requests meet their limits, so a miss rate that falls is noise and is averaged away.
    This is what keeps one lucky cell above a failing one from becoming the answer.
    """
    if not rungs:
        return []
    rates = [rung.misses / rung.requests if rung.requests else 0.0 for rung in rungs]
    weights = [max(rung.effective, 1e-9) for rung in rungs]
    fitted: list[float] = isotonic_regression(rates, weights=weights).x.tolist()
    return fitted


def bracket(rungs: Sequence[Rung], settings: SearchSettings) -> tuple[Rung | None, Rung | None]:
    """The highest rung that holds and the lowest that does not, by the isotonic fit."""
    held = [rate <= settings.allowed + 1e-9 for rate in monotone_rates(rungs)]
    passing = [rung for rung, ok in zip(rungs, held, strict=True) if ok]
    failing = [rung for rung, ok in zip(rungs, held, strict=True) if not ok]
    return (passing[-1] if passing else None), (failing[0] if failing else None)


def crossing(rungs: Sequence[Rung], settings: SearchSettings) -> float | None:
    """Where the isotonic fit meets the allowed miss rate, between two rungs on a straight line over log rate.

    Miss rates grow faster than that line, so the crossing lies below the curve's own: it errs downward. None where the
    fit does not cross within the tested rates.
    """
    low, high = bracket(rungs, settings)
    if low is None or high is None:
        return None
    fitted = dict(zip([rung.rung for rung in rungs], monotone_rates(rungs), strict=True))
    below, above = fitted[low.rung], fitted[high.rung]
    share = (settings.allowed - below) / (above - below)
    logs = np.log([low.rate_rps, high.rate_rps])
    return float(np.exp(logs[0] + min(1.0, max(0.0, share)) * (logs[1] - logs[0])))
