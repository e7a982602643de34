"""Single requests of a race, drawn: when each was due and how late its first word came, and its two latencies against
the limits. Pure.

A picture of thousands of dots says no more than one of hundreds, so they are thinned: every miss stays as long as there
is room, and of the rest every k-th. The caption says how many are shown of how many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from arena.judging.cells import Sample
from arena.judging.results import EngineResult, RaceResult
from arena.judging.traces import Course
from arena.reports.axes import latency_axis
from arena.reports.document import Area, Axis, Chart, Point, Rule, Series
from arena.reports.wording import milliseconds, rate_words

MOST_DOTS = 220
T = TypeVar("T")


def course_charts(result: RaceResult) -> tuple[tuple[Chart, ...], tuple[Chart, ...]]:
    """Requests in flight, and TTFT of each request, over the cell at each engine's goodput."""
    known = [
        (place, engine, result.traces.courses[engine.engine_id])
        for place, engine in enumerate(result.engines)
        if engine.engine_id in result.traces.courses
    ]
    if not known:
        return (), ()
    fullest = max(level for _, _, course in known for _, level in course.in_flight)
    limit = result.scenario.slo.ttft_ms
    ttft = latency_axis("ttft", [value for _, _, course in known for _, value in course.requests], limit)
    return (
        tuple(_in_flight(place, engine, course, fullest) for place, engine, course in known),
        tuple(_lateness(place, engine, course, ttft, limit) for place, engine, course in known),
    )


def _in_flight(place: int, engine: EngineResult, course: Course, fullest: int) -> Chart:
    high = max(4, fullest * 1.1)
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**6) if high / step <= 6)
    ticks = tuple((float(value), str(value)) for value in range(0, math.floor(high) + 1, step))
    points = tuple(Point(at, level) for at, level in course.in_flight)
    return Chart(
        title=f"{engine.name} at {rate_words(course.rate_rps)} requests/s",
        alt=f"Requests in flight over the cell: at most {max(point.y for point in points):.0f}. "
        "A line that keeps rising would be a backlog.",
        x=_time_axis(course),
        y=Axis("requests in flight", 0, high, ticks),
        series=(Series(engine.name, place, points, has_marks=False),),
        areas=_phases(course),
    )


def _lateness(place: int, engine: EngineResult, course: Course, axis: Axis, limit: float) -> Chart:
    shown = thinned(course.requests, [ttft > limit for _, ttft in course.requests])
    points = tuple(_dot(due, ttft, axis, f"due at {due:.2f} s: TTFT {_or_failed(ttft)}") for due, ttft in shown)
    failed = sum(math.isinf(ttft) for _, ttft in course.requests)
    return Chart(
        title=f"{engine.name} at {rate_words(course.rate_rps)} requests/s",
        alt=f"TTFT of {len(shown)} of {len(course.requests)} requests over the time they were due; {failed} failed.",
        x=_time_axis(course),
        y=axis,
        series=(Series(engine.name, place, points, has_line=False),),
        rules=(Rule("y", limit, f"limit {limit:g} ms"),),
        areas=_phases(course),
    )


def _time_axis(course: Course) -> Axis:
    step = next(step for step in (1, 2, 5, 10, 20, 60, 120, 300, 600, 10**6) if course.end_s / step <= 7)
    ticks = tuple((float(value), str(value)) for value in range(0, math.floor(course.end_s) + 1, step))
    return Axis("seconds of the cell", 0, course.end_s, ticks)


def _phases(course: Course) -> tuple[Area, ...]:
    """What is shaded is not measured."""
    return Area("warm-up", (0, course.warmup_s)), Area("cool-down", (course.horizon_s, course.end_s))


def scatter_charts(result: RaceResult) -> tuple[Chart, ...]:
    """Every measured request at each engine's goodput, as its two latencies; those inside the box are good."""
    slo = result.scenario.slo
    known = [(place, engine) for place, engine in enumerate(result.engines) if engine.headline]
    every = [sample for _, engine in known for sample in engine.headline]
    x = latency_axis("ttft", [sample.ttft_ms for sample in every], slo.ttft_ms)
    y = latency_axis("tpot", [sample.tpot_ms for sample in every if sample.tpot_ms is not None], slo.tpot_ms)
    return tuple(_scatter(place, engine, result, x, y) for place, engine in known)


def _scatter(place: int, engine: EngineResult, result: RaceResult, x: Axis, y: Axis) -> Chart:
    slo, samples = result.scenario.slo, engine.headline
    missed = [sample.severity(slo) > 1 for sample in samples]
    shown = thinned(samples, missed)
    points = tuple(_pair(sample, x, y, sample.severity(slo) > 1) for sample in shown)
    good, failed = len(samples) - sum(missed), sum(not sample.ok for sample in samples)
    lost = f", {failed} failed" if failed else ""
    return Chart(
        title=f"{engine.name} at {rate_words(engine.headline_rps or 0)}/s: {good} of {len(samples)} in time",
        alt=f"TPOT against TTFT of {len(shown)} of {len(samples)} requests; {good} lie inside both limits{lost}. "
        "Failures are arrows in the upper right corner.",
        x=x,
        y=y,
        series=(Series(engine.name, place, points, has_line=False),),
        areas=(Area("in time", (None, slo.ttft_ms), (None, slo.tpot_ms), "good"),),
    )


def _pair(sample: Sample, x: Axis, y: Axis, is_missed: bool) -> Point:
    if not sample.ok:
        return Point(x.high, y.high, f"due at {sample.scheduled_s:.2f} s: failed", at_edge=True)
    tpot = sample.tpot_ms if sample.tpot_ms is not None else y.low
    words = f"TTFT {milliseconds(sample.ttft_ms)}, TPOT {milliseconds(sample.tpot_ms)}"
    return Point(sample.ttft_ms, tpot, words, is_hollow=is_missed)


def _dot(due: float, ttft: float, axis: Axis, words: str) -> Point:
    return Point(due, min(ttft, axis.high), words, at_edge=math.isinf(ttft))


def _or_failed(value: float) -> str:
    return "none, it failed" if math.isinf(value) else milliseconds(value)


def thinned(items: Sequence[T], keep: Sequence[bool]) -> list[T]:
    """At most about `MOST_DOTS`, in their order: those to keep, or every k-th of them, and of the rest what fits."""
    kept = [index for index, is_kept in enumerate(keep) if is_kept]
    rest = [index for index, is_kept in enumerate(keep) if not is_kept]
    kept = _every(kept, MOST_DOTS // 2 if len(rest) > MOST_DOTS // 2 else MOST_DOTS)
    return [items[index] for index in sorted([*kept, *_every(rest, MOST_DOTS - len(kept))])]


def _every(indices: Sequence[int], most: int) -> list[int]:
    step = max(1, math.ceil(len(indices) / max(1, most)))
    return list(indices[::step])
