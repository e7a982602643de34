"""The ledger's files: one for each UTC day and, where a day is full, several. Whoever writes or reads them asks here.

    GOODGATE_HOME/state/ledger/2026-11-30.0000.sqlite       requests that ended on that day

A file is deleted whole, oldest first: once it is older than `keep_days`, or while all of them exceed `max_mib`. So what
is kept can be a little less than the bounds allow, and to let go of a million records costs no more than of one.
"""

from __future__ import annotations

import os
import re
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from msgspec import Struct

from gateway.config import LedgerConfig
from gateway.records.record import COLUMNS

FOLDER = "state/ledger"
LAYOUT = zlib.crc32(",".join(COLUMNS).encode()) >> 1  # changes with the columns; other files are not touched
BUSY_TIMEOUT_S = 5.0  # how long one process waits for another one's batch
PARTS = 8  # no file holds more than this part of `max_mib`, so deleting one never takes more
MAX_NUMBER = 9999

_NAME = re.compile(r"(\d{4}-\d\d-\d\d)\.(\d{4})\.sqlite")
_OTHER_LAYOUT = "it was written by another version of Goodgate"
_BESIDE = ("", "-wal", "-shm")  # what SQLite keeps beside a file
_TABLE = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS requests ({", ".join(COLUMNS)});
CREATE INDEX IF NOT EXISTS by_id ON requests (request_id);
CREATE INDEX IF NOT EXISTS by_time ON requests (received);
PRAGMA user_version = {LAYOUT};
COMMIT;
"""


class NotALedger(Exception):
    """The file has another layout, or is no database."""


class NotBegun(NotALedger):
    """There is nothing in the file yet: it is being made right now."""


class Segment(Struct, frozen=True, order=True):
    """One of the files. Their order is that of time."""

    day: date
    number: int
    size: int = 0  # in bytes, with what is written but not yet in its place

    @property
    def name(self) -> str:
        return f"{self.day}.{self.number:04}.sqlite"


def segments(folder: Path) -> list[Segment]:
    """Those that there are, oldest first."""
    return sorted(_found(folder)) if folder.is_dir() else []


def _found(folder: Path) -> Iterator[Segment]:
    for path in folder.iterdir():
        if (match := _NAME.fullmatch(path.name)) is not None:
            try:
                yield Segment(date.fromisoformat(match[1]), int(match[2]), size_of(path))
            except ValueError:
                continue  # 2026-02-31: a stranger's file


def size_of(path: Path) -> int:
    """Bytes on disk, with the write-ahead log; 0 for what has just gone."""
    total = 0
    for suffix in _BESIDE:
        try:
            total += os.stat(f"{path}{suffix}").st_size
        except FileNotFoundError:
            continue
    return total


def day_of(at: float) -> date:
    return datetime.fromtimestamp(at, UTC).date()


def full_size(config: LedgerConfig) -> int:
    """Bytes from which on a file takes no more."""
    return (config.max_mib << 20) // PARTS


def segment_to_write(present: Sequence[Segment], today: date, config: LedgerConfig) -> Segment:
    """Today's last one, or its next where that is full."""
    of_today = [segment for segment in present if segment.day == today]
    if not of_today:
        return Segment(today, 0)
    last = max(of_today)
    is_full = last.size >= full_size(config) and last.number < MAX_NUMBER
    return Segment(today, last.number + 1) if is_full else last


def segments_to_delete(present: Sequence[Segment], today: date, config: LedgerConfig) -> list[Segment]:
    """What is too old, and as many of the oldest as leave no room for a full one.

    >>> day = date(2026, 11, 30)
    >>> present = [Segment(day, 0, 4 << 20), Segment(day, 1, 4 << 20)]
    >>> [each.name for each in segments_to_delete(present, day, LedgerConfig(max_mib=8))]
    ['2026-11-30.0000.sqlite']
    """
    first_kept = today - timedelta(days=config.keep_days - 1)
    excess = sum(segment.size for segment in present) + full_size(config) - (config.max_mib << 20)
    doomed = []
    for segment in sorted(present):
        if segment.day >= first_kept and excess <= 0:
            break
        doomed.append(segment)
        excess -= segment.size
    return doomed


def delete(folder: Path, segment: Segment) -> None:
    """The file, or what another process has left of it."""
    for suffix in _BESIDE:
        (folder / f"{segment.name}{suffix}").unlink(missing_ok=True)


def connect_to_write(path: Path) -> sqlite3.Connection:
    """Make the file where there is none, for its owner's eyes only. Raises `NotALedger`, `sqlite3.Error`, `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        if _layout(db) not in (0, LAYOUT):
            raise NotALedger(_OTHER_LAYOUT)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # a batch survives the process at once, the machine by and by
        db.executescript(_TABLE)
    except BaseException:
        db.close()
        raise
    return db


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Raises `NotBegun`, `NotALedger`, `sqlite3.Error`."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout=BUSY_TIMEOUT_S, uri=True, isolation_level=None)
    try:
        if (layout := _layout(db)) != LAYOUT:
            raise NotALedger(_OTHER_LAYOUT) if layout else NotBegun
    except BaseException:
        db.close()
        raise
    return db


def is_broken(error: sqlite3.DatabaseError) -> bool:
    """The file is damaged, or was never a database. Anything else (locked, full, unreadable) may pass."""
    return error.sqlite_errorname in ("SQLITE_CORRUPT", "SQLITE_NOTADB")


def _layout(db: sqlite3.Connection) -> int:
    try:
        return int(db.execute("PRAGMA user_version").fetchone()[0])
    except sqlite3.DatabaseError as error:
        if is_broken(error):
            raise NotALedger(str(error)) from error
        raise
