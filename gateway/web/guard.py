"""Looks at the process four times a second, and sheds what is new while memory, descriptors or the loop are short.

    guard = Guard(live, metrics)
    guard.start()                            # on the event loop that it watches
    guard.check()                            # before a body is read: Pressed, which is 503 and Retry-After
    guard.admit(sock)                        # a new connection: False where it has to go unread

What presses decides gateway/admission/pressure.py. Each look is a timer of the loop itself, so how late it comes is how
late everything is; and after the loop has stood still it comes before the requests that have gathered meanwhile. A new
connection's number is the lowest that was free, so it alone says that descriptors run out, without counting them.
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from gateway.admission import pressure
from gateway.admission.pressure import Pressed, Reading, Resource
from gateway.config import Live
from gateway.records import logs
from gateway.records.metrics import Metrics
from gateway.web import process

LOOK_EVERY_S = 0.25
COUNT_FILES_EVERY = 4  # looks: it costs more than the rest

_log = logs.logger("overload")


class Guard:
    def __init__(self, live: Live, metrics: Metrics) -> None:
        self._live = live
        self._metrics = metrics
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._num_looks = 0
        self._found_limit = process.memory_limit()
        self._reading = Reading()
        self._resource: Resource | None = None
        self._shed_files = self._drop_files = float("inf")
        metrics.watch("goodgate_resident_bytes", lambda: _gauge(self._reading.resident_bytes))
        metrics.watch("goodgate_memory_limit_bytes", lambda: _gauge(self._reading.memory_limit))
        metrics.watch("goodgate_open_files", lambda: _gauge(process.open_files()))
        metrics.watch("goodgate_open_files_limit", lambda: _gauge(self._reading.files_limit))

    def start(self) -> None:
        self._look(0.0)
        self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def resource(self) -> Resource | None:
        """What is short."""
        return self._resource

    def check(self) -> None:
        if self._resource is not None:
            self._metrics.add("goodgate_overload_shed", self._resource)
            raise Pressed(self._resource)

    def admit(self, sock: socket.socket) -> bool:
        number = sock.fileno()
        if number < self._shed_files:
            return True
        if self._resource != "files":
            self._judge(self._reading._replace(open_files=process.open_files()))
        if number < self._drop_files:
            return True
        self._metrics.add("goodgate_overload_shed", "files")
        return False

    # ----------------------------------------------------------------------------------------------------- the looking

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + LOOK_EVERY_S
        self._timer = loop.call_at(self._due, self._look_again)

    def _look_again(self) -> None:
        lag_s = max(0.0, asyncio.get_running_loop().time() - self._due)
        self._metrics.observe("goodgate_loop_lag_seconds", lag_s)
        self._look(lag_s)
        self._wait()

    def _look(self, lag_s: float) -> None:
        counts_files = self._num_looks % COUNT_FILES_EVERY == 0 or self._resource == "files"
        self._num_looks += 1
        wanted = self._live.config.overload.memory_mib
        self._judge(
            Reading(
                lag_s=lag_s,
                resident_bytes=process.resident_bytes(),
                memory_limit=self._found_limit if wanted == "auto" else None if wanted == "unlimited" else wanted << 20,
                open_files=process.open_files() if counts_files else self._reading.open_files,
                files_limit=process.files_limit(),
            )
        )

    def _judge(self, reading: Reading) -> None:
        config = self._live.config.overload
        self._reading = reading
        self._shed_files = pressure.files_to_shed_at(config, reading.files_limit)
        self._drop_files = pressure.files_to_drop_at(config, reading.files_limit)
        was, self._resource = self._resource, pressure.pressing(config, reading, self._resource)
        if self._resource == was:
            return
        if self._resource is None:
            logs.info(_log, "there is room again", after=was)
        else:
            logs.warning(_log, "new requests are refused", short_of=self._resource, **reading._asdict())


def _gauge(value: int | None) -> tuple[tuple[tuple[str, ...], float], ...]:
    return () if value is None else (((), value),)


GUARD = web.AppKey("guard", Guard)
