"""The history of races for people: a table for the terminal, a page with a picture, and JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table as TerminalTable

from arena.judging.trends import Change, Mark, Point, Trend
from arena.records.history import Skipped
from arena.reports.axes import log_axis
from arena.reports.document import Axis, Charts, Document, Paragraph, Section, Series, Table, Text
from arena.reports.document import Chart as Picture
from arena.reports.document import Point as Dot
from arena.reports.wording import rate_words


def trends_table(trends: Sequence[Trend]) -> TerminalTable:
    """Every race of every trend, the latest last."""
    table = TerminalTable(title="Goodput over races, requests/s", title_justify="left", caption_justify="left")
    for heading in ("engine", "scenario", "machine", "race", "version"):
        table.add_column(heading, style="bold" if heading == "engine" else "", overflow="fold")
    for heading in ("goodput", "interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("against the one before")
    for trend in trends:
        for number, point in enumerate(trend.points):
            names = (trend.engine, trend.scenario, trend.host) if number == 0 else ("", "", "")
            mark = point.mark
            table.add_row(
                *map(escape, names),
                escape(mark.run_id),
                escape(mark.version or "-"),
                _rate(mark.goodput_rps),
                _interval(mark),
                _coloured(point),
            )
        table.add_section()
    table.caption = _caption(trends)
    return table


def trends_json(trends: Sequence[Trend], skipped: Sequence[Skipped]) -> dict[str, Any]:
    """Its keys are a stable interface. Rates in requests a second, null where there is none."""
    return {
        "trends": [
            {
                "engine": trend.engine,
                "scenario": trend.scenario,
                "model": trend.model,
                "machine": trend.host,
                "question": trend.question,
                "points": [_point_json(point) for point in trend.points],
            }
            for trend in trends
        ],
        "regressions": [
            {"engine": trend.engine, "scenario": trend.scenario, "machine": trend.host, **_point_json(point)}
            for trend in trends
            for point in trend.regressions
        ],
        "skipped": [{"folder": each.folder, "why": each.why} for each in skipped],
    }


def trends_document(trends: Sequence[Trend], skipped: Sequence[Skipped]) -> Document:
    """The page: one picture for each question and machine, with a line for each engine."""
    sections = tuple(_sections(trends))
    lost = [f"{each.folder} is left out: {each.why}" for each in skipped]
    races = len({point.mark.folder for trend in trends for point in trend.points})
    worse = [(trend, point) for trend in trends for point in trend.regressions]
    return Document(
        title="No engine is surely worse than before" if not worse else "Something became worse",
        kicker=("Goodgate arena", "history"),
        plain_words=(f"{races} races. Each engine is compared with its own race before, on the same machine.",),
        notices=(*(_regression_words(trend, point) for trend, point in worse), *lost),
        sections=sections,
        footer="Computed from the raw rows of each race. This page needs no network and runs no script.",
        links=tuple((section.anchor, section.title) for section in sections),
    )


def _sections(trends: Sequence[Trend]) -> Iterator[Section]:
    questions: dict[tuple[str, str, str], list[Trend]] = {}
    for trend in trends:
        questions.setdefault((trend.scenario, trend.question, trend.points[0].mark.host), []).append(trend)
    for number, ((scenario, question, _), lines) in enumerate(questions.items(), 1):
        head = ("engine", "race", "version", "goodput", "interval", "against the one before")
        rows = tuple(_row(place, point) for place, trend in enumerate(lines) for point in trend.points)
        yield Section(
            f"question-{number}",
            f"{scenario}, on {lines[0].host}",
            (
                Charts((_picture(lines),), tuple((place, trend.engine) for place, trend in enumerate(lines))),
                Table(head, rows, numeric=(3, 4)),
                Paragraph(f"Question {question}: equal model, workload, arrivals, limits and cells.", "soft"),
            ),
            "Races in the order in which they ran. Whiskers are the intervals of goodput; a hollow mark has no rank.",
        )


def _picture(lines: Sequence[Trend]) -> Picture:
    marks = [point.mark for trend in lines for point in trend.points if point.mark.goodput_rps is not None]
    order = sorted({(mark.started_utc, mark.run_id) for trend in lines for mark in (p.mark for p in trend.points)})
    number = {key: place for place, key in enumerate(order, 1)}
    values = [value for mark in marks for value in (mark.goodput_rps, mark.lo, mark.hi) if value] or [1.0]
    low, high = min(values) / 1.25, max(values) * 1.25
    series = [
        Series(
            trend.engine,
            place,
            tuple(
                _dot(number[mark.started_utc, mark.run_id], mark)
                for mark in (point.mark for point in trend.points)
                if mark.goodput_rps is not None
            ),
        )
        for place, trend in enumerate(lines)
    ]
    step = max(1, len(order) // 8)
    ticks = tuple((float(place), str(place)) for place in range(1, len(order) + 1, step))
    return Picture(
        "Goodput over races",
        f"Goodput of {', '.join(trend.engine for trend in lines)} over {len(order)} races.",
        Axis("race", 0.5, len(order) + 0.5, ticks),
        log_axis("goodput, requests/s", low, high),
        tuple(series),
    )


def _dot(place: int, mark: Mark) -> Dot:
    assert mark.goodput_rps is not None
    words = f"{mark.engine} {mark.version or ''}, {mark.run_id}: {_rate(mark.goodput_rps)} ({_interval(mark)})"
    return Dot(place, mark.goodput_rps, words, mark.lo, mark.hi, is_hollow=not mark.counts)


def _row(place: int, point: Point) -> tuple[Text | str, ...]:
    mark, change = point.mark, point.change
    tone = {"surely better": "good", "surely worse": "bad"}.get(change.words if change else "", "soft")
    return (
        Text(mark.engine, engine=place),
        mark.run_id,
        mark.version or "-",
        _rate(mark.goodput_rps),
        _interval(mark),
        Text(_change_words(point), tone=tone),  # type: ignore[arg-type]  # one of the tones above
    )


def _point_json(point: Point) -> dict[str, Any]:
    mark, change = point.mark, point.change
    return {
        "run_id": mark.run_id,
        "folder": mark.folder,
        "started_utc": mark.started_utc,
        "version": mark.version,
        "settings": mark.settings,
        "goodput_rps": mark.goodput_rps,
        "ci": [mark.lo, mark.hi],
        "proven": mark.proven,
        "rank": mark.rank,
        "unranked": mark.unranked,
        "change": None if change is None else _change_json(change),
    }


def _change_json(change: Change) -> dict[str, Any]:
    return {
        "probability_better": change.probability_better,
        "words": change.words,
        "ratio": change.ratio,
        "differs_in": change.what,
    }


def _change_words(point: Point) -> str:
    change = point.change
    if change is None:
        return "" if point.mark.counts else "not ranked"
    by = f" ({change.ratio - 1:+.0%})" if change.ratio is not None else ""
    other = f", other {' and '.join(change.what)}" if change.what else ""
    return change.words + by + other


def _coloured(point: Point) -> str:
    colour = {"surely better": "green", "surely worse": "red"}.get(point.change.words if point.change else "")
    words = escape(_change_words(point))
    return f"[{colour}]{words}[/]" if colour else words


def _regression_words(trend: Trend, point: Point) -> str:
    return f"{trend.engine} in {point.mark.run_id} ({trend.scenario}): {_change_words(point)}."


def _caption(trends: Sequence[Trend]) -> str:
    worse = [escape(_regression_words(trend, point)) for trend in trends for point in trend.regressions]
    return "\n".join(worse) or "No engine is surely worse than in the race before."


def _interval(mark: Mark) -> str:
    if mark.lo is None:
        return "-"
    if mark.hi is None:
        return f"above {rate_words(mark.lo)}"
    return f"{rate_words(mark.lo)} \N{EN DASH} {rate_words(mark.hi)}"


def _rate(value: float | None) -> str:
    return "-" if value is None else rate_words(value)
