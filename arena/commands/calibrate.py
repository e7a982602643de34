"""goodgate arena calibrate: are the intervals, proofs and ranks of the arena as sure as they claim?"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from arena.commands.common import Failure, Misuse, errors

if TYPE_CHECKING:
    from arena.judging.calibration import Row

app = typer.Typer()

MARK = "calibration"


@app.command()
def calibrate(
    searches: Annotated[int, typer.Option(min=2, max=100_000, help="Searches for each line of the table.")] = 200,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Another seed, other searches.")] = 1,
    page: Annotated[
        Path | None, typer.Option(help="Write the table into this page, between its marks.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON on stdout.")] = False,
) -> None:
    """Try the arena's statistics on simulated engines whose goodput is known. Takes some minutes, and all cores.

    Example: goodgate arena calibrate --searches 20

    Example: goodgate arena calibrate --page docs/statistics.md
    """
    with errors():
        if page is not None and not page.is_file():
            raise Misuse(f"There is no page {page}; make it, with the marks <!-- {MARK}: begin --> and end.")
        rows = _run(searches, seed, Console(stderr=True))
        if page is not None:
            _write(page, rows, searches, seed)
        if as_json:
            typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        else:
            Console().print(_table(rows))
        missed = [f"{row.engine}, {row.budget}: {', '.join(row.missed)}" for row in rows if row.missed]
        if missed:
            raise Failure("Targets are missed. " + "; ".join(missed) + ".")


def _run(searches: int, seed: int, console: Console) -> list[Row]:
    from arena.judging.calibration import BUDGETS, ENGINES, calibrate

    engines = list(enumerate(ENGINES))
    lines = [(budget, engine, ENGINES[place - 1]) for budget in BUDGETS for place, engine in engines]
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("lines"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("calibrating", total=len(lines))
        # Fresh processes: a forked one would inherit the thread that draws the bars.
        with ProcessPoolExecutor(min(len(lines), os.cpu_count() or 1), get_context("spawn")) as pool:
            asked = [
                pool.submit(calibrate, engine, budget, searches=searches, seed=seed, unlike=unlike)
                for budget, engine, unlike in lines
            ]
            for _ in as_completed(asked):
                bars.advance(task)
            return [line.result() for line in asked]


def _write(page: Path, rows: list[Row], searches: int, seed: int) -> None:
    from adapters.marked_page import placed
    from arena.judging.calibration import table

    made = f"`goodgate arena calibrate --searches {searches} --seed {seed} --page {page}`:"
    page.write_text(placed(page.read_text("utf-8"), MARK, f"{made}\n\n{table(rows)}"), "utf-8")


def _table(rows: list[Row]) -> Table:
    shown = Table(title="Shares of searches; ratios to the true goodput", title_justify="left")
    for heading in (
        "engine",
        "search",
        "covered",
        "estimate",
        "proven",
        "falsely",
        "apart",
        "unlike",
        "power",
        "naive",
        "target",
    ):
        shown.add_column(heading, justify="left" if heading in ("engine", "search", "target") else "right")
    for row in rows:
        estimated = "-" if row.estimate is None else f"{row.estimate:.2f}"
        shown.add_row(
            row.engine, row.budget, f"{row.covered:.1%}", estimated, f"{row.proven:.1%}", f"{row.false_pass:.1%}",
            f"{row.apart:.1%}", f"{row.apart_unlike:.1%}", " ".join(f"{part.told:.0%}" for part in row.power),
            f"{row.naive:.2f}", "[red]missed[/]" if row.missed else "[green]met[/]",
        )  # fmt: skip
    return shown
