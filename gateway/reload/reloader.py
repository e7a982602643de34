"""A new configuration without a restart: read, checked completely, compared, and put in force at once; or refused.

    reloader = Reloader(source, live, digest, adopt, metrics)
    asyncio.create_task(reloader.attend())         # looks at the file, and waits to be asked
    reloader.ask()                                 # from a signal's handler
    outcome = await reloader.reload("request")     # what has changed; ConfigError where it is refused

A configuration that is refused changes nothing. What of a good one can only hold after a restart is named, and keeps
its old value; the rest of it holds. What that means for replicas says fleet.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from gateway.config import Config, ConfigError, Live
from gateway.records import logs
from gateway.records.metrics import Metrics
from gateway.reload.changes import compare
from gateway.reload.source import Source

Cause: TypeAlias = Literal["signal", "file", "request"]
# Puts it in force, and names the replicas whose secrets are others; raises `ConfigError` before anything is changed.
Adopt: TypeAlias = Callable[[Config], Awaitable[Sequence[str]]]

_log = logs.logger("reload")


class Outcome(Struct, frozen=True, kw_only=True):
    """What came of one reload. The paths are those of changes.py."""

    outcome: Literal["applied", "unchanged", "refused"]
    cause: Cause
    at: float  # seconds since 1970
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    error: str = ""


def lines(outcome: Outcome) -> Iterator[str]:
    """For the terminal."""
    yield {"applied": "The configuration is in force.", "unchanged": "Nothing has changed."}[outcome.outcome]
    yield from (f"  changed: {path}" for path in outcome.changed)
    yield from (f"  needs a restart: {path}" for path in outcome.needs_restart)


class Reloader:
    def __init__(self, source: Source, live: Live, digest: str, adopt: Adopt, metrics: Metrics) -> None:
        self._source = source
        self._live = live
        self._adopt = adopt
        self._metrics = metrics
        self._read = self._glimpsed = digest  # of what was read last, good or bad; and of what the last look saw
        self._asked = asyncio.Event()
        self._lock = asyncio.Lock()
        self._is_closed = False
        self._in_force_since = time.time()
        self.last: Outcome | None = None
        metrics.watch("goodgate_config_timestamp_seconds", lambda: [((), self._in_force_since)])

    def status(self) -> dict[str, Any]:
        """For people."""
        return {"in_force_since": self._in_force_since, "last_reload": self.last}

    def ask(self) -> None:
        """Have it read again soon, from the handler of a signal."""
        self._asked.set()

    def close(self) -> None:
        """A gateway that ends takes no other configuration any more."""
        self._is_closed = True

    async def attend(self) -> None:
        """Reload when asked, and where the configuration says so when the file has changed; until cancelled."""
        while not self._is_closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._live.config.reload.interval_s):
                    await self._asked.wait()
            is_asked = self._asked.is_set()
            self._asked.clear()
            try:
                if not self._is_closed and (is_asked or await self._has_settled()):
                    await self.reload("signal" if is_asked else "file")
            except ConfigError:
                pass  # it stands in the log, the metrics and the status
            except Exception as error:  # nobody foresaw it; the next file may be put right
                logs.error(_log, "a reload failed; the old configuration holds", error=error)

    async def reload(self, cause: Cause) -> Outcome:
        """What has changed. Raises `ConfigError` when the configuration is refused; then the old one holds."""
        async with self._lock:
            self._read = await asyncio.to_thread(self._source.digest, self._live.config)
            try:
                reading = await asyncio.to_thread(self._source.read)
                changes = compare(self._live.config, reading.config)
                rotated = await self._adopt(changes.config)
            except ConfigError as error:
                self._note(Outcome(outcome="refused", cause=cause, at=time.time(), error=error.message))
                raise
            self._read = reading.digest
            outcome = Outcome(
                outcome="applied" if changes.changed or rotated else "unchanged",
                cause=cause,
                at=time.time(),
                changed=(*changes.changed, *rotated),
                needs_restart=changes.needs_restart,
            )
            self._note(outcome)
            if cause == "request":
                self._source.spread()
            return outcome

    async def _has_settled(self) -> bool:
        """It is another one than was read last, and was so at the last look already: one that is being written is left
        alone, because half a file can be a valid one."""
        if not self._live.config.reload.watch:
            return False
        now = await asyncio.to_thread(self._source.digest, self._live.config)
        glimpsed, self._glimpsed = self._glimpsed, now
        return now != self._read and now == glimpsed

    def _note(self, outcome: Outcome) -> None:
        self.last = outcome
        self._metrics.add("goodgate_config_reloads", outcome.outcome)
        if outcome.outcome == "refused":
            logs.warning(_log, "configuration refused; the old one holds", cause=outcome.cause, reason=outcome.error)
            return
        if outcome.outcome == "applied":
            self._in_force_since = outcome.at
        logs.info(
            _log,
            f"configuration {outcome.outcome}",
            cause=outcome.cause,
            changed=", ".join(outcome.changed),
            needs_restart=", ".join(outcome.needs_restart),
        )
