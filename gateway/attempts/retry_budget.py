"""How many second tries the gateway may make, however many requests fail: a share of them all. Pure: times come in.

    budget = RetryBudget()
    budget.opened(now)                     # a request has begun; `closed` when it ends
    match budget.verdict(now, rules):      # before a try that is not its first; `rules` are the `retries:` of now
        case "go": budget.lend()           # `repaid` when it is answered or over; `lost(now)` too if it has failed

A retry that is answered was worth its place and gives it back; one that fails has spent it for ten seconds. So when one
of two engines dies, all its requests find their way to the other one, a few at a time; and when every engine fails,
engines see at most a fifth more attempts than there are requests. Envoy's budget (20 % of
the active requests) and Finagle's (20 % and a floor, in a window of 10 s) gave the figures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

from gateway.config import RetriesConfig

WINDOW_S = 10

FIRST_PAUSE_S = 0.1  # before the same replica is asked again
FIRST_PAUSE_OF_FULL_S = 0.5  # if it had no room
LONGEST_PAUSE_S = 4.0

Verdict: TypeAlias = Literal["go", "wait", "spent"]


class Recent:
    """How often something happened in the last ten seconds, counted by the second.

    >>> recent = Recent()
    >>> recent.add(0.0), recent.add(9.9), recent.total(9.9), recent.total(10.5)
    (None, None, 2, 1)
    """

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()  # [second, count], the oldest first
        self._total = 0

    def add(self, now: float) -> None:
        second = math.floor(now)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1][1] += 1
        else:
            self._forget(second)
            self._seconds.append([second, 1])
        self._total += 1

    def total(self, now: float) -> int:
        self._forget(math.floor(now))
        return self._total

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - WINDOW_S:
            self._total -= self._seconds.popleft()[1]


class RetryBudget:
    """Of the requests that are open, or of those that began in the last ten seconds where these are more."""

    def __init__(self) -> None:
        self._begun = Recent()
        self._lost = Recent()
        self._num_open = 0
        self._num_lent = 0

    def opened(self, now: float) -> None:
        self._begun.add(now)
        self._num_open += 1

    def closed(self) -> None:
        self._num_open -= 1

    def verdict(self, now: float, rules: RetriesConfig) -> Verdict:
        """May one more be made? `wait`: perhaps, once it is known what becomes of those that are under way."""
        allowed = max(rules.floor, math.floor(rules.budget * max(self._num_open, self._begun.total(now))))
        num_lost = self._lost.total(now)
        if num_lost >= allowed:
            return "spent"
        return "go" if num_lost + self._num_lent < allowed else "wait"

    def lend(self) -> None:
        self._num_lent += 1

    def repaid(self) -> None:
        self._num_lent -= 1

    def lost(self, now: float) -> None:
        self._lost.add(now)


def pause_s(num_rounds: int, *, was_full: bool, random: Callable[[], float]) -> float:
    """How long to wait after so many rounds over all replicas before the next: twice as long each time, and at random
    between half of that and all of it, so that those who failed together do not come back together."""
    first_s = FIRST_PAUSE_OF_FULL_S if was_full else FIRST_PAUSE_S
    return min(first_s * 2.0 ** (num_rounds - 1), LONGEST_PAUSE_S) * (0.5 + 0.5 * random())
