"""How many times slower is a replica than the others? Pure: durations go in, a ratio comes out.

    tempo = Tempo()
    tempo.note(log(0.4), usual)          # of seconds: to a first token by the prompt's work, or for each later token
    tempo.excess(usual)                  # 2.1, the logarithm of 8: so many times the usual

Everything here is a logarithm, so means are geometric. One value counts as ten times the mean at most: one odd request
moves little, and it takes as long to be trusted again as it took to lose the trust.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, inf, log

NEW_WEIGHT = 0.4  # of one value in the recent mean: three or four slow ones tell
PAST_WEIGHT = 0.01  # and in that of the past: a change that lasts for hundreds of answers becomes what is usual
MAX_STEP = log(10)


class Tempo:
    """The recent and the past mean. Where nothing is usual, a replica is compared with its own past."""

    __slots__ = ("_num", "last_excess", "past", "recent")

    def __init__(self) -> None:
        self.recent = -inf
        self.past = 0.0
        self.last_excess = 0.0  # as of the last value
        self._num = 0

    @property
    def seconds(self) -> float:
        """The recent mean; 0 until there is something to tell."""
        return exp(self.recent)

    @property
    def is_known(self) -> bool:
        return self._num > 0

    def note(self, value: float, usual: float | None) -> None:
        self._num += 1
        if self._num == 1:
            self.recent = self.past = value
        else:
            self.recent += NEW_WEIGHT * min(max(value - self.recent, -MAX_STEP), MAX_STEP)
            self.past += max(PAST_WEIGHT, 1 / self._num) * (value - self.past)
        self.last_excess = self.recent - (self.past if usual is None else usual)

    def excess(self, usual: float | None, at_least: float = -inf) -> float:
        """How much the recent mean is above the usual. A value that is under way and will be `at_least` so much counts
        already."""
        recent = max(self.recent, at_least)
        if usual is not None:
            return recent - usual if recent > -inf else 0.0
        return recent - self.past if self._num else 0.0


def usual(tempos: Iterable[Tempo]) -> float | None:
    """What is usual among several: the lower of the two in the middle, so that of two the faster one sets it. None
    where fewer than two can be compared."""
    known = sorted(tempo.recent for tempo in tempos if tempo.is_known)
    return known[(len(known) - 1) // 2] if len(known) > 1 else None
