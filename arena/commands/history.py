"""goodgate arena history: what many races say together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adapters.config import goodgate_home
from arena.commands.common import Failure, Misuse, errors

app = typer.Typer()


@app.command()
def history(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="Races, or folders with races in them. Default: GOODGATE_HOME/arena."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Only this engine.")] = None,
    scenario: Annotated[str | None, typer.Option(help="Only races of this scenario.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the trends as JSON on stdout.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures, too.", metavar="FILE")] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Judge every race again, not only what has changed.")
    ] = False,
    fail: Annotated[
        bool, typer.Option("--fail", help="End with 1 where the latest race of an engine is surely worse.")
    ] = False,
) -> None:
    """Trends over many races: goodput of each engine, scenario and machine, and what became surely worse.

    Example: goodgate arena history --scenario chat --html history.html
    """
    from arena.judging.trends import trends
    from arena.records.history import History, HistoryError, find_races
    from arena.reports.html_page import page
    from arena.reports.trends import trends_document, trends_json, trends_table

    home = goodgate_home() / "arena"
    with errors():
        races = find_races(folders or [home])
        if not races:
            raise Misuse(
                f"There is no race in {', '.join(map(str, folders or [home]))}; run `goodgate arena run` first."
            )
        console = Console(stderr=True)
        try:
            with History(home / "history.duckdb") as known, console.status("judging races ...") as status:
                known.update(races, rebuild=rebuild, tell=lambda folder: status.update(f"judging {folder.name} ..."))
                marks, skipped = known.marks(races), known.skipped(races)
        except HistoryError as error:
            raise Failure(str(error)) from error
        lines = trends(
            mark
            for mark in marks
            if engine in (None, mark.engine)
            and scenario in (None, mark.scenario, mark.scenario.removesuffix(" (quick)"))
        )
        if not lines and not skipped:
            raise Misuse("No race has such an engine and scenario; leave --engine and --scenario out to see all.")
        if html:
            html.write_text(page(trends_document(lines, skipped)), "utf-8")
        if as_json:
            typer.echo(json.dumps(trends_json(lines, skipped), indent=2))
        else:
            Console().print(trends_table(lines))
            for each in skipped:
                typer.echo(f"{each.folder} is left out: {each.why}", err=True)
        if fail and any(line.points[-1] in line.regressions for line in lines):
            raise Failure("An engine is surely worse than in its race before.")
