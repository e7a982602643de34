"""One serving process: listen, serve until told to stop, drain, leave nothing behind.

async with serving(app, sock):
    ...                                        # it answers
"""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from adapters.errors import GoodgateError
from gateway.app import PARTS, RELOADER
from gateway.web.guard import GUARD
from gateway.web.protocol import Connection

BACKLOG = 2048
# Responses already computed leave within this after draining; whatever generates has been drained or cancelled before.
CLOSE_TIMEOUT_S = 2.0
MAX_UNSENT_BYTES = 64 << 10  # what the system takes for a client before it is on its way; the rest waits with us


class CannotListen(GoodgateError):
    code = "cannot_listen"


def listen(host: str, port: int, *, share: bool = False) -> socket.socket:
    """A bound socket. `share` lets several processes accept on the same port (SO_REUSEPORT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
        if not share:
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise CannotListen(
                f"Port {port} on {host} is in use; stop what listens there, or choose another with --port."
            ) from error
        raise CannotListen(f"Cannot listen on {host}:{port}: {error.strerror or error}.") from error
    return sock


def watch_clients(sock: socket.socket, timeout_s: float) -> None:
    """Have the system notice clients that vanish without a word, and hold little for those that take nothing. Each
    connection inherits these from the listening socket; systems that do not know one go without."""
    options = {
        "TCP_NOTSENT_LOWAT": MAX_UNSENT_BYTES,
        "TCP_USER_TIMEOUT": math.ceil(timeout_s * 1000),  # what was sent has to be acknowledged by then
        "TCP_KEEPIDLE": max(1, math.ceil(timeout_s / 2)),  # a client that waits is asked whether it is there
        "TCP_KEEPINTVL": max(1, math.ceil(timeout_s / 6)),
        "TCP_KEEPCNT": 3,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), min(value, 32_767) if "KEEP" in name else value)


@asynccontextmanager
async def serving(app: web.Application, sock: socket.socket) -> AsyncIterator[None]:
    """Serve on the socket for as long as the block lasts, then drain. Clients that leave cancel their requests."""
    live = app[PARTS].live
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_TIMEOUT_S)
    await runner.setup()
    web_server = runner.server
    assert web_server is not None
    watch_clients(sock, live.server.write_timeout_s)
    try:
        listener = await loop.create_server(
            lambda: Connection(web_server, loop, limits=live.server, guard=app[GUARD]),
            sock=sock,
            backlog=BACKLOG,
        )
        try:
            yield
            if RELOADER in app:
                app[RELOADER].close()
            # Still listening: new requests are served for a while, and then told 503.
            await app[PARTS].open_requests.drain(live.server.drain_timeout_s, after_s=live.server.drain_delay_s)
        finally:
            listener.close()
    finally:
        await runner.cleanup()


async def serve_until_signal(app: web.Application, sock: socket.socket, on_listening: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends the wait for open answers. SIGHUP has the configuration read
    again, or ends serving where it says that the terminal has gone. Raises the error of a replica without which serving
    makes no sense."""
    loop = asyncio.get_running_loop()
    stop = loop.create_future()
    has_terminal = os.isatty(0)

    def on_signal() -> None:
        if stop.done():
            app[PARTS].open_requests.hurry()
        else:
            stop.set_result(None)

    def on_hangup() -> None:
        if has_terminal and not os.isatty(0):
            on_signal()
        elif RELOADER in app:
            app[RELOADER].ask()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    async with serving(app, sock):
        gc.collect()
        gc.freeze()  # what is there by now stays, so that a full collection, which halts every stream, is a short one
        on_listening()
        fatal = app[PARTS].fleet.fatal
        assert fatal is not None  # set when the fleet starts, and serving has started it
        await asyncio.wait({stop, fatal}, return_when=asyncio.FIRST_COMPLETED)
        if fatal.done():
            raise fatal.result()
