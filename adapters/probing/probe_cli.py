"""`goodgate engines probe`: does a live engine keep what Goodgate declares for it?"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from adapters.base import EngineAdapter
from adapters.command_line import parse_options, reported_errors
from adapters.config import goodgate_home, secret
from adapters.launching.launch import Launchable, launch
from adapters.models.model_store import DEFAULT_MODEL
from adapters.option_errors import read_options
from adapters.probing.faces import as_table, headline, tally, timings
from adapters.probing.probe import DEFAULT_TIMEOUT_S, Report, Task, probe
from adapters.probing.recognise import Recognised, recognise
from adapters.registry import AdapterClass, UnknownEngine, adapter_class
from adapters.wire.engine_client import launched_options

console = Console(markup=False, highlight=False)
progress_console = Console(stderr=True, markup=False, highlight=False)
CONTRADICTED_EXIT = 1


class Subject(msgspec.Struct, frozen=True):
    """An engine that answers, and how long it took to get there."""

    adapter: EngineAdapter[Any]
    recognised_by: str = ""
    version: str = ""  # of the package that was started; an engine may not know its own
    ready_s: float | None = None


async def run_probe(
    target: str, *, engine: str, model: str, options: dict[str, Any], timeout_s: float, shows_progress: bool
) -> Report:
    """Reach or start the engine, probe it, and leave nothing behind."""
    async with contextlib.AsyncExitStack() as stack:
        reached = reach(target, engine, model, options) if is_url(target) else started(target, model, options)
        subject = await stack.enter_async_context(reached)
        step = stack.enter_context(progress(shows_progress))
        report = await probe(subject.adapter, timeout_s=timeout_s, on_step=step)
        return msgspec.structs.replace(
            report,
            version=subject.version or report.version,
            recognised_by=subject.recognised_by,
            ready_s=subject.ready_s,
        )


def is_url(target: str) -> bool:
    """Or the name of an engine. What can be neither, such as `localhost:8000`, is misuse."""
    if target.lower().startswith(("http://", "https://")):
        return True
    if set(target) & set(":/."):
        raise UnknownEngine(f"{target!r} is neither an engine nor a url; write a url as http://HOST:PORT.")
    return False


@contextlib.asynccontextmanager
async def reach(url: str, engine: str, model: str, options: dict[str, Any]) -> AsyncIterator[Subject]:
    """An engine that runs already. Its adapter is the one that was named, or that of the engine which it looks like."""
    found = Recognised(engine, "") if engine else await recognise(url, _headers(options))
    adapter = make_adapter(adapter_class(found.engine), {"url": url, **({"model": model} if model else {}), **options})
    async with _open(adapter):
        yield Subject(adapter, found.why)


def _headers(options: dict[str, Any]) -> dict[str, str]:
    key = options.get("api_key") or secret(options.get("api_key_env", ""))
    return {"Authorization": f"Bearer {key}"} if key else {}


@contextlib.asynccontextmanager
async def started(engine: str, model: str, options: dict[str, Any]) -> AsyncIterator[Subject]:
    """An engine that is started for the probe, by its recipe or, where it lives in our process, by its adapter."""
    cls, model = adapter_class(engine), model or DEFAULT_MODEL
    began = time.monotonic()
    if "url" not in cls.Options.__struct_fields__:
        adapter = make_adapter(cls, {"model": model, **options})
        async with _open(adapter):
            yield Subject(adapter, version=_installed_version(cls), ready_s=time.monotonic() - began)
        return
    async with launch(engine, home=goodgate_home(), model_name=model, options=options) as process:
        ready_s = time.monotonic() - began
        adapter = make_adapter(cls, launched_options(cls.Options, process.url, options))
        async with _open(adapter):
            yield Subject(adapter, version=_installed_version(cls), ready_s=ready_s)


def _installed_version(cls: AdapterClass) -> str:
    return cls.installed(goodgate_home()).version if issubclass(cls, Launchable) else ""


def make_adapter(cls: AdapterClass, options: dict[str, Any]) -> EngineAdapter[Any]:
    return cls(read_options(options, cls.Options, cls.engine))


@contextlib.asynccontextmanager
async def _open(adapter: EngineAdapter[Any]) -> AsyncIterator[None]:
    try:
        await adapter.start()
        yield
    finally:
        await adapter.close()


@contextlib.contextmanager
def progress(is_shown: bool) -> Iterator[Any]:
    """A line on stderr that says what is being asked; nothing where nobody watches."""
    if not is_shown or not progress_console.is_terminal:
        yield lambda task, number, total: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=progress_console, transient=True) as bar:
        line = bar.add_task("probing", total=None)

        def step(task: Task, number: int, total: int) -> None:
            bar.update(line, description=task.capability, completed=number - 1, total=total)

        yield step


Target = Annotated[str, typer.Argument(help="The url of a running engine, or the name of one to start for the probe.")]


def probe_command(
    target: Target,
    engine: Annotated[str, typer.Option(help="The engine behind the url; otherwise it is recognised.")] = "",
    model: Annotated[str, typer.Option(help="The model to ask for, or to start the engine with.")] = "",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="key=value: of the adapter for a url, of the launch for a name."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds for all questions; what is left then is not shown.", min=1)
    ] = DEFAULT_TIMEOUT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Ask a live engine for everything that Goodgate declares of it, and say what it honours.

    Exit code 1: something that is declared is refused, fails or has no effect.

    Example: goodgate engines probe http://127.0.0.1:8000 --engine vllm
    """
    with reported_errors():
        report = asyncio.run(
            run_probe(
                target, engine=engine, model=model, options=parse_options(option or []), timeout_s=timeout,
                shows_progress=not as_json,
            )
        )  # fmt: skip
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        show(report)
    if report.contradicted:
        raise typer.Exit(CONTRADICTED_EXIT)


def show(report: Report) -> None:
    console.print(headline(report), style="bold", soft_wrap=True)
    console.print(timings(report), soft_wrap=True)
    console.print(as_table(report))
    console.print(tally(report), soft_wrap=True)
