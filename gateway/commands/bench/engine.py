"""An engine as a script: it answers chats as OpenAI does, and misbehaves as it is told on its stdin.

    python -m gateway.commands.bench.engine --port 20000 [--ttft-ms 10] [--itl-ms 10]

It prints its port first. Then each line on its stdin is a `Mode` that holds from now on, or `open`, which it answers
with the number of generations it works on. It ends when its stdin does, so it outlives nobody.

The n-th word of an answer is always the same (`answer_text`), so that a client can tell a whole answer from a part of
one. It is written on callbacks alone, so that it is never what a measurement finds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from enum import StrEnum
from functools import lru_cache
from typing import Any, cast

import msgspec
import uvloop
from msgspec import Struct

BULK_TOKENS = (
    500  # longer answers are of long words, as fast as they are taken: for clients that are slow by themselves
)
BULK = "x" * 1000
SLOWER = 10
EVENT = '{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[%s],"usage":%s}'
CHOICE = '{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}'
WHOLE = (
    '{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    '"content":"%s"},"logprobs":null,"finish_reason":"stop"}],"usage":%s}'
)
USAGE = '{"prompt_tokens":10,"completion_tokens":%d,"total_tokens":%d}'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Mode(StrEnum):
    WELL = "well"
    REFUSE = "refuse"  # nobody listens
    SILENCE = "silence"  # requests are taken and never answered
    FAIL = "fail"  # 500
    BUSY = "busy"  # 429 with Retry-After
    RESET = "reset"  # the connection is reset amid an answer
    CUT = "cut"  # the answer ends early, without a word
    MALFORMED = "malformed"  # what comes amid an answer is no JSON
    SLOW = "slow"  # ten times


BREAKS_AMID = {Mode.RESET, Mode.CUT, Mode.MALFORMED}


class Wanted(Struct):
    stream: bool = False
    max_tokens: int = 16
    max_completion_tokens: int | None = None
    messages: Any = None

    @property
    def num_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens


def answer_text(num_tokens: int) -> str:
    return "".join(_word(number, num_tokens) for number in range(num_tokens))


def _word(number: int, num_tokens: int) -> str:
    return f"w{number}{BULK if num_tokens > BULK_TOKENS else ''} "


def response(status: int, body: bytes, *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@lru_cache(4096)
def token_event(number: int, num_tokens: int) -> bytes:
    return _event(CHOICE % (f'{{"content":"{_word(number, num_tokens)}"}}', "null"))


@lru_cache(256)
def last_events(num_tokens: int) -> bytes:
    usage = USAGE % (num_tokens, num_tokens + 10)
    end = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return _event(CHOICE % ("{}", '"stop"')) + _event("", usage) + end


def _event(choices: str, usage: str = "null") -> bytes:
    return _chunk(b"data: " + (EVENT % (choices, usage)).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine:
    def __init__(self, port: int, ttft_s: float, itl_s: float) -> None:
        self.port = port
        self.ttft_s = ttft_s
        self.itl_s = itl_s
        self.mode = Mode.WELL
        self.connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def slower(self) -> int:
        return SLOWER if self.mode is Mode.SLOW else 1

    @property
    def num_open(self) -> int:
        return sum(connection.generation is not None for connection in self.connections)

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), "127.0.0.1", self.port, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]

    async def enter(self, mode: Mode) -> None:
        """Behave so from now on. What is under way ends as it began."""
        self.mode = mode
        if mode is Mode.REFUSE and self._server is not None:
            self._server.close()
            self._server = None
            for connection in list(self.connections):
                connection.transport.abort()
        elif mode is not Mode.REFUSE and self._server is None:
            await self.listen()


class Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.generation: Generation | None = None
        self._held = bytearray()
        self._needed = 0  # bytes of the request that is coming, once its head is here

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's
        self.engine.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.connections.discard(self)
        self.ended()

    def ended(self) -> None:
        if self.generation is not None:
            self.generation.stop()
            self.generation = None

    def data_received(self, data: bytes) -> None:
        self._held += data
        if len(self._held) < self._needed:
            return  # most of a large body: nothing is looked for in it again and again
        head, found, body = self._held.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        self._needed = len(head) + 4 + length
        if len(self._held) >= self._needed:
            del self._held[: self._needed]
            self._needed = 0
            self._asked(bytes(head).split(b" ", 2)[1], bytes(body[:length]))

    def _asked(self, path: bytes, body: bytes) -> None:
        if path == b"/v1/chat/completions":
            self.generation = Generation(self, msgspec.json.decode(body, type=Wanted))
            self.generation.begin()
        elif path == b"/v1/models":
            self.transport.write(response(200, b'{"object":"list","data":[{"id":"m","object":"model"}]}'))
        else:
            self.transport.write(response(200 if path == b"/health" else 404, b"{}"))

    def pause_writing(self) -> None:
        if self.generation is not None:
            self.generation.is_paused = True

    def resume_writing(self) -> None:
        if self.generation is not None:
            self.generation.is_paused = False
            self.generation.go_on()


class Generation:
    """One answer, token by token; `stop` ends it wherever it is."""

    def __init__(self, connection: Connection, wanted: Wanted) -> None:
        self.is_paused = False
        self._connection = connection
        self._engine = connection.engine
        self._mode = connection.engine.mode
        self._is_stream = wanted.stream
        self._num_tokens = wanted.num_tokens
        self._breaks_at = wanted.num_tokens // 2 if self._mode in BREAKS_AMID else -1
        self._itl_s = 0.0 if wanted.num_tokens > BULK_TOKENS else self._engine.itl_s * self._engine.slower
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        if self._mode is Mode.FAIL:
            self._end(response(500, b'{"error":{"message":"It failed.","type":"server_error"}}'))
        elif self._mode is Mode.BUSY:
            self._end(response(429, b'{"error":{"message":"Too much to do."}}', "Retry-After: 1"))
        elif self._mode is not Mode.SILENCE:
            whole_s = 0.0 if self._is_stream else self._itl_s * self._num_tokens
            self._later(self._engine.ttft_s * self._engine.slower + whole_s)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def go_on(self) -> None:
        """Write what is due: a word, or all that is taken where there are no waits between them."""
        if not self._is_stream:
            self._whole()
            return
        write = self._connection.transport.write
        if self._sent == 0:
            write(STREAM_HEAD)
        while not self.is_paused:
            if self._sent == self._breaks_at:
                self._break(b"data: {no JSON\n\n")
                return
            if self._sent == self._num_tokens:
                self._end(last_events(self._num_tokens))
                return
            write(token_event(self._sent, self._num_tokens))
            self._sent += 1
            if self._itl_s:
                self._later(self._itl_s)
                return

    def _whole(self) -> None:
        usage = USAGE % (self._num_tokens, self._num_tokens + 10)
        body = (WHOLE % (answer_text(self._num_tokens), usage)).encode()
        if self._mode is Mode.MALFORMED:
            self._end(response(200, body[: len(body) // 2]))
        elif self._mode in BREAKS_AMID:
            self._connection.transport.write(response(200, body)[: -len(body) // 2])
            self._break(b"")
        else:
            self._end(response(200, body))

    def _break(self, malformed: bytes) -> None:
        transport = self._connection.transport
        if self._mode is Mode.RESET:
            transport.abort()
        elif self._mode is Mode.MALFORMED:
            self._breaks_at = -1  # and it goes on as if nothing had happened
            transport.write(_chunk(malformed))
            self._later(self._itl_s)
        elif self._is_stream:
            self._end(b"0\r\n\r\n")
        else:
            transport.close()

    def _later(self, after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self.go_on)

    def _end(self, data: bytes) -> None:
        self._connection.transport.write(data)
        self._connection.ended()


async def serve(port: int, ttft_s: float, itl_s: float) -> None:
    engine = Engine(port, ttft_s, itl_s)
    await engine.listen()
    print(engine.port, flush=True)
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[bytes] = asyncio.Queue()
    loop.add_reader(sys.stdin.fileno(), lambda: orders.put_nowait(os.read(sys.stdin.fileno(), 4096)))
    while lines := await orders.get():
        for line in lines.decode().split():
            if line == "open":
                print(engine.num_open, flush=True)
            else:
                await engine.enter(Mode(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=10)
    parser.add_argument("--itl-ms", type=float, default=10)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.ttft_ms / 1e3, arguments.itl_ms / 1e3))


if __name__ == "__main__":
    main()
