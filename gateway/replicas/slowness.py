"""How many times slower is a replica than the others? Pure: durations go in, a ratio comes out.

    tempo = Tempo()
    tempo.note(0.4)                      # seconds: to a first token by the prompt's work, or for each later token
    tempo.times(usual)                   # 8.1: so many times the usual

Means are geometric and take one value for ten times the mean at most, so one odd request moves little, and it takes as
long to be trusted again as it took to lose the trust.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, inf, log

NEW_WEIGHT = 0.4  # of one value in the recent mean: three or four slow ones tell
PAST_WEIGHT = 0.01  # and in that of the past: a change that lasts for hundreds of answers becomes what is usual
MAX_STEP = log(10)


class Tempo:
    """The recent and the past mean, as logarithms; None until there is something to tell."""

    __slots__ = ("_num", "past", "recent")

    def __init__(self) -> None:
        self.recent: float | None = None
        self.past = 0.0
        self._num = 0

    @property
    def seconds(self) -> float:
        """The recent mean; 0 until there is something to tell."""
        return 0.0 if self.recent is None else exp(self.recent)

    def note(self, seconds: float) -> None:
        value = log(seconds)
        self._num += 1
        if self.recent is None:
            self.recent = self.past = value
            return
        self.recent += NEW_WEIGHT * min(max(value - self.recent, -MAX_STEP), MAX_STEP)
        self.past += max(PAST_WEIGHT, 1 / self._num) * (value - self.past)

    def times(self, usual: float | None, at_least_s: float = 0.0) -> float:
        """So many times the usual, or its own past where nothing is usual. Where a value is under way that will be
        `at_least_s`, it counts already."""
        recent = self.recent
        if at_least_s:
            recent = max(log(at_least_s), -inf if recent is None else recent)
        if recent is None or (reference := self.reference(usual)) is None:
            return 1.0
        return exp(recent - reference)

    def is_usual(self, seconds: float, usual: float | None, factor: float) -> bool:
        reference = self.reference(usual)
        return reference is None or log(seconds / factor) <= reference

    def reference(self, usual: float | None) -> float | None:
        return self.past if usual is None and self.recent is not None else usual


def usual(tempos: Iterable[Tempo]) -> float | None:
    """What is usual among several: the lower of the two in the middle, so that of two the faster one sets it. None
    where fewer than two can be compared."""
    known = sorted(tempo.recent for tempo in tempos if tempo.recent is not None)
    return known[(len(known) - 1) // 2] if len(known) > 1 else None
