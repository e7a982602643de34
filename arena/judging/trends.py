"""How an engine's goodput moved from race to race, and whether that was chance. Pure.

A trend is one engine under one question (model, workload, arrivals, limits, length of cells) on one kind of machine.
Each race in it is compared with the one before by the posteriors of their knees, so a wide interval makes no alarm.

    trends(marks) -> [Trend(engine="native", ..., points=(Point(mark, change=None), Point(mark, Change(...))))]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from arena.judging.knee import Knee, probability_better
from arena.judging.ladder import Outcome, SearchSettings
from arena.judging.ranking import SURE

Words: TypeAlias = Literal["surely better", "surely worse", "cannot be told apart"]


class Mark(Struct, frozen=True, kw_only=True):
    """One engine in one race. Rates in requests a second; None: it has no valid cell, or nothing bounds it."""

    folder: str
    run_id: str
    started_utc: str
    git_sha: str | None
    scenario: str
    model: str
    question: str
    host: str
    host_words: str
    engine: str
    version: str | None
    settings: dict[str, Any]
    goodput_rps: float | None
    proven: bool
    lo: float | None
    hi: float | None
    rank: tuple[int, int] | None
    unranked: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    search: SearchSettings

    @property
    def counts(self) -> bool:
        """An engine that got no rank did other work than its rivals: it is shown, and compared with nothing."""
        return self.goodput_rps is not None and not self.unranked


@dataclass(frozen=True, slots=True)
class Change:
    """Against the race before that counts. `what`: in what else the two differ than in the day they ran."""

    probability_better: float
    words: Words
    ratio: float | None
    what: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Point:
    mark: Mark
    change: Change | None  # None: the first that counts, or it does not count


@dataclass(frozen=True, slots=True)
class Trend:
    engine: str
    scenario: str
    model: str
    host: str
    question: str
    points: tuple[Point, ...]

    @property
    def regressions(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.change and point.change.words == "surely worse")


def trends(marks: Iterable[Mark]) -> list[Trend]:
    """`marks` in the order of time."""
    lines: dict[tuple[str, str, str, str], list[Mark]] = {}
    for mark in marks:
        lines.setdefault((mark.scenario, mark.question, mark.host, mark.engine), []).append(mark)
    return [_trend(line) for _, line in sorted(lines.items())]


def _trend(line: Sequence[Mark]) -> Trend:
    points = []
    before: Mark | None = None
    for mark in line:
        points.append(Point(mark, change_between(before, mark) if before and mark.counts else None))
        before = mark if mark.counts else before
    latest = line[-1]
    return Trend(latest.engine, latest.scenario, latest.model, latest.host_words, latest.question, tuple(points))


def change_between(before: Mark, after: Mark) -> Change:
    better = probability_better(Knee(after.outcomes, after.search), Knee(before.outcomes, before.search))
    ratio = after.goodput_rps / before.goodput_rps if after.goodput_rps is not None and before.goodput_rps else None
    differing = [
        words
        for words, old, new in (
            ("version", before.version, after.version),
            ("settings", before.settings, after.settings),
            ("goodgate", before.git_sha, after.git_sha),
        )
        if old != new
    ]
    return Change(round(better, 4), change_words(better), ratio, tuple(differing))


def change_words(better: float) -> Words:
    """In words: P(later goodput > earlier goodput)."""
    if better >= SURE:
        return "surely better"
    return "surely worse" if better <= 1 - SURE else "cannot be told apart"
