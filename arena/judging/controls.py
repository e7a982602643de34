"""Does the race tell apart what is the same, and did the machine stay what it was? Pure: readings in, findings out.

Two controls run inside a race. *A/A*: one engine is entered twice under two names, so that a race which ranks the two
apart is known to rank apart what is equal. *Drift*: before each cell the same task takes its time on an otherwise idle
machine (`arena.race.fixed_task`); that time cannot depend on the engines, so where it moves, over the race or from
engine to engine, the machine has moved and figures of different slots do not compare. A race with a control that fails
is unproven, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from scipy.stats import kendalltau, kruskal

from arena.judging.ranking import is_apart

DRIFT_CHECK = "fixed_task_ms"
MOVED = 0.05  # less than this share is not what makes engines differ
DRIFT_ALPHA = 0.005  # of each of the two tests: a race on a still machine is called unproven once in a hundred
MIN_READINGS = 8


@dataclass(frozen=True, slots=True)
class Control:
    """`ok` is None where the race was too short to tell."""

    kind: Literal["aa", "drift"]
    ok: bool | None
    value: float | None
    words: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What the fixed task took before a cell of this engine."""

    slot: int
    engine: str
    task_ms: float


def aa_control(name: str, twin: str, better: float | None) -> Control:
    """`better` is the probability that `name` carries more than `twin`; None where one of them has no valid cell."""
    if better is None:
        return Control("aa", None, None, f"{name} and its second entry {twin} could not be compared.")
    if is_apart(better):
        words = f"{name} and its second entry {twin} are one engine, and were told apart (P = {better:.3f})."
        return Control("aa", False, better, words)
    return Control("aa", True, better, f"{name} and its second entry {twin} were not told apart.")


def drift_control(readings: Sequence[Reading]) -> Control:
    ordered = sorted(readings, key=lambda reading: reading.slot)
    times = [reading.task_ms for reading in ordered]
    if len(times) < MIN_READINGS:
        return Control("drift", None, None, f"{len(times)} readings of the fixed task are too few to see a drift.")
    third = len(times) // 3
    over_time = median(times[-third:]) / median(times[:third]) - 1
    trend = float(kendalltau(range(len(times)), times).pvalue)
    if abs(over_time) > MOVED and trend < DRIFT_ALPHA:
        words = f"A fixed task took {over_time:+.0%} time at the end of the race against its beginning."
        return Control("drift", False, over_time, words)
    return _between_engines(ordered) or Control("drift", True, over_time, "A fixed task took the same time throughout.")


def _between_engines(ordered: Sequence[Reading]) -> Control | None:
    engines = sorted({reading.engine for reading in ordered})
    groups = [[reading.task_ms for reading in ordered if reading.engine == engine] for engine in engines]
    groups = [group for group in groups if len(group) >= 3]
    if len(groups) < 2 or len({time for group in groups for time in group}) < 2:
        return None
    medians = [median(group) for group in groups]
    spread = max(medians) / min(medians) - 1
    if spread > MOVED and float(kruskal(*groups).pvalue) < DRIFT_ALPHA:
        words = f"A fixed task took {spread:.0%} longer in some engines' slots than in others'."
        return Control("drift", False, spread, words)
    return None
