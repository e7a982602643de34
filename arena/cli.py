"""goodgate arena: run a race, print its report again, compare two races, check a race's files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
import yaml
from rich.console import Console
from rich.markup import escape

from adapters.config import goodgate_home
from adapters.errors import GoodgateError
from adapters.models.model_store import DEFAULT_MODEL
from adapters.registry import UnknownEngine, adapter_class

if TYPE_CHECKING:
    from adapters.launching.launch import EngineProcess
    from arena.bakeoff import Contender
    from arena.results import RaceResult
    from arena.scenario import Scenario
    from arena.store import Store

app = typer.Typer(
    help="Race engines on goodput: the highest rate of requests at which the latency targets hold.",
    epilog="Example: goodgate arena run chat --quick",
    no_args_is_help=True,
)

OK, FAILED, MISUSE = 0, 1, 2

EngineOption = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="A launch option, as engine.key=value; can be repeated.")
]

RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The output folder of a race.", show_default=False)]


class Misuse(Exception):
    """One sentence that says what to do differently. Exit code 2."""


class Failure(Exception):
    """One sentence that says what went wrong. Exit code 1."""


@app.command()
def run(
    scenario: Annotated[
        str,
        typer.Argument(help="A name from configs/scenarios, or a YAML file.", metavar="SCENARIO", show_default=False),
    ],
    engines: Annotated[
        str | None,
        typer.Option(help="Engines to start and race, with commas between. Default: all that are installed."),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option(help="A running endpoint, name=url or name=url@model; several with commas or repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder. Default: a new one under GOODGATE_HOME/arena.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="The scenario's short form: a first look in under a minute.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print summary.json on stdout; progress goes to stderr.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Race with this model instead of the scenario's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Repeat the plans of an earlier race.")] = None,
    option: EngineOption = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="The environment variable with the key of the --targets.")
    ] = None,
) -> None:
    """Race engines, print the ranking, write a report.

    Example: goodgate arena run chat --quick --engines native,llama_cpp

    Example: goodgate arena run chat --targets a=http://127.0.0.1:8000,b=http://127.0.0.1:8001@my-model
    """
    with _errors():
        key = _api_key(api_key_env) if api_key_env else None
        _run(scenario, engines, targets or [], out, quick, as_json, model, seed, option or [], key)


@app.command()
def burst(
    engines: Annotated[
        str | None, typer.Option(help="Engines to start, with commas between. Default: all that are installed.")
    ] = None,
    model: Annotated[str, typer.Option(help="A model of `goodgate models list`.")] = DEFAULT_MODEL,
    concurrency: Annotated[str, typer.Option(help="Requests at once, several depths with commas between.")] = "1,8,32",
    words: Annotated[int, typer.Option(min=1, help="Words of each prompt; 120 are about 130 tokens.")] = 120,
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each request.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Bursts of each depth, each time an engine is up.")] = 3,
    passes: Annotated[int, typer.Option(min=1, help="How often each engine is started, in alternating order.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON on stdout.")] = False,
    option: EngineOption = None,
) -> None:
    """A quick look at raw speed: bursts of requests at engines that take turns. No verdict: it knows no latency target.

    Example: goodgate arena burst --engines native,openvino,vllm --concurrency 1,8,32
    """
    from arena.burst import BurstShape, burst_table, render

    with _errors():
        depths = tuple(_count(depth) for depth in concurrency.split(","))
        names = _names(engines) if engines is not None else []
        chosen = _engine_options(option or [])
        contenders = _engines(names, model, chosen)
        _refuse_idle_options(chosen, contenders)
        shape = BurstShape(concurrency=depths, prompt_words=words, output_tokens=tokens, rounds=rounds, passes=passes)
        starters = {contender.name: contender.process for contender in contenders if contender.process}
        console = Console(stderr=True)
        with console.status("starting") as status:
            rows = asyncio.run(burst_table(starters, shape, say=status.update))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console().print(render(rows))


@app.command()
def report(
    folder: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json on stdout.")] = False,
) -> None:
    """Judge a finished race again from its raw rows, rewrite its report and print the ranking.

    Example: goodgate arena report .goodgate/arena/chat-20261129-200000
    """
    from arena.report import publish, ranking_table
    from arena.results import judge_race, summary

    with _errors(), _open_store(folder) as store:
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
    from arena.compare import compare_races, comparison_table

    with _errors():
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
    from arena.check import check_run

    with _errors(), _open_store(folder) as store:
        complaints = check_run(store, folder)
        if complaints:
            raise Failure("\n".join(complaints))
        cells = store.query("SELECT count(*) AS n FROM cells WHERE ingested_utc IS NOT NULL")[0]["n"]
        typer.echo(f"{folder}: cells verified: {cells}; all digests, audits and figures agree.")


def _run(
    name: str,
    engines: str | None,
    targets: list[str],
    out: Path | None,
    quick: bool,
    as_json: bool,
    model: str | None,
    seed: int | None,
    options: list[str],
    api_key: str | None,
) -> None:
    import duckdb

    from arena.bakeoff import RaceCard, race
    from arena.config import git_sha, host_facts, load_scenario
    from arena.progress import RaceScreen
    from arena.report import publish, ranking_table
    from arena.results import summary
    from arena.scenario import ScenarioError
    from arena.spool import SpoolError

    try:
        loaded = load_scenario(name, quick=quick, model=model)
    except ScenarioError as error:
        raise Misuse(str(error)) from error
    scenario = loaded.scenario
    contenders = _targets(targets, api_key)
    chosen = _engine_options(options)
    for engine in scenario.options:
        adapter_class(engine)  # options for an engine that does not exist are a typing error
    if engines is not None or not contenders:
        wanted = _names(engines) if engines is not None else list(scenario.engines)
        contenders = _engines(wanted, scenario.model, _merged(scenario.options, chosen)) + contenders
    _refuse_idle_options(chosen, contenders)
    _refuse_duplicates([contender.name for contender in contenders])
    now = datetime.now(UTC)
    run_id = f"{scenario.name}-{now:%Y%m%d-%H%M%S}"
    folder = _new_folder(out or goodgate_home() / "arena" / run_id)
    card = RaceCard(
        run_id=run_id,
        started_utc=now.isoformat(timespec="seconds"),
        seed=secrets.randbits(32) if seed is None else seed,
        scenario=scenario,
        prompts_text=loaded.prompts_text,
        quick=quick,
        contenders=contenders,
        out=folder,
        host=host_facts(),
        git_sha=git_sha(),
        command=shlex.join(["goodgate", "arena", *sys.argv[2:]]) if "arena" in sys.argv[1:2] else "",
    )
    console = Console(stderr=as_json)
    console.print(_opening(scenario, [contender.name for contender in contenders]), highlight=False, soft_wrap=True)
    try:
        with RaceScreen(console, [contender.name for contender in contenders], scenario.slo.percentile) as screen:
            result = asyncio.run(_interruptible(race(card, screen)))
    except (duckdb.Error, SpoolError) as error:
        raise Failure(f"The race ended, its files in {folder} could not be written: {error}") from error
    publish(result, folder)
    console.print(ranking_table(result))
    console.print(f"Report: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(summary(result), indent=2))
    if result.notes.interrupted:
        raise Failure("The race was interrupted; the report shows what had been measured.")
    if not any(engine.rank for engine in result.engines):
        raise Failure("No engine could be ranked: " + " ".join(result.invalid_reasons))


async def _interruptible(running: Coroutine[Any, Any, RaceResult]) -> RaceResult:
    """Let SIGTERM end the race as Ctrl-C does: children stopped, partial result written."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await running


def _engines(names: list[str], model: str, options: Mapping[str, Mapping[str, Any]]) -> list[Contender]:
    """Contenders that we start, each with its launch options: the named ones, or all that are installed."""
    from adapters.models.model_store import ModelMissing, ModelStore
    from arena.bakeoff import Contender
    from arena.config import installations

    home = goodgate_home()
    known = installations(home)
    for name in names:
        adapter_class(name)  # an unknown name is told before one that only cannot be started
        if name not in known:
            raise Misuse(
                f"The engine {name!r} cannot be started from here; start it yourself and use --targets {name}=URL."
            )
        if not known[name].available:
            raise Misuse(f"The engine {name!r} is not installed: {known[name].how.rstrip('.')}.")
    chosen = names or [name for name, installation in known.items() if installation.available]
    if not chosen:
        raise Misuse(
            "No engine is installed here; run `goodgate engines install llama_cpp`, or use --targets name=url."
        )
    try:
        ModelStore(home).get(model)
    except ModelMissing as error:
        raise Misuse(error.message) from error
    return [
        Contender(
            name=name,
            version=known[name].version or None,
            process=partial(_process, name, home, model, options.get(name, {})),
            flags=options.get(name, {}),
        )
        for name in chosen
    ]


def _process(name: str, home: Path, model: str, options: Mapping[str, Any]) -> EngineProcess:
    from adapters.launching.launch import launch

    return launch(name, home=home, model_name=model, options=options)


def _engine_options(values: list[str]) -> dict[str, dict[str, Any]]:
    """`["llama_cpp.quantization=q8_0"]` -> `{"llama_cpp": {"quantization": "q8_0"}}`; values are YAML scalars."""
    options: dict[str, dict[str, Any]] = {}
    for value in values:
        place, equals, setting = value.partition("=")
        engine, dot, key = place.partition(".")
        if not (engine and dot and key and equals):
            raise Misuse(f"--option {value!r} is not of the form engine.key=value.")
        adapter_class(engine)
        try:
            options.setdefault(engine, {})[key] = yaml.safe_load(setting)
        except yaml.YAMLError as error:
            raise Misuse(f"--option {value!r}: the value is not a YAML scalar.") from error
    return options


def _merged(
    base: Mapping[str, Mapping[str, Any]], over: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Option by option: one from the command line leaves the scenario's others of that engine as they are."""
    return {engine: {**base.get(engine, {}), **over.get(engine, {})} for engine in [*base, *over]}


def _refuse_idle_options(options: Mapping[str, Mapping[str, Any]], contenders: list[Contender]) -> None:
    started = {contender.name for contender in contenders if contender.process is not None}
    for engine in options:
        if engine not in started:
            raise Misuse(f"--option {engine}.{next(iter(options[engine]))}: this command does not start {engine!r}.")


def _api_key(variable: str) -> str:
    key = os.environ.get(variable, "")
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise Misuse(f"--api-key-env: the variable {variable} holds no key.")
    return key


def _count(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise Misuse(f"--concurrency {text!r} is not a whole number of at least 1.")
    return int(text)


def _targets(values: list[str], api_key: str | None) -> list[Contender]:
    from arena.bakeoff import Contender

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    contenders = []
    for value in ",".join(values).split(","):
        if not value:
            continue
        name, _, address = value.partition("=")
        url, _, model = address.partition("@")
        if not name or not re.match(r"https?://[^/]", url):
            raise Misuse(f"--targets {value!r} is not of the form name=http://host:port[@model].")
        if url.startswith("https:"):
            raise Misuse(
                f"--targets {value!r}: the arena measures plain http:// only; put a proxy that ends TLS before it."
            )
        base = url.rstrip("/").removesuffix("/v1")
        contenders.append(Contender(name=name, url=base, model=model or None, headers=headers))
    return contenders


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise Misuse("--engines names no engine; give it names with commas between, or leave it out.")
    return names


def _refuse_duplicates(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise Misuse(f"Two contenders are called {name!r}; give each its own name (--targets other-name=url).")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
            raise Misuse(f"A contender cannot be called {name!r}; use letters, digits, dots, dashes and underscores.")


def _new_folder(folder: Path) -> Path:
    """An empty folder: a race takes nobody's files away."""
    if (folder / "arena.duckdb").exists():
        raise Misuse(f"{folder} already holds a race; choose another --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise Misuse(f"{folder} cannot be made: {error.strerror or error}.") from error
    if not is_empty:
        raise Misuse(f"{folder} is not empty; choose another --out.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Misuse(f"{folder} cannot be written to; choose another --out.")
    return folder


def _opening(scenario: Scenario, names: list[str]) -> str:
    slo = scenario.slo
    return (
        f"[bold]{escape(scenario.title or scenario.name)}[/]\n"
        f"{escape(', '.join(names))}: how many requests a second, while p{slo.percentile:g} TTFT <= {slo.ttft_ms:g} ms "
        f"and p{slo.percentile:g} TPOT <= {slo.tpot_ms:g} ms?"
    )


def _judge(folder: Path) -> RaceResult:
    from arena.results import judge_race

    with _open_store(folder) as store:
        return judge_race(store)


@contextmanager
def _open_store(folder: Path) -> Iterator[Store]:
    """The store of a finished race, for reading. Judging writes nothing into it."""
    import duckdb

    from arena.store import Store, StoreError

    path = folder / "arena.duckdb"
    if not path.is_file():
        raise Misuse(f"{folder} holds no race (there is no {path}); give the --out folder of `goodgate arena run`.")
    try:
        with Store(path, read_only=True) as store:
            if not store.query("SELECT run_id FROM runs"):
                raise Failure(f"{path} holds no run: the race ended before it began.")
            yield store
    except StoreError as error:
        raise Failure(str(error)) from error
    except (duckdb.Error, msgspec.DecodeError) as error:  # not a store of ours, or one that was tampered with
        raise Failure(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


@contextmanager
def _errors() -> Iterator[None]:
    """Known errors as one sentence on stderr and an exit code."""
    try:
        yield
    except (Misuse, UnknownEngine) as error:
        typer.echo(f"goodgate arena: {error}", err=True)
        raise typer.Exit(MISUSE) from error
    except Failure as error:
        typer.echo(f"goodgate arena: {error}", err=True)
        raise typer.Exit(FAILED) from error
    except GoodgateError as error:
        typer.echo(f"goodgate arena: {error.message}", err=True)
        raise typer.Exit(FAILED) from error
    except OSError as error:
        typer.echo(f"goodgate arena: {error.strerror or error}: {error.filename or 'the output folder'}.", err=True)
        raise typer.Exit(FAILED) from error
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        typer.echo("goodgate arena: stopped.", err=True)
        raise typer.Exit(FAILED) from error


if __name__ == "__main__":
    app()
