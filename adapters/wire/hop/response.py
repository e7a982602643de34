"""One answer: what has come of it, and the one task that reads it.

    await response.head(deadline)               # status and headers are known
    data = await response.read(deadline)        # whatever has come since; empty at the end
    response.close()                            # leave it where it stands: the engine sees its socket close

The connection adds, the task takes. What it does not take soon is held up to `MAX_HELD_BYTES`; then the socket is not
read any further, and the engine waits. Once complete an answer stands alone: its connection may serve the next one.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future
from typing import Protocol

from adapters.wire.hop.errors import CutOff, HopError
from adapters.wire.hop.inflate import Inflater, inflater_for

MAX_HELD_BYTES = 16 << 10  # before the socket is left alone


class Source(Protocol):
    """The connection, as its answer knows it."""

    def watch(self, deadline: float) -> None:
        """Call `expire` at that time."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class Response:
    __slots__ = ("_error", "_held", "_inflater", "_loop", "_pieces", "_source", "_waiter", "headers", "status")

    def __init__(self, loop: AbstractEventLoop, source: Source) -> None:
        self.status = 0  # not known yet
        self.headers: dict[bytes, bytes] = {}  # by their names in lower case
        self._loop = loop
        self._source: Source | None = source  # None: nothing more will come
        self._pieces: list[bytes] = []
        self._held = 0
        self._error: HopError | None = None
        self._inflater: Inflater | None = None
        self._waiter: Future[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Nothing more will come, and nothing went wrong."""
        return self._source is None and self._error is None

    @property
    def is_read(self) -> bool:
        """Complete, and everything has been taken."""
        return self.is_complete and not self._pieces and self._inflater is None

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def content_type(self) -> str:
        """Without its parameters."""
        return self.header(b"content-type").partition(";")[0].strip().lower()

    # --------------------------------------------------------------------------------------- for the task that reads

    async def head(self, deadline: float) -> None:
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._news(deadline)

    async def read(self, deadline: float) -> bytes:
        """What has come since the last time, as soon as there is any; empty at the end. Raises `TimeoutError`, and what
        went wrong only after everything that came before it."""
        while True:
            if self._pieces:
                data = self._take()
                if self._inflater is not None:
                    data = self._inflater.feed(data)
                if data:
                    return data
            elif self._inflater is not None and (data := self._inflater.more()):
                return data
            elif self._error is not None:
                raise self._error
            elif self._source is None:
                if self._inflater is not None and not self._inflater.is_whole:
                    raise CutOff("the compressed answer is not whole")
                return b""
            else:
                await self._news(deadline)

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        if self._held > MAX_HELD_BYTES and self._source is not None:
            self._source.resume()
        self._held = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _news(self, deadline: float) -> Future[None]:
        # Not a coroutine itself: every read passes here.
        if self._source is None or self._loop.time() >= deadline:
            raise TimeoutError
        self._waiter = waiter = self._loop.create_future()
        self._source.watch(deadline)
        return waiter

    # ------------------------------------------------------------------------------------------- for its connection

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.headers = status, headers
        if b"content-encoding" in headers:  # we ask for none, but some proxies know better
            self._inflater = inflater_for(headers[b"content-encoding"])
        self._wake()

    def add(self, data: bytes) -> None:
        self._pieces.append(data)
        was_held, self._held = self._held, self._held + len(data)
        if self._held > MAX_HELD_BYTES >= was_held and self._source is not None:
            self._source.pause()
        self._wake()

    def end(self) -> None:
        self._source = None
        self._wake()

    def fail(self, error: HopError) -> None:
        self._source, self._error = None, error
        self._wake()

    def expire(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: whoever waited has been cancelled
            waiter.set_result(None)
