"""One timer for deadlines that move all the time and hardly ever pass.

    alarm = Alarm(loop, on_late)
    alarm.set(loop.time() + 60)     # again with every read: costs a comparison
    alarm.cancel()                  # for good

A later deadline leaves the timer where it is; when it goes off too early it is set again. So a stream whose deadline
moves with each token has a timer go off once in `token_timeout_s`, not one made and cancelled with each token.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable


class Alarm:
    __slots__ = ("_deadline", "_due", "_loop", "_ring", "_timer")

    def __init__(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._timer: TimerHandle | None = None
        self._due = 0.0  # when the timer goes off
        self._deadline: float | None = None

    def set(self, deadline: float) -> None:
        self._deadline = deadline
        if self._timer is None:
            self._start(deadline)
        elif deadline < self._due:
            self._timer.cancel()
            self._start(deadline)

    def clear(self) -> None:
        """Nobody waits any more. The timer may still go off, and then does nothing."""
        self._deadline = None

    def cancel(self) -> None:
        self._deadline = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self, due: float) -> None:
        self._due = due
        self._timer = self._loop.call_at(due, self._go_off)

    def _go_off(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._loop.time() < self._deadline:
            self._start(self._deadline)
            return
        self._deadline = None
        self._ring()
