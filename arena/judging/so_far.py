"""How a cell stands while it runs: of its measured requests that have ended, how many were in time. Pure.

    tally = Tally(scenario.slo)
    tally.add(row)                 # every row, as it is written
    tally.so_far().in_time

The definitions are those of the views that judge the cell when it is over (`arena/records/views.sql`). Before that the
picture is a little too good: what takes longest has not ended yet.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass

from arena.judging import stats
from arena.load.spool import RequestRow
from arena.race.scenario import SLO


@dataclass(frozen=True, slots=True)
class SoFar:
    """TTFTs in ms from when the requests were due, infinite for failures; None before the first."""

    ended: int = 0
    in_time: int = 0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None


NOTHING_YET = SoFar()


class Tally:
    """One cell's."""

    def __init__(self, slo: SLO) -> None:
        self._slo = slo
        self._in_time = 0
        self._ttfts_ms: list[float] = []  # in order

    def add(self, row: RequestRow) -> None:
        if not row.measured:
            return
        ttft_ms = ttft_of(row)
        insort(self._ttfts_ms, ttft_ms)
        self._in_time += ttft_ms <= self._slo.ttft_ms and (tpot_of(row) or 0.0) <= self._slo.tpot_ms

    def so_far(self) -> SoFar:
        p50, p99 = (stats.quantile(self._ttfts_ms, percentile) for percentile in (50, 99))
        return SoFar(len(self._ttfts_ms), self._in_time, p50, p99)


def ttft_of(row: RequestRow) -> float:
    """In ms; infinite where the request failed or nothing was generated."""
    if row.status != "ok" or row.first_gen_ns is None:
        return math.inf
    return (row.first_gen_ns - row.scheduled_ns) / 1e6


def tpot_of(row: RequestRow) -> float | None:
    """In ms; None where no token came after those of the first read."""
    if row.first_gen_ns is None or row.last_gen_ns is None:
        return None
    at_first = sum(n for t_ns, n in zip(row.token_ns, row.token_n, strict=True) if t_ns == row.token_ns[0])
    tokens = row.out_tok_counted if row.out_tok_usage is None else row.out_tok_usage
    return (row.last_gen_ns - row.first_gen_ns) / 1e6 / (tokens - at_first) if tokens > at_first else None
