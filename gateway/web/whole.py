"""A whole answer of JSON to a POST, which leaves in one write with its head.

    return WholeAnswer(body)

Most requests end with one. aiohttp's own response takes several times as long, for all that a response may be: of any
type, in pieces, compressed, from a file. A client of HTTP/1.0 gets that one.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView
from email.utils import formatdate
from functools import lru_cache

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import SERVER_SOFTWARE

from gateway.web.envelope import JSON

MAX_AT_ONCE = 64 << 10  # a body up to this size is put behind its head; a larger one is not copied for that
_HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: {JSON}\r\nServer: {SERVER_SOFTWARE}\r\n"


class WholeAnswer(web.StreamResponse):
    def __init__(self, body: bytes) -> None:
        super().__init__()
        self._json = body
        self._plain: web.Response | None = None  # aiohttp's, in the place of this one

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if request.version != HttpVersion11:
            self._plain = web.Response(body=self._json, content_type=JSON)
            writer = await self._plain.prepare(request)
            self._keep_alive = self._plain.keep_alive
            return writer
        self._keep_alive = request.keep_alive
        await request._prepare_hook(self)  # the signal to which the application has added its headers
        if not self._keep_alive:
            self.headers["Connection"] = "close"
        _write(request, _head(self.headers.items(), len(self._json)), self._json)
        self._payload_writer = request.writer  # it is prepared: whoever looks whether an answer has begun finds so
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Waits until the client has taken most of it."""
        if self._plain is not None:
            await self._plain.write_eof()
        elif self._payload_writer is not None:
            await self._payload_writer.drain()
            self._eof_sent = True


def _head(headers: ItemsView[str, str], length: int) -> bytes:
    """Raises `ValueError` for a header that would be read as two."""
    told = "".join([f"{name}: {value}\r\n" for name, value in headers])
    if told.count("\n") != len(headers) or told.count("\r") != len(headers) or "\0" in told:
        raise ValueError("A header holds a line end.")
    return f"{_HEAD}Date: {_date(int(time.time()))}\r\n{told}Content-Length: {length}\r\n\r\n".encode()


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


def _write(request: web.BaseRequest, head: bytes, body: bytes) -> None:
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("The client has left.")
    if len(body) <= MAX_AT_ONCE:
        transport.write(head + body)
    else:
        transport.write(head)
        transport.write(body)
