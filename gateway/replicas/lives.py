"""How replicas come up, are kept up and are stopped: each has a life, which is one task.

    lives = Lives(fleet, find_adapter=find_adapter, home=home, wants_versions=False, isolates=False)
    lives.begin(replicas)                          # in the background
    await lives.stop(replicas)                     # with their engines, where those were launched

A replica's state is the fleet's, which is told of everything that becomes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

import msgspec

from adapters.base import EngineAdapter
from adapters.errors import EngineUnavailable, GoodgateError
from adapters.launching.kept_alive import Ready, Restarting, kept_alive
from adapters.launching.launch import launch
from adapters.launching.restart import Policy
from adapters.models.model_store import ModelMissing
from adapters.wire.engine_client import launched_options
from gateway.config import FindAdapter
from gateway.records import logs
from gateway.replicas.replica import Replica, State

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
VERSION_TIMEOUT_S = 5.0
RESTARTS = Policy()  # of launched engines
LAUNCHED_SPEAKS = "goodgate_peer"  # how to talk to a launched engine whose own adapter works in process only

_log = logs.logger("fleet")


class CannotIsolate(EngineUnavailable):
    """Tenants must not share a prefix cache, and this engine would let them."""


class Told(Protocol):
    """The fleet."""

    def mark(self, replica: Replica, state: State, reason: str = "", details: str = "") -> None: ...

    def note_end(self, replica: Replica, end: Restarting) -> None: ...

    def note_recovery(self, replica: Replica) -> None: ...

    def give_up(self, replica: Replica, reason: str, details: str = "") -> None: ...


class Lives:
    def __init__(
        self, fleet: Told, *, find_adapter: FindAdapter, home: Path, wants_versions: bool, isolates: bool
    ) -> None:
        self._fleet = fleet
        self._find_adapter = find_adapter
        self._home = home
        self._wants_versions = wants_versions  # to know of which version a race's figures are
        self._isolates = isolates

    def begin(self, replicas: Iterable[Replica]) -> None:
        for replica in replicas:
            replica.life = asyncio.create_task(self._bring_up(replica), name=f"start {replica.name}")

    async def stop(self, replicas: Sequence[Replica]) -> None:
        lives = [replica.life for replica in replicas if replica.life is not None]
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        adapters = [replica.adapter for replica in replicas if replica.adapter is not None]
        results = await asyncio.gather(*(adapter.close() for adapter in adapters), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                logs.error(_log, "closing a replica failed", error=result)

    async def _bring_up(self, replica: Replica) -> None:
        try:
            await (self._keep_alive(replica) if replica.config.launch else self._connect_in_time(replica))
        except GoodgateError as error:
            replica.end = error.for_records
            self._fleet.give_up(replica, error.for_records, error.message)
        except Exception as error:
            logs.error(_log, "a replica could not start", replica=replica.name, error=error)
            self._fleet.give_up(replica, f"It could not start ({type(error).__name__}); see the log.")

    async def _keep_alive(self, replica: Replica) -> None:
        """Run the replica's engine until cancelled. Raises when it cannot be started, or crashes time after time."""
        process = replica.process = await asyncio.to_thread(  # it looks at files
            launch,
            replica.engine,
            home=self._home,
            model_name=replica.config.model or "",
            options=replica.config.options,
            find_adapter=self._find_adapter,
        )
        async with aclosing(kept_alive(process, RESTARTS)) as changes:
            async for change in changes:
                match change:
                    case Ready():
                        await self._reconnect(replica)
                        self._fleet.note_recovery(replica)
                    case Restarting():
                        self._fleet.note_end(replica, change)

    async def _reconnect(self, replica: Replica) -> None:
        """Drop the connections to the engine's former life, with what may still wait for an answer on them. Its new
        one may listen on another port."""
        if replica.adapter is not None:
            await replica.adapter.close()
            replica.adapter = None
        await self._connect(replica)

    async def _connect_in_time(self, replica: Replica) -> None:
        """Connect to an engine that somebody else starts, sooner or later. A missing model will not come by itself."""
        delay_s = FIRST_RETRY_S
        while True:
            try:
                return await self._connect(replica)
            except (ModelMissing, CannotIsolate):
                raise
            except GoodgateError as error:
                self._fleet.mark(replica, State.UNHEALTHY, error.for_records)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_RETRY_S)

    async def _connect(self, replica: Replica) -> None:
        """Start the adapter; READY or UNHEALTHY as the engine's health says."""
        adapter = replica.adapter = replica.adapter or self._new_adapter(replica)
        if self._isolates:
            _check_isolates(adapter)
        await adapter.start()
        replica.has_started = True
        health = await adapter.health()
        self._fleet.mark(replica, State.READY if health.ready else State.UNHEALTHY, health.reason)
        if self._wants_versions:
            await self._ask_version(replica)

    async def _ask_version(self, replica: Replica) -> None:
        """Of which version the engine is. One that does not tell is compared with nothing."""
        version = ""
        try:
            async with asyncio.timeout(VERSION_TIMEOUT_S):
                version = await replica.started_adapter.version()
        except (GoodgateError, TimeoutError):
            pass  # it has no route for that, or no time now
        except Exception as error:  # the adapter breaks its contract; the replica serves all the same
            logs.error(_log, "an engine's version could not be asked for", error=error, replica=replica.name)
        replica.version = version

    def _new_adapter(self, replica: Replica) -> EngineAdapter[Any]:
        adapter = self._find_adapter(replica.engine)
        if replica.process is None:
            return adapter(replica.options)
        options = replica.config.options
        if "url" not in adapter.Options.__struct_fields__:
            continues = "continuation" in adapter.capabilities.parameters
            adapter = self._find_adapter(LAUNCHED_SPEAKS)
            options = {**options, "tells_tenants": True, "continues": continues}
        return adapter(
            msgspec.convert(launched_options(adapter.Options, replica.process.url, options), adapter.Options)
        )


def _check_isolates(adapter: EngineAdapter[Any]) -> None:
    offered = adapter.capabilities
    if (offered.chat or offered.completions) and not offered.cache_salt:
        raise CannotIsolate(
            f"The engine {adapter.engine!r} cannot keep the prefix caches of tenants apart, as "
            "`tenants.isolate_prefix_cache: require` asks; take another engine, or write `auto`."
        )
