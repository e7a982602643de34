"""goodgate arena report, compare, check, export: what is done with races that are over."""

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
    """Judge a race again from its raw rows, rewrite its report and print the ranking. Of a race that was killed, what
    had ended is taken in first, and the report says that it is partial.

    Example: goodgate arena report .goodgate/arena/chat-20261129-200000
    """
    from arena.judging.judge import judge_race
    from arena.reports.report import publish, ranking_table
    from arena.reports.summary import summary

    with errors(), open_store(folder, settle=True) as store:
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
    """Compare two races engine by engine: is goodput surely better, surely worse, or can it not be told? Races with the
    same seed are compared request by request, too.

    Example: goodgate arena compare runs/monday runs/tuesday
    """
    from arena.reports.compare import compare_races, comparison_table, paired_table, why_unpaired

    with errors():
        first, second = _judge(before), _judge(after)
        try:
            changes = compare_races(first, second)
        except ValueError as error:
            raise Failure(str(error)) from error
        if as_json:
            typer.echo(json.dumps([change.to_dict() for change in changes], indent=2))
        else:
            console = Console()
            console.print(comparison_table(changes, before.resolve().name, after.resolve().name))
            console.print(paired_table(changes, second.scenario.confidence) or why_unpaired(first, second))


@app.command()
def check(
    folder: RunFolder,
    repair: Annotated[
        bool, typer.Option("--repair", help="First take in what a killed race has left, and write the report anew.")
    ] = False,
) -> None:
    """Verify a race: every file against the manifest, every published figure against the raw rows.

    Example: goodgate arena check .goodgate/arena/chat-20261129-200000
    """
    from arena.judging.judge import judge_race
    from arena.records.check import check_files, check_run
    from arena.reports.report import publish

    with errors():
        if repair:
            with open_store(folder, settle=True) as store:
                publish(judge_race(store), folder)
        with Console(stderr=True).status("digests, audits and figures ..."):
            complaints = check_files(folder) if (folder / "arena.duckdb").exists() else []
            try:
                with open_store(folder) as store:
                    complaints += check_run(store, folder)
                    cells = store.query("SELECT count(*) AS n FROM cells WHERE ingested_utc IS NOT NULL")[0]["n"]
            except Failure as error:
                complaints.append(str(error))
        if complaints:
            raise Failure("\n".join(complaints))
        typer.echo(f"{folder}: cells verified: {cells}; all digests, audits and figures agree.")


@app.command()
def export(
    folder: RunFolder,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the archive; it may hold other races. Default: DIR/parquet.")
    ] = None,
) -> None:
    """Write a race as Parquet files, with its plans as JSON, the metrics as views for DuckDB, and a manifest.

    Example: goodgate arena export .goodgate/arena/chat-20261129-200000 --out archive
    """
    from arena.records.export import ExportError, export_race

    target = out or folder / "parquet"
    with errors(), open_store(folder) as store, Console(stderr=True).status(f"writing {target} ..."):
        try:
            written = export_race(store, folder, target)
        except ExportError as error:
            raise Failure(str(error)) from error
    typer.echo(f"{target}: {written.rows:,} rows in {written.files} files, {written.bytes / 2**20:.1f} MiB.")


def _judge(folder: Path) -> RaceResult:
    from arena.judging.judge import judge_race

    with open_store(folder) as store:
        return judge_race(store)
