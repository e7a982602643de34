"""goodgate arena report, compare, check: what is done with races that are over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from arena.commands.common import Failure, RunFolder, errors, open_store

if TYPE_CHECKING:
    from arena.judging.results import RaceResult

app = typer.Typer()


@app.command()
def report(
    folder: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json on stdout.")] = False,
) -> None:
    """Judge a finished race again from its raw rows, rewrite its report and print the ranking.

    Example: goodgate arena report .goodgate/arena/chat-20261129-200000
    """
    from arena.judging.results import judge_race, summary
    from arena.reports.report import publish, ranking_table

    with errors(), open_store(folder) as store:
        result = judge_race(store)
        publish(result, folder)
    if as_json:
        typer.echo(json.dumps(summary(result), indent=2))
        return
    console = Console()
    console.print(ranking_table(result))
    console.print(f"Report: {folder / 'report.html'}", highlight=False, soft_wrap=True)


@app.command()
def compare(
    before: RunFolder,
    after: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON on stdout.")] = False,
) -> None:
    """Compare two races engine by engine: is goodput surely better, surely worse, or can it not be told?

    Example: goodgate arena compare runs/monday runs/tuesday
    """
    from arena.reports.compare import compare_races, comparison_table

    with errors():
        first, second = _judge(before), _judge(after)
        try:
            changes = compare_races(first, second)
        except ValueError as error:
            raise Failure(str(error)) from error
        if as_json:
            typer.echo(json.dumps([change.to_dict() for change in changes], indent=2))
        else:
            Console().print(comparison_table(changes, before.resolve().name, after.resolve().name))


@app.command()
def check(folder: RunFolder) -> None:
    """Verify a race's files: digests of the spools, plans, audits, verdicts and evidence.

    Example: goodgate arena check .goodgate/arena/chat-20261129-200000
    """
    from arena.records.check import check_run

    with errors(), open_store(folder) as store:
        complaints = check_run(store, folder)
        if complaints:
            raise Failure("\n".join(complaints))
        cells = store.query("SELECT count(*) AS n FROM cells WHERE ingested_utc IS NOT NULL")[0]["n"]
        typer.echo(f"{folder}: cells verified: {cells}; all digests, audits and figures agree.")


def _judge(folder: Path) -> RaceResult:
    from arena.judging.results import judge_race

    with open_store(folder) as store:
        return judge_race(store)
