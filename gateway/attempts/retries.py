"""One attempt after the other, while the failures are such that the next one may do better.

    retries = Retries(live, metrics)
    with retries.request():
        answer = await retries.first_answer(stack, route, attempt, max_attempts=3)

Only ever before anything has reached the client: once this has answered there is no second attempt. This is the one
layer that repeats anything. It goes over the replicas of a route in their order, and when all have been asked and tries
are left, over those again that may do better after a pause. Every try but the first needs a place in the budget of
retry_budget.py. A replica that has told when to come back is left out of routes until then; where that leaves none, the
request waits for it as long as `max_wait_s` allows, or is refused with that time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from adapters.errors import GoodgateError, Overloaded
from gateway.attempts.retry_budget import RetryBudget, pause_s
from gateway.attempts.tries import Try
from gateway.config import Live
from gateway.records.metrics import Metrics
from gateway.replicas.replica import Replica
from gateway.routing.router import Resting, Route

LATE_S = 0.25  # at most, after the time that a replica has named: not all who wait for it at the same moment

T = TypeVar("T")
NewRoute: TypeAlias = Callable[[], Route]  # to those that may be asked now
MakeAttempt: TypeAlias = Callable[[Replica, Try], AbstractAsyncContextManager[T]]


class Retries:
    def __init__(self, live: Live, metrics: Metrics) -> None:
        self._live = live
        self._metrics = metrics
        self._budget = RetryBudget()
        self._counted = _Counted(self._budget)
        self._news = asyncio.Event()  # set, and replaced, when a retry gives its place back

    def request(self) -> AbstractContextManager[None]:
        """Counts one request; what all of them may repeat is a share of these."""
        return self._counted

    async def first_answer(
        self, stack: AsyncExitStack, new_route: NewRoute, attempt: MakeAttempt[T], max_attempts: int
    ) -> T:
        """The first answer, or the last failure. What answers stays open on the stack, and below it the route, which
        keeps its model loaded."""
        pursuit = _Pursuit(max_attempts, patient_until=time.monotonic() + self._live.retries.max_wait_s)
        while True:
            route = new_route()
            try:
                async for replica in route:
                    if replica in pursuit.asked_in_vain:
                        continue
                    try:
                        return await self._asked(stack, route, replica, attempt, pursuit)
                    except GoodgateError as error:
                        pursuit.note(replica, error)
            except Resting as rest:
                route.close()
                pursuit.resting = rest
            except BaseException as error:
                route.close()
                if isinstance(error, GoodgateError):
                    raise pursuit.failure or error from error.__cause__
                raise
            await asyncio.sleep(pursuit.pause_s())

    async def _asked(
        self, stack: AsyncExitStack, route: Route, replica: Replica, attempt: MakeAttempt[T], pursuit: _Pursuit
    ) -> T:
        if pursuit.failure is None:
            return await _opened(stack, route, attempt(replica, Try()))
        await self._place(replica, pursuit.failure, pursuit.patient_until)
        how = Try(why=pursuit.failure.code or pursuit.failure.type)
        loan = _Loan(self._budget, self._tell)
        how.on_first_token = loan.give_back
        self._metrics.add("goodgate_retries", replica.model, how.why)
        try:
            return await _opened(stack, route, attempt(replica, how))
        except GoodgateError:
            self._budget.lost(time.monotonic())
            raise
        finally:
            loan.give_back()

    async def _place(self, replica: Replica, failure: GoodgateError, patient_until: float) -> None:
        """Waits for a place in the budget. Raises the failure where there is none, or not in time."""
        while (verdict := self._budget.verdict(time.monotonic(), self._live.retries)) != "go":
            try:
                if verdict == "spent":
                    raise TimeoutError
                async with asyncio.timeout(patient_until - time.monotonic()):
                    await self._news.wait()
            except TimeoutError:
                self._metrics.add("goodgate_retries_refused", replica.model)
                raise failure from None

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


async def _opened(stack: AsyncExitStack, route: Route, attempt: AbstractAsyncContextManager[T]) -> T:
    answer = await attempt.__aenter__()
    stack.push_async_exit(_OnItsWay(attempt, route))
    return answer


class _OnItsWay(AbstractAsyncContextManager[None]):
    """An attempt that answers, and its route, which goes after it. A stack would take longer over two than over one."""

    __slots__ = ("_attempt", "_route")

    def __init__(self, attempt: AbstractAsyncContextManager[Any], route: Route) -> None:
        self._attempt = attempt
        self._route = route

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return await self._attempt.__aexit__(kind, error, traceback)
        finally:
            self._route.close()


class _Counted(AbstractContextManager[None]):
    """One request more, for as long as the block lasts. The same for all of them: only their number counts."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget

    def __enter__(self) -> None:
        self._budget.opened(time.monotonic())

    def __exit__(self, *_: object) -> None:
        self._budget.closed()


class _Loan:
    """One retry's place in the budget, until it gives that back."""

    def __init__(self, budget: RetryBudget, tell: Callable[[], None]) -> None:
        self._budget = budget
        self._tell = tell
        self._is_open = True
        budget.lend()

    def give_back(self) -> None:
        if self._is_open:
            self._is_open = False
            self._budget.repaid()
            self._tell()


class _Pursuit:
    """How far one request has come in looking for its answer."""

    def __init__(self, max_attempts: int, *, patient_until: float) -> None:
        self.patient_until = patient_until
        self.failure: GoodgateError | None = None
        self.resting: Resting | None = None  # why the last round has ended, where every replica had asked for a pause
        self.asked_in_vain: set[Replica] = set()  # to ask them again would come to the same
        self._tries_left = max_attempts
        self._num_rounds = 0
        self._has_asked = False  # somebody, in this round

    def note(self, replica: Replica, failure: GoodgateError) -> None:
        """One try has failed. Raises its failure where it has to be the last."""
        self.failure = failure
        self._tries_left -= 1
        if not failure.retryable or self._tries_left == 0:
            raise failure
        self._has_asked = True
        if not failure.repeatable:
            self.asked_in_vain.add(replica)

    def pause_s(self) -> float:
        """How long to wait before the next round. Raises the last failure where a next one would bring nothing."""
        resting, self.resting = self.resting, None
        has_asked, self._has_asked = self._has_asked, False
        now = time.monotonic()
        if resting is not None and not has_asked:
            if now + resting.rest_s > self.patient_until:
                raise self.failure or resting
            return resting.rest_s + LATE_S * random.random()
        assert self.failure is not None  # a route gives at least one replica, or raises
        if not has_asked:
            raise self.failure
        self._num_rounds += 1
        return pause_s(self._num_rounds, was_full=isinstance(self.failure, Overloaded), random=random.random)
