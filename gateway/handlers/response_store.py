"""Responses that clients may come back to: bounded, and forgotten after a time.

    store = store_of(config.responses, home)             # None where nothing is kept
    store.open()                                         # ConfigError where its file cannot be used
    is_kept = await store.put("resp_1", Stored(response=b"{...}", items=b"[...]"))
    stored = await store.get("resp_1")                   # None once it is gone
    await store.delete("resp_1"), await store.close()

It is SQLite either way, in memory or in a file, so both keep the same promises. The file is one for all workers of a
gateway; memory is one worker's own, which is why several workers keep nothing in it (`gateway/web/workers.py`). Beyond
`max_responses` or `max_mib` the one that was used longest ago goes first. Each response holds the whole conversation
that led to it, so that none depends on another one that is gone. All work is done in one thread of the store's own.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from adapters.errors import GoodgateError
from gateway.config import ConfigError, ResponsesConfig

T = TypeVar("T")

FILE = "state/responses.sqlite"
LAYOUT = 1  # of the table; a file with another one begins anew
BUSY_TIMEOUT_S = 5.0  # how long a worker waits for another one's write

# `size` and `used` stand in an index of their own, so that the bounds are checked without reading any conversation.
_TABLE = f"""
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, size INTEGER NOT NULL, used INTEGER NOT NULL, expires REAL NOT NULL,
    response BLOB NOT NULL, items BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used, size);
CREATE INDEX IF NOT EXISTS by_end ON responses (expires);
PRAGMA user_version = {LAYOUT};
"""
_NEXT_USE = "(SELECT COALESCE(MAX(used), 0) + 1 FROM responses)"  # a count, not a clock: ties would be ambiguous
_EVICT = """
DELETE FROM responses WHERE rowid IN (
    SELECT rowid FROM (
        SELECT rowid, ROW_NUMBER() OVER latest AS place, SUM(size) OVER latest AS total
        FROM responses WINDOW latest AS (ORDER BY used DESC ROWS UNBOUNDED PRECEDING)
    ) WHERE place > ? OR total > ?
)
"""


class Stored(Struct, frozen=True):
    """A response and the items that led to it, both as JSON."""

    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items)


class StoreFailed(GoodgateError):
    code = "response_store_failed"


def store_of(config: ResponsesConfig, home: Path) -> ResponseStore | None:
    if config.keep == "none":
        return None
    return ResponseStore(config, None if config.keep == "memory" else home / FILE)


class ResponseStore:
    def __init__(self, config: ResponsesConfig, path: Path | None, *, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._path = path
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="response store")
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        self._connection = _connect(self._path)

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._connection is not None  # the gateway opens it before it listens
        return self._connection

    async def put(self, id: str, stored: Stored) -> bool:
        """Keep a response; False where it alone is beyond the bounds."""
        if stored.size > self._config.max_mib << 20:
            return False
        await self._do(lambda: self._put(id, stored))
        return True

    async def get(self, id: str) -> Stored | None:
        return await self._do(lambda: self._get(id))

    async def delete(self, id: str) -> bool:
        """True where there was one."""
        return await self._do(lambda: self._delete(id))

    async def close(self) -> None:
        try:
            if self._connection is not None:
                await self._do(self._connection.close)
        finally:
            self._thread.shutdown()

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            where = "in memory" if self._path is None else str(self._path)
            raise StoreFailed(f"The store of responses {where} failed: {error}.") from error

    def _put(self, id: str, stored: Stored) -> None:
        now = self._clock()
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._forget_expired(now)
            self._db.execute(
                f"INSERT OR REPLACE INTO responses VALUES (?, ?, {_NEXT_USE}, ?, ?, ?)",
                (id, stored.size, now + self._config.ttl_s, stored.response, stored.items),
            )
            self._db.execute(_EVICT, (self._config.max_responses, self._config.max_mib << 20))

    def _get(self, id: str) -> Stored | None:
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._forget_expired(self._clock())
            row = self._db.execute("SELECT response, items FROM responses WHERE id = ?", (id,)).fetchone()
            if row is None:
                return None
            self._db.execute(f"UPDATE responses SET used = {_NEXT_USE} WHERE id = ?", (id,))
        return Stored(*row)

    def _delete(self, id: str) -> bool:
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._forget_expired(self._clock())
            return self._db.execute("DELETE FROM responses WHERE id = ?", (id,)).rowcount > 0

    def _forget_expired(self, now: float) -> None:
        self._db.execute("DELETE FROM responses WHERE expires <= ?", (now,))


def _connect(path: Path | None) -> sqlite3.Connection:
    """Raises `ConfigError` where the file cannot be used."""
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # conversations are nobody else's to read
        db = sqlite3.connect(path or ":memory:", timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten
        if path is not None:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
        if db.execute("PRAGMA user_version").fetchone()[0] not in (0, LAYOUT):
            db.execute("DROP TABLE IF EXISTS responses")
        db.executescript(_TABLE)
        return db
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"Responses cannot be kept in {path}: {error}; remove the file, or set `responses.keep` to memory."
        ) from error
