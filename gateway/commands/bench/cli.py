"""`goodgate bench-gateway`: what the gateway costs, and whether it stays as it is."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure the gateway: its cost beside others', its streams, its memory, and how it stands faults for long.\n\n"
    "Example: goodgate bench-gateway soak --minutes 30",
)


@app.callback()
def _group() -> None:
    """A group, whatever the number of its commands."""


Page = Annotated[Path | None, typer.Option("--write", help="Put the table into this page, between its marks.")]


@app.command(
    epilog="Example: goodgate bench-gateway soak --minutes 30 --picture docs/soak.svg --write docs/performance.md"
)
def soak(
    minutes: Annotated[float, typer.Option(help="How long clients come.", min=0.1)] = 30,
    rate: Annotated[float, typer.Option(help="Requests a second.", min=1, max=200)] = 50,
    picture: Annotated[Path | None, typer.Option(help="Draw what was held over time into this SVG.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write everything that was seen into this JSON file.")] = None,
    page: Page = None,
) -> None:
    """Load the gateway while its engines fail in turn; status 1 if it did not keep its word."""
    from gateway.commands.bench import tables
    from gateway.commands.bench.picture import drawn
    from gateway.commands.bench.soak import soak as run

    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(run(minutes=minutes, rate=rate, folder=Path(folder)))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    if picture is not None:
        picture.write_text(drawn(report))
    tables.show(tables.of_soak(report), "soak", page)
    if not report.holds:
        raise typer.Exit(1)
