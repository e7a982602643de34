"""Writes a stream of server-sent events to one client, and keeps watch over the connection while it does.

    stream = EventStream(request, limits)                   # in OpenAI's framing; `framing=` for another
    await stream.open()                    # 200 and headers; from here on an error can only be an event. Safe twice
    await stream.send(b"data: ...\\n\\n")
    await stream.finish()                  # [DONE]: the whole answer has been sent
    await stream.fail(error)               # or an error event, and no [DONE]
    stream.close()                         # always

While nothing is sent a sign of life goes out every `heartbeat_s`, so that proxies keep the connection; a single timer
sees to it. The head and the end are aiohttp's; between them we frame the chunks ourselves. Sending an event
costs one write and no timer, and events that follow each other at once leave in one. It waits only while the client is
behind by more than the transport holds (64 KiB). One that takes nothing is cut off by its connection
(gateway/web/protocol.py): it must not hold an engine's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from aiohttp import HttpVersion11, web
from msgspec import Struct

from adapters.errors import GoodgateError
from gateway.config import ServerConfig
from gateway.web import envelope

DONE = b"data: [DONE]\n\n"
MAX_HELD_BYTES = 16 << 10  # of events that leave together
HEARTBEAT = b": keep-alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Framing(Struct, frozen=True, kw_only=True):
    """What a dialect says in every stream: still here, that was all, it has failed."""

    heartbeat: bytes
    end: bytes
    error: Callable[[GoodgateError], bytes]


OPENAI = Framing(heartbeat=HEARTBEAT, end=DONE, error=lambda error: b"data: " + envelope.body(error) + b"\n\n")


class ClientLeft(asyncio.CancelledError):
    """The client is gone, noticed while writing to it. Like every cancellation it is control flow, not an error."""


class EventStream:
    def __init__(self, request: web.Request, limits: ServerConfig, *, framing: Framing = OPENAI) -> None:
        self._request = request
        self._framing = framing
        self._heartbeat_s = limits.heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._response = web.StreamResponse(headers=HEADERS)
        self._transport: asyncio.Transport | None = None
        self._last_write = self._loop.time()
        self._held: list[bytes] = []  # events that leave together, when the loop comes to it
        self._num_held = 0  # bytes of them
        self._is_chunked = True
        self._is_writing = False
        self._is_whole = False
        self._watch: asyncio.Handle | None = None
        self._opening = asyncio.Lock()

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    @property
    def has_begun(self) -> bool:
        """The 200 is out: from now on the status cannot tell what happened."""
        return self._response.prepared

    @property
    def is_open(self) -> bool:
        """Something may still be sent: the answer has begun and the client has not left."""
        return self._response.prepared and self._transport is not None and not self._transport.is_closing()

    @property
    def is_whole(self) -> bool:
        """Everything has been sent. A client that has it may leave before the request's task has ended."""
        return self._is_whole

    async def open(self, headers: Mapping[str, str] | None = None) -> None:
        """Send the head. An answer that is late may have been begun before its first chunk, to keep its client."""
        async with self._opening:
            if self._response.prepared:
                return
            self._response.headers.update(headers or {})
            try:
                await self._response.prepare(self._request)
            except ConnectionError as error:
                raise ClientLeft from error
            self._transport = self._request.transport
            self._is_chunked = self._request.version >= HttpVersion11
            self._watch = self._loop.call_soon(self._keep_watch)

    async def send(self, events: bytes) -> None:
        now = self._loop.time()  # uvloop reads the clock once a turn
        if now == self._last_write and self._num_held + len(events) <= MAX_HELD_BYTES:
            self._hold(events)
            return
        self._last_write = now
        self._write(events)
        if self._request.protocol.writing_paused:
            self._is_writing = True
            await self._drained()
            self._is_writing = False

    def _hold(self, events: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._release)
        self._held.append(events)
        self._num_held += len(events)

    def _release(self) -> None:
        if self._held:
            with suppress(ClientLeft):  # its request is being cancelled
                self._write(b"")

    def _write(self, data: bytes) -> None:
        """Sends what has been held, and this."""
        if self._transport is None or self._transport.is_closing():
            raise ClientLeft
        if self._held:
            data = b"".join([*self._held, data])
            self._drop_held()
        if data:  # an empty chunk would be the last one
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def _drop_held(self) -> None:
        self._held.clear()
        self._num_held = 0

    async def _drained(self) -> None:
        """Waits until the client has taken most of what it was sent."""
        try:
            await self._request.writer.drain()
        except ConnectionError as error:
            raise ClientLeft from error

    async def finish(self) -> None:
        await self._end_with(self._framing.end)
        self._is_whole = True

    async def fail(self, error: GoodgateError) -> None:
        """Tell a client that is still there that its answer is not whole."""
        if self.is_open:
            await self._end_with(self._framing.error(error))

    async def _end_with(self, event: bytes) -> None:
        self._write(event)
        self._is_writing = True  # the end waits for the client too, and no comment may follow it
        try:
            await self._response.write_eof()
        except ConnectionError as error:
            raise ClientLeft from error
        self.close()

    def close(self) -> None:
        self._drop_held()
        if self._watch is not None:
            self._watch.cancel()

    def _keep_watch(self) -> None:
        now = self._loop.time()
        if now >= self._last_write + self._heartbeat_s:
            self._last_write = now
            if not self._is_writing:  # or else it is the client that keeps us waiting
                with suppress(ClientLeft):  # its request is being cancelled
                    self._write(self._framing.heartbeat)
        self._watch = self._loop.call_at(self._last_write + self._heartbeat_s, self._keep_watch)
