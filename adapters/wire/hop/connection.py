"""One connection to an engine: bytes in, one answer after the other out.

    response = connection.send(head, body)      # where `connection.is_quiet()`
    ...
    connection.close()                          # at once; whoever reads its answer is told

It is driven by the event loop's callbacks alone: no task, and no timer but one `Alarm`. What is read lies in a buffer
that it has in common with others until the parser, which is called at once, has taken what it wants of it. When an
answer is complete and the connection may serve another, it says so through `on_idle`, before the reader of that answer
has taken it. Whatever is not ours to read ends the connection: bytes after the end of an answer, or bytes that come
while nothing is asked.
"""

from __future__ import annotations

import select
from asyncio import AbstractEventLoop, BaseTransport, BufferedProtocol, Transport
from collections.abc import Callable
from typing import cast

from httptools import HttpParserError, HttpResponseParser

from adapters.wire.hop.alarm import Alarm
from adapters.wire.hop.errors import BadHTTP, CutOff, Dropped, HopError
from adapters.wire.hop.response import Response

MAX_HEAD_BYTES = 64 << 10  # of a head, or of trailers, or of whatever else is not body
MAX_INTERIM = 16  # answers of the kind "100 Continue" before the real one
MAX_AT_ONCE = 64 << 10  # a body up to this size leaves in one write with its head


class Connection(BufferedProtocol):
    def __init__(
        self,
        loop: AbstractEventLoop,
        buffer: memoryview,
        on_idle: Callable[[Connection], None],
        on_closed: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._buffer = buffer
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._alarm = Alarm(loop, self._expire)
        self._transport: Transport | None = None
        self._socket_events = select.poll()
        self._parser: HttpResponseParser | None = None
        self._response: Response | None = None
        self._is_paused = False
        self._start_over()
        self.idle_since = 0.0

    def _start_over(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._num_interim = 0
        self._num_bare = 0  # bytes that were read since the last ones of a body
        self._ends_with_connection = False
        self._is_whole = False
        self._keeps_alive = False

    # ---------------------------------------------------------------------------------------------------- for the pool

    def send(self, head: bytes, body: bytes) -> Response:
        assert self._transport is not None  # the pool gives out connections that stand
        self._start_over()
        self._response = response = Response(self._loop, self)
        if len(body) <= MAX_AT_ONCE:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return response

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def is_quiet(self) -> bool:
        """It may carry a request: open, and nothing waits to be read. The system is asked, because an end or a word
        that nobody asked for may have arrived that the loop has not come to yet."""
        return self.is_open and not self._socket_events.poll(0)

    def close(self, *, is_orderly: bool = False) -> None:
        """Not waiting for anything, and telling whoever waits. Orderly: it is the engine that has ended it."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
            self._lost(is_orderly=is_orderly)

    # ------------------------------------------------------------------------------------------------- for its answer

    def watch(self, deadline: float) -> None:
        self._alarm.set(deadline)

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def _expire(self) -> None:
        if self._response is not None:
            self._response.expire()

    # --------------------------------------------------------------------------------------------- for the event loop

    def connection_made(self, transport: BaseTransport) -> None:
        self._transport = cast(Transport, transport)
        self._parser = parser = HttpResponseParser(self)
        parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)
        self._socket_events.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._response is None or self._parser is None:
            self.close()  # nobody asked
            return
        self._num_bare += nbytes
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except HttpParserError as error:
            self._keeps_alive = False
            if not self._is_whole:
                self._fail(_error_in(self._response, error))
                return
        if self._is_whole:
            self._finish(self._response)
        elif self._num_bare > MAX_HEAD_BYTES:
            self._fail(BadHTTP(f"more than {MAX_HEAD_BYTES >> 10} KiB of headers"))

    def eof_received(self) -> None:
        self.close(is_orderly=True)  # left to itself, a transport would first wait until all of the request is sent

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost(is_orderly=error is None)

    def _lost(self, *, is_orderly: bool) -> None:
        """The connection is no more. What is still under way ends with it, well only where that is how it ends."""
        self._alarm.cancel()
        self._parser = None
        self._on_closed(self)
        response, self._response = self._response, None
        if response is None:
            return
        if self._ends_with_connection and is_orderly:
            response.end()
        elif response.status:
            response.fail(CutOff("the connection ended in the middle of the answer"))
        else:
            response.fail(Dropped(is_unanswered=self._num_bare == 0))

    def _fail(self, error: HopError) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.fail(error)
        self.close()

    def _finish(self, response: Response) -> None:
        self._response = None
        response.end()
        transport = self._transport
        if transport is None or not self._keeps_alive or transport.get_write_buffer_size():
            self.close()
            return
        self.resume()  # the end may have come when the reader was behind
        self._alarm.clear()
        self.idle_since = self._loop.time()
        self._on_idle(self)

    # -------------------------------------------------------------------------------------------------- for its parser

    def on_message_begin(self) -> None:
        if self._is_whole:  # and there is more: it cannot be the answer to anything
            raise BadHTTP("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._response is not None
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, {}
        if status >= 200:
            self._response.begin(status, headers)
            self._ends_with_connection = not (
                b"content-length" in headers
                or b"chunked" in headers.get(b"transfer-encoding", b"").lower()
                or status in (204, 304)
            )
            return
        self._num_interim += 1
        if status == 101 or self._num_interim > MAX_INTERIM:
            raise BadHTTP("no answer, only what precedes one")

    def on_body(self, data: bytes) -> None:
        self._num_bare = 0
        if self._response is not None:
            self._response.add(data)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        assert self._response is not None
        if self._response.status:
            self._is_whole = True
            self._keeps_alive = self._parser.should_keep_alive()


def _error_in(response: Response, error: HttpParserError) -> HopError:
    """Nonsense in the place of an answer, or in the middle of one."""
    return CutOff("the body breaks off in nonsense") if response.status else BadHTTP(str(error))
