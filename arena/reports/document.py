"""A report as a structure: sections of blocks, every text plain, every figure a number beside its words. Pure data.

    document = document_of(result)              # arena/reports/report.py: what is said
    page(document), markdown(document)          # how it is written down

Renderers know nothing of races, and what makes documents knows nothing of HTML: that is why nothing from an engine can
become markup, and why the page, the Markdown and report.json cannot say different things. A chart carries the table of
what it shows, for readers who cannot see it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from msgspec import Struct

Tone: TypeAlias = Literal["", "good", "bad", "warn", "soft"]


@dataclass(frozen=True, slots=True)
class Text:
    """A cell of a table. `engine` is the place of an engine in the race's list, which chooses its mark and colour."""

    words: str
    tone: Tone = ""
    engine: int | None = None
    is_code: bool = False
    hint: str = ""  # more, for those who ask: a tooltip


Cell: TypeAlias = Text | str


@dataclass(frozen=True, slots=True)
class Paragraph:
    words: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and what they stand for."""

    rows: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """`numeric` are the columns that are aligned to the right. The first column is the row's name."""

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Code:
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """One engine's line in the ranking. Places are percent of an axis that all lines share; None: nothing measured."""

    rank: str
    engine: int
    name: str
    version: str
    rate: str
    proof: str
    interval: str
    span: tuple[float, float] | None
    point: float | None
    open_above: bool
    latency: tuple[str, ...]
    in_time: str
    unranked: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """`ticks` are (place in percent, words) on the shared axis."""

    interval_name: str
    latency_name: str
    ticks: tuple[tuple[float, str], ...]
    rows: tuple[Standing, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """`ticks` are (value, words). A log axis has positive ends."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False


class Point(
    Struct, frozen=True, omit_defaults=True
):  # a struct: there are thousands, and in JSON most fields go unsaid
    """`lo` and `hi`: its interval in y. `is_hollow`: it did not hold. `at_edge`: it really lies beyond the axis."""

    x: float
    y: float
    words: str = ""
    lo: float | None = None
    hi: float | None = None
    is_hollow: bool = False
    at_edge: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    engine: int
    points: tuple[Point, ...]
    has_line: bool = True
    has_marks: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """A line across the chart at a value of one axis. `engine` gives it that engine's colour."""

    axis: Literal["x", "y"]
    value: float
    label: str = ""  # of a level in y
    engine: int | None = None


@dataclass(frozen=True, slots=True)
class Area:
    """A shaded part of the chart; None is the chart's own edge."""

    label: str
    x: tuple[float | None, float | None] = (None, None)
    y: tuple[float | None, float | None] = (None, None)
    tone: Literal["good", "soft"] = "soft"


@dataclass(frozen=True, slots=True)
class Diagonal:
    """The line y = x, where everything that was offered is done."""

    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """`alt` says in a sentence what is to be seen; `table` has the figures."""

    title: str
    alt: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    rules: tuple[Rule, ...] = ()
    areas: tuple[Area, ...] = ()
    diagonal: Diagonal | None = None
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Charts:
    """Charts side by side. `legend`: the engines in them, as (place, name); empty where each chart names its own."""

    charts: tuple[Chart, ...]
    legend: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks that are hidden until somebody asks for them."""

    summary: str
    blocks: tuple[Block, ...]
    is_open: bool = False


Block: TypeAlias = Paragraph | Facts | Table | Code | Ranking | Charts | Fold


@dataclass(frozen=True, slots=True)
class Section:
    """`anchor` is its name in links; `why` says what the reader is looking at."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]
    why: str = ""
    is_half: bool = False  # short: the next one may stand beside it


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    kicker: tuple[str, ...]
    plain_words: tuple[str, ...]  # what it says, for somebody who knows none of it
    notices: tuple[str, ...]
    sections: tuple[Section, ...]
    footer: str = ""
    links: tuple[tuple[str, str], ...] = field(default=())  # (anchor, title) of the sections, in order


def plain(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.words
