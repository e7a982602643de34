"""One timer for deadlines that move all the time and hardly ever pass.

    alarm = Alarm(loop, on_late)
    alarm.set(loop.time() + 60)     # again with every read: costs a comparison
    alarm.cancel()                  # for good

    async with patiently(loop.time() + 60): ...     # asyncio.timeout_at, by such an alarm

A later deadline leaves the timer where it is; when it goes off too early it is set again. So a stream whose deadline
moves with each token has a timer go off once in `token_timeout_s`, not one made and cancelled with each token.

Deadlines are for others. When our own loop has stood still, what they sent in time lies unread in the sockets, and
loops run their timers before they read those (libuv does). So before it rings, an alarm waits for as long as its timer
came late, and `LAST_LOOK_S` at least; and then for some turns of the loop: what takes several of them, as connecting
does, is slow where each of our turns is.
"""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop, Handle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

LAST_LOOK_S = 0.01  # enough for the loop to come round to its sockets
LAST_TURNS = 8  # a connection takes four; where nothing else runs, these take microseconds


class Alarm:
    __slots__ = ("_deadline", "_due", "_looked_after", "_loop", "_ring", "_timer", "_turns")

    def __init__(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._timer: Handle | None = None
        self._due = 0.0  # when the timer goes off
        self._deadline: float | None = None
        self._looked_after: float | None = None  # the deadline that has had its last look, and the turns since
        self._turns = 0

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
        now = self._loop.time()
        if now < self._deadline:
            self._start(self._deadline)
        elif self._looked_after != self._deadline:
            self._looked_after, self._turns = self._deadline, 0
            self._start(now + max(now - self._due, LAST_LOOK_S))
        elif self._turns < LAST_TURNS:
            self._turns += 1
            self._timer = self._loop.call_soon(self._go_off)
        else:
            self._deadline = None
            self._ring()


@asynccontextmanager
async def patiently(deadline: float) -> AsyncIterator[None]:
    """`TimeoutError` where the block takes longer."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as clock:
        alarm = Alarm(loop, lambda: clock.reschedule(loop.time()))
        alarm.set(deadline)
        try:
            yield
        finally:
            alarm.cancel()
