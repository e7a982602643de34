"""What a judged race is: its engines, their cells, and what may be said of them. Everything that is printed, plotted or
handed on stands here; `arena.judging.judge` computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from arena.judging import stats
from arena.judging.cells import CellResult, Sample, tpots
from arena.judging.controls import Control, Reading
from arena.judging.differences import Paired
from arena.judging.economy import Economy
from arena.judging.ladder import Rung
from arena.judging.notes import EngineNotes, RunNotes
from arena.judging.ranking import RankSet
from arena.judging.search import Goodput
from arena.judging.shape import UNTOLD, Shape
from arena.judging.traces import Traces
from arena.race.scenario import Scenario


@dataclass(frozen=True, slots=True)
class FitPoint:
    """A rate, with all of its cells as one."""

    rung: Rung
    miss_rate: float  # by the isotonic fit over all rates; the observed one is misses / requests


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    engine_id: str
    name: str
    version: str | None
    model: str
    endpoint: str
    notes: EngineNotes
    goodput: Goodput | None  # None: no valid cell
    cells: tuple[CellResult, ...]
    headline: tuple[Sample, ...]  # all valid samples at the goodput rate (or at the lowest tried rate, where none held)
    headline_rps: float | None
    rank: RankSet | None
    unranked: tuple[str, ...]  # why there is no rank
    settings: Mapping[str, Any] = field(default_factory=dict)  # launch options: part of what was raced
    fit: tuple[FitPoint, ...] = ()  # by ascending rate
    economy: Economy | None = None  # at the headline rate; None: nothing was delivered there
    remarks: tuple[str, ...] = ()  # differences from its rivals that cost it no rank

    def headline_quantile(self, metric: str, percentile: float) -> float | None:
        values = [sample.ttft_ms for sample in self.headline] if metric == "ttft" else tpots(self.headline)
        return stats.quantile(values, percentile)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    run_id: str
    started_utc: str
    seed: int
    git_sha: str | None
    host: Mapping[str, Any]
    notes: RunNotes
    engines: tuple[EngineResult, ...]  # best first
    better: Mapping[tuple[str, str], float]  # P(first better than second), ranked engines only
    invalid_reasons: tuple[str, ...]
    prompt_tokens: float | None  # medians over all answers, by the engines' own count
    answer_tokens: float | None
    shape: Shape = UNTOLD
    traces: Traces = field(default_factory=Traces)  # what a report draws request by request
    paired: tuple[Paired, ...] = ()  # on equal plans, ranked engines only; simultaneous intervals
    controls: tuple[Control, ...] = ()  # what the race says of what cannot differ
    drift: tuple[Reading, ...] = ()  # the fixed task before each cell, by slot
    floor_ms: float = 0.0  # how far the client may be off; no claim rests on less

    @property
    def unproven(self) -> tuple[str, ...]:
        """Why the race as a whole proves nothing: the controls that failed."""
        return tuple(control.words for control in self.controls if control.ok is False)

    @property
    def scenario(self) -> Scenario:
        return self.notes.scenario

    @property
    def is_valid(self) -> bool:
        """A complete race in which every engine could be ranked."""
        return not self.invalid_reasons
