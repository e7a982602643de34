"""Sleep until a moment of the clock, to some hundredths of a millisecond, while the process serves its sockets."""

from __future__ import annotations

import time

import gevent

from arena.load.deadline_timer import DeadlineTimer


class Sleeper:
    """Wait until an absolute CLOCK_MONOTONIC time. Never spins: that would spoil the stamps of concurrent reads."""

    def __init__(self) -> None:
        self._timer = DeadlineTimer() if DeadlineTimer.available else None
        self._watcher = gevent.get_hub().loop.io(self._timer.fileno, 1) if self._timer else None

    @property
    def kind(self) -> str:
        return "timerfd" if self._timer else "poll"

    def sleep_until(self, deadline_ns: int) -> None:
        if self._timer is None:
            while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
                gevent.sleep(min(left_ns / 1e9, 0.001))
        elif time.monotonic_ns() < deadline_ns:
            self._timer.arm(deadline_ns)
            gevent.get_hub().wait(self._watcher)
            self._timer.clear()
