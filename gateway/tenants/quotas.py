"""How much each key has used, for all processes that serve it: one record a key in memory that they share.

    quotas = Quotas()                      # of one process; Quotas.shared() goes to workers as an argument
    with quotas.reserved(key, requests=1, tokens=300) as reservation:      # RateLimited when it does not fit
        reservation.spent = 120

The records lie in a file without a name, mapped into every worker, and each change is made under the file's lock. The
kernel gives the lock back when its holder dies. A change takes microseconds, so it is made on the event loop. Use is
not kept over a restart of the gateway.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from typing import Any

from adapters.errors import InvalidRequest
from gateway.tenants import limits
from gateway.tenants.keys import MAX_KEYS, Key
from gateway.tenants.limits import RateLimited, Refused, Used

_RECORD = struct.Struct("<dddq")
_SIZE = _RECORD.size * (MAX_KEYS + 1)


class Reservation:
    """A request that was let in. `spent` is told before it ends; `headers` are for its answer."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers
        self.spent = 0


class Quotas:
    def __init__(self, file: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._memory = mmap.mmap(-1 if file is None else file, _SIZE)
        self._clock = clock  # the system's monotonic clock is the same in every process

    @classmethod
    def shared(cls) -> Quotas:
        """One whose copies in child processes are the same quotas."""
        with tempfile.TemporaryFile() as file:
            file.truncate(_SIZE)
            return cls(os.dup(file.fileno()))

    def __reduce__(self) -> tuple[Any, ...]:
        assert self._file is not None, "only a shared quotas can go to another process"
        return _received, (reduction.DupFd(self._file),)

    def used(self, key: Key) -> Used:
        return limits.drained(key.limits, self._read(key), self._clock())

    @contextmanager
    def reserved(
        self, key: Key, *, requests: int, tokens: int, tell: Callable[[dict[str, str]], None] = lambda _: None
    ) -> Iterator[Reservation]:
        """Holds the request's share of the key's limits for as long as the block. `tell` gets the headers of its
        answer, of a refusal too."""
        if (bound := limits.too_many_at_once(key.limits, requests)) is not None:
            raise InvalidRequest(f"With this key one request may hold at most {bound} prompts.", param="prompt")
        with self._locked():
            now, before = self._clock(), self._read(key)
            outcome = limits.reserve(key.limits, before, now, requests=requests, tokens=tokens)
            if isinstance(outcome, Used):
                self._write(key, outcome)
        if isinstance(outcome, Refused):
            tell(limits.headers(key.limits, limits.drained(key.limits, before, now)))
            raise RateLimited(
                f"This key may use {outcome.reason}; try again in {outcome.retry_after_s:.1f} s.",
                retry_after_s=outcome.retry_after_s,
            )
        reservation = Reservation(limits.headers(key.limits, outcome))
        tell(reservation.headers)
        try:
            yield reservation
        finally:
            with self._locked():
                after = limits.settle(
                    key.limits,
                    self._read(key),
                    self._clock(),
                    requests=requests,
                    reserved=tokens,
                    spent=reservation.spent,
                )
                self._write(key, after)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._file is None:
            yield
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _read(self, key: Key) -> Used:
        return Used(*_RECORD.unpack_from(self._memory, key.id * _RECORD.size))

    def _write(self, key: Key, used: Used) -> None:
        _RECORD.pack_into(self._memory, key.id * _RECORD.size, used.at, used.requests, used.tokens, used.in_flight)


def _received(file: Any) -> Quotas:
    return Quotas(file.detach())
