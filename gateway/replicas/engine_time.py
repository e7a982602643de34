"""Whose time an engine's seconds are. Pure: times go in, shares come out.

    time = EngineTime()
    mark = time.opened(0.0)         # one generation, alone
    other = time.opened(2.0)        # from now on two share each second
    time.share(mark, 4.0)           # 3.0: two seconds of its own, and half of two more
    time.closed(4.0)                # one of them has ended

Each second in which an engine has n generations open is an n-th of a second to each of them, so the shares of all
generations add up to the time in which the engine was busy. One figure is enough for that: what a generation that was
open from the beginning would have got by now. The share of any other is the difference between two of its values.
"""

from __future__ import annotations


class EngineTime:
    """Times are seconds on one monotonic clock."""

    __slots__ = ("_at", "_num_open", "_share_of_one")

    def __init__(self) -> None:
        self._at = 0.0
        self._num_open = 0
        self._share_of_one = 0.0

    def opened(self, now: float) -> float:
        """One more generation. What is returned tells its share later on."""
        self._advance(now)
        self._num_open += 1
        return self._share_of_one

    def share(self, mark: float, now: float) -> float:
        """Its seconds until now, while it is still open."""
        self._advance(now)
        return self._share_of_one - mark

    def closed(self, now: float) -> None:
        self._advance(now)
        self._num_open -= 1

    def _advance(self, now: float) -> None:
        if self._num_open:
            self._share_of_one += max(now - self._at, 0.0) / self._num_open
        self._at = max(now, self._at)
