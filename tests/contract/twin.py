"""A scripted engine on a real socket: what it answers, byte by byte, is in the test; what it was asked, it keeps.

twin.reply("/v1/chat/completions", Reply.stream(transcript))
...
twin.bodies[-1]["max_tokens"]                 # what the adapter sent
await twin.client_left(within_s=1)            # the adapter closed the socket in the middle of a reply
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from socket import SO_LINGER, SOL_SOCKET
from typing import Any, Literal

Step = bytes | float | Literal["reset", "hold", "end"]  # send, wait in seconds, RST, silence until the client leaves


@dataclass(frozen=True)
class Reply:
    """One answer: its head, and then steps. A chunked body ends well unless a step ends it otherwise."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    steps: tuple[Step, ...] = ()
    is_chunked: bool = True
    keep_alive: bool = True

    @classmethod
    def stream(cls, *steps: Step, content_type: str = "text/event-stream; charset=utf-8", **headers: str) -> Reply:
        named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        return cls(headers=(("Content-Type", content_type), *named), steps=steps)

    @classmethod
    def plain(
        cls, status: int, body: bytes | Any = b"", content_type: str = "application/json", **headers: str
    ) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        length = ("Content-Length", str(len(data)))
        return cls(status, (("Content-Type", content_type), length, *named), (data,), is_chunked=False)

    @classmethod
    def raw(cls, *steps: Step) -> Reply:
        """Bytes as they stand, without a head of ours. The connection ends with them."""
        return cls(status=-1, steps=steps, is_chunked=False, keep_alive=False)

    @classmethod
    def silent(cls) -> Reply:
        """Nothing at all, until the client leaves."""
        return cls(status=-1, steps=("hold",))

    @classmethod
    def dropped(cls) -> Reply:
        """The connection closes before any answer."""
        return cls(status=0)


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Twin:
    """Replies by path; a list is used up one by one, and its last reply stays."""

    requests: list[Request] = field(default_factory=list)
    num_connections: int = 0
    otherwise: Reply | None = None  # where no reply was set for a path; None: a 404
    _replies: dict[str, list[Reply]] = field(default_factory=dict)
    _left: asyncio.Event = field(default_factory=asyncio.Event)
    _asked: asyncio.Event = field(default_factory=asyncio.Event)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def __aenter__(self) -> Twin:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    def reply(self, path: str, *replies: Reply) -> None:
        self._replies[path] = list(replies)

    def answers_everything_with(self, reply: Reply) -> None:
        """Whatever the path; what was said before is forgotten."""
        self._replies.clear()
        self.otherwise = reply

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.body) for request in self.requests if request.method == "POST"]

    async def client_left(self, within_s: float) -> None:
        """Wait until a client has closed its connection in the middle of a reply."""
        await asyncio.wait_for(self._left.wait(), within_s)

    async def asked(self, within_s: float = 2.0) -> None:
        """Wait until a generation was asked for."""
        await asyncio.wait_for(self._asked.wait(), within_s)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        try:
            while (request := await _read_request(reader)) is not None:
                self.requests.append(request)
                if request.method == "POST":
                    self._asked.set()
                if not await self._play(self._next(request.path), reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            self._left.set()
        finally:
            self._writers.discard(writer)
            writer.close()

    def _next(self, path: str) -> Reply:
        replies = self._replies.get(path)
        if not replies and self.otherwise is not None:
            return self.otherwise
        if not replies:
            return Reply.plain(404, {"error": {"message": f"no route {path}", "type": "not_found_error"}})
        return replies.pop(0) if len(replies) > 1 else replies[0]

    async def _play(self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Play one reply; False when the connection is at its end."""
        if reply.status == 0:
            return False
        if reply.status > 0:
            writer.write(_head(reply))
        for step in reply.steps:
            if isinstance(step, bytes):
                writer.write(_chunk(step) if reply.is_chunked else step)
                await writer.drain()
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif step == "hold":
                await _wait_for_eof(reader)
                self._left.set()
                return False
            elif step == "reset":
                writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
                return False
            else:
                return False
        if reply.is_chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return reply.keep_alive


def _head(reply: Reply) -> bytes:
    headers = [*reply.headers, *([("Transfer-Encoding", "chunked")] if reply.is_chunked else [])]
    return (
        f"HTTP/1.1 {reply.status} Whatever\r\n{''.join(f'{k}: {v}{chr(13)}{chr(10)}' for k, v in headers)}\r\n".encode()
    )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    request_line, *lines = head.decode().strip().split("\r\n")
    method, path, _ = request_line.split(" ")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return Request(method, path, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


async def _wait_for_eof(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(65_536):
            pass
    except ConnectionError:
        return


def event(payload: Any) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


def events(payloads: Iterable[Any], *, done: bool = True) -> bytes:
    return b"".join(event(payload) for payload in payloads) + (b"data: [DONE]\n\n" if done else b"")
