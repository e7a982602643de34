"""Goodput over each knob that a tuning has turned before the race, as charts. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from arena.judging.results import EngineResult, RaceResult
from arena.race.tuning import Trial, Tuning, peak_words
from arena.reports.document import Axis, Chart, Charts, Point, Series, Table
from arena.reports.wording import rate_words


def tuning_charts(result: RaceResult) -> Iterator[Charts]:
    """Nothing where no engine was tuned."""
    charts = [chart for place, engine in enumerate(result.engines) for chart in _charts(place, engine)]
    if charts:
        yield Charts(tuple(charts))


def _charts(place: int, engine: EngineResult) -> Iterator[Chart]:
    if not engine.notes.tuning.get("trials"):
        return
    tuning = msgspec.convert(engine.notes.tuning, Tuning)
    for knob in tuning.knobs:
        curve = [trial for trial in tuning.curve(knob) if trial.goodput_rps is not None]
        if len(curve) < 2:
            continue
        values = [trial.settings[knob.option] for trial in curve]
        highest = 1.15 * max(max(trial.goodput_rps or 0.0, trial.hi or 0.0) for trial in curve)
        points = tuple(_point(trial, value, highest) for trial, value in zip(curve, values, strict=True))
        yield Chart(
            title=f"{engine.name}, tuned: {knob.meaning}",
            alt=f"Goodput over {knob.option}, the other settings at their best. {peak_words(tuning, knob)}.",
            x=Axis(
                knob.option, max(1, min(values)) / 1.2, max(values) * 1.2,
                tuple((value, str(value)) for value in values if value), is_log=True,
            ),
            y=Axis("goodput, requests/s", 0, highest or 1.0, _ticks(highest)),
            series=(Series(engine.name, place, points),),
            table=Table(
                (knob.option, "requests/s", "interval"),
                tuple((f"{point.x:g}", rate_words(point.y), point.words.partition(", ")[2]) for point in points),
                numeric=(0, 1),
            ),
        )  # fmt: skip


def _point(trial: Trial, value: int, highest: float) -> Point:
    rate = trial.goodput_rps or 0.0
    if trial.lo is None:
        interval = "no interval"
    elif trial.hi is None:
        interval = f"above {rate_words(trial.lo)}"
    else:
        interval = f"{rate_words(trial.lo)} to {rate_words(trial.hi)}"
    high = trial.hi if trial.hi is not None else highest
    return Point(value, rate, f"{value}: {rate_words(rate)} requests/s, {interval}", lo=trial.lo, hi=high)


def _ticks(highest: float) -> tuple[tuple[float, str], ...]:
    step = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000, 10**6) if highest / step <= 6)
    return tuple((round(step * count, 2), f"{step * count:g}") for count in range(int(highest / step) + 1))
