"""The connections to one address: opened when needed, kept while they are likely to be good, replaced in silence once.

    pool = Pool(Origin.of("https://engine.example/api"), connect_timeout_s=2, keepalive_s=4)     # 0 keeps none
    response = await pool.send(head, body, deadline)
    pool.close()

The one used last is used first, so that the others grow old and go. How many are open is not decided here: whoever
admits requests has. A request that meets a kept connection just as the engine closes it goes out once more on a fresh
one, but only where not a byte had been answered.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
import ssl
from collections import deque
from typing import NamedTuple

import aiohappyeyeballs
from yarl import URL

from adapters.wire.hop.alarm import patiently
from adapters.wire.hop.connection import Connection
from adapters.wire.hop.errors import ConnectTimeout, Dropped, NotAccepting, OutOfFiles, Unreachable
from adapters.wire.hop.names import Addresses
from adapters.wire.hop.response import Response

READ_BYTES = 16 << 10  # at once, so that little is held for a client that does not take it
NEXT_ADDRESS_AFTER_S = 0.25  # where a name has several, and the first one is slow (RFC 8305)


class Origin(NamedTuple):
    host: str
    port: int
    is_tls: bool

    @classmethod
    def of(cls, url: str) -> Origin:
        try:
            parsed = URL(url)
            if parsed.raw_host and parsed.port:
                return cls(parsed.raw_host, parsed.port, parsed.scheme == "https")
        except ValueError:
            pass
        raise Unreachable("that is no address; write it as http://HOST:PORT")


class Pool:
    def __init__(self, origin: Origin, *, connect_timeout_s: float, keepalive_s: float) -> None:
        self._origin = origin
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._all: set[Connection] = set()
        self._idle: deque[Connection] = deque()  # longest idle first
        self._sweep: asyncio.TimerHandle | None = None
        self._addresses = Addresses(origin.host, origin.port)

    @property
    def num_open(self) -> int:
        return len(self._all)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    async def send(self, head: bytes, body: bytes, deadline: float) -> Response:
        """The answer, once its head is there. Raises `HopError`, and `TimeoutError` where it does not come in time."""
        kept = self._take_idle()
        if kept is not None:
            try:
                return await _answer(kept, head, body, deadline)
            except Dropped as error:
                if not error.is_unanswered:
                    raise
        return await _answer(await self._connect(deadline), head, body, deadline)

    def close(self) -> None:
        """All of them, whatever they carry."""
        if self._sweep is not None:
            self._sweep.cancel()
        self._addresses.close()
        self._keepalive_s = 0
        for connection in [*self._all]:
            connection.close()

    # ------------------------------------------------------------------------------------------------ kept connections

    def _take_idle(self) -> Connection | None:
        now = self._loop.time()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < self._keepalive_s and connection.is_quiet():
                return connection
            connection.close()
        return None

    def _keep(self, connection: Connection) -> None:
        if not self._keepalive_s:
            connection.close()
            return
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._keepalive_s, self._drop_old)

    def _drop_old(self) -> None:
        self._sweep = None
        now = self._loop.time()
        while self._idle and now - self._idle[0].idle_since >= self._keepalive_s:
            self._idle.popleft().close()
        if self._idle:
            due = self._idle[0].idle_since + self._keepalive_s
            self._sweep = self._loop.call_at(due, self._drop_old)

    # ------------------------------------------------------------------------------------------------- new connections

    async def _connect(self, deadline: float) -> Connection:
        due = min(deadline, self._loop.time() + self._connect_timeout_s)
        try:
            async with patiently(due):
                return await self._opened()
        except TimeoutError as error:
            raise ConnectTimeout("it does not accept a connection in time") from error
        except ssl.SSLCertVerificationError as error:
            reason = error.verify_message or "it does not verify"
            raise Unreachable(
                f"its certificate is not trusted ({reason}); SSL_CERT_FILE names the authorities that are"
            ) from error
        except ssl.SSLError as error:
            raise Unreachable("it does not speak TLS there; write http:// instead of https://") from error
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise OutOfFiles("no file descriptor is left") from error
            self._addresses.doubt()
            raise NotAccepting("the connection is refused") from error

    async def _opened(self) -> Connection:
        sock = await aiohappyeyeballs.start_connection(
            await self._addresses.known(), happy_eyeballs_delay=NEXT_ADDRESS_AFTER_S, loop=self._loop
        )
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = _trusted_tls() if self._origin.is_tls else None
        try:
            _, connection = await self._loop.create_connection(
                lambda: Connection(self._loop, self._buffer, self._keep, self._all.discard),
                sock=sock, ssl=tls, server_hostname=self._origin.host if tls else None,
            )  # fmt: skip
        except BaseException:
            sock.close()
            raise
        if not connection.is_open:  # it was closed, or spoke before it was asked, as soon as it stood
            raise Dropped(is_unanswered=True)
        self._all.add(connection)
        return connection


async def _answer(connection: Connection, head: bytes, body: bytes, deadline: float) -> Response:
    response = connection.send(head, body)
    try:
        await response.head(deadline)
    except BaseException:  # also whoever stops waiting
        response.close()
        raise
    return response


@functools.cache
def _trusted_tls() -> ssl.SSLContext:
    """One for all, because reading the authorities takes tens of milliseconds."""
    return ssl.create_default_context()
