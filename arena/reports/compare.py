"""Two races side by side, engine by engine. Pure, but for the table.

Figures are comparable when limits, model, what is sent and when are the same; otherwise `compare_races` refuses.
Different machines are compared, since that is a fair question, and the table says so. An engine that got no rank in one
of the races did other work there than its rivals, so it gets no verdict here either.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from arena.judging.ranking import SURE
from arena.judging.results import EngineResult, RaceResult
from arena.judging.search import Knee, probability_better
from arena.race.config import fingerprint


@dataclass(frozen=True, slots=True)
class Change:
    """One engine in both races. None: it was not measured there."""

    engine: str
    before_rps: float | None
    after_rps: float | None
    probability_better: float | None
    words: str
    same_machine: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_races(before: RaceResult, after: RaceResult) -> list[Change]:
    """Raises ValueError with a sentence when the races did not ask the same question."""
    for what in ("slo", "workload", "arrivals", "cache", "model"):
        ours, theirs = getattr(before.scenario, what), getattr(after.scenario, what)
        if ours != theirs:
            raise ValueError(f"The races cannot be compared: they differ in `{what}` ({ours} against {theirs}).")
    same_machine = fingerprint(before.host) == fingerprint(after.host)
    known = {engine.name: engine for engine in before.engines}
    names = [*known, *(engine.name for engine in after.engines if engine.name not in known)]
    later = {engine.name: engine for engine in after.engines}
    return [_change(name, known.get(name), later.get(name), before, after, same_machine) for name in names]


def _change(
    name: str,
    before: EngineResult | None,
    after: EngineResult | None,
    first: RaceResult,
    second: RaceResult,
    same_machine: bool,
) -> Change:
    old = before.goodput.rate_rps if before and before.goodput else None
    new = after.goodput.rate_rps if after and after.goodput else None
    if before is None or after is None or old is None or new is None:
        return Change(name, old, new, None, "measured in one race only", same_machine)
    if before.unranked or after.unranked:
        return Change(name, old, new, None, "not ranked in both races", same_machine)
    knees = [
        Knee([cell.outcome() for cell in engine.cells if cell.is_valid], race.scenario.settings)
        for engine, race in ((after, second), (before, first))
    ]
    better = probability_better(*knees)
    if better >= SURE:
        words = "surely better"
    elif better <= 1 - SURE:
        words = "surely worse"
    else:
        words = "cannot be told apart"
    return Change(name, old, new, round(better, 4), words, same_machine)


def comparison_table(changes: list[Change], before: str, after: str) -> Table:
    caption = None if all(change.same_machine for change in changes) else "The races ran on different machines."
    table = Table(title="Goodput, requests/s", caption=caption, title_justify="left")
    table.add_column("engine", style="bold")
    for heading in (before, after, "change"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for change in changes:
        ratio = "-"
        if change.before_rps and change.after_rps is not None:
            ratio = f"{change.after_rps / change.before_rps - 1:+.0%}"
        table.add_row(change.engine, _rate(change.before_rps), _rate(change.after_rps), ratio, change.words)
    return table


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
