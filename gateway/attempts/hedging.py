"""A second replica is asked when the first is unusually late with its first token; whoever begins first answers.

    hedges = Hedges(fleet, gates, metrics)
    attempt = hedges.hedged(model, check, attempt)     # the same attempt where the model has no `hedge:`
    async with attempt(replica, Try()) as answer: ...

Hedging doubles the work of a request, so it is off unless a model asks for it, and bounded then: a share of the
requests, only to another replica of the same model that has nothing waiting and is not full, never while requests of
the model wait for their turn. The loser is cancelled as soon as there is a winner, and the block does not end before it
is gone. Both are attempts in the records: the loser's outcome is `lost`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Generic, TypeVar

from adapters.errors import GoodgateError, UnsupportedOperation, UnsupportedParameter
from gateway.admission.gate import Gates
from gateway.attempts.hedge_timing import HedgeTiming
from gateway.attempts.retries import MakeAttempt
from gateway.attempts.tries import HEDGE, Try
from gateway.config import HedgeConfig
from gateway.records.metrics import Metrics
from gateway.replicas.replica import Replica, ServedModel
from gateway.routing.router import Check

T = TypeVar("T")


class Hedges:
    def __init__(self, gates: Gates, metrics: Metrics) -> None:
        self._gates = gates
        self._metrics = metrics
        self._timings: dict[str, tuple[HedgeConfig, HedgeTiming]] = {}

    def hedged(self, model: ServedModel, check: Check, attempt: MakeAttempt[T]) -> MakeAttempt[T]:
        if model.config.hedge is None or len(model.replicas) < 2:
            return attempt
        return partial(self._attempt, model, self._timing(model.name, model.config.hedge), check, attempt)

    @asynccontextmanager
    async def _attempt(
        self,
        model: ServedModel,
        timing: HedgeTiming,
        check: Check,
        attempt: MakeAttempt[T],
        replica: Replica,
        how: Try,
    ) -> AsyncIterator[T]:
        began = time.perf_counter()
        timing.opened(began)
        runners = [_Runner(attempt, replica, how)]
        try:
            if (other := await self._late(runners[0], model, timing, check, replica)) is not None:
                runners.append(_Runner(attempt, other, Try(why=HEDGE)))
            winner = await _winner(runners)
            timing.answered(time.perf_counter() - began)
            losers = [runner for runner in runners if runner is not winner]
            for loser in losers:
                await loser.end(is_lost=True)
            if losers:
                self._metrics.add("goodgate_hedges", model.name, "first" if winner is runners[0] else HEDGE)
            answer = await winner.task
            async with winner.stack:
                yield answer
        finally:
            for runner in runners:
                await runner.end()

    def _timing(self, model: str, config: HedgeConfig) -> HedgeTiming:
        known = self._timings.get(model)
        if known is None or known[0] != config:  # the configuration may be another by now
            known = self._timings[model] = config, HedgeTiming(config)
        return known[1]

    async def _late(
        self, runner: _Runner[T], model: ServedModel, timing: HedgeTiming, check: Check, replica: Replica
    ) -> Replica | None:
        """Another replica to ask, once this one is late; None where it is not, or nobody else should be asked."""
        if (delay_s := timing.delay_s()) is None:
            return None
        await asyncio.wait([runner.decided], timeout=delay_s)
        now = time.perf_counter()
        if runner.decided.done() or not timing.may_hedge(now):
            return None
        other = self._spare(model, replica, check, now)
        if other is not None:
            timing.hedged(now)
        return other

    def _spare(self, model: ServedModel, first: Replica, check: Check, now: float) -> Replica | None:
        """The replica of the same model with the least to do, if it can do this and has time for it."""
        if first not in model.replicas or self._gates.num_waiting(model.name):
            return None
        idle = [
            each
            for each in model.replicas
            if each is not first and each.has_room and not each.load.waiting and each.standing.may_serve(now)
        ]
        return min((each for each in idle if _can(each, check)), key=lambda each: each.open_tokens, default=None)


def _can(replica: Replica, check: Check) -> bool:
    try:
        check(replica.started_adapter)
    except (UnsupportedParameter, UnsupportedOperation):
        return False
    return True


class _Runner(Generic[T]):
    """One attempt of a race. `decided` is done when it has its first token, its answer, or has failed."""

    def __init__(self, attempt: MakeAttempt[T], replica: Replica, how: Try) -> None:
        self.how = how
        self.stack = AsyncExitStack()
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tell, how.on_first_token = how.on_first_token, self._first_token
        self.task = asyncio.ensure_future(self.stack.enter_async_context(attempt(replica, how)))
        self.task.add_done_callback(self._decide)

    def _first_token(self) -> None:
        self._tell()
        self._decide()

    def _decide(self, _: object = None) -> None:
        if not self.decided.done():
            self.decided.set_result(None)

    @property
    def failure(self) -> BaseException | None:
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None

    async def end(self, *, is_lost: bool = False) -> None:
        """Stops the attempt, wherever it is, and waits until it has given everything back."""
        self.how.is_lost = is_lost or self.how.is_lost
        if not self.task.done():
            self.task.cancel()
        await asyncio.wait([self.task])
        if not self.task.cancelled() and self.task.exception() is None:  # its answer is open, if nobody has closed it
            cancelled = asyncio.CancelledError()
            await self.stack.__aexit__(type(cancelled), cancelled, None)


async def _winner(runners: Sequence[_Runner[T]]) -> _Runner[T]:
    """The first that begins to answer. Raises a failure that no other replica would mend, or that of the first where
    all have failed."""
    while True:
        for runner in runners:
            if isinstance(runner.failure, GoodgateError) and not runner.failure.retryable:
                raise runner.failure
            if runner.decided.done() and runner.failure is None:
                return runner
        undecided = [runner.decided for runner in runners if not runner.decided.done()]
        if not undecided:
            assert runners[0].failure is not None
            raise runners[0].failure
        await asyncio.wait(undecided, return_when=asyncio.FIRST_COMPLETED)
