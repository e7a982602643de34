"""`goodgate engines`: which engines this machine can run, how to get them, and starting one by hand."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adapters.command_line import fail, parse_options, reported_errors
from adapters.config import goodgate_home
from adapters.launching.kept_alive import Change, Ready, kept_alive, one_life
from adapters.launching.launch import EngineProcess, Installable, Launchable, launch
from adapters.launching.progress import steps_on
from adapters.launching.recipes import Environment
from adapters.models.model_store import DEFAULT_MODEL
from adapters.probing.probe_cli import probe_command
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
        with reported_errors():
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
        runs = {True: Text("yes", style="green"), False: Text("not yet"), None: Text("elsewhere")}[row.local]
        table.add_row(row.engine, runs, row.version or "-", row.how)
    console.print(table)


def show_matrix(*, as_json: bool, as_markdown: bool) -> None:
    """What the adapters declare: nothing is asked of an engine."""
    from adapters.probing import matrix  # makes every adapter, which a mere list need not

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
            console.print(line, soft_wrap=not console.is_terminal)  # whole lines for programs, whole words for people


app.command("probe")(probe_command)


@app.command()
def install(
    name: Name,
    again: Annotated[bool, typer.Option("--again", help="Remove what is installed, and install it anew.")] = False,
) -> None:
    """Install an engine into an environment of its own under GOODGATE_HOME/engines.

    Example: goodgate engines install llama_cpp
    """
    with reported_errors():
        adapter, home = adapter_class(name), goodgate_home()
        if not issubclass(adapter, Installable):
            row = describe(name)
            if row.local:
                console.print(f"{name} is part of what is installed already ({row.version}).", soft_wrap=True)
                return
            fail(f"{name} is not installed from here: {row.how.rstrip('.')}.")
        state = adapter.installed(home)
        if state.available and not again:
            console.print(f"{name} {state.version} is installed; --again installs it anew.", soft_wrap=True)
            return
        with steps_on(console) as say:
            if again:
                say(f"removing {Environment(home, name).folder}")
                Environment(home, name).remove()
            adapter.install(home, say)


@app.command()
def up(
    name: Name,
    model: Annotated[str, typer.Option(help="A model of the store; see `goodgate models list`.")] = DEFAULT_MODEL,
    port: Annotated[
        int | None, typer.Option(help="The port to listen on; by default a free one.", min=1, max=65535)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="A launch option, as key=value; docs/engines.md has those of each engine."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart/--no-restart", help="Start it again when it ends by itself.")
    ] = True,
) -> None:
    """Start an engine in the foreground, print its URL, and stop it on Ctrl-C.

    Example: goodgate engines up llama_cpp --model smollm2-135m-instruct -o quantization=q4_0
    """
    with reported_errors():
        process = launch(name, home=goodgate_home(), model_name=model, options=parse_options(option or []), port=port)
        version = describe(name).version
        title = f"{name} {version}" if version[:1].isdigit() else name
        changes = kept_alive(process) if restart else one_life(process)
        asyncio.run(_until_interrupted(_tell(changes, process, title, model)))
        console.print(f"{name} has stopped")


async def _tell(changes: AsyncGenerator[Change, None], process: EngineProcess, title: str, model: str) -> None:
    """One line for each change, until the changes end. Raises `EngineUnavailable` when the engine is given up."""
    console.print(f"starting {title}")
    async with aclosing(changes):
        async for change in changes:
            if isinstance(change, Ready):
                ready = f"{title} is ready after {change.after_s:.1f} s and serves {model}"
                console.print(f"{ready} at {process.url}/v1 (Ctrl-C stops it)", soft_wrap=True)
                console.print(f"its log: {process.log_path}", soft_wrap=True)
            else:
                ended = change.failure.for_records
                console.print(f"{ended} It is started again in {change.delay_s:g} s.", soft_wrap=True)


async def _until_interrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it on the first SIGINT or SIGTERM."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: task.cancelling() or task.cancel())
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


def describe(name: str) -> EngineRow:
    """One row of the list. A plug-in that cannot be imported is a row that says so."""
    try:
        adapter: Any = adapter_class(name)
    except UnknownEngine as error:
        return EngineRow(name, None, "", str(error))
    if not issubclass(adapter, Launchable):
        return EngineRow(name, None, "", adapter.how_to_reach)
    state = adapter.installed(goodgate_home())
    return EngineRow(name, state.available, state.version, "" if state.available else state.how)
