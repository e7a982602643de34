"""What decides when a request leaves: the schedule (open loop), or the answer to the one before it (closed loop).

Open loop never waits for an answer: late requests leave at once, and their rows keep the time they were due. Closed
loop holds a stated number of requests in flight; each is due when its user has read the last answer and thought.
A closed loop offers less to a slow engine than to a fast one, so it says nothing of goodput; it is another kind.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Protocol

import gevent
import gevent.event

from arena.load.connection import Exchange
from arena.load.loadgen import ClosedLoop
from arena.load.plan import CellPlan
from arena.load.sleeper import Sleeper

LATE_ROWS_PER_SLICE = 8


class Sends(Protocol):
    """The cell, as a pacer sees it."""

    epoch_ns: int
    plan: CellPlan
    exchanges: deque[Exchange]
    sleeper: Sleeper

    def launch(self, exchange: Exchange) -> None: ...
    def close_window(self, *, ran_dry: bool = False) -> None: ...


class OpenPacer:
    """Fire every request at its time."""

    def __init__(self, cell: Sends) -> None:
        self._cell = cell

    def run(self) -> None:
        cell = self._cell
        late_rows = 0
        cell.close_window()  # what is measured is known from the start
        while cell.exchanges:
            deadline_ns = cell.epoch_ns + cell.exchanges[0].request.scheduled_ns
            if time.monotonic_ns() < deadline_ns:
                cell.sleeper.sleep_until(deadline_ns)
                late_rows = 0
            elif (late_rows := late_rows + 1) % LATE_ROWS_PER_SLICE == 0:
                gevent.sleep(0)
            cell.launch(cell.exchanges.popleft())

    def has_ended(self, exchange: Exchange) -> None:
        """Nobody waits for an answer."""


class ClosedPacer:
    """`concurrency` users: each sends, reads the answer, thinks for `think_s`, and sends again.

    The think time is constant, so users are due again in the order in which their answers ended.
    """

    def __init__(self, cell: Sends, loop: ClosedLoop) -> None:
        self._cell = cell
        self._think_ns = round(loop.think_s * 1e9)
        self._users = loop.concurrency
        self._due_ns: deque[int] = deque()
        self._somebody_is_free = gevent.event.Event()

    def run(self) -> None:
        cell = self._cell
        self._due_ns.extend([cell.epoch_ns] * self._users)
        sent = 0
        while cell.exchanges:
            while not self._due_ns:
                self._somebody_is_free.wait()
                self._somebody_is_free.clear()
            due_ns = self._due_ns.popleft()
            cell.sleeper.sleep_until(due_ns)
            self._send(due_ns - cell.epoch_ns)
            if (sent := sent + 1) % LATE_ROWS_PER_SLICE == 0:
                gevent.sleep(0)
        cell.close_window(ran_dry=True)

    def has_ended(self, exchange: Exchange) -> None:
        ended_ns = exchange.done_ns if exchange.done_ns is not None else time.monotonic_ns()
        self._due_ns.append(ended_ns + self._think_ns)
        self._somebody_is_free.set()

    def _send(self, scheduled_ns: int) -> None:
        cell = self._cell
        exchange = cell.exchanges.popleft()
        exchange.request = replace(exchange.request, scheduled_ns=scheduled_ns)
        exchange.measured = cell.plan.is_measured(exchange.request)
        if scheduled_ns >= cell.plan.horizon_ns:
            cell.close_window()
        cell.launch(exchange)
