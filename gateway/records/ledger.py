"""The ledger: one record a request, kept on this machine for `goodgate usage` and `goodgate why`.

    ledger = Ledger(config.ledger, home / FOLDER, proven=proven_goodput.rates)
    ledger.open()                     # one thread of its own writes; serving never waits for it
    ledger.note(trace)                # a sink: microseconds, no I/O
    ledger.close()                    # what waits is written

The row is made on the event loop: two threads that both run Python take the interpreter from each other with every
step, which costs more than the row. Rows wait in memory for a fifth of a second and are written in one transaction, so
that a killed gateway loses no more than that. Several workers and gateways of one GOODGATE_HOME write into the same
file. Where the disk does not take them, the gateway serves on, says so once, and keeps records for later up to a bound;
what it drops, it counts.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from gateway.config import LedgerConfig
from gateway.records import ledger_files, logs
from gateway.records.ledger_files import NotALedger, Segment
from gateway.records.metrics import Read, Values
from gateway.records.record import COLUMNS, Proven, record_of
from gateway.records.trace import Trace

FLUSH_S = 0.2
RETRY_S = 1.0
BATCH = 500  # records in one transaction: other processes wait no longer than for these
AT_ONCE = 64  # rows in one statement, half a millisecond; after it the loop has its turn, which costs both sides
MAX_WAITING = 20_000  # some 40 MB; at 100 requests a second three minutes without a disk
CLOSE_TIMEOUT_S = 10.0
UNMATCHED = "unmatched"

Row: TypeAlias = tuple[Any, ...]  # the values of COLUMNS

_ROW = f"({', '.join('?' * len(COLUMNS))})"
_log = logs.logger("ledger")


def concerns_a_model(trace: Trace) -> bool:
    """Lists, health and scrapes are not kept; nor is what came without a valid key, or strangers could fill the disk
    and push out what matters."""
    return trace.is_let_in and trace.method == "POST" and trace.route != UNMATCHED


class Broken(Exception):
    """A file of the ledger is damaged or not ours."""


class Ledger:
    """`note` belongs to the event loop, everything with an underscore that touches files to the thread."""

    def __init__(
        self,
        config: LedgerConfig,
        folder: Path,
        *,
        proven: Read = tuple,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._folder = folder
        self._proven = proven
        self._clock = clock
        self._waiting: deque[Row] = deque()
        self._rates: Proven = {}  # as of the first of those that wait
        self._has_work = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._db: sqlite3.Connection | None = None
        self._segment: Segment | None = None
        self._is_failing = False
        self._is_full = False
        self._num_written = 0
        self._num_dropped = 0  # on the event loop: too many wait, or it makes no row
        self._num_lost = 0  # in the thread

    @property
    def num_written(self) -> int:
        return self._num_written

    @property
    def num_dropped(self) -> int:
        return self._num_dropped + self._num_lost

    def open(self) -> None:
        self._thread.start()

    def note(self, trace: Trace) -> None:
        """Keep this request, if it is one to keep."""
        if not concerns_a_model(trace):
            return
        if len(self._waiting) >= MAX_WAITING:
            self._drop(trace)
            return
        try:
            self._waiting.append(self._row_of(trace))
        except Exception as error:  # a record that cannot be made must not stand in the way of its answer
            self._num_dropped += 1
            logs.error(_log, "records of requests are lost", error=error, records=1)
            return
        if not self._has_work.is_set():
            self._has_work.set()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._closing.set()
        self._has_work.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if (lost := len(self._waiting)) or self._thread.is_alive():
            logs.warning(_log, "records of requests are lost", records=lost, folder=str(self._folder))

    def written(self) -> list[tuple[Values, float]]:
        """For the metric of that name."""
        return [((), self.num_written)]

    def dropped(self) -> list[tuple[Values, float]]:
        return [((), self.num_dropped)]

    def _row_of(self, trace: Trace) -> Row:
        if not self._waiting:
            self._rates = dict(self._proven())
        return msgspec.structs.astuple(record_of(trace, self._rates))

    def _drop(self, trace: Trace) -> None:
        self._num_dropped += 1
        if not self._is_full:
            self._is_full = True
            logs.warning(_log, "the ledger drops records: too many wait", first=trace.request_id, waiting=MAX_WAITING)

    def _work(self) -> None:
        """The thread: sleep until there is something, let others join it, write."""
        while not self._closing.is_set():
            self._has_work.wait()
            self._closing.wait(RETRY_S if self._is_failing else FLUSH_S)
            self._has_work.clear()
            self._write_all()
        self._write_all()  # what came while the last batch was written
        self._disconnect()

    def _write_all(self) -> None:
        """Write what waits. What the disk does not take goes on waiting."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH))]
            try:
                self._write(batch)
            except (sqlite3.OperationalError, Broken, OSError) as error:
                self._waiting.extendleft(reversed(batch))
                self._has_work.set()
                self._complain(error)
                return
            except Exception as error:  # a record that cannot be written must not stand in the way of all others
                self._num_lost += len(batch)
                logs.error(_log, "records of requests are lost", error=error, records=len(batch))
            else:
                self._num_written += len(batch)
                self._is_full = False
        if self._is_failing:
            self._is_failing = False
            logs.info(_log, "the ledger is written again", dropped=self.num_dropped)

    def _write(self, batch: list[Row]) -> None:
        db = self._connection()
        try:
            with db:
                db.execute("BEGIN IMMEDIATE")
                for first in range(0, len(batch), AT_ONCE):
                    rows = batch[first : first + AT_ONCE]
                    db.execute(f"INSERT INTO requests VALUES {', '.join([_ROW] * len(rows))}", list(chain(*rows)))
        except sqlite3.DatabaseError as error:
            if not ledger_files.is_broken(error):
                raise
            self._begin_another()
            raise Broken(f"{error}; another file is begun") from error

    def _connection(self) -> sqlite3.Connection:
        """To the file of the day. Another one begins where that is full or gone."""
        today = ledger_files.day_of(self._clock())
        if self._db is not None and self._segment is not None:
            size = ledger_files.size_of(self._folder / self._segment.name)
            if self._segment.day == today and 0 < size < ledger_files.full_size(self._config):
                return self._db
            self._disconnect()
        present = ledger_files.segments(self._folder)
        db = self._connect(ledger_files.segment_to_write(present, today, self._config))
        for segment in ledger_files.segments_to_delete(present, today, self._config):
            ledger_files.delete(self._folder, segment)
            logs.info(_log, "old records are deleted", file=segment.name)
        return db

    def _connect(self, segment: Segment) -> sqlite3.Connection:
        """To this file, or to the first one after it that is ours."""
        while True:
            try:
                self._db = ledger_files.connect_to_write(self._folder / segment.name)
            except NotALedger as error:
                if segment.number == ledger_files.MAX_NUMBER:
                    raise Broken(f"{segment.name}: {error}") from error
                segment = Segment(segment.day, segment.number + 1)
            else:
                self._segment = segment
                return self._db

    def _begin_another(self) -> None:
        """The file is damaged: it stays for whoever can still read it, and the next one takes over."""
        self._disconnect()
        if self._segment is not None and self._segment.number < ledger_files.MAX_NUMBER:
            self._connect(Segment(self._segment.day, self._segment.number + 1))

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _complain(self, error: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            logs.warning(
                _log,
                "the ledger cannot be written, and is tried again; serving goes on",
                folder=str(self._folder),
                reason=str(error),
            )
