"""goodgate arena tune: an engine's own knobs, turned until its goodput is highest. `arena run --tune` does it first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from adapters.registry import adapter_class
from arena.commands.common import Failure, Misuse, end_by_signals, errors, finite, racing_in
from arena.commands.contenders import EngineOption, engine_options, launched, merged, refuse_idle_options

if TYPE_CHECKING:
    from adapters.launching.knobs import Knob
    from arena.judging.cells import CellResult
    from arena.judging.so_far import SoFar
    from arena.load.loadgen import Progress
    from arena.race.card import Contender, RaceCard
    from arena.race.tuning import Budget, Trial, Tuning

app = typer.Typer()

DEFAULT_CELLS = 24

BudgetCells = Annotated[
    int | None, typer.Option("--tune-cells", min=2, help=f"Cells that each engine may spend. Default: {DEFAULT_CELLS}.")
]
BudgetMinutes = Annotated[
    float | None,
    typer.Option(
        "--tune-minutes",
        min=0.1,
        max=10_000,
        callback=finite,
        help="Minutes that each engine may spend, starts included.",
    ),
]


@app.command()
def tune(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="An engine that is installed.", show_default=False)],
    scenario: Annotated[str, typer.Option(help="A name from configs/scenarios, or a YAML file.")] = "chat",
    cells: BudgetCells = None,
    minutes: BudgetMinutes = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="OPTION", help="Try every value of this one knob, and turn no other.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder. Default: a new one under GOODGATE_HOME/arena.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The scenario's short form.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Repeat the plans of an earlier one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print tuning.json on stdout; progress to stderr.")] = False,
    option: EngineOption = None,
) -> None:
    """Search an engine's knobs (batch depth, chunk size) for the highest goodput, within a budget.

    Example: goodgate arena tune native --scenario chat --quick --sweep max_num_seqs

    Example: goodgate arena tune vllm --tune-minutes 20
    """
    from arena.commands.run import card_of, load
    from arena.reports.tuning import tuning_table

    with errors():
        loaded = load(scenario, quick=quick, model=None)
        if loaded.scenario.load.closed:
            raise Misuse("A tuning looks for goodput, which a closed loop does not have; choose another --scenario.")
        chosen = merged(loaded.scenario.options, engine_options(option or []))
        knobs = knobs_of(engine)
        swept = swept_knob(engine, knobs, sweep)
        contenders = launched([engine], loaded.scenario.model, chosen)  # tells it where the engine cannot be started
        refuse_idle_options(engine_options(option or []), contenders)
        if not knobs:
            raise Misuse(f"The engine {engine!r} declares no knobs to turn; set its launch options with --option.")
        card = card_of(loaded, contenders, out, quick=quick, seed=seed, suffix=f"tune-{engine}")
        console = Console(stderr=as_json)
        budget = budget_of(cells, minutes, sweeps=len(swept.values) if swept else 0)
        with racing_in(_kept(card.out)):
            tuning = asyncio.run(_interruptible(engine, card, chosen.get(engine, {}), budget, console, swept))
            keep(tuning, card.out)
        if as_json:
            typer.echo(json.dumps(tuning.told(), indent=2))
        else:
            console.print(tuning_table(tuning))
            console.print(f"Kept in {card.out}", highlight=False, soft_wrap=True)
        if tuning.is_stopped:
            raise Failure(f"The tuning was stopped; what had been tried is kept in {card.out}.")
        if tuning.best is None:
            words = tuning.trials[0].words if tuning.trials else "the budget is too small for a trial."
            raise Failure(f"{engine} could not be tuned: {words}")


def tuned(card: RaceCard, contenders: list[Contender], budget: Budget, console: Console) -> list[Contender]:
    """The contenders of a race, each that is started here with the settings that its own tuning found best."""
    if not any(contender.process for contender in contenders):
        raise Misuse("--tune turns knobs of engines that the race starts; give it --engines.")
    found = []
    for contender in contenders:
        if contender.process is None:
            found.append(replace(contender, tuning={"words": "An endpoint has its own settings; it was not tuned."}))
            continue
        with racing_in(_kept(card.out)):
            tuning = asyncio.run(_interruptible(contender.name, card, contender.flags, budget, console, None))
            keep(tuning, card.out / "tuning" / contender.name)
        if tuning.is_stopped:
            raise Failure(f"The tuning was stopped; what had been tried is in {card.out / 'tuning'}.")
        if tuning.best is None:
            found.append(replace(contender, tuning=tuning.told()))
            continue
        options = {**contender.flags, **tuning.best.settings}
        again = launched([contender.name], card.scenario.model, {contender.name: options})[0]
        found.append(replace(again, tuning=tuning.told()))
    return found


def _kept(out: Path) -> str:
    return f"each trial is the folder of a race below {out / 'trials'}"


def knobs_of(engine: str) -> tuple[Knob, ...]:
    from adapters.launching.launch import Launchable

    adapter = adapter_class(engine)
    return adapter.knobs() if issubclass(adapter, Launchable) else ()


def swept_knob(engine: str, knobs: tuple[Knob, ...], option: str | None) -> Knob | None:
    if option is None or not knobs:
        return None
    for knob in knobs:
        if knob.option == option:
            return knob
    raise Misuse(f"--sweep {option}: the knobs of {engine} are {', '.join(knob.option for knob in knobs)}.")


def budget_of(cells: int | None, minutes: float | None, *, sweeps: int = 0) -> Budget:
    """A sweep without a budget runs all its values."""
    from arena.race.tuning import CELLS_PER_TRIAL, Budget

    if cells is None and minutes is None:
        cells = 2 * CELLS_PER_TRIAL * sweeps or DEFAULT_CELLS
    return Budget(cells=cells, minutes=minutes)


def keep(tuning: Tuning, folder: Path) -> None:
    """tuning.json, tuning.md, and a picture for each knob that was searched."""
    from arena.reports.tuning import tuning_markdown, tuning_picture

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tuning.json").write_text(json.dumps(tuning.told(), indent=2) + "\n", "utf-8")
    (folder / "tuning.md").write_text(tuning_markdown(tuning), "utf-8")
    for knob in tuning.knobs:
        if len(tuning.curve(knob)) > 1:
            title = f"{tuning.engine}: goodput over {knob.meaning}"
            (folder / f"tuning-{knob.option}.svg").write_text(tuning_picture(tuning, knob, title), "utf-8")


async def _interruptible(
    engine: str,
    card: RaceCard,
    options: Mapping[str, Any],
    budget: Budget,
    console: Console,
    swept: Knob | None,
) -> Tuning:
    """Ctrl-C and SIGTERM end it after what has been tried."""
    from arena.race.tuning import Bench, Tuning, next_settings, start_of, sweep_of, tune

    end_by_signals()
    knobs = knobs_of(engine)
    tuning = Tuning(engine=engine, knobs=knobs, start=start_of(knobs, options), budget=budget)
    if not knobs:
        return tuning

    def contender(chosen: Mapping[str, Any]) -> Contender:
        return launched([engine], card.scenario.model, {engine: chosen})[0]

    with console.status(f"tuning {engine}") as status:
        bench = Bench(
            card=card,
            contender=contender,
            options=options,
            show=Told(status.update),
            folder=card.out / "trials" / engine,  # engines have knobs of one name
        )

        async def attempt(settings: dict[str, int], cells: int) -> Trial:
            trial = await bench.attempt(settings, cells)
            words = ", ".join(f"{name} {value}" for name, value in settings.items())
            rate = f"{trial.goodput_rps:.2f} requests/s" if trial.goodput_rps is not None else trial.words
            console.print(f"{engine}  {words}: {rate}", highlight=False, soft_wrap=True, markup=False)
            return trial

        propose = partial(sweep_of, knob=swept) if swept else next_settings
        return await tune(tuning, attempt, propose=propose)


class Told:
    """Says in one line what a trial is at. Implements `arena.race.show.Show`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._rate = 0.0

    def client_calibrating(self, words: str) -> None: ...

    def engine_starting(self, name: str) -> None:
        self._say(f"{name} starts")

    def engine_ready(self, name: str, words: str) -> None:
        self._say(f"{name}: {words}")

    def engine_failed(self, name: str, words: str) -> None:
        self._say(f"{name} is out: {words}")

    def cell_starting(self, name: str, rate_rps: float, expected_s: float) -> None:
        self._rate = rate_rps

    def cell_progress(self, name: str, progress: Progress, so_far: SoFar) -> None:
        timely = f", {so_far.in_time}/{so_far.ended} in time so far" if so_far.ended else ""
        self._say(f"{name}: {self._rate:.2f} requests/s, {progress.in_flight} in flight, {progress.done} done{timely}")

    def cell_judged(self, name: str, cell: CellResult) -> None:
        self._say(f"{name}: {cell.rate_rps:.2f} requests/s, {cell.requests - cell.misses} of {cell.requests} in time")
