"""One keep-alive connection and the pool of them, driven by the callbacks of an event loop that they are given.

The hot path of the load generator: a read is `recv`, stamp, framing, and nothing else. No greenlet, thread or future
stands between the kernel and the stamp. Sockets are the C ones, so that monkey patching cannot put a layer in between.

    pool.launch(exchange)  ->  connect if none is idle  ->  write  ->  reads  ->  on_end(exchange)

A request is tried once. One that meets a connection which the engine has just closed is an error like any other: a
retry would count as a success what a user saw fail. To keep that rare, idle connections are replaced before common
servers drop them (uvicorn: after 5 s).
"""

from __future__ import annotations

import _socket
import errno
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from arena.load.plan import PlannedRequest
from arena.load.response_reader import ResponseReader

READ, WRITE = 1, 2
RECV_BYTES = 64 << 10
MAX_IDLE_NS = 4_000_000_000


class Watcher(Protocol):
    def start(self, callback: Callable[..., None], /, *args: Any) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class Loop(Protocol):
    def io(self, fd: int, events: int, /) -> Watcher: ...


@dataclass(slots=True)
class Address:
    family: int
    sockaddr: Any


@dataclass(slots=True)
class Exchange:
    """One request and its response. Stamps are CLOCK_MONOTONIC; the row makes them relative to the cell's start."""

    request: PlannedRequest
    measured: bool
    payload: bytes
    sent_ns: int | None = None
    connected_ns: int | None = None
    wrote_ns: int | None = None
    done_ns: int | None = None
    reused: bool | None = None
    response: ResponseReader = field(default_factory=ResponseReader)
    fault: str | None = None  # of the transport or the client: "connect_refused", "reset", "request_timeout", ...
    connection: Connection | None = None

    @property
    def has_ended(self) -> bool:
        return self.done_ns is not None


def address_of(host: str, port: int, *, timeout_s: float) -> Address:
    """The first of the host's addresses at which somebody listens, and the first of all where nobody does: `localhost`
    is two, and most engines listen at one. OSError where the name has none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [Address(family, sockaddr) for family, _, _, _, sockaddr in found]
    if len(addresses) == 1:
        return addresses[0]
    return next((address for address in addresses if _somebody_listens(address, timeout_s)), addresses[0])


def _somebody_listens(address: Address, timeout_s: float) -> bool:
    try:
        with socket.socket(address.family, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout_s)
            probe.connect(address.sockaddr)
    except OSError:
        return False
    return True


class Connection:
    def __init__(self, pool: Pool, address: Address) -> None:
        self._pool = pool
        self._socket = _socket.socket(address.family, _socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        self._reader = pool.loop.io(self._socket.fileno(), READ)
        self._writer = pool.loop.io(self._socket.fileno(), WRITE)
        self._unwritten = b""
        self.exchange: Exchange | None = None
        self.opened_ns = time.monotonic_ns()
        self.idle_since_ns = self.opened_ns
        self.is_connected = False
        self.is_closed = False
        code = self._socket.connect_ex(address.sockaddr)
        if code not in (0, errno.EINPROGRESS):
            self._failed_connect = code
            self._writer.start(self._report_failed_connect)
        else:
            self._writer.start(self._on_connect)

    def carry(self, exchange: Exchange) -> None:
        """Take a request: write it now, or as soon as the connection stands."""
        self.exchange = exchange
        exchange.connection = self
        exchange.sent_ns = time.monotonic_ns()
        exchange.reused = self.is_connected
        if self.is_connected:
            self._write(exchange.payload)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for watcher in (self._reader, self._writer):
            watcher.stop()
            watcher.close()
        self._socket.close()
        self._pool.forget(self)

    def abandon(self, fault: str) -> None:
        """Give up on the request in flight: the engine sees the connection close."""
        self._end_exchange(fault)

    def _report_failed_connect(self) -> None:
        self._end_exchange(_connect_fault(self._failed_connect))

    def _on_connect(self) -> None:
        self._writer.stop()
        code = self._socket.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
        if code:
            self._end_exchange(_connect_fault(code))
            return
        now_ns = time.monotonic_ns()
        self.is_connected = True
        self._reader.start(self._on_readable)
        if self.exchange is None:
            self.idle_since_ns = now_ns
            self._pool.is_fresh(self)
        else:
            self.exchange.connected_ns = now_ns
            self._write(self.exchange.payload)

    def _write(self, data: bytes) -> None:
        try:
            written = self._socket.send(data)
        except BlockingIOError:
            written = 0
        except OSError as error:
            self._end_exchange(_transport_fault(error))
            return
        if written == len(data):
            if self.exchange is not None:
                self.exchange.wrote_ns = time.monotonic_ns()
            return
        self._unwritten = data[written:]
        self._writer.start(self._on_writable)

    def _on_writable(self) -> None:
        self._writer.stop()
        self._write(self._unwritten)

    def _on_readable(self) -> None:
        fault = None
        try:
            data = self._socket.recv(RECV_BYTES)
            now_ns = time.monotonic_ns()
        except BlockingIOError:
            return
        except OSError as error:
            data = b""
            fault = _transport_fault(error)
        exchange = self.exchange
        if exchange is None:  # an idle connection: the engine closed it, or says what nobody asked
            self.close()
        elif not data:
            exchange.response.end()
            self._end_exchange(fault)
        elif exchange.response.feed(now_ns, data):
            exchange.done_ns = now_ns
            self._end_exchange(None)

    def _end_exchange(self, fault: str | None) -> None:
        exchange, self.exchange = self.exchange, None
        now_ns = time.monotonic_ns()
        if exchange is None:
            self.close()
            return
        if exchange.done_ns is None:
            exchange.done_ns = now_ns
        exchange.fault = fault
        exchange.connection = None
        if fault is None and exchange.response.keeps_alive and exchange.wrote_ns is not None:
            self.idle_since_ns = now_ns
            self._pool.is_idle(self)
        else:
            self.close()
        self._pool.on_end(exchange)


class Pool:
    """Connections to one address. Those used last are used first; fresh ones, which the engine may not have accepted
    yet, only when no used one is idle (a server with few threads may leave them waiting)."""

    def __init__(self, loop: Loop, address: Address, on_end: Callable[[Exchange], None]) -> None:
        self.loop = loop
        self.on_end = on_end
        self.num_opened = 0
        self._address = address
        self._used: list[Connection] = []
        self._fresh: deque[Connection] = deque()
        self._all: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_idle(self) -> int:
        return len(self._used) + len(self._fresh)

    @property
    def num_connecting(self) -> int:
        return sum(not connection.is_connected for connection in self._all)

    def launch(self, exchange: Exchange) -> None:
        """Send on an idle connection, or open one. OSError where the machine has no socket left."""
        if self._used:
            connection = self._used.pop()
        elif self._fresh:
            connection = self._fresh.popleft()
        else:
            connection = self._open()
        connection.carry(exchange)

    def warm(self, count: int) -> None:
        """Open connections until `count` are idle or on their way there."""
        for _ in range(count - self.num_idle - self.num_connecting):
            self._open()

    def refresh(self, now_ns: int) -> None:
        """Drop connections that have been idle for too long to be trusted."""
        for connection in [*self._used, *self._fresh]:
            if now_ns - connection.idle_since_ns > MAX_IDLE_NS:
                connection.close()

    def give_up_connecting(self, opened_before_ns: int) -> None:
        for connection in [each for each in self._all if not each.is_connected]:
            if connection.opened_ns < opened_before_ns:
                connection.abandon("connect_timeout")

    def is_idle(self, connection: Connection) -> None:
        self._used.append(connection)

    def is_fresh(self, connection: Connection) -> None:
        self._fresh.append(connection)

    def forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._used:
            self._used.remove(connection)
        if connection in self._fresh:
            self._fresh.remove(connection)

    def close(self) -> None:
        for connection in list(self._all):
            connection.close()

    def _open(self) -> Connection:
        connection = Connection(self, self._address)
        self._all.add(connection)
        self.num_opened += 1
        return connection


def _connect_fault(code: int) -> str:
    return "connect_refused" if code == errno.ECONNREFUSED else f"connect_{errno.errorcode.get(code, code)}".lower()


def _transport_fault(error: OSError) -> str:
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "reset"
    return f"socket_{errno.errorcode.get(error.errno or 0, os.strerror(error.errno or 0))}".lower()
