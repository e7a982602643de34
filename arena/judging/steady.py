"""Is a cell in its steady state, and since when? Pure: times and latencies in schedule order in, findings out.

*Since when*: MSER-5 (White 1997) on the TTFT of all requests up to the horizon, those of the scenario's warm-up
included. The steady window is a matter of scheduled time alone, so a warm-up that is found longer than the scenario's
moves the window's beginning and drops nobody out of its middle. It is moved only for a difference that chance does not
make, and that was there from the cell's first request on: MSER takes any early burst of a busy queue for a warm-up, and
cutting bursts away would flatter the engine.

*Whether*: an overloaded queue looks fine in a short cell, since its backlog has had no time to grow. So the slope of
TTFT, the share of the offered requests that was completed, and Little's law (requests in the system = arrival rate x
time in the system) have to say that it is steady; the slope of the backlog is an audit of its own
(`arena.judging.audit.backlog`). What fails makes the rate a fail, whatever its percentiles say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from arena.judging import stats
from arena.judging.findings import Effect, Finding

Series = NDArray[np.float64]

BATCH = 5
SURE_Z = 3.0  # of a comparison at a place that the data chose
GROWTH_T = 5.0
CLUMP = 8.0  # requests that are late together, at least: a short window reads too few
GROWTH_FACTOR = 3.0  # TTFT of the last quarter over that of the first
UNCOMPLETED = 0.10
LITTLE = 0.20
CHANCE = 4.0  # over the root of the requests: what a busy spell at an end of the window moves, as a share of them


@dataclass(frozen=True, slots=True)
class Window:
    """The steady window, in seconds of scheduled time. `warmup_s` is the warm-up that was found; None: no end of it."""

    from_s: float
    to_s: float
    warmup_s: float | None

    def holds(self, scheduled_s: float) -> bool:
        return self.from_s <= scheduled_s < self.to_s


def mser5(series: ArrayLike) -> int | None:
    """Where the steady part of a series begins: the cut that leaves the smallest standard error of the mean of batches
    of five, looked for in the first half. None where it is the half itself: the series is too short to have settled.
    """
    values = _finite(series)
    count = values.size // BATCH
    if count < 4:
        return 0
    means = values[: count * BATCH].reshape(count, BATCH).mean(axis=1)
    left = np.arange(count, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(means[::-1] ** 2)[::-1]
    errors = (squares - sums**2 / left) / left.astype(float) ** 2
    half = count // 2  # near its end a series has hardly any batches left, which agree by chance
    cut = int(np.argmin(errors[: half + 1]))
    return cut * BATCH if cut < half else None


def steady_window(scheduled_s: ArrayLike, ttft_ms: ArrayLike, *, warmup_s: float, horizon_s: float) -> Window:
    """Both series in schedule order, from the cell's first request to the last one before the horizon."""
    times, latencies = np.asarray(scheduled_s, dtype=float), _finite(ttft_ms)
    cut = mser5(latencies)
    if cut is None:
        half = latencies.size // 2
        unsettled = _shift(latencies[:half], latencies[half:]) != 0
        return Window(warmup_s, horizon_s, None if unsettled else 0.0)
    found = float(times[cut]) if cut else 0.0
    if found <= warmup_s:
        return Window(warmup_s, horizon_s, found)
    first, early, late = latencies[times < warmup_s], latencies[(times >= warmup_s) & (times < found)], latencies[cut:]
    shift = _shift(early, late)
    is_warmup = shift != 0 and shift == _shift(first, late)
    return Window(found if is_warmup else warmup_s, horizon_s, found if is_warmup else 0.0)


def _shift(early: Series, late: Series) -> int:
    """Is the early part another population, allowing for requests that share a queue? 1 slower, -1 faster, 0 no."""
    if early.size < BATCH or late.size < BATCH:
        return 0
    ranks = rankdata(np.concatenate([early, late]))
    clump = stats.autocorrelation_time(late.tolist())
    error = ranks.std() * np.sqrt(clump / early.size + clump / late.size)
    difference = ranks[: early.size].mean() - ranks[early.size :].mean()
    return int(np.sign(difference)) if abs(difference) > SURE_Z * error else 0


def findings(
    scheduled_s: ArrayLike, ended_s: ArrayLike, ttft_ms: ArrayLike, window: Window, warmup_s: float
) -> list[Finding]:
    """`ended_s` is when a request left the system, infinity where it was still there when the cell ended. All requests
    of the cell: those of the warm-up are in the system, too.
    """
    scheduled, ended = np.asarray(scheduled_s, dtype=float), np.asarray(ended_s, dtype=float)
    inside = (scheduled >= window.from_s) & (scheduled < window.to_s)
    return [
        warm_up(window, warmup_s),
        ttft_growth(scheduled[inside], _finite(ttft_ms)[inside]),
        completed(scheduled[inside], ended, window),
        littles_law(scheduled, ended, window),
    ]


def warm_up(window: Window, warmup_s: float) -> Finding:
    """Told, and without consequence: the window has been moved already, where that was called for."""
    if window.warmup_s is None:
        words = "TTFT had not settled by the middle of the cell; give the scenario longer cells."
        return Finding("warmup_s", False, None, warmup_s, "note", words)
    moved = window.from_s > warmup_s
    words = (
        f"The warm-up took {window.warmup_s:.1f} s instead of {warmup_s:g}; the window begins there." if moved else ""
    )
    return Finding("warmup_s", not moved, window.warmup_s, warmup_s, "note", words)


def ttft_growth(scheduled_s: Series, ttft_ms: Series) -> Finding:
    """Does TTFT grow over the window, beyond chance (the t of its slope, for effective requests) and threefold?"""
    check = "ttft_growth"
    quarter = scheduled_s.size // 4
    if quarter < BATCH:
        return Finding(check, True, None, GROWTH_FACTOR, "note", "Too few requests to see whether TTFT grows.")
    first, last = float(np.median(ttft_ms[:quarter])), float(np.median(ttft_ms[-quarter:]))
    ranks = rankdata(ttft_ms)
    slope, t = stats.slope(scheduled_s.tolist(), ranks.tolist())
    residual = ranks - slope * (scheduled_s - scheduled_s.mean())
    t /= math.sqrt(max(CLUMP, stats.autocorrelation_time(residual.tolist())))
    factor = last / first if first > 0 else 1.0
    ok = not (t > GROWTH_T and factor > GROWTH_FACTOR)
    words = f"TTFT grew {factor:.1f} times over the window, from {first:.0f} to {last:.0f} ms."
    return Finding(check, ok, factor, GROWTH_FACTOR, "unstable", words)


def completed(scheduled_s: Series, ended_s: Series, window: Window) -> Finding:
    """Requests that left the system within the window, over those that came: not below 1 by more than chance."""
    offered = scheduled_s.size
    left = int(((ended_s >= window.from_s) & (ended_s < window.to_s)).sum())
    share = left / offered if offered else None
    least = max(0.0, 1 - max(UNCOMPLETED, CHANCE / math.sqrt(max(1, offered))))
    words = f"Of {offered} requests offered in the window, {left} were done in the same time."
    return Finding("completed_share", share is None or share >= least, share, least, "unstable", words)


def littles_law(scheduled_s: Series, ended_s: Series, window: Window) -> Finding:
    """Mean number in the system over arrival rate x mean time in the system: 1 in a steady state, less while a backlog
    grows, more while one is worked off. What straddles the window's ends is allowed for.
    """
    check = "littles_law"
    inside = (scheduled_s >= window.from_s) & (scheduled_s < window.to_s)
    length = window.to_s - window.from_s
    ends = np.where(np.isfinite(ended_s), ended_s, max(window.to_s, float(scheduled_s.max(initial=0.0))))
    time_in_system = float((ends - scheduled_s)[inside].sum())
    if time_in_system <= 0:
        return Finding(check, True, None, LITTLE, "note", "No time in the system to compare with.")
    overlap = np.minimum(ends, window.to_s) - np.maximum(scheduled_s, window.from_s)
    ratio = float(np.maximum(overlap, 0).sum()) / time_in_system
    chance = CHANCE / math.sqrt(int(inside.sum()))
    tolerance = max(LITTLE, chance, 4 * float((ends - scheduled_s)[inside].mean()) / length)
    words = f"The mean number of requests in the system is {ratio:.2f} times what arrivals and their times make."
    effect: Effect = "unstable" if ratio < 1 else "note"
    return Finding(check, abs(1 - ratio) <= tolerance, ratio, 1 - tolerance, effect, words)


def _finite(series: ArrayLike) -> Series:
    """Failures are infinitely late; for means and variances they are as late as the latest answer."""
    values = np.asarray(series, dtype=float)
    known = values[np.isfinite(values)]
    return np.where(np.isfinite(values), values, known.max(initial=0.0))
