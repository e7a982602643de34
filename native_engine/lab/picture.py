"""What experiments are drawn and written down with: the charts, tables and sheets of the arena's reports.

    chart(title, alt, linear_axis("tokens", 1024), log_axis("ms", 1, 1000), [line("with cache", 0, points)])

Beside cli.py the only module of the lab that reaches beyond the engine; it takes pictures from there and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from arena.reports.axes import linear_axis, log_axis
from arena.reports.document import (
    Area,
    Axis,
    Chart,
    Charts,
    Document,
    Facts,
    Paragraph,
    Point,
    Rule,
    Section,
    Series,
    Table,
)
from arena.reports.markdown import markdown
from arena.reports.standalone import sheet
from native_engine.lab.workbench import Spread, short

__all__ = [
    "Area", "Axis", "Chart", "Charts", "Document", "Facts", "Paragraph", "Point", "Rule", "Section", "Series", "Shown",
    "Table", "axis_of", "chart", "legend", "line", "linear_axis", "log_axis", "markdown", "sheet", "table", "times",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shown:
    """One experiment for people: what to see, in a paragraph; the figure; the figures, each table with its title."""

    says: str
    charts: tuple[Chart, ...]
    tables: tuple[tuple[str, Table], ...]


def axis_of(label: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis on which every tick is a value that was tried."""
    ticks = sorted(set(values))
    return Axis(label, ticks[0] / 1.15, ticks[-1] * 1.15, tuple((tick, f"{tick:,.10g}") for tick in ticks), is_log=True)


def line(
    name: str,
    place: int,
    points: Iterable[tuple[float, Spread | float]],
    *,
    unit: str = "",
    has_marks: bool = True,
    has_line: bool = True,
) -> Series:
    """`place` chooses its colour and mark. A `Spread` is drawn with its ends; what a point is, is told on hovering."""
    made = []
    for x, y in points:
        spread = y if isinstance(y, Spread) else Spread(y, y, y, 1)
        words = f"{name}, {short(x)}: {spread} {unit}".rstrip() if has_marks else ""
        lo, hi = (spread.low, spread.high) if spread.count > 1 else (None, None)
        made.append(Point(x, spread.median, words, lo, hi))
    return Series(name, place, tuple(made), has_line=has_line, has_marks=has_marks)


def chart(
    title: str,
    alt: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    rules: Sequence[Rule] = (),
    areas: Sequence[Area] = (),
) -> Chart:
    return Chart(title, alt, x, y, tuple(series), tuple(rules), tuple(areas))


def legend(charts: Iterable[Chart]) -> tuple[tuple[int, str], ...]:
    """Every name once, in the order of its first chart."""
    return tuple(dict.fromkeys((series.engine, series.name) for each in charts for series in each.series))


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> tuple[str, Table]:
    """The first column names the row; the others are figures."""
    return title, Table(tuple(head), tuple(map(tuple, rows)), numeric=tuple(range(1, len(head))))


def times(more: float, less: float) -> str:
    """How many times as much: `21 times`, `1.4 times`."""
    ratio = more / less
    return f"{ratio:,.0f} times" if ratio >= 9.5 else f"{ratio:.1f} times"
