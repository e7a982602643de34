"""`goodgate bench-gateway`: what the gateway costs, and whether it stays as it is."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from adapters.config import goodgate_home

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure the gateway: its cost beside others', its streams, its memory, and how it stands faults for long.\n\n"
    "Example: goodgate bench-gateway all --write docs/performance.md",
)

Page = Annotated[
    Path | None, typer.Option("--write", help="Put the table into this page, between its marks.", dir_okay=False)
]
Install = Annotated[
    bool, typer.Option("--install-peers", help="Install the gateways to compare with, below GOODGATE_HOME, first.")
]
Rounds = Annotated[int, typer.Option(help="Each is measured so many times, in turn; medians count.", min=1)]


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

    with _folder() as folder:
        report = asyncio.run(run(minutes=minutes, rate=rate, folder=folder, say=_say))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    if picture is not None:
        picture.write_text(drawn(report))
    tables.show(tables.of_soak(report), "soak", page)
    if not report.holds:
        raise typer.Exit(1)


@app.command(epilog="Example: goodgate bench-gateway cost --install-peers")
def cost(
    rounds: Rounds = 5,
    seconds: Annotated[float, typer.Option(help="Of each measurement.", min=0.5)] = 5,
    is_installing: Install = False,
    page: Page = None,
) -> None:
    """What one request costs, beside other gateways on this machine. Needs wrk and nginx."""
    from gateway.commands.bench import tables
    from gateway.commands.bench.cost import cost as run
    from gateway.commands.bench.peers import install

    peers = goodgate_home() / "peers"
    if is_installing:
        install(peers, _say)
    with _folder() as folder:
        report = run(rounds=rounds, seconds=seconds, peers=peers, folder=folder, say=_say)
    tables.show(tables.of_cost(report), "cost", page)


@app.command(epilog="Example: goodgate bench-gateway streams --number 500")
def streams(
    number: Annotated[int, typer.Option(help="Streams at a time.", min=20, max=5000)] = 500,
    rounds: Rounds = 3,
    page: Page = None,
) -> None:
    """Many streams at 20 tokens a second each: what the gateway adds and takes away."""
    from gateway.commands.bench import tables
    from gateway.commands.bench.streams import streams as run

    with _folder() as folder:
        report = run(number=number, rounds=rounds, folder=folder, say=_say)
    tables.show(tables.of_streams(report), "streams", page)


@app.command(epilog="Example: goodgate bench-gateway memory --requests 100000")
def memory(
    requests: Annotated[int, typer.Option(help="So many in all.", min=100)] = 100_000,
    page: Page = None,
) -> None:
    """What the gateway holds after many requests."""
    from gateway.commands.bench import tables
    from gateway.commands.bench.memory import memory as run

    with _folder() as folder:
        report = run(requests=requests, folder=folder, say=_say)
    tables.show(tables.of_memory(report), "memory", page)


@app.command(epilog="Example: goodgate bench-gateway start")
def start(rounds: Rounds = 5, page: Page = None) -> None:
    """How soon the gateway answers after it was started."""
    from gateway.commands.bench import tables
    from gateway.commands.bench.memory import start as run

    with _folder() as folder:
        report = run(rounds=rounds, folder=folder)
    tables.show(tables.of_start(report), "start", page)


@app.command(epilog="Example: goodgate bench-gateway linear")
def linear(rounds: Rounds = 3, page: Page = None) -> None:
    """Whether large bodies and large events cost linear time."""
    from gateway.commands.bench import tables
    from gateway.commands.bench.linear import linear as run

    with _folder() as folder:
        report = run(rounds=rounds, folder=folder)
    tables.show(tables.of_linear(report), "linear", page)


@app.command("all", epilog="Example: goodgate bench-gateway all --write docs/performance.md")
def everything(is_installing: Install = False, page: Page = None) -> None:
    """All of it but the soak, which takes as long as it is told to."""
    cost(is_installing=is_installing, page=page)
    streams(page=page)
    memory(page=page)
    start(page=page)
    linear(page=page)


@contextmanager
def _folder() -> Iterator[Path]:
    """For configurations, logs and ledgers of what is measured."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _say(line: str) -> None:
    """What is going on, apart from what was found."""
    typer.echo(line, err=True)
