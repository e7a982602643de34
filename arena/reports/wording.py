"""Figures in words, the same for the terminal and for the report. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from arena.judging.gateway_cost import Added, costs
from arena.judging.results import EngineResult, RaceResult


def headline(result: RaceResult) -> str:
    """The race in one sentence, claiming no more than the rank sets do."""
    if not result.notes.searched:
        return "; ".join(_added(name, rows) for name, rows in costs(result)) or "Nothing could be compared"
    ranked = [engine for engine in result.engines if engine.rank and engine.goodput]
    if not ranked:
        return "No engine could be ranked"
    best = ranked[0]
    assert best.goodput is not None
    carries = f"{best.name} carries {rate_words(best.goodput.rate_rps)} requests/s"
    if best.goodput.rate_rps == 0:
        return f"No engine held the limits at any rate that was tried{'' if len(ranked) > 1 else f' ({best.name})'}"
    if len(ranked) == 1:
        return carries
    tied = [engine for engine in ranked if engine.rank and engine.rank.lo == 1]
    if len(tied) > 1:
        rates = and_words([rate_words(engine.goodput.rate_rps) for engine in tied if engine.goodput])
        return f"{and_words([engine.name for engine in tied])} cannot be told apart ({rates} requests/s)"
    second = ranked[1]
    assert second.goodput is not None
    if second.goodput.rate_rps == 0:
        return f"{carries}; {second.name} held the limits at no rate that was tried"
    times = best.goodput.rate_rps / second.goodput.rate_rps
    return f"{carries}, {times:.1f} times what {second.name} carries ({rate_words(second.goodput.rate_rps)})"


def _added(name: str, rows: Sequence[Added]) -> str:
    found = {row.metric: row.difference for row in rows}
    ttft, tpot = found.get("TTFT, median"), found.get("TPOT, median")
    if ttft is None:
        return f"Of {name}, no request was answered both directly and through the gateway"
    rest = "" if tpot is None else f" and {tpot:+.2f} ms to each token after it"
    return f"The gateway adds {ttft:+.2f} ms to the first token of {name}{rest}"


def rate_words(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}" if rate else "0"


def interval_words(engine: EngineResult) -> str:
    goodput = engine.goodput
    if goodput is None:
        return "-"
    if goodput.hi is None:
        return f"above {rate_words(goodput.lo)}"
    return f"{rate_words(goodput.lo)} \N{EN DASH} {rate_words(goodput.hi)}"


def milliseconds(value: float | None) -> str:
    """A latency for people: no false precision, and a failed percentile is infinite rather than missing."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "\N{INFINITY}"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def share_words(share: float | None) -> str:
    """A share in percent: 99.7 %, but never a rounded-up 100 % and never a rounded-down 0 %."""
    if share is None:
        return "-"
    percent = 100 * share
    digits = 1 if percent in (0, 100) or 0.05 <= percent < 99.95 else 3
    return f"{percent:.{digits}f} %".replace(".0 %", " %")


def figure(value: float | None) -> str:
    """Three digits of any number, never as a power of ten where it can be read without."""
    if value is None:
        return "-"
    return "\N{INFINITY}" if math.isinf(value) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def and_words(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
