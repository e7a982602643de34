"""The states of accounts in one file that all gateway processes of a host map into their memory.

    store = FileStore(home)       # opened by the first request that needs it

Each change is made under the file's lock, which the kernel gives back when its holder dies. A change takes
microseconds, so it is made on the event loop.

A record is what an account has used, followed by a row for each process with what that one holds now: requests in
flight, and tokens and GPU time of budgets. A process writes no row but its own, and what is held is the sum of all.
A process that dies leaves rows and a lock that nobody holds; whoever notices empties the rows. What was spent is kept
over restarts. The buckets of the limits are not: their clock is that of the running system.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.tenants import accounts
from gateway.tenants.accounts import Account, Claim, Now, State
from gateway.tenants.budgets import Amount, Spending
from gateway.tenants.limits import Used
from gateway.tenants.quotas import Outcome, QuotasUnavailable

MAX_PROCESSES = 128
TEND_INTERVAL_S = 1.0
_MAGIC = b"goodgate quotas 1\n".ljust(32)
_PROCESSES = len(_MAGIC)
_HEADER = _PROCESSES + MAX_PROCESSES  # then a byte for each process: 1 as long as it may hold something
_BUCKETS = struct.Struct("<ddd")  # at, requests, tokens
_SHARED = struct.Struct("<dddqqq")  # the buckets, then what was spent: period, tokens, gpu_us
_ROW = struct.Struct("<qqq")  # in flight, tokens held, gpu_us held
_RECORDS = tuple(struct.Struct(f"<dddqqq{_num * 3}q") for _num in range(MAX_PROCESSES + 1))  # by the number of rows
_ROWS = _SHARED.size
_RECORD = _ROWS + MAX_PROCESSES * _ROW.size
_STEP = 64 * _RECORD  # the file grows by so much


def this_host() -> Now:
    return Now(time.monotonic(), time.time())


class FileStore:
    def __init__(self, home: Path, *, clock: Callable[[], Now] = this_host) -> None:
        self._folder = _folder_in(home)
        self._clock = clock  # the system's monotonic clock is the same in every process
        self._table: _Table | None = None

    async def reserve(self, wanted: Sequence[Account], claim: Claim) -> Outcome:
        table = self._opened()
        with table.lock:
            now, before = self._clock(), table.read(wanted)
            outcome = accounts.reserve(wanted, before, now, claim)
            if not isinstance(outcome, list):
                return Outcome(accounts.current(wanted, before, now), now, refusal=outcome)
            table.write(wanted, before, outcome)
        return Outcome(outcome, now, claim)

    async def settle(self, held: Sequence[Account], claim: Claim, spent: Amount) -> None:
        table = self._opened()
        with table.lock:
            before = table.read(held)
            table.write(held, before, accounts.settle(held, before, self._clock(), claim, spent))

    async def states(self, wanted: Sequence[Account]) -> Outcome:
        table = self._opened()
        with table.lock:
            now = self._clock()
            return Outcome(accounts.current(wanted, table.read(wanted), now), now)

    async def tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_INTERVAL_S)
            if self._table is not None:
                self._table.bury_the_dead()

    async def close(self) -> None:
        if self._table is not None:
            self._table.close()
            self._table = None

    def _opened(self) -> _Table:
        if self._table is None:
            try:
                self._table = _Table(self._folder)
            except OSError as error:
                raise QuotasUnavailable(_cannot_be_kept(self._folder, error)) from error
        return self._table


def spending(home: Path, wanted: Sequence[Account]) -> list[Spending] | None:
    """What accounts had spent, for those who only look; None where nothing was kept yet."""
    path = _folder_in(home) / _ACCOUNTS
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise QuotasUnavailable(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        if os.fstat(file).st_size == 0:  # it is being made
            return None
        with _Lock(file), mmap.mmap(file, 0, access=mmap.ACCESS_READ) as memory:
            _check_magic(memory, path)
            return [state.spending for state in _read(memory, [_place(each) for each in wanted])]
    finally:
        os.close(file)


class _Table:
    """The open file, with a row of its own in each record. Opened by the first process it is emptied of what others
    have left, which takes its lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = _open(folder / _ACCOUNTS)
        self.lock = _Lock(self._file)
        self._life = -1
        try:
            with self.lock:
                if os.fstat(self._file).st_size == 0:
                    os.pwrite(self._file, _MAGIC.ljust(_HEADER, b"\0"), 0)
                self._memory = mmap.mmap(self._file, os.fstat(self._file).st_size)
                _check_magic(self._memory, folder / _ACCOUNTS)
                self._row, self._life = self._claim_row()
                self._bury()
                if self._living() == {self._row}:
                    self._empty_buckets()
        except BaseException:
            self.close()
            raise

    def read(self, wanted: Sequence[Account]) -> list[State]:
        places = [_place(account) for account in wanted]
        if (end := max(places) + _RECORD) > len(self._memory):
            self._grow(end)
        return _read(self._memory, places)

    def write(self, changed: Sequence[Account], before: Sequence[State], after: Sequence[State]) -> None:
        """What was spent goes before what is no longer held: a process that dies between them has charged it."""
        for account, old, new in zip(changed, before, after, strict=True):
            place = _place(account)
            used, spent = new.used, new.spending
            _SHARED.pack_into(
                self._memory, place, used.at, used.requests, used.tokens, spent.period, spent.tokens, spent.gpu_us
            )
            place += _ROWS + self._row * _ROW.size
            in_flight, tokens, gpu_us = _ROW.unpack_from(self._memory, place)
            in_flight += used.in_flight - old.used.in_flight
            tokens += spent.tokens_held - old.spending.tokens_held
            gpu_us += spent.gpu_us_held - old.spending.gpu_us_held
            if in_flight < 0 or tokens < 0 or gpu_us < 0:
                in_flight, tokens, gpu_us = max(in_flight, 0), max(tokens, 0), max(gpu_us, 0)
            _ROW.pack_into(self._memory, place, in_flight, tokens, gpu_us)

    def bury_the_dead(self) -> None:
        """Give back what processes held that are no longer there."""
        with self.lock:
            self._bury()

    def close(self) -> None:
        if self._life >= 0:
            with self.lock:
                self._empty_row(self._row)
            os.close(self._life)
            self._life = -1
            self._memory.close()
        os.close(self._file)

    def _claim_row(self) -> tuple[int, int]:
        """A free row, and the file whose lock says that its process lives."""
        for row in range(MAX_PROCESSES):
            if (life := _lock_of(self._folder, row)) is not None:
                self._empty_row(row)
                self._memory[len(_MAGIC) + row] = 1
                return row, life
        raise QuotasUnavailable(f"{MAX_PROCESSES} processes share {self._folder} already, which is all that can.")

    def _living(self) -> set[int]:
        return {row for row in range(MAX_PROCESSES) if self._memory[len(_MAGIC) + row]}

    def _bury(self) -> None:
        for row in self._living() - {self._row}:
            if (life := _lock_of(self._folder, row)) is not None:
                self._empty_row(row)
                os.close(life)

    def _empty_row(self, row: int) -> None:
        nothing = bytes(_ROW.size)
        for record in range(_HEADER, len(self._memory) - _RECORD + 1, _RECORD):
            place = record + _ROWS + row * _ROW.size
            self._memory[place : place + _ROW.size] = nothing
        self._memory[len(_MAGIC) + row] = 0

    def _empty_buckets(self) -> None:
        nothing = bytes(_BUCKETS.size)
        for record in range(_HEADER, len(self._memory) - _RECORD + 1, _RECORD):
            self._memory[record : record + _BUCKETS.size] = nothing

    def _grow(self, end: int) -> None:
        """Map all of the file, which another process may have made longer already. Zeros are written rather than left
        to the mapping: on a full disk that would end the process."""
        try:
            size = os.fstat(self._file).st_size
            wanted = size + -(-(end - size) // _STEP) * _STEP
            while size < end:  # a disk with some room left takes a part, and refuses the rest
                size += os.pwrite(self._file, bytes(wanted - size), size)
            self._memory.close()
            self._memory = mmap.mmap(self._file, os.fstat(self._file).st_size)
        except OSError as error:
            raise QuotasUnavailable(_cannot_be_kept(self._folder, error)) from error


_ACCOUNTS = "accounts"


def _folder_in(home: Path) -> Path:
    return home / "state" / "quotas"


def _cannot_be_kept(folder: Path, error: OSError) -> str:
    return f"What keys have used cannot be kept in {folder} ({error.strerror or error}); the gateway needs that folder."


def _check_magic(memory: mmap.mmap, path: Path) -> None:
    if len(memory) < _HEADER or memory[: len(_MAGIC)] != _MAGIC:
        raise QuotasUnavailable(f"{path} was not written by this version; move it away.")


def _place(account: Account) -> int:
    """Keys and tenants are numbered apart, and take turns in the file."""
    return _HEADER + (2 * account.id + (account.kind == "tenant")) * _RECORD


def _read(memory: mmap.mmap, places: Sequence[int]) -> list[State]:
    """The states of the records there. What lies beyond the end of the file was never used."""
    num_rows = memory.rfind(b"\1", _PROCESSES, _HEADER) + 1 - _PROCESSES
    if num_rows < 0:  # no process has one
        num_rows = 0
    end, record, states = len(memory) - _RECORD, _RECORDS[num_rows], []
    for place in places:
        if place > end:
            states.append(accounts.NEW)
            continue
        at, requests, tokens, period, spent_tokens, spent_gpu_us, *rows = record.unpack_from(memory, place)
        if num_rows == 1:
            in_flight, tokens_held, gpu_us_held = rows
        else:
            in_flight, tokens_held, gpu_us_held = sum(rows[0::3]), sum(rows[1::3]), sum(rows[2::3])
        spending = Spending(period, spent_tokens, spent_gpu_us, tokens_held, gpu_us_held)
        states.append(State(Used(at, requests, tokens, in_flight), spending))
    return states


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock_of(folder: Path, row: int) -> int | None:
    """The locked file of a row that no living process has; None where one has it."""
    life = _open(folder / f"process-{row}")
    try:
        fcntl.flock(life, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(life)
        return None
    return life


class _Lock:
    """The lock of a file. Not a generator, which would cost more than the lock itself."""

    __slots__ = ("_file",)

    def __init__(self, file: int) -> None:
        self._file = file

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
