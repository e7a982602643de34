"""Two races side by side, engine by engine. Pure, but for the table.

Figures are comparable when limits, model, what is sent and when are the same; otherwise `compare_races` refuses.
Different machines are compared, since that is a fair question, and the table says so. An engine that got no rank in one
of the races did other work there than its rivals, so it gets no verdict here either.

Where both races had the same plans (the later one was given the earlier one's `--seed`), requests are compared one by
one, too: what chance put into a plan cancels in the difference (`arena.judging.differences`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from arena.judging.differences import Paired, paired
from arena.judging.knee import Knee, probability_better
from arena.judging.results import EngineResult, RaceResult
from arena.judging.trends import change_words
from arena.load.calibration import worst_floor_ms
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
    paired: tuple[Paired, ...] = ()  # later minus earlier, over equal plans; empty where there is none

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
    return Change(
        name,
        old,
        new,
        round(better, 4),
        change_words(better),
        same_machine,
        _request_by_request(before, after, first, second),
    )


def _request_by_request(
    before: EngineResult, after: EngineResult, first: RaceResult, second: RaceResult
) -> tuple[Paired, ...]:
    """No latency counts as another that differs by less than the client's own error in either race."""
    scenario = second.scenario
    found = paired(
        "after",
        after.cells,
        "before",
        before.cells,
        scenario.slo,
        confidence=scenario.confidence,
        floor_ms=worst_floor_ms(first.notes.calibration, second.notes.calibration),
    )
    return tuple(found) if found[0].requests else ()


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


def paired_table(changes: list[Change], confidence: float) -> Table | None:
    """Request by request, where the races had plans in common; None where no engine met the same plan twice."""
    rows = [(change.engine, row) for change in changes for row in change.paired]
    if not rows:
        return None
    table = Table(
        title="The same requests in both races, later minus earlier",
        title_justify="left",
        caption="Means over blocks of equal time, with t-intervals; latencies are medians of answers that both gave.",
        caption_justify="left",
    )
    table.add_column("engine", style="bold")
    table.add_column("what")
    for heading in ("difference", f"{confidence:.0%} interval", "requests", "blocks"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for engine, row in rows:
        table.add_row(
            escape(engine),
            METRICS[row.metric],
            _difference(row, row.difference),
            "-" if row.lo is None else f"{_difference(row, row.lo)} .. {_difference(row, row.hi)}",
            f"{row.requests:,}",
            str(row.blocks),
            paired_words(row),
        )
    return table


def paired_words(row: Paired) -> str:
    if row.lo is None or row.difference is None:
        return "too few blocks"
    if not row.apart:
        return "cannot be told apart"
    is_better = (row.difference > 0) == (row.metric == "in_time")
    return "surely better" if is_better else "surely worse"


def why_unpaired(before: RaceResult, after: RaceResult) -> str:
    """What to do so that requests can be compared one by one."""
    if before.seed != after.seed:
        return (
            f"The races had other arrivals and prompts (seeds {before.seed} and {after.seed}); a race with `--seed "
            f"{before.seed}` can be compared request by request."
        )
    return "No engine met the same plan in both races, so requests cannot be compared one by one."


METRICS = {"in_time": "share in time", "ttft_ms": "TTFT", "tpot_ms": "TPOT"}


def _difference(row: Paired, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.2f} pp" if row.metric == "in_time" else f"{value:+.2f} ms"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
