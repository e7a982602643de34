"""`goodgate engines`: which engines this machine can run, how to get them, and starting one by hand."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adapters.command_line import fail, parse_options, reported_errors
from adapters.config import goodgate_home
from adapters.launch import EngineProcess, Installable, Launchable, launch
from adapters.model_store import DEFAULT_MODEL
from adapters.probe_cli import probe_command
from adapters.registry import UnknownEngine, adapter_class, engine_names

app = typer.Typer(help="The engines that Goodgate can serve from.\n\nExample: goodgate engines install openvino")
console = Console(markup=False, highlight=False)  # `goodgate[native]` is no style

Name = Annotated[str, typer.Argument(help="The engine's name, as `goodgate engines` lists it.")]


class EngineRow(msgspec.Struct, frozen=True):
    """What is known of one engine on this machine. `local` is None for engines that only run elsewhere."""

    engine: str
    local: bool | None
    version: str
    how: str


@app.callback(invoke_without_command=True)
def list_engines(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    as_matrix: Annotated[bool, typer.Option("--matrix", help="What each engine offers, capability by engine.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the matrix as Markdown.")] = False,
) -> None:
    """List the engines: can each run on this machine, in which version, and how to get it.

    Example: goodgate engines --matrix
    """
    if context.invoked_subcommand is not None:
        return
    if as_matrix or as_markdown:
        show_matrix(as_json=as_json, as_markdown=as_markdown)
        return
    rows = [describe(name) for name in engine_names()]
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    table = Table(box=None, header_style="bold")
    for heading in ("engine", "runs here", "version", "how"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        runs = {True: Text("yes", style="green"), False: Text("not yet"), None: Text("by url")}[row.local]
        table.add_row(row.engine, runs, row.version or "-", row.how)
    console.print(table)


def show_matrix(*, as_json: bool, as_markdown: bool) -> None:
    """What the adapters declare: nothing is asked of an engine."""
    from adapters import matrix  # makes every adapter, which a mere list need not

    columns = matrix.all_columns()
    if as_json:
        typer.echo(matrix.as_json(columns).decode())
    elif as_markdown:
        typer.echo(matrix.as_markdown(columns))
    else:
        for table in matrix.as_tables(columns, console.width):
            console.print(table)
            console.print()
        for line in matrix.legend(columns):
            console.print(line, soft_wrap=True)


app.command("probe")(probe_command)


@app.command()
def install(name: Name) -> None:
    """Install an engine into an environment of its own under GOODGATE_HOME/engines.

    Example: goodgate engines install llama_cpp
    """
    with reported_errors():
        adapter = adapter_class(name)
        if not issubclass(adapter, Installable):
            fail(f"{name} is not installed from here. {describe(name).how}")
        adapter.install(goodgate_home(), lambda step: console.print(step, soft_wrap=True))


@app.command()
def up(
    name: Name,
    model: Annotated[str, typer.Option(help="A model of the store; see `goodgate models list`.")] = DEFAULT_MODEL,
    port: Annotated[
        int | None, typer.Option(help="The port to listen on; by default a free one.", min=1, max=65535)
    ] = None,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help="A launch option, as key=value.")] = None,
) -> None:
    """Start an engine in the foreground, print its URL, and stop it on Ctrl-C.

    Example: goodgate engines up llama_cpp --model smollm2-135m-instruct -o quantization=q4_0
    """
    with reported_errors():
        process = launch(name, home=goodgate_home(), model_name=model, options=parse_options(option or []), port=port)
        asyncio.run(run_in_foreground(process, model))


async def run_in_foreground(process: EngineProcess, model: str) -> None:
    """Raises `EngineUnavailable` when the engine does not start, or ends before it is asked to."""
    loop, asked_to_stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked_to_stop.set)
    console.print(f"starting {process.spec.name}")
    try:
        if not await _unless(asked_to_stop, process.start()):
            return
        console.print(f"{process.spec.name} serves {model} at {process.url}/v1 (Ctrl-C stops it)", soft_wrap=True)
        console.print(f"its log: {process.log_path}", soft_wrap=True)
        if await _unless(asked_to_stop, process.wait()):
            raise process.failure()
    finally:
        await process.stop()
        console.print(f"{process.spec.name} has stopped")


async def _unless(event: asyncio.Event, work: Any) -> bool:
    """Run `work` to its end and return True, or cancel it when the event comes first and return False."""
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        for pending in (task, waiting):
            pending.cancel()
        await asyncio.wait({task, waiting})


def describe(name: str) -> EngineRow:
    """One row of the list. A plug-in that cannot be imported is a row that says so."""
    try:
        adapter: Any = adapter_class(name)
    except (ImportError, UnknownEngine) as error:
        return EngineRow(name, None, "", f"cannot be loaded: {error}")
    if not issubclass(adapter, Launchable):
        return EngineRow(name, None, "", "start it yourself and name its `url` in the configuration")
    state = adapter.installed(goodgate_home())
    return EngineRow(name, state.available, state.version, "" if state.available else state.how)
