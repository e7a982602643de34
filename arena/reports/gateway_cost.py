"""What the gateway adds, for the report and for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.markup import escape
from rich.table import Table as Grid

from arena.judging.gateway_cost import Added, costs
from arena.judging.results import RaceResult
from arena.reports.document import Cell, Section, Table, Text

HEAD = ("", "directly", "via gateway", "added", "interval")


def gateway_section(result: RaceResult) -> Iterator[Section]:
    """Nothing where no engine was met both ways."""
    for name, rows in costs(result):
        table: tuple[tuple[Cell, ...], ...] = tuple(
            (Text(row.metric), *words(row)) for row in rows if row.difference is not None
        )
        requests = max((row.requests for row in rows), default=0)
        yield Section(
            f"gateway-{name}",
            f"What the gateway adds to {name}",
            (Table(HEAD, table, numeric=(1, 2, 3, 4)),),
            f"The same schedule directly and through Goodgate's gateway, in alternating order: {requests} requests, "
            "each beside itself. Medians are of the differences request by request; the "
            f"{result.scenario.confidence:.0%} interval comes from resampled blocks of neighbours.",
        )


def gateway_grid(name: str, rows: list[Added]) -> Grid:
    grid = Grid(title=f"What the gateway adds to {escape(name)}", title_justify="left", box=box.SIMPLE_HEAD)
    for place, heading in enumerate(HEAD):
        grid.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        if row.difference is not None:
            grid.add_row(row.metric, *words(row))
    return grid


def words(row: Added) -> tuple[str, str, str, str]:
    """Directly, through, added, interval."""
    values = [_figure(value, row.unit) for value in (row.direct, row.through)]
    if row.difference is None:
        return values[0], values[1], "-", "-"
    interval = "too few" if row.lo is None or row.hi is None else f"{row.lo:+.2f} to {row.hi:+.2f}"
    return values[0], values[1], f"{row.difference:+.2f} {row.unit}", interval


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.2f} {unit}"
