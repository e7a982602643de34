"""An engine of a few bytes: what each connection plays, request by request, on a real socket.

async with Engine(OK, OK) as engine:            # one answer a request, on however many connections
    response = await engine.pool().send(*REQUEST, soon())
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any

from adapters.wire.hop.pool import Origin, Pool
from adapters.wire.hop.request import head, opening
from adapters.wire.hop.response import Response

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSE = "close"
HOLD = "hold"
Step = bytes | float | str | asyncio.Event


class Engine:
    """Each answer is bytes, or steps: bytes to send, seconds or an event to wait for, `HOLD` until the client
    leaves, `CLOSE`."""

    def __init__(
        self, *answers: bytes | Iterable[Step], reads_bodies: bool = True, tls: ssl.SSLContext | None = None
    ) -> None:
        self._tls = tls
        self._answers = iter(answers)
        self._reads_bodies = reads_bodies
        self._writers: list[asyncio.StreamWriter] = []
        self._pools: list[Pool] = []
        self.num_connections = 0
        self.num_requests = 0
        self.num_sent = 0
        self.left = asyncio.Event()  # a client has closed its connection

    async def __aenter__(self) -> Engine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"https://localhost:{self.port}" if self._tls else f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.close()
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    def pool(self, **options: Any) -> Pool:
        pool = Pool(Origin.of(self.url), **{"connect_timeout_s": 2.0, "keepalive_s": 4.0, **options})
        self._pools.append(pool)
        return pool

    async def get(self, pool: Pool) -> bytes:
        return await whole(await pool.send(*request(self.url), soon()))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.append(writer)
        try:
            while True:
                said = await reader.readuntil(b"\r\n\r\n")
                if self._reads_bodies:
                    await reader.readexactly(int(said.lower().partition(b"content-length:")[2].split()[0]))
                self.num_requests += 1
                answer = next(self._answers)
                if not await self._play([answer] if isinstance(answer, bytes) else answer, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            self.left.set()
        writer.close()

    async def _play(self, steps: Iterable[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
                self.num_sent += len(step)
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, float):
                await asyncio.sleep(step)
            else:
                if step == HOLD:
                    await reader.read()
                    self.left.set()
                return False
        return True


def soon(within_s: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + within_s


def request(url: str, body: bytes = b"{}") -> tuple[bytes, bytes]:
    return head(opening("POST", f"{url}/v1/x", {}), {}, len(body)), body


async def whole(response: Response) -> bytes:
    body = bytearray()
    while data := await response.read(soon()):
        body += data
    return bytes(body)
