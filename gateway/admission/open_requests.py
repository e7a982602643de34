"""The requests that are open: how many more may come in, and how all of them end when the gateway does.

    with open_requests.admitted(2):                # two generations of one request; InvalidRequest, Overloaded
        ...
    await open_requests.drain(30)                  # new ones are refused, open ones end or are cancelled

Whether one may come in decides capacity.py, which is pure; here is the count that it is asked about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from adapters.errors import InvalidRequest
from gateway.admission import capacity


class OpenRequests:
    def __init__(self, max_in_flight: int, num_waiting: Callable[[], int] = int) -> None:
        self.max_in_flight = max_in_flight
        self._num_waiting = num_waiting  # of those in flight, before a model's gate: their own bounds hold for them
        self.in_flight = 0  # generations: a request of several prompts has several
        self.is_ending = False  # new ones still come in, but should go elsewhere
        self.is_draining = False
        self.is_cut_off = False  # draining took too long, and what is still open is being cancelled
        self._tasks: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()

    def admitted(self, num_wanted: int) -> AbstractContextManager[None]:
        """Counts the generations of the current task's request for as long as the block lasts."""
        if num_wanted > self.max_in_flight:
            raise InvalidRequest(f"One request may hold at most {self.max_in_flight} prompts.", param="prompt")
        refusal = capacity.refusal(
            num_wanted,
            in_flight=self.in_flight - self._num_waiting(),
            max_in_flight=self.max_in_flight,
            is_draining=self.is_draining,
        )
        if refusal is not None:
            raise refusal
        task = asyncio.current_task()
        assert task is not None
        self.in_flight += num_wanted
        self._tasks.add(task)
        return _Place(self, num_wanted, task)

    def leave(self, num: int, task: asyncio.Task[None]) -> None:
        self.in_flight -= num
        self._tasks.discard(task)

    async def drain(self, timeout_s: float, *, after_s: float = 0) -> None:
        """Say that the end is near, and serve for `after_s` until load balancers know. Then refuse what is new, let
        what is open finish, and after the time, or when hurried, cancel what is left."""
        self.is_ending = True
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await self._hurry.wait()
        self.is_draining = True
        finished = asyncio.ensure_future(self._all_finished())
        hurried = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({finished, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (finished, hurried):
            waiting.cancel()
        self.is_cut_off = True
        late = set(self._tasks)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=2)

    def hurry(self) -> None:
        """Whoever drains, or will, waits no longer."""
        self._hurry.set()

    async def _all_finished(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)


class _Place(AbstractContextManager[None]):
    """Each request passes here: a class costs a third of what a generator would."""

    __slots__ = ("_num", "_open_requests", "_task")

    def __init__(self, open_requests: OpenRequests, num: int, task: asyncio.Task[None]) -> None:
        self._open_requests = open_requests
        self._num = num
        self._task = task

    def __exit__(self, *_: object) -> None:
        self._open_requests.leave(self._num, self._task)
