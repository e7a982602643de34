"""Axes: how far they reach and where their ticks lie. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from arena.reports.document import Axis


def linear_axis(label: str, high: float) -> Axis:
    """From 0 to the next whole step above `high`, which is positive; about five ticks."""
    least = high / 5
    magnitude = 10.0 ** math.floor(math.log10(least))
    step = next(times for times in (1, 2, 2.5, 5, 10) if times * magnitude >= least * 0.999) * magnitude
    count = math.ceil(high / step * 0.999)
    ticks = tuple((number * step, f"{round(number * step, 9):,.10g}") for number in range(count + 1))
    return Axis(label, 0, count * step, ticks)


def log_axis(label: str, low: float, high: float, words: Callable[[float], str] = "{:g}".format) -> Axis:
    """From `low` to `high`, both positive, with ticks that are called by `words`."""
    return Axis(label, low, high, tuple((tick, words(tick)) for tick in nice_ticks(low, high)), is_log=True)


def latency_axis(metric: str, values: Sequence[float], limit: float) -> Axis:
    """Logarithmic, with room for the limit and for an arrow above everything that is finite."""
    from arena.reports.wording import figure  # which knows races, and pictures of anything else need none

    finite = [value for value in values if 0 < value < math.inf]
    low, high = min([*finite, limit]) / 1.3, max([*finite, limit]) * 1.6
    return log_axis(f"{metric.upper()}, ms", low, high, figure)


def nice_ticks(low: float, high: float) -> list[float]:
    """On a log axis: the coarsest steps of which at least three lie inside it, never more than about eight."""
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), [step / 10 for step in range(10, 100)]):
        ticks = [
            step * 10.0**exponent
            for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for step in steps
            if low <= step * 10.0**exponent <= high
        ]
        if len(ticks) >= 3:
            break
    return [round(tick, 6) for tick in ticks[:: math.ceil(len(ticks) / 8) or 1]]
