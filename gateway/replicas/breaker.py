"""Is a replica that fails asked again, and when? Pure: outcomes and times go in, a decision comes out.

    breaker = Breaker(BreakerConfig())
    breaker.failed(started, now, "it answered 500")     # an attempt that began at `started` has failed now
    breaker.admits(now)                                 # may it be asked?
    breaker.began(now)                                  # it is asked
    breaker.answered(started)                           # a first token has come
    breaker.completed(started, now)                     # and a whole answer

           too many failures                its time is over, or a health probe finds it well again
    CLOSED -----------------> OPEN -----------------------------------------------> HALF OPEN
       ^                       ^                                                      |    |
       |                       '------------------ a trial fails ---------------------'    |
       '------------------------------------ a trial is answered --------------------------'

Each opening lasts longer than the one before, and while it is open its end only moves away. Half open, it admits a
trial every `probe_s`, whatever became of the one before: a trial that nobody hears of again holds nothing up. Closed
by a trial it is on parole until an answer was whole: one failure opens it again.
"""

from __future__ import annotations

from enum import IntEnum
from math import inf

from gateway.config import BreakerConfig


class Position(IntEnum):
    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    __slots__ = (
        "_closed_at", "_ends_at", "_in_a_row", "_is_open", "_level", "_next_trial", "_share", "num_openings",
        "reason", "rules",
    )  # fmt: skip

    def __init__(self, rules: BreakerConfig) -> None:
        self.num_openings = 0
        self.reason = ""  # why it is open, or was the last time
        self.rules = rules
        self._share = FailureShare()
        self._in_a_row = 0
        self._is_open = False
        self._ends_at = -inf  # from then on it is half open
        self._next_trial = -inf
        self._level = 0  # openings lately: each makes the next one longer
        self._closed_at = -inf

    @property
    def is_open(self) -> bool:
        """Open or half open."""
        return self._is_open

    def position(self, now: float) -> Position:
        if not self._is_open:
            return Position.CLOSED
        return Position.OPEN if now < self._ends_at else Position.HALF_OPEN

    def admits(self, now: float) -> bool:
        return not self._is_open or (now >= self._ends_at and now >= self._next_trial)

    def opens_for_s(self, now: float) -> float:
        """The seconds until it admits a trial."""
        return max(self._ends_at - now, self._next_trial - now, 0.0) if self._is_open else 0.0

    def began(self, now: float) -> None:
        if self._is_open:
            self._next_trial = now + self.rules.probe_s

    def answered(self, started: float) -> None:
        """What began before it was half open is no trial, and proves nothing."""
        if self._is_open and started >= self._ends_at:
            self._is_open = False
            self._closed_at = started
            self._in_a_row = max(self.rules.failures - 1, 0)
            self._share.clear()

    def completed(self, started: float, now: float) -> None:
        self.answered(started)
        if not self._is_open:
            self._in_a_row = 0
            self._share.note(now, self.rules.window_s, is_failure=False)

    def failed(self, started: float, now: float, reason: str, *, may_open: bool = True) -> None:
        """`may_open` is False for a replica that the others cannot do without."""
        if self._is_open:
            self._failed_again(started, now, reason)
            return
        self._in_a_row += 1
        self._share.note(now, self.rules.window_s, is_failure=True)
        if may_open and (why := self._too_many(now)):
            self._is_open = True
            self._open(now, f"{why}, the last: {reason}")

    def recovered(self, now: float) -> None:
        """It was down, and a health probe has found it well: it may be tried at once."""
        if self._is_open:
            self._ends_at = self._next_trial = min(now, self._ends_at)

    def _failed_again(self, started: float, now: float, reason: str) -> None:
        if started >= self._ends_at:
            self._open(now, f"it failed when it was tried again: {reason}")
        elif now < self._ends_at:  # begun before it opened: no news, but a sign that it is not over
            self._ends_at = max(self._ends_at, now + self._length_s)

    def _too_many(self, now: float) -> str:
        rules = self.rules
        if self._in_a_row >= rules.failures:
            return f"{self._in_a_row} failures in a row"
        num, share = self._share.at(now, rules.window_s)
        if num >= rules.min_requests and share >= rules.failure_share:
            return f"{share:.0%} of {num:.0f} attempts failed"
        return ""

    def _open(self, now: float, reason: str) -> None:
        if self._closed_at > -inf:  # what is long over counts no more: one level less for each time it stayed closed
            self._level = max(0, self._level - int((now - self._closed_at) / self.rules.open_s))
            self._closed_at = -inf
        self._level += 1
        self.num_openings += 1
        self.reason = reason
        self._ends_at = max(self._ends_at, now + self._length_s)

    @property
    def _length_s(self) -> float:
        return min(self._level * self.rules.open_s, self.rules.max_open_s)


class FailureShare:
    """How many attempts ended lately, and what share of them failed: those of this window, and of the one before it
    as much as still lies within a window's length. Nothing to keep for each attempt."""

    __slots__ = ("_before", "_began", "_failures", "_num")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._began = -inf
        self._num = self._failures = 0
        self._before = (0, 0)

    def note(self, now: float, window_s: float, *, is_failure: bool) -> None:
        self._turn(now, window_s)
        self._num += 1
        self._failures += is_failure

    def at(self, now: float, window_s: float) -> tuple[float, float]:
        self._turn(now, window_s)
        rest = max(0.0, 1 - (now - self._began) / window_s)
        num = self._num + rest * self._before[0]
        return num, (self._failures + rest * self._before[1]) / num if num else 0.0

    def _turn(self, now: float, window_s: float) -> None:
        if (passed := now - self._began) < window_s:
            return
        is_next = passed < 2 * window_s
        self._before = (self._num, self._failures) if is_next else (0, 0)
        self._num = self._failures = 0
        self._began = self._began + window_s if is_next else now
