"""Tuning: an engine's own knobs, turned within a stated budget, so that it races at its best.

    knobs, start, budget -> a short race of the engine alone -> goodput -> the next settings -> ... -> the best of them

`next_settings` decides, and is pure: coordinate descent. From the best settings so far, the untried neighbours on the
first knob's scale are tried, then those on the second one's, and each better one is moved to at once; where no
neighbour is left, the best has no better one beside it. Each trial is a small race in a folder of its own, with the
audits, plans and rows of any race, and all trials of a tuning draw the same plans, so that they differ by the settings.

Every engine of a race gets the same budget. What was tried is kept and told, whatever came of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from adapters.launching.knobs import Knob
from arena.judging.results import EngineResult
from arena.race.bakeoff import race
from arena.race.card import Contender, RaceCard
from arena.race.scenario import Parity, Scenario
from arena.race.show import Show

CELLS_PER_TRIAL = 4
FEWEST_CELLS = 2  # of a trial: fewer find no goodput, only whether one rate holds

Settings = Mapping[str, int]


class Budget(Struct, frozen=True, kw_only=True):
    """What each engine may spend; at least one is given. A trial that has begun is finished."""

    cells: int | None = None
    minutes: float | None = None
    per_trial: int = CELLS_PER_TRIAL

    def cells_left(self, spent_cells: int, spent_s: float) -> int:
        """Cells of the next trial; 0 where it is not to be begun."""
        if self.minutes is not None and spent_s >= 60 * self.minutes:
            return 0
        left = self.per_trial if self.cells is None else min(self.per_trial, self.cells - spent_cells)
        return left if left >= FEWEST_CELLS else 0

    def words(self) -> str:
        parts = [f"{self.cells} cells"] if self.cells is not None else []
        return " or ".join([*parts, f"{self.minutes:g} minutes"] if self.minutes is not None else parts)


class Trial(Struct, frozen=True, kw_only=True):
    """One short race. Rates in requests a second; None where the engine did not come to run a valid cell."""

    settings: dict[str, int]
    goodput_rps: float | None
    lo: float | None
    hi: float | None
    cells: int  # the invalid ones too
    seconds: float  # with the start of the engine
    words: str = ""  # why there is no goodput

    @property
    def merit(self) -> tuple[float, float]:
        """What is compared: the highest rate that held, and the interval's middle where two are the same rung."""
        if self.goodput_rps is None:
            return (-1.0, 0.0)
        low = self.lo or 0.0
        return (self.goodput_rps, (low * (self.hi or low)) ** 0.5)


class Tuning(Struct, frozen=True, kw_only=True):
    """What was tried, in order."""

    engine: str
    knobs: tuple[Knob, ...]
    start: dict[str, int]
    budget: Budget
    trials: tuple[Trial, ...] = ()
    is_finished: bool = False  # nothing was left to try; else the budget was spent, or it was stopped
    is_stopped: bool = False

    @property
    def best(self) -> Trial | None:
        """The best of those that ran; of equals the first, which is the nearest to the start."""
        ran = [trial for trial in self.trials if trial.goodput_rps is not None]
        return max(ran, key=lambda trial: trial.merit, default=None)

    def curve(self, knob: Knob) -> list[Trial]:
        """Trials that differ from the best in this knob alone, by its value."""
        best = self.best
        if best is None:
            return []
        same = [trial for trial in self.trials if _apart(trial.settings, best.settings, knob.option)]
        return sorted(same, key=lambda trial: trial.settings[knob.option])

    def told(self) -> dict[str, Any]:
        """As it is kept in the race's notes and in tuning.json."""
        best = self.best
        summary = {
            "found": dict(best.settings) if best else {},
            "goodput_rps": best.goodput_rps if best else None,
            "cells": sum(trial.cells for trial in self.trials),
            "minutes": round(sum(trial.seconds for trial in self.trials) / 60, 2),
            "peaks": {knob.option: peak_words(self, knob) for knob in self.knobs},
        }
        return {**msgspec.to_builtins(self), **summary}


def _apart(settings: Settings, best: Settings, option: str) -> bool:
    return all(value == best[name] for name, value in settings.items() if name != option)


def peak_words(tuning: Tuning, knob: Knob) -> str:
    """Where goodput is highest over one knob: between two lower values, or at an end of what was tried."""
    curve, best = tuning.curve(knob), tuning.best
    if best is None or len(curve) < 2:
        return f"{knob.meaning}: not searched"
    rates = [trial.goodput_rps or 0.0 for trial in curve]
    top = max(rates)
    if not top:
        return f"{knob.meaning} ({knob.option}): no rate held with any value"
    on_top = [trial.settings[knob.option] for trial, rate in zip(curve, rates, strict=True) if rate == top]
    where = f"{on_top[0]}" if len(on_top) == 1 else f"{on_top[0]} to {on_top[-1]}"
    is_interior = rates[0] < top and rates[-1] < top
    kind = "an interior peak" if is_interior else "highest at an end of what was tried"
    return f"{knob.meaning} ({knob.option}): {kind}, {top:.3g} requests/s at {where}"


def start_of(knobs: Sequence[Knob], options: Mapping[str, Any]) -> dict[str, int]:
    """Where a tuning begins: what the scenario or the user has set, else the engine's default, else mid-scale."""
    return {
        knob.option: int(options.get(knob.option) or knob.default or knob.values[len(knob.values) // 2])
        for knob in knobs
    }


def next_settings(tuning: Tuning) -> dict[str, int] | None:
    """The settings to try next; None when the best has no untried neighbour."""
    if not tuning.trials:
        return dict(tuning.start)
    best = tuning.best
    if best is None:
        return None  # the start itself does not run: there is nothing to move from
    tried = [trial.settings for trial in tuning.trials]
    for knob in tuning.knobs:
        value = best.settings[knob.option]
        scale = sorted({*knob.values, value})
        place = scale.index(value)
        neighbours = [*scale[place + 1 : place + 2], *scale[max(0, place - 1) : place]]
        for neighbour in neighbours:
            if (settings := {**best.settings, knob.option: neighbour}) not in tried:
                return settings
    return None


def sweep_of(tuning: Tuning, knob: Knob) -> dict[str, int] | None:
    """As `next_settings`, for every value of one knob in ascending order, the others left as they are."""
    tried = [trial.settings for trial in tuning.trials]
    wanted = ({**tuning.start, knob.option: value} for value in knob.values)
    return next((settings for settings in wanted if settings not in tried), None)


Try = Callable[[dict[str, int], int], Awaitable[Trial]]
"""Settings and a number of cells -> what came of them."""


async def tune(
    tuning: Tuning, attempt: Try, *, propose: Callable[[Tuning], dict[str, int] | None] = next_settings
) -> Tuning:
    """Try settings until none is left or the budget is spent. Cancellation keeps what was tried: the result tells that
    it is not finished.
    """
    began = time.monotonic()
    while settings := propose(tuning):
        spent = sum(trial.cells for trial in tuning.trials)
        if not (cells := tuning.budget.cells_left(spent, time.monotonic() - began)):
            return tuning
        try:
            trial = await attempt(settings, cells)
        except asyncio.CancelledError:
            return msgspec.structs.replace(tuning, is_stopped=True)
        tuning = msgspec.structs.replace(tuning, trials=(*tuning.trials, trial))
    return msgspec.structs.replace(tuning, is_finished=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where trials of one engine are run: short races by `card`; `contender` makes one of launch options."""

    card: RaceCard
    contender: Callable[[Mapping[str, Any]], Contender]
    options: Mapping[str, Any]  # those that are no knobs stay as they are
    show: Show
    folder: Path

    async def attempt(self, settings: dict[str, int], cells: int) -> Trial:
        began = time.monotonic()
        name = "-".join(f"{option}={value}" for option, value in settings.items())
        card = trial_card(self.card, self.contender({**self.options, **settings}), cells, self.folder / name)
        result = await race(card, self.show)
        if result.notes.interrupted:
            raise asyncio.CancelledError
        return trial_of(result.engines[0], settings, time.monotonic() - began)


def trial_of(engine: EngineResult, settings: dict[str, int], seconds: float) -> Trial:
    goodput = engine.goodput
    return Trial(
        settings=settings,
        goodput_rps=goodput.rate_rps if goodput else None,
        lo=goodput.lo if goodput else None,
        hi=goodput.hi if goodput else None,
        cells=len(engine.cells),
        seconds=seconds,
        words="" if goodput else " ".join(engine.unranked),
    )


def trial_card(card: RaceCard, contender: Contender, cells: int, out: Path) -> RaceCard:
    """The race of one trial: this engine alone, once through, in so many cells; seed and plans as in all others."""
    return replace(
        card,
        run_id=f"{card.run_id}-{contender.name}-{out.name}",
        scenario=trial_scenario(card.scenario, cells),
        contenders=[contender],
        out=out,
        calibrates=False,  # the client is the same in all trials, and the race that follows asks it
    )


def trial_scenario(scenario: Scenario, cells: int) -> Scenario:
    search = msgspec.structs.replace(scenario.search, max_cells=cells, max_replicates=1)
    return msgspec.structs.replace(
        scenario, search=search, rounds=1, restart="never", residency="one", parity=Parity(weights="any")
    )
