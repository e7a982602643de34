"""Clients that cost next to nothing themselves: callbacks on sockets, which count tokens and look at nothing else.

seen = await open_streams(port, key, 500, tokens=100, spread_s=1)     # Seen: times to the first token, tokens, time
await ask_repeatedly(port, key, connections=16, requests=10_000)      # closed loop, answers in one piece
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import cast

from msgspec import Struct

from gateway.commands.bench.processes import BenchError

ROUTE = "/v1/chat/completions"
TOKEN = b'"content":"w'  # as the scripted engine writes them, and a gateway after it
LAST_CHUNK = b"\r\n0\r\n\r\n"  # with the end of the one before it: a header may end with a 0
HEAD_END = b"\r\n\r\n"


class Seen(Struct, frozen=True):
    """`took_s` is from the first request to the end of the last answer."""

    first_s: list[float]
    tokens: int
    took_s: float


def request(key: str, max_tokens: int, *, stream: bool, content: str = "Count for me, as far as you are let.") -> bytes:
    messages = [{"role": "user", "content": content}]
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": max_tokens, "stream": stream}).encode()
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Stream(asyncio.Protocol):
    """One stream on a connection of its own. A token's bytes may lie in two reads: the few that do are not counted."""

    def __init__(self, asked: bytes, due: float) -> None:
        self.first_s = 0.0
        self.tokens = 0
        self.ended = asyncio.get_running_loop().create_future()
        self._asked = asked
        self._due = due
        self._tail = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._asked)

    def data_received(self, data: bytes) -> None:
        if found := data.count(TOKEN):
            if not self.tokens:
                self.first_s = time.perf_counter() - self._due
            self.tokens += found
        self._tail = (
            (self._tail + data)[-len(LAST_CHUNK) :] if len(data) < len(LAST_CHUNK) else data[-len(LAST_CHUNK) :]
        )
        if self._tail == LAST_CHUNK:
            self._transport.close()
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(BenchError(f"A stream was cut off after {self.tokens} tokens."))


async def open_streams(port: int, key: str, number: int, *, tokens: int, spread_s: float) -> Seen:
    """Streams that begin evenly over the time, or all at once where it is 0."""
    loop = asyncio.get_running_loop()
    asked = request(key, tokens, stream=True)
    begin = time.perf_counter()  # the loop's own time is that of its last turn

    async def one(place: int) -> _Stream:
        due = begin + spread_s * place / number
        await asyncio.sleep(due - time.perf_counter())
        _, stream = await loop.create_connection(lambda: _Stream(asked, due), "127.0.0.1", port)
        await stream.ended
        return stream

    streams = await asyncio.gather(*(one(place) for place in range(number)))
    first = sorted(stream.first_s for stream in streams)
    return Seen(first, sum(stream.tokens for stream in streams), time.perf_counter() - begin)


class _Loop(asyncio.Protocol):
    """Asks again as soon as it has its answer, for as long as `wants_more` says so."""

    def __init__(self, asked: bytes, wants_more: Callable[[], bool]) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._asked = asked
        self._wants_more = wants_more
        self._held = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        if self._wants_more():
            self._transport.write(self._asked)
        else:
            self._transport.close()
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, found, body = self._held.partition(HEAD_END)
        if found and len(body) >= int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            if not head.startswith(b"HTTP/1.1 200"):
                self._transport.close()
                self.ended.set_exception(BenchError(f"A request failed: {body.decode()}"))
                return
            self._held = b""
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(BenchError("A connection was cut off."))


async def ask_repeatedly(port: int, key: str, *, connections: int, requests: int) -> None:
    left = requests

    def wants_more() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    async def one() -> None:
        loop = asyncio.get_running_loop()
        asked = request(key, 16, stream=False)
        _, client = await loop.create_connection(lambda: _Loop(asked, wants_more), "127.0.0.1", port)
        await client.ended

    await asyncio.gather(*(one() for _ in range(connections)))
