"""What a gateway adds, out of cells that an engine ran directly and through it: the same requests, paired. Pure.

    for name, rows in costs(result):        # name of the engine; one row a metric
        ...

Both arms of a pair have one schedule (same rung, same replicate), so a request is matched by when it was due. Chance
that is in the plan cancels. Neighbours share a queue, so not requests are resampled but blocks of them (block
bootstrap; Kuensch, The Annals of Statistics 17, 1989), each block of both arms together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from arena.judging.cells import CellResult, Sample
from arena.judging.results import RaceResult
from arena.race.scenario import SLO

SUFFIX = "-via-gateway"
BLOCKS_A_CELL = 10
MIN_BLOCKS = 10
RESAMPLES = 1000

Match: TypeAlias = tuple[Sample, Sample]  # directly, and through the gateway
Arms: TypeAlias = npt.NDArray[np.float64]  # one row a request: directly, and through the gateway
Places: TypeAlias = npt.NDArray[np.int64]
Reading: TypeAlias = tuple[float, float, float]  # directly, through, and the difference
Statistic: TypeAlias = Callable[[Arms], Reading | None]


class Added(Struct, frozen=True, kw_only=True):
    """One metric in both arms, and through minus direct with its interval. None: too few blocks, or no such value."""

    metric: str
    unit: str
    requests: int
    direct: float | None
    through: float | None
    difference: float | None
    lo: float | None
    hi: float | None


def costs(result: RaceResult) -> Iterator[tuple[str, list[Added]]]:
    """Of each engine that took part beside itself behind a gateway (`NAME` and `NAME-via-gateway`)."""
    engines = {engine.name: engine for engine in result.engines}
    for name, engine in sorted(engines.items()):
        behind = engines.get(f"{name}{SUFFIX}")
        if behind is not None:
            yield name, added(engine.cells, behind.cells, result.scenario.slo, confidence=result.scenario.confidence)


def added(
    direct: Sequence[CellResult], through: Sequence[CellResult], slo: SLO, *, confidence: float, seed: int = 0
) -> list[Added]:
    known = {(cell.rung, cell.replicate): cell for cell in through if cell.is_valid}
    pairs = [
        (cell, known[cell.rung, cell.replicate])
        for cell in direct
        if cell.is_valid and (cell.rung, cell.replicate) in known
    ]
    blocks = [block for one, other in pairs for block in _blocks(one, other)]
    matches = [match for block in blocks for match in block]
    edges = np.cumsum([0, *map(len, blocks)])
    picks = _resampled([np.arange(*edge) for edge in pairwise(edges)], np.random.default_rng(seed))
    rate_rps = len(matches) / (sum(_span_s(one) for one, _ in pairs) or 1.0)
    ttft = _both(matches, lambda sample: sample.ttft_ms)
    tpot = _both(matches, lambda sample: sample.tpot_ms)
    in_time = np.array(
        [[rate_rps * (sample.severity(slo) <= 1) for sample in match] for match in matches], dtype=float
    ).reshape(-1, 2)
    readings: tuple[tuple[str, str, Arms, Statistic], ...] = (
        ("TTFT, median", "ms", ttft, _middle),
        ("TTFT, p99", "ms", ttft, _tail),
        ("TPOT, median", "ms", tpot, _middle),
        ("TPOT, p99", "ms", tpot, _tail),
        ("in time", "/s", in_time, _mean),
    )
    return [
        _added(metric, unit, len(matches), values, statistic, picks, confidence)
        for metric, unit, values, statistic in readings
    ]


def _added(
    metric: str,
    unit: str,
    requests: int,
    values: Arms,
    statistic: Statistic,
    picks: Sequence[Places],
    confidence: float,
) -> Added:
    seen = statistic(values)
    lo = hi = None
    if seen is not None:
        drawn = [again[2] for places in picks if (again := statistic(values[places])) is not None]
        tail = 100 * (1 - confidence) / 2
        lo, hi = (float(edge) for edge in np.percentile(drawn, [tail, 100 - tail])) if drawn else (None, None)
    direct, through, difference = seen or (None, None, None)
    return Added(
        metric=metric,
        unit=unit,
        requests=requests,
        direct=direct,
        through=through,
        difference=difference,
        lo=lo,
        hi=hi,
    )


def _resampled(blocks: Sequence[Places], rng: np.random.Generator) -> list[Places]:
    """Places of the requests of as many blocks as there are, drawn with replacement; none where blocks are few."""
    if len(blocks) < MIN_BLOCKS:
        return []
    return [
        np.concatenate([blocks[pick] for pick in picks])
        for picks in rng.integers(len(blocks), size=(RESAMPLES, len(blocks)))
    ]


def _blocks(direct: CellResult, through: CellResult) -> list[list[Match]]:
    """Stretches of neighbours in schedule order, all about equally many."""
    other = {sample.scheduled_s: sample for sample in through.samples}
    matches = [(sample, other[sample.scheduled_s]) for sample in direct.samples if sample.scheduled_s in other]
    size = max(1, math.ceil(len(matches) / BLOCKS_A_CELL))
    return [matches[start : start + size] for start in range(0, len(matches), size)]


def _span_s(cell: CellResult) -> float:
    """How long so many requests take to come at this rate: the window, on average."""
    return len(cell.samples) / cell.rate_rps


def _both(matches: Sequence[Match], value: Callable[[Sample], float | None]) -> Arms:
    """One row a request: NaN in both arms where one of them has no value, as only answers that both gave compare."""
    rows = [
        (value(direct), value(through)) if direct.ok and through.ok else (None, None) for direct, through in matches
    ]
    whole = [(math.nan, math.nan) if None in row else row for row in rows]
    return np.array(whole, dtype=float).reshape(-1, 2)


def _middle(values: Arms) -> Reading | None:
    """Medians, and the median of the differences request by request."""
    known = values[~np.isnan(values[:, 0])]
    if not len(known):
        return None
    direct, through = np.median(known, axis=0)
    return float(direct), float(through), float(np.median(known[:, 1] - known[:, 0]))


def _tail(values: Arms) -> Reading | None:
    """p99s: values that occurred."""
    known = values[~np.isnan(values[:, 0])]
    if not len(known):
        return None
    direct, through = np.percentile(known, 99, axis=0, method="inverted_cdf")
    return float(direct), float(through), float(through - direct)


def _mean(values: Arms) -> Reading | None:
    if not len(values):
        return None
    direct, through = values.mean(axis=0)
    return float(direct), float(through), float(through - direct)
