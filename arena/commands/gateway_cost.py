"""goodgate arena gateway-cost: what Goodgate's own gateway adds to an engine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from adapters.config import goodgate_home
from adapters.registry import UnknownEngine, adapter_class
from arena.commands.common import Failure, Misuse, errors, finite, racing_in, reported
from arena.commands.contenders import EngineOption, contenders_of
from arena.commands.run import card_of, interruptible, load

if TYPE_CHECKING:
    from arena.judging.results import RaceResult
    from arena.race.card import Contender, RaceCard
    from arena.race.show import Show

app = typer.Typer()


@app.command("gateway-cost")
def gateway_cost(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE",
            help="An engine to start, or a running one as name=url or name=url@model.",
            show_default=False,
        ),
    ],
    scenario: Annotated[
        str, typer.Option(help="What is sent: a name from configs/scenarios, or a YAML file.")
    ] = "chat",
    rate: Annotated[
        float | None,
        typer.Option(min=0.01, max=1000, callback=finite, help="Requests a second. Default: half of a burst's."),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, max=100, help="Pairs of cells, in the order d g, g d, d g, ...")] = 4,
    out: Annotated[
        Path | None, typer.Option(help="Output folder. Default: a new one under GOODGATE_HOME/arena.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The scenario's short form.")] = False,
    model: Annotated[str | None, typer.Option(help="Another model than the scenario's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Repeat the plans of an earlier one.")] = None,
    option: EngineOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON on stdout.")] = False,
) -> None:
    """Meet one engine directly and through a gateway started for it, in pairs of cells with the same requests, and say
    what the gateway adds to the latencies and takes from the requests in time, with intervals.

    Example: goodgate arena gateway-cost llama_cpp --quick --pairs 2
    """
    from arena.judging.gateway_cost import costs
    from arena.race.progress import RaceConsole
    from arena.reports.gateway_cost import gateway_grid
    from arena.reports.report import publish

    with errors():
        loaded = load(scenario, quick=quick, model=model)
        is_running = "=" in engine
        if loaded.scenario.load.closed:
            raise Misuse("A closed loop has no rate at which both arms could be met; choose another --scenario.")
        contenders = contenders_of(
            loaded.scenario, None if is_running else engine, [engine] if is_running else [], option or [], None
        )
        if len(contenders) > 1:
            raise Misuse(f"{engine!r} names several engines; measure one after the other.")
        contender = contenders[0]
        card = card_of(loaded, contenders, out, quick=quick, seed=seed)
        with racing_in(reported(card.out)):
            result = _measure(card, contender, rate, pairs, RaceConsole(stderr=as_json))
            publish(result, card.out)
        found = dict(costs(result))
        if as_json:
            typer.echo(json.dumps({name: msgspec.to_builtins(rows) for name, rows in found.items()}, indent=2))
        else:
            console = Console()
            for name, rows in found.items():
                console.print(gateway_grid(name, rows))
            console.print(f"Report: {card.out / 'report.html'}", highlight=False, soft_wrap=True)
        if result.notes.interrupted:
            raise Failure("It was interrupted; the report shows what had been measured.")


def _measure(card: RaceCard, contender: Contender, rate: float | None, pairs: int, console: Console) -> RaceResult:
    from arena.race.progress import RaceScreen

    names = [contender.name, _behind(contender.name)]
    with RaceScreen(console, names, card.scenario) as screen:
        return asyncio.run(interruptible(measure(card, contender, screen, rate_rps=rate, pairs=pairs)))


async def measure(
    card: RaceCard, contender: Contender, show: Show, *, rate_rps: float | None, pairs: int
) -> RaceResult:
    """The engine up, where it is ours to start, and a gateway before it."""
    from contextlib import AsyncExitStack

    from arena.race.bakeoff import race
    from arena.race.gateway_cost import PairedCourse, behind_gateway
    from arena.race.probe import served_model

    async with AsyncExitStack() as stack:
        url = contender.url
        if contender.process is not None:
            show.engine_starting(contender.name)
            url = (await stack.enter_async_context(contender.process())).url
        assert url is not None
        model = contender.model or await served_model(url)
        adapter = _adapter(contender)
        through = await stack.enter_async_context(behind_gateway(url, model, adapter=adapter, home=goodgate_home()))
        direct = replace(contender, process=None, url=url, model=model)
        both = [direct, replace(direct, name=_behind(contender.name), url=through)]
        return await race(replace(card, contenders=both), show, partial(PairedCourse, rate_rps=rate_rps, pairs=pairs))


def _behind(name: str) -> str:
    from arena.judging.gateway_cost import SUFFIX

    return f"{name}{SUFFIX}"


def _adapter(contender: Contender) -> str:
    """How the gateway speaks to it: as to the engine that its name says. Our own is behind a gateway already."""
    if contender.name == "native":
        return "goodgate_peer"
    try:
        options = adapter_class(contender.name).Options
    except UnknownEngine:
        return "openai_compatible"
    return contender.name if "url" in options.__struct_fields__ else "openai_compatible"
