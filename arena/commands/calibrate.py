"""goodgate arena calibrate: are the intervals, proofs and ranks of the arena as sure as they claim?"""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
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
    from adapters.marked_page import NoPlace, placed
    from arena.race.config import text_of

    with errors():
        if page is not None:
            if not page.is_file():
                raise Misuse(f"There is no page {page}; make it, with the marks <!-- {MARK}: begin --> and end.")
            try:  # now, and not after minutes
                placed(text_of(page), MARK, "")
            except NoPlace as error:
                raise Misuse(f"{page}: {error.message}") from error
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
        processes = min(len(lines), os.cpu_count() or 1)
        with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_end_with_parent) as pool:
            try:
                asked = [
                    pool.submit(calibrate, engine, budget, searches=searches, seed=seed, unlike=unlike)
                    for budget, engine, unlike in lines
                ]
                for _ in as_completed(asked):
                    bars.advance(task)
                return [line.result() for line in asked]
            except BrokenProcessPool as error:
                raise Failure("A process of the calibration was killed, perhaps for want of memory.") from error
            finally:
                for process in active_children():  # else who ends it early would wait for every line that is asked for
                    process.terminate()


def _end_with_parent() -> None:
    """In each process of the pool: Ctrl-C is its parent's, and where that is killed it is not to work on for nobody."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _write(page: Path, rows: list[Row], searches: int, seed: int) -> None:
    from adapters.marked_page import placed
    from arena.judging.calibration import table
    from arena.race.config import text_of

    made = f"`goodgate arena calibrate --searches {searches} --seed {seed} --page {page}`:"
    page.write_text(placed(text_of(page), MARK, f"{made}\n\n{table(rows)}"), "utf-8")


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
