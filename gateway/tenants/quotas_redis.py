"""The states of accounts in a Redis or Valkey, for gateways on several hosts.

    store = RedisStore("redis://10.0.0.5:6379/0", timeout_s=0.25, lease_s=10)

A change is two steps: look at the records, decide here, and swap them if nobody has changed them since, or else look
again. The server runs no logic of ours but that comparison. What comes while a change is under way is decided with the
next one, all at once, so the callers of one process never meet, and 200 of them cost a few round trips. The time is the
server's, so it does not matter what the hosts' clocks say.

The look is left out for a second after this process has seen or made a record: the swap tells whether it is still the
same. What is remembered may let a request in, but never refuses one.

As in the file (quotas_file.py) a record has a row for each process, with what that one holds. A process that the server
has not heard of for `lease_s` counts as dead, and its rows as empty.

A swap whose answer was lost is neither repeated nor forgotten: its row has the number of the swap, so the next look
tells whether it was made. While the server is down, requests are refused or let in as `allow` says, and what had to be
charged waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from gateway.records import logs
from gateway.tenants import accounts
from gateway.tenants.accounts import Account, Claim, Now, State
from gateway.tenants.budgets import Amount, Spending
from gateway.tenants.limits import Used
from gateway.tenants.quotas import NO_CLAIM, NOTHING, Outcome, QuotasUnavailable

try:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
except ImportError as error:
    raise QuotasUnavailable(
        "`quotas.store` names a Redis, whose library is missing here; install it with: pip install 'goodgate[redis]'."
    ) from error

REMEMBER_S = 1.0  # a record that nobody else has changed
RETRY_S = 0.1  # between tries while the server is down
CLOSE_TIMEOUT_S = 2.0
FORGET_AFTER_S = 3600  # a process that has been dead for so long

_LOOK = """
return {redis.call('TIME'), redis.call('HGETALL', KEYS[1]), redis.call('MGET', unpack(KEYS, 2))}
"""
_SWAP = """
for n = 2, #KEYS do
  if (redis.call('GET', KEYS[n]) or '') ~= ARGV[2 * n - 1] then return 0 end
end
for n = 2, #KEYS do redis.call('SET', KEYS[n], ARGV[2 * n]) end
redis.call('HSET', KEYS[1], ARGV[1], redis.call('TIME')[1] + ARGV[2])
return 1
"""
_log = logs.logger("quotas")


class Row(Struct, frozen=True, array_like=True):
    """What one process holds of an account, as of its swap with this number."""

    in_flight: int = 0
    tokens: int = 0
    gpu_us: int = 0
    swap: int = 0


class Record(Struct, frozen=True, array_like=True):
    """An account as it is kept, in JSON."""

    at: float = 0.0
    requests: float = 0.0
    tokens: float = 0.0
    period: int = 0
    tokens_spent: int = 0
    gpu_us_spent: int = 0
    rows: dict[str, Row] = {}

    def state(self, living: Iterable[str]) -> State:
        rows = [row for process, row in self.rows.items() if process in living]
        return State(
            Used(self.at, self.requests, self.tokens, sum(row.in_flight for row in rows)),
            Spending(
                self.period,
                self.tokens_spent,
                self.gpu_us_spent,
                sum(row.tokens for row in rows),
                sum(row.gpu_us for row in rows),
            ),
        )

    def changed(self, living: Iterable[str], process: str, swap: int, before: State, after: State) -> Record:
        """The record with what one process has made of its state. The rows of the dead are gone."""
        mine = self.rows.get(process, Row()) if process in living else Row()
        row = Row(
            max(mine.in_flight + after.used.in_flight - before.used.in_flight, 0),
            max(mine.tokens + after.spending.tokens_held - before.spending.tokens_held, 0),
            max(mine.gpu_us + after.spending.gpu_us_held - before.spending.gpu_us_held, 0),
            swap,
        )
        others = {name: other for name, other in self.rows.items() if name in living}
        used, spent = after.used, after.spending
        return Record(
            used.at, used.requests, used.tokens, spent.period, spent.tokens, spent.gpu_us, {**others, process: row}
        )


class _Seen(Struct):
    """What one look has found, or what is remembered of it."""

    now: Now
    living: set[str]
    texts: list[bytes]
    records: list[Record]
    is_remembered: bool = False


class _Memory:
    """The records as this process has last seen or made them, with the server's time."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[bytes, Record]] = {}
        self._looked = -math.inf  # on this host's steady clock, at which the server's showed `_then`
        self._then = 0.0
        self._living: set[str] = set()

    def keep(self, names: Sequence[str], seen: _Seen) -> None:
        self._looked, self._then, self._living = time.monotonic(), seen.now.wall, seen.living
        self.keep_records(names, seen.texts, seen.records)

    def keep_records(self, names: Sequence[str], texts: Sequence[bytes], records: Sequence[Record]) -> None:
        self._records.update(zip(names, zip(texts, records, strict=True), strict=True))

    def recall(self, names: Sequence[str]) -> _Seen | None:
        elapsed_s = time.monotonic() - self._looked
        found = [self._records[name] for name in names if name in self._records]
        if elapsed_s > REMEMBER_S or len(found) < len(names):
            return None
        now = self._then + elapsed_s
        return _Seen(Now(now, now), self._living, [text for text, _ in found], [record for _, record in found], True)

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self._records.pop(name, None)


class _Change:
    """A reservation that waits for its turn, or with `spent` a settlement."""

    def __init__(self, wanted: Sequence[Account], claim: Claim, spent: Amount | None = None) -> None:
        self.accounts = wanted
        self.claim = claim
        self.spent = spent
        self.names = [f"{each.kind}:{each.name}" for each in wanted]
        self.answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.is_abandoned = False

    def apply(self, states: dict[str, State], now: Now) -> Outcome:
        """Decide, and put what was decided into `states`."""
        before = [states[name] for name in self.names]
        if self.spent is None:
            outcome = accounts.reserve(self.accounts, before, now, self.claim)
            if not isinstance(outcome, list):
                return Outcome(accounts.current(self.accounts, before, now), now, refusal=outcome)
        else:
            outcome = accounts.settle(self.accounts, before, now, self.claim, self.spent)
        states.update(zip(self.names, outcome, strict=True))
        return Outcome(outcome, now, self.claim)


class RedisStore:
    """`allow`: requests come in, unmeasured, while the server is down."""

    def __init__(
        self,
        url: str,
        *,
        username: str | None = None,
        password: str | None = None,
        prefix: str = "goodgate:",
        timeout_s: float = 0.25,
        lease_s: int = 10,
        allow: bool = False,
    ) -> None:
        self._redis: Redis = Redis.from_url(
            url,
            username=username,
            password=password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # this module knows better what may be sent again
        )
        self._process = secrets.token_hex(8)
        self._living = f"{prefix}processes"
        self._prefix = f"{prefix}quota:"
        self._lease_s = lease_s
        self._allow = allow
        self._memory = _Memory()
        self._swaps = itertools.count(1)
        self._waiting: dict[str, list[_Change]] = {}  # by the account that a queue is for
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._owed: dict[str, _Change] = {}  # charges of requests that came in unmeasured
        self._outage: asyncio.Future[None] | None = None  # done while the server is down
        self._beat: asyncio.Task[None] | None = None
        self._is_closing = False

    async def reserve(self, wanted: Sequence[Account], claim: Claim) -> Outcome:
        change = _Change(wanted, claim)
        if not self._is_down:
            self._enqueue(change)
            try:
                await self._answered_or_down(change)
            except asyncio.CancelledError:
                self._abandon(change)
                raise
        if change.answer.done():
            return change.answer.result()
        self._abandon(change)
        if self._allow:
            return Outcome([], Now(0.0, 0.0), NO_CLAIM)
        raise QuotasUnavailable(
            "What this key has left is kept in a store that does not answer; try again shortly.", retry_after_s=1
        )

    async def settle(self, held: Sequence[Account], claim: Claim, spent: Amount) -> None:
        if claim == NO_CLAIM:
            self._owe(held, spent)
        else:
            change = _Change(held, claim, spent)
            self._enqueue(change)
            await self._answered_or_down(change)

    async def states(self, wanted: Sequence[Account]) -> Outcome:
        names = [f"{each.kind}:{each.name}" for each in wanted]
        try:
            seen = await self._look(names)
        except (RedisError, OSError) as error:
            raise QuotasUnavailable(f"The store of quotas does not answer: {error}.") from error
        states = [record.state(seen.living) for record in seen.records]
        return Outcome(accounts.current(wanted, states, seen.now), seen.now)

    async def tend(self) -> None:
        """Renew the lease, three times in its length; while the server is down look for it more often."""
        while True:
            self._beat = asyncio.create_task(self._renew(), name="renews the lease")
            await asyncio.shield(self._beat)  # its library may swallow a cancellation; it has deadlines of its own
            await asyncio.sleep(RETRY_S if self._is_down else self._lease_s / 3)

    async def close(self) -> None:
        """Wait a moment for what is under way, and leave. What could not be charged by then is not."""
        if self._workers:
            await asyncio.wait(self._workers.values(), timeout=CLOSE_TIMEOUT_S)
        self._is_closing = True
        await asyncio.gather(*self._workers.values(), *([] if self._beat is None else [self._beat]))
        with suppress(RedisError, OSError):  # the lease ends by itself
            await self._redis.hdel(self._living, self._process)
        await self._redis.aclose()

    async def _renew(self) -> None:
        try:
            await self._swap([], [], [])
            await self._forget_the_dead()
            self._up()
        except (RedisError, OSError) as error:
            self._down(error)

    # ------------------------------------------------------------------------------------------------ changes in turn

    def _enqueue(self, change: _Change) -> None:
        """Keys of a bounded tenant share its queue."""
        queue = change.names[-1]
        self._waiting.setdefault(queue, []).append(change)
        if queue not in self._workers:
            self._workers[queue] = asyncio.create_task(self._work(queue), name=f"quotas of {queue}")

    async def _work(self, queue: str) -> None:
        try:
            while changes := self._waiting.pop(queue, None):
                try:
                    self._answer(changes, await self._carry_out(changes))
                except Exception as error:
                    logs.error(_log, "what keys have used could not be changed", error=error)
                    for change in changes:
                        change.answer.set_exception(error)
                        change.answer.exception()  # nobody asks for that of a settlement
        finally:
            del self._workers[queue]

    async def _carry_out(self, changes: Sequence[_Change]) -> list[Outcome]:
        """One look, all decisions, one swap; from the beginning when others came between, or the server went."""
        names = sorted({name for change in changes for name in change.names})
        tried: dict[int, list[Outcome]] = {}
        while not self._is_closing:
            try:
                seen = self._memory.recall(names) or await self._look(names)
                for record in seen.records:
                    if (made := self._row_in(record).swap) in tried:
                        return tried[made]  # only its answer was lost
                before = {name: record.state(seen.living) for name, record in zip(names, seen.records, strict=True)}
                after = dict(before)
                outcomes = [self._decide(change, after, seen.now) for change in changes]
                if seen.is_remembered and any(outcome.refusal is not None for outcome in outcomes):
                    self._memory.forget(names)
                    continue
                if after == before:
                    return outcomes
                swap = next(self._swaps)
                tried[swap] = outcomes
                new = [
                    record.changed(seen.living, self._process, swap, before[name], after[name])
                    for name, record in zip(names, seen.records, strict=True)
                ]
                texts = [msgspec.json.encode(record) for record in new]
                self._memory.forget(names)  # until it is known what is there
                if await self._swap(names, seen.texts, texts):
                    self._memory.keep_records(names, texts, new)
                    return outcomes
                await asyncio.sleep(random.random() * min(len(tried), 10) / 1000)  # hosts that meet go apart
            except (RedisError, OSError) as error:
                self._memory.forget(names)
                self._down(error)
                await asyncio.sleep(RETRY_S)
        raise QuotasUnavailable("The gateway stops, and the store of quotas did not answer in time.")

    def _decide(self, change: _Change, states: dict[str, State], now: Now) -> Outcome:
        """One whose caller has gone before it was his turn holds nothing."""
        if change.is_abandoned and change.spent is None:
            return Outcome([], now, NO_CLAIM)
        return change.apply(states, now)

    def _answer(self, changes: Sequence[_Change], outcomes: Sequence[Outcome]) -> None:
        for change, outcome in zip(changes, outcomes, strict=True):
            change.answer.set_result(outcome)
            if change.is_abandoned:
                self._give_back(change)

    def _abandon(self, change: _Change) -> None:
        """Its caller has gone, or could not wait."""
        change.is_abandoned = True
        if change.answer.done():
            self._give_back(change)

    def _give_back(self, change: _Change) -> None:
        if change.spent is None and change.answer.exception() is None and change.answer.result().held != NO_CLAIM:
            self._enqueue(_Change(change.accounts, change.claim, NOTHING))

    def _owe(self, wanted: Sequence[Account], spent: Amount) -> None:
        """Charge without a claim. What comes while the server is down adds up to one change an account."""
        new = _Change(wanted, NO_CLAIM, spent)
        waiting = self._owed.get(",".join(new.names))
        if waiting is not None and waiting in self._waiting.get(new.names[-1], ()):
            assert waiting.spent is not None
            waiting.spent = Amount(waiting.spent.tokens + spent.tokens, waiting.spent.gpu_us + spent.gpu_us)
        else:
            self._owed[",".join(new.names)] = new
            self._enqueue(new)

    async def _answered_or_down(self, change: _Change) -> None:
        either: set[asyncio.Future[Any]] = {change.answer, self._outage_now()}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    # ------------------------------------------------------------------------------------------------------ the server

    async def _look(self, names: Sequence[str]) -> _Seen:
        (seconds, micros), hash_of_living, texts = await self._redis.eval(
            _LOOK, 1 + len(names), self._living, *self._keys(names)
        )
        now = int(seconds) + int(micros) / 1e6
        leases = zip(hash_of_living[::2], hash_of_living[1::2], strict=True)
        living = {process.decode() for process, until in leases if float(until) > now}
        found = [text or b"" for text in texts]
        seen = _Seen(Now(now, now), living | {self._process}, found, [_decoded(text) for text in found])
        self._memory.keep(names, seen)
        self._up()
        return seen

    async def _swap(self, names: Sequence[str], old: Sequence[bytes], new: Sequence[bytes]) -> bool:
        """Put new records in the place of the old ones, unless another one is there. It renews the lease too."""
        pairs = itertools.chain.from_iterable(zip(old, new, strict=True))
        made: Any = await self._redis.eval(
            _SWAP, 1 + len(names), self._living, *self._keys(names), self._process, self._lease_s, *pairs
        )
        return bool(made)

    async def _forget_the_dead(self) -> None:
        seconds, _ = await self._redis.time()
        leases = await self._redis.hgetall(self._living)
        dead = [process for process, until in leases.items() if float(until) < seconds - FORGET_AFTER_S]
        if dead:
            await self._redis.hdel(self._living, *dead)

    def _keys(self, names: Sequence[str]) -> Iterator[str]:
        return (self._prefix + name for name in names)

    def _row_in(self, record: Record) -> Row:
        return record.rows.get(self._process, Row())

    @property
    def _is_down(self) -> bool:
        return self._outage is not None and self._outage.done()

    def _outage_now(self) -> asyncio.Future[None]:
        if self._outage is None:
            self._outage = asyncio.get_running_loop().create_future()
        return self._outage

    def _down(self, error: Exception) -> None:
        if not self._is_down:
            then = "requests come in unmeasured" if self._allow else "keys with limits are refused"
            logs.warning(_log, f"the store of quotas does not answer; {then}", reason=str(error))
            self._outage_now().set_result(None)

    def _up(self) -> None:
        if self._is_down:
            logs.info(_log, "the store of quotas answers again")
            self._outage = None


def _decoded(text: bytes) -> Record:
    try:
        return msgspec.json.decode(text, type=Record) if text else Record()
    except msgspec.MsgspecError as error:
        raise QuotasUnavailable("A record in the store of quotas was not written by this version.") from error
