"""Replicas that the configuration does not have any more, from their last request to the end of their engines.

    departures = Departures(stop, limits)
    departures.see_off(replica, model)             # the model where it stands in until another one is ready, or None
    departures.take_back(replica)                  # the configuration has it again, and it still stood in
    await departures.close()                       # at once, whatever is open

What is open on one goes on to its end, for as long as `reload.drain_timeout_s` allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from gateway.config import Live
from gateway.records import logs
from gateway.replicas.replica import Replica, ServedModel, State

_log = logs.logger("fleet")


class Departures:
    def __init__(
        self, live: Live, *, drop: Callable[[Replica, ServedModel], None], stop: Callable[[Replica], Awaitable[None]]
    ) -> None:
        self._live = live
        self._drop = drop  # out of what its model is served by
        self._stop = stop
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    @property
    def replicas(self) -> list[Replica]:
        return list(self._tasks)

    def see_off(self, replica: Replica, model: ServedModel | None) -> None:
        if replica not in self._tasks:
            replica.is_leaving = True
            leave = self._leave(replica, model)
            self._tasks[replica] = asyncio.create_task(leave, name=f"sees off {replica.name}")

    def take_back(self, replica: Replica) -> None:
        if replica.is_leaving:
            replica.is_leaving = False
            self._tasks.pop(replica).cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for replica, task in self._tasks.items():
            if replica.state is not State.UNLOADED:  # its engine is being stopped already
                task.cancel()
        left = self.replicas
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*map(self._stop, left))

    async def _leave(self, replica: Replica, model: ServedModel | None) -> None:
        if model is not None:
            await self._stand_in(replica, model)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._live.config.reload.drain_timeout_s):
                await replica.until_empty()
        logs.info(_log, "replica leaves", model=replica.model, replica=replica.name, cut_off=replica.in_flight)
        replica.has_started, replica.state = False, State.UNLOADED
        await self._stop(replica)
        self._tasks.pop(replica, None)

    async def _stand_in(self, replica: Replica, model: ServedModel) -> None:
        """Until a replica that stays is ready, or for as long as is allowed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._live.config.reload.stand_in_s):
                while replica in model.replicas:
                    await model.change()
        if replica in model.replicas:
            waiting_for = {each.name: each.reason for each in model.replicas if not each.is_leaving}
            logs.warning(
                _log, "replica stood in for too long", model=model.name, replica=replica.name, waiting_for=waiting_for
            )
            self._drop(replica, model)
