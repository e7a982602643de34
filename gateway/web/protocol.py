"""The server's side of a connection: aiohttp's, with a deadline for the first request's headers, one for clients that
take nothing, and errors in our envelope.

aiohttp waits for headers without a limit, so a client that sends one byte a minute would keep a connection for ever.
Between requests its keep-alive timeout does that work. It waits as long for a client to take its answer, which would
keep the answer, and an engine's work where that goes on, from everybody else.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from adapters.errors import GoodgateError, InvalidRequest
from adapters.wire.hop.alarm import Alarm
from gateway.config import ServerConfig
from gateway.records.trace import new_request_id
from gateway.web import envelope
from gateway.web.guard import Guard

KEEPALIVE_TIMEOUT_S = 75.0
BLIND_FOR_S = 1.0  # how long requests may wait behind an unfinished one while nothing more is read
# Of what waits for a client it has to take so much in `write_timeout_s`: as much as takes a stream of small events from
# the mark where it has to wait to the mark where it goes on, so that one rule holds for streams and for whole answers.
MIN_TAKEN_BYTES = 48 << 10
# Nearly no descriptor is left: those that there are belong to the requests that are under way.
OUT_OF_FILES = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
LINGERING_TIME_S = 2.0  # how long an unread body is swallowed, so that the client can read why it was refused


class Connection(RequestHandler):
    __slots__ = (
        "_blind_deadline", "_guard", "_header_deadline", "_limits", "_paused_at", "_paused_s", "_stall", "_untaken",
    )  # fmt: skip

    def __init__(
        self, server: web.Server, loop: asyncio.AbstractEventLoop, *, limits: ServerConfig, guard: Guard
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            lingering_time=LINGERING_TIME_S,
            auto_decompress=False,  # gateway/web/body.py does it, beside the event loop
            access_log=None,  # type: ignore[arg-type]  # the documented way to switch it off
        )
        self._limits = limits
        self._guard = guard
        self._stall = Alarm(loop, self._cut_off_if_stalled)
        self._untaken = 0  # what waited for the client at the last look
        self._header_deadline: asyncio.TimerHandle | None = None
        self._blind_deadline: asyncio.TimerHandle | None = None
        self._paused_at: float | None = None
        self._paused_s = 0.0

    @property
    def paused_s(self) -> float:
        """How long, of all its life, the client took nothing while we had something for it."""
        return self._paused_s + (0.0 if self._paused_at is None else time.perf_counter() - self._paused_at)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused_at = time.perf_counter()
        self._wait_until_taken()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._paused_s, self._paused_at = self.paused_s, None
        self._stall.clear()

    def _wait_until_taken(self) -> None:
        assert self.transport is not None
        self._untaken = self.transport.get_write_buffer_size()
        self._stall.set(self._loop.time() + self._limits.write_timeout_s)

    def _cut_off_if_stalled(self) -> None:
        """aiohttp then cancels the request's task, where it still runs, and that stops the engine."""
        if self.transport is None:
            return
        if self._untaken - self.transport.get_write_buffer_size() >= MIN_TAKEN_BYTES:
            self._wait_until_taken()
        else:  # with a reset: the system need not keep for it what it will not take
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        if self._guard.admit(self.transport.get_extra_info("socket")):
            self._header_deadline = self._loop.call_later(self._limits.header_timeout_s, self._close_if_silent)
        else:
            self.transport.write(OUT_OF_FILES)
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stall.cancel()
        for deadline in (self._header_deadline, self._blind_deadline):
            if deadline is not None:
                deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A client that sends so much ahead of its answer that no more is read would leave unnoticed, and its engine
        would go on: it is cut off. One whose answer is just ending gets a moment."""
        super().data_received(data)
        if self._messages and self._is_blind() and self._blind_deadline is None:
            self._blind_deadline = self._loop.call_later(BLIND_FOR_S, self._cut_off_if_blind)

    def _is_blind(self) -> bool:
        return self.transport is not None and not self.transport.is_reading()

    def _cut_off_if_blind(self) -> None:
        self._blind_deadline = None
        if self._messages and self._is_blind() and self.transport is not None:
            self.transport.abort()

    def _close_if_silent(self) -> None:
        if self._request_count == 0:
            self.force_close()

    def log_exception(self, *arguments: Any, **options: Any) -> None:
        """A body that is not encoded as its headers say has been answered; its traceback would only fill the log."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*arguments, **options)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """What aiohttp answers before any handler of ours is asked: it repeats an `Expect` that it does not know."""
        if isinstance(resp, web.HTTPExpectationFailed):
            resp = _answer(envelope.ExpectationFailed("The only expectation that can be met is 100-continue."), request)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Bytes that are not HTTP. The parser's own words would repeat them, so they are not used."""
        error: GoodgateError = InvalidRequest("This is not a valid HTTP request.")
        request_id = new_request_id()
        if status != 400:
            self.log_exception("Error handling request", exc_info=exc)
            error = envelope.InternalError(request_id)
        answer = _answer(error, request, request_id)
        answer.force_close()
        return answer


def _answer(error: GoodgateError, request: web.BaseRequest, request_id: str = "") -> web.Response:
    """An error of a request that never got a trace."""
    request_id = request_id or new_request_id()
    answer = envelope.response(error, request=request, request_id=request_id)
    answer.headers["x-request-id"] = request_id
    return answer
