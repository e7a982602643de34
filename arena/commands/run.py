"""goodgate arena run: a race from scenario to report."""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import sys
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from adapters.config import goodgate_home
from arena.commands.common import Failure, Misuse, end_by_signals, errors, new_folder, racing_in, reported
from arena.commands.contenders import EngineOption, api_key, contenders_of, controlled, priced
from arena.commands.tune import BudgetCells, BudgetMinutes, budget_of, tuned

if TYPE_CHECKING:
    from arena.judging.results import RaceResult
    from arena.race.card import Contender, RaceCard
    from arena.race.config import LoadedScenario
    from arena.race.scenario import Scenario

app = typer.Typer()


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
    events: Annotated[
        bool, typer.Option("--events", help="Print each step on stdout as a JSON object, the summary last.")
    ] = False,
    web: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="PORT", help="Also serve locust's web page, on 127.0.0.1; 0: any port."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Race with this model instead of the scenario's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Repeat the plans of an earlier race.")] = None,
    option: EngineOption = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            help="What an hour of an engine's machine costs, as engine=2.5; can be repeated.", metavar="PRICE"
        ),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="First search each engine's own knobs, all within the same budget.")
    ] = False,
    tune_cells: BudgetCells = None,
    tune_minutes: BudgetMinutes = None,
    control: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE", help="Enter this engine a second time under another name: the two may not be told apart."
        ),
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="The environment variable with the key of the --targets.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Load processes that share each cell. Default: the scenario's.")
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Wait there for the --workers, as `goodgate arena worker` on other hosts."
        ),
    ] = None,
    calibration: Annotated[
        bool,
        typer.Option(help="First measure the client's own errors here; refuse the race where they are too large."),
    ] = True,
) -> None:
    """Race engines, print the ranking, write a report.

    Example: goodgate arena run chat --quick --engines native,llama_cpp

    Example: goodgate arena run chat --events | jq -c 'select(.event == "cell_judged")'

    Example: goodgate arena run chat --targets a=http://127.0.0.1:8000,b=http://127.0.0.1:8001@my-model
    """
    with errors():
        if as_json and events:
            raise Misuse("--json and --events both write to stdout; --events ends with the summary, so use it alone.")
        key = api_key(api_key_env) if api_key_env is not None else None
        loaded = load(scenario, quick=quick, model=model)
        contenders = contenders_of(loaded.scenario, engines, targets or [], option or [], key)
        names = [contender.name for contender in contenders]
        loaded = replace(loaded, scenario=priced(loaded.scenario, price or [], names))
        if not tune and (tune_cells or tune_minutes):
            raise Misuse("--tune-cells and --tune-minutes are the budget of --tune; give it, too.")
        loaded, address = _distributed(loaded, workers, master, has_key=key is not None)
        if tune and loaded.scenario.load.closed:
            raise Misuse("--tune looks for goodput, which a closed loop does not have; leave one of them out.")
        card = card_of(loaded, contenders, out, quick=quick, seed=seed)
        twice = controlled(loaded.scenario, control, names)
        card = replace(card, calibrates=calibration, master=address, control=twice)
        if tune:
            budget = budget_of(tune_cells, tune_minutes)
            card = replace(card, contenders=tuned(card, contenders, budget, Console(stderr=True)))
        _race(card, as_json=as_json, events=events, web=web)


def _distributed(
    loaded: LoadedScenario, workers: int | None, master: str | None, *, has_key: bool
) -> tuple[LoadedScenario, tuple[str, int] | None]:
    """The scenario with as many workers as were asked for, and where they are waited for."""
    from arena.commands.worker import host_and_port

    scenario = loaded.scenario.with_workers(workers) if workers else loaded.scenario
    if fault := scenario.load.contradiction():
        raise Misuse(fault[0].upper() + fault[1:])
    if master is None:
        return replace(loaded, scenario=scenario), None
    if has_key:
        raise Misuse("--master would send the key of --api-key-env to whoever joins; leave one of them out.")
    if scenario.load.closed:
        raise Misuse("--master: a closed loop runs in one load process, here.")
    return replace(loaded, scenario=scenario), host_and_port(master, "--master")


def load(name: str, *, quick: bool, model: str | None) -> LoadedScenario:
    from arena.load.spec import ScenarioError
    from arena.race.config import load_scenario

    try:
        return load_scenario(name, quick=quick, model=model)
    except ScenarioError as error:
        raise Misuse(str(error)) from error


def card_of(
    loaded: LoadedScenario,
    contenders: list[Contender],
    out: Path | None,
    *,
    quick: bool,
    seed: int | None,
    suffix: str = "",
) -> RaceCard:
    from arena.race.card import RaceCard
    from arena.race.config import clock_facts, git_sha, host_facts
    from arena.race.recount import from_store

    now = datetime.now(UTC)
    run_id = "-".join(filter(None, (loaded.scenario.name, suffix, f"{now:%Y%m%d-%H%M%S}")))
    return RaceCard(
        run_id=run_id,
        started_utc=now.isoformat(timespec="seconds"),
        seed=secrets.randbits(32) if seed is None else seed,
        scenario=loaded.scenario,
        material=loaded.material,
        quick=quick,
        contenders=contenders,
        out=new_folder(out or goodgate_home() / "arena" / run_id),
        host=host_facts(),
        clock=clock_facts(),
        open_counter=from_store(goodgate_home()),
        git_sha=git_sha(),
        command=shlex.join(["goodgate", "arena", *sys.argv[2:]]) if "arena" in sys.argv[1:2] else "",
    )


def _race(card: RaceCard, *, as_json: bool, events: bool, web: int | None) -> None:
    from arena.race.bakeoff import race
    from arena.race.events import EventLines
    from arena.race.progress import RaceConsole, RaceScreen
    from arena.race.show import Several
    from arena.race.web import WebError, web_view
    from arena.reports.report import publish, ranking_table
    from arena.reports.summary import summary

    names = [contender.name for contender in card.contenders]
    console = RaceConsole(stderr=as_json or events)
    told = EventLines(typer.echo)
    console.print(_opening(card.scenario, names), highlight=False, soft_wrap=True)
    for sentence in card.material.told:
        console.print(escape(sentence), highlight=False, soft_wrap=True)
    with racing_in(reported(card.out)):
        try:
            with ExitStack() as stack:
                if web is not None:
                    url = stack.enter_context(web_view(card.out / "spool", web))
                    console.print(f"Locust's page: {url}", highlight=False)
                screen = stack.enter_context(RaceScreen(console, names, card.scenario))
                show = Several([screen, told]) if events else screen
                result = asyncio.run(interruptible(race(card, show)))
        except WebError as error:
            raise Misuse(str(error)) from error
        publish(result, card.out)
    console.print(ranking_table(result))
    console.print(f"Report: {card.out / 'report.html'}", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(summary(result), indent=2))
    if events:
        told.tell("result", summary=summary(result))
    if result.notes.interrupted:
        raise Failure("The race was interrupted; the report shows what had been measured.")
    if card.scenario.load.closed:
        return  # nobody has a rank, and nothing is wrong with that
    if not any(engine.rank for engine in result.engines):
        raise Failure("No engine could be ranked: " + " ".join(result.invalid_reasons))


async def interruptible(running: Coroutine[Any, Any, RaceResult]) -> RaceResult:
    """Let signals end the race as Ctrl-C does: children stopped, partial result written."""
    end_by_signals()
    return await running


def _opening(scenario: Scenario, names: list[str]) -> str:
    slo = scenario.slo
    return (
        f"[bold]{escape(scenario.title or scenario.name)}[/]\n"
        f"{escape(', '.join(names))}: how many requests a second, while p{slo.percentile:g} TTFT <= {slo.ttft_ms:g} ms "
        f"and p{slo.percentile:g} TPOT <= {slo.tpot_ms:g} ms?"
    )
