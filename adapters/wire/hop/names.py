"""The addresses behind a name, asked for once however many want to know, and kept for a while.

    addresses = Addresses("engine.example", 443)
    await addresses.known()                # `Unreachable` where nobody knows the name, and none was ever found
    addresses.doubt()                      # the last ones do not answer: perhaps it has moved
    addresses.close()

An outage of names is not one of engines: while nobody answers for a name, or nobody knows it any more, the last
addresses go on serving. A lookup runs in one of the few threads that the event loop has for that, and a name server
that says nothing holds it for as long as the system waits, so each name has one lookup at most.
"""

from __future__ import annotations

import asyncio
import socket

import aiohappyeyeballs

from adapters.wire.hop.errors import Unreachable

KEPT_S = 10.0  # before it is asked again
WITH_OLD_ONES_S = 0.1  # how long a new answer is waited for where there are addresses of before


class Addresses:
    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._found: list[aiohappyeyeballs.AddrInfoType] = []
        self._until = 0.0
        self._lookup: asyncio.Task[None] | None = None

    async def known(self) -> list[aiohappyeyeballs.AddrInfoType]:
        if self._loop.time() < self._until:
            return self._found
        if self._lookup is None:
            self._lookup = self._loop.create_task(self._look_up())
            self._lookup.add_done_callback(self._looked_up)
        await asyncio.wait({lookup := self._lookup}, timeout=WITH_OLD_ONES_S if self._found else None)
        if self._found:
            return self._found
        error = None if lookup.cancelled() else lookup.exception()
        raise Unreachable(f"there is no host {self._host!r}") from error

    def doubt(self) -> None:
        self._until = 0.0

    def close(self) -> None:
        if self._lookup is not None:
            self._lookup.cancel()

    async def _look_up(self) -> None:
        self._found = list(await self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM))
        self._until = self._loop.time() + KEPT_S

    def _looked_up(self, lookup: asyncio.Task[None]) -> None:
        self._lookup = None
        if not lookup.cancelled():
            lookup.exception()  # whoever waited says it
