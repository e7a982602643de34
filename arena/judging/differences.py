"""Two engines on the same plan, request by request. Pure.

Every engine meets the same arrivals and prompts at the same rung and replicate, so what chance puts into a plan cancels
in the difference. Requests are matched by when they were due. Neighbours share a queue, so the unit of the interval is
not the request but the block: each cell is cut into `BLOCKS` stretches of equal time, and the mean of the blocks'
differences has a t-interval.

    paired("a", cells_a, "b", cells_b, slo, confidence=0.95)
    # [Paired(first="a", second="b", metric="in_time", difference=0.03, lo=0.01, hi=0.05, ...), ...]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal, TypeAlias

import numpy as np
from scipy.stats import t as student

from arena.judging.cells import CellResult, Sample
from arena.race.scenario import SLO

BLOCKS = 5
MIN_BLOCKS = 10

Metric: TypeAlias = Literal["in_time", "ttft_ms", "tpot_ms"]
Match: TypeAlias = tuple[Sample, Sample]


@dataclass(frozen=True, slots=True)
class Paired:
    """First minus second. `in_time` is a share of requests, the others are medians in ms of answers that both gave.

    `lo` and `hi` are None where there are too few blocks. `apart`: the interval leaves out all differences that are no
    larger than the client's error.
    """

    first: str
    second: str
    metric: Metric
    requests: int
    blocks: int
    difference: float | None
    lo: float | None
    hi: float | None
    apart: bool


def paired(
    first: str,
    mine: Sequence[CellResult],
    second: str,
    theirs: Sequence[CellResult],
    slo: SLO,
    *,
    confidence: float = 0.95,
    floor_ms: float = 0.0,
) -> list[Paired]:
    """One row a metric, over the valid cells that both engines ran with the same plan."""
    known = {cell.plan_sha256: cell for cell in theirs if cell.is_valid}
    blocks = [
        block
        for cell in mine
        if cell.is_valid and cell.plan_sha256 in known
        for block in _blocks(cell, known[cell.plan_sha256])
    ]

    def in_time(block: Sequence[Match]) -> float:
        return fmean((a.severity(slo) <= 1) - (b.severity(slo) <= 1) for a, b in block)

    readings: tuple[tuple[Metric, Callable[[Sequence[Match]], float | None], float], ...] = (
        ("in_time", in_time, 0.0),
        ("ttft_ms", lambda block: _median([(a.ttft_ms, b.ttft_ms) for a, b in block]), floor_ms),
        ("tpot_ms", lambda block: _median([(a.tpot_ms, b.tpot_ms) for a, b in block]), 0.0),
    )
    requests = sum(len(block) for block in blocks)
    return [
        _interval(first, second, metric, requests, [read(block) for block in blocks], confidence, floor)
        for metric, read, floor in readings
    ]


def _blocks(mine: CellResult, theirs: CellResult) -> list[list[Match]]:
    other = {sample.scheduled_s: sample for sample in theirs.samples}
    matches = [(sample, other[sample.scheduled_s]) for sample in mine.samples if sample.scheduled_s in other]
    if not matches:
        return []
    edges = np.linspace(matches[0][0].scheduled_s, matches[-1][0].scheduled_s, BLOCKS + 1)[1:-1]
    places = np.searchsorted(edges, [a.scheduled_s for a, _ in matches], side="right")
    cut = [[match for match, place in zip(matches, places, strict=True) if place == block] for block in range(BLOCKS)]
    return [block for block in cut if block]


def _median(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    known = [a - b for a, b in pairs if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)]
    return median(known) if known else None


def _interval(
    first: str,
    second: str,
    metric: Metric,
    requests: int,
    blocks: Sequence[float | None],
    confidence: float,
    floor: float,
) -> Paired:
    known = [value for value in blocks if value is not None]
    mean = fmean(known) if known else None
    if mean is None or len(known) < MIN_BLOCKS:
        return Paired(first, second, metric, requests, len(known), mean, None, None, False)
    half = (
        float(student.ppf((1 + confidence) / 2, len(known) - 1)) * float(np.std(known, ddof=1)) / math.sqrt(len(known))
    )
    lo, hi = mean - half, mean + half
    return Paired(first, second, metric, requests, len(known), mean, lo, hi, lo > floor or hi < -floor)
