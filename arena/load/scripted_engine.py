"""An engine whose timing is known: it does what each request's `script` says, and remembers when each piece left.

It is the yardstick of the load generator (`goodgate arena truth`) and the twin for its fault tests. It computes
nothing, so it keeps its times at ten thousand events a second. `python -m arena.load.scripted_engine`
prints one JSON line with its port and serves until it is killed or its stdin ends.

    POST any path, body {"script": {...}}   answers as a script says; the X-Request-Id names it in the log
    PUT /script, body a script              answers those with it that bring none: those of other load generators
    GET /log                                {"requests": {id: {"received_ns", "left_ns": [...]}}, "max_in_flight", ...}
    GET any other path                      a list of models with one in it, for clients that look before they leap

>>> stream_script(ttft_ms=200, itl_ms=20, tokens=5)        # a plain well-behaved stream
>>> Script(steps=[Step(0, role_event()), Step(200, text_event("a"))], end="cut")
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import msgspec

End: TypeAlias = Literal["whole", "cut", "reset", "hang"]
"""whole: the body ends properly. cut: the connection closes in mid-body. reset: as cut, with RST. hang: nothing more
comes."""


class Step(msgspec.Struct, array_like=True):
    at_ms: float  # after the request's last byte came (or its turn, where the script is serial)
    data: str  # raw bytes of the body, as latin-1


class Script(msgspec.Struct, kw_only=True):
    steps: list[Step]
    status: int = 200
    content_type: str = "text/event-stream"
    framing: Literal["chunked", "length", "close"] = "chunked"
    end: End = "whole"
    end_at_ms: float | None = None  # None: right after the last step
    serial: bool = False  # one serial request at a time, the others queue: an engine of capacity one
    freeze_ms: float = 0.0  # the whole engine stops for so long when this request comes


class _Request(msgspec.Struct):
    script: Script | None = None


class Record(msgspec.Struct):
    """One request's truth, on CLOCK_MONOTONIC. `left_ns[i]` was taken just before step i was handed to the kernel."""

    received_ns: int
    left_ns: list[int]


class Log(msgspec.Struct):
    requests: dict[str, Record]
    max_in_flight: int
    connections: int
    asked: dict[str, Any]  # body fields other than the script, by request: what the client really sent


def event(payload: dict[str, Any]) -> str:
    return f"data: {msgspec.json.encode(payload).decode()}\n\n"


def role_event() -> str:
    return event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})


def text_event(text: str, *, usage: int | None = None, **delta: Any) -> str:
    """A content event; `usage` adds the running count of completion tokens, as engines do that offer it per chunk."""
    payload: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": None}]}
    if usage is not None:
        payload["usage"] = {"prompt_tokens": 7, "completion_tokens": usage}
    return event(payload)


def finish_event(reason: str = "length") -> str:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def usage_event(completion_tokens: int, *, reasoning_tokens: int | None = None) -> str:
    usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": completion_tokens}
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return event({"choices": [], "usage": usage})


DONE = "data: [DONE]\n\n"
MODEL = "scripted"


def stream_script(*, ttft_ms: float, itl_ms: float, tokens: int, **options: Any) -> Script:
    """Role at once, then `tokens` text events, finish, usage and [DONE] with the last of them."""
    steps = [Step(0.0, role_event())]
    steps += [Step(ttft_ms + index * itl_ms, text_event("word ")) for index in range(tokens)]
    end = finish_event() + usage_event(tokens) + DONE
    return Script(steps=[*steps, Step(steps[-1].at_ms, end)], **options)


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the machine has no part in this


class RunningEngine:
    """A scripted engine in a process of its own, as its user sees it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.process = process
        self.url = f"http://127.0.0.1:{msgspec.json.decode(process.stdout.readline())['port']}"

    def take_log(self) -> Log:
        """What happened since the last call."""
        with _opener.open(f"{self.url}/log", timeout=30) as response:
            return msgspec.json.decode(response.read(), type=Log)

    def play(self, script: Script) -> None:
        """Answer every request with this script that brings none of its own."""
        request = urllib.request.Request(f"{self.url}/script", msgspec.json.encode(script), method="PUT")
        _opener.open(request, timeout=30).close()


@contextlib.contextmanager
def running() -> Iterator[RunningEngine]:
    """Start an engine, and stop it."""
    argv = [sys.executable, "-m", "arena.load.scripted_engine"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield RunningEngine(process)
        finally:
            process.kill()


class Engine:
    def __init__(self) -> None:
        self.requests: dict[str, Record] = {}
        self.asked: dict[str, Any] = {}
        self.in_flight = self.max_in_flight = self.connections = 0
        self.serial_queue: deque[_Connection] = deque()
        self.script: Script | None = None  # for requests that bring none
        self._num_nameless = 0

    def name(self) -> str:
        """For a request without an id."""
        self._num_nameless += 1
        return f"nameless-{self._num_nameless}"

    def begin(self) -> None:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)

    def take_log(self) -> bytes:
        log = Log(self.requests, self.max_in_flight, self.connections, self.asked)
        self.requests, self.asked, self.max_in_flight, self.connections = {}, {}, 0, 0
        return msgspec.json.encode(log)


class _Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._buffer = b""
        self._timers: list[asyncio.TimerHandle] = []
        self._script: Script | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._engine.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._script is not None:
            self._release()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        headers = _headers(head)
        length = int(headers.get(b"content-length", b"0"))
        if len(rest) < length:
            return
        body, self._buffer = rest[:length], rest[length:]
        if head.startswith(b"GET /log "):
            self._answer_json(200, self._engine.take_log())
        elif head.startswith(b"GET"):
            self._answer_json(200, msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
        elif head.startswith(b"PUT /script "):
            self._engine.script = msgspec.json.decode(body, type=Script)
            self._answer_json(200, b"{}")
        else:
            self._answer(headers.get(b"x-request-id", b"").decode() or self._engine.name(), body)

    def _answer_json(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} Scripted\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _answer(self, request_id: str, body: bytes) -> None:
        received_ns = time.monotonic_ns()
        script = msgspec.json.decode(body, type=_Request).script or self._engine.script
        if script is None:
            self._answer_json(400, b'{"error": {"message": "The body has no script, and none was PUT to /script."}}')
            return
        self._record = Record(received_ns, [])
        self._engine.requests[request_id] = self._record
        self._engine.asked[request_id] = {k: v for k, v in msgspec.json.decode(body).items() if k != "script"}
        self._script = script
        self._engine.begin()
        if self._script.freeze_ms:
            time.sleep(self._script.freeze_ms / 1e3)
        if self._script.serial:
            self._engine.serial_queue.append(self)
            if self._engine.serial_queue[0] is not self:
                return
        self._play()

    def _play(self) -> None:
        script = self._script
        assert script is not None
        start = self._loop.time()
        body = [_framed(step.data.encode("latin-1"), script) for step in script.steps]
        head = self._head(script, sum(map(len, body)))
        is_silent = not script.steps and script.end in ("cut", "reset")  # not even a status line
        if not is_silent and not (script.steps and script.steps[0].at_ms <= 0):
            self._transport.write(head)
            head = b""
        for step, data in zip(script.steps, body, strict=True):
            if step.at_ms <= 0:
                self._leave(head + data)
            else:
                self._timers.append(self._loop.call_at(start + step.at_ms / 1e3, self._leave, head + data))
            head = b""
        end_ms = script.end_at_ms if script.end_at_ms is not None else max((s.at_ms for s in script.steps), default=0.0)
        self._timers.append(self._loop.call_at(start + end_ms / 1e3 + 1e-6, self._finish))

    def _leave(self, data: bytes) -> None:
        if self._transport.is_closing():  # whoever asked has gone
            return
        self._record.left_ns.append(time.monotonic_ns())
        self._transport.write(data)

    def _finish(self) -> None:
        script = self._script
        assert script is not None
        if script.end == "hang":
            return
        if script.end == "reset":
            linger = struct.pack("ii", 1, 0)
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._transport.abort()
        elif script.end == "cut" or script.framing == "close":
            self._transport.close()
        elif script.framing == "chunked":
            self._transport.write(b"0\r\n\r\n")
        self._release()

    def _release(self) -> None:
        script, self._script = self._script, None
        self._timers.clear()
        self._engine.in_flight -= 1
        if script is not None and script.serial:
            queue = self._engine.serial_queue
            with contextlib.suppress(ValueError):
                was_first = queue[0] is self if queue else False
                queue.remove(self)
                if was_first and queue:
                    queue[0]._play()

    def _head(self, script: Script, length: int) -> bytes:
        framing = {
            "chunked": "Transfer-Encoding: chunked\r\n",
            "length": f"Content-Length: {length}\r\n",
            "close": "Connection: close\r\n",
        }[script.framing]
        return f"HTTP/1.1 {script.status} Scripted\r\nContent-Type: {script.content_type}\r\n{framing}\r\n".encode()


def _headers(head: bytes) -> dict[bytes, bytes]:
    lines = (line.partition(b":") for line in head.split(b"\r\n"))
    return {name.lower(): value.strip() for name, _, value in lines}


def _framed(data: bytes, script: Script) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if script.framing == "chunked" else data


async def serve() -> None:
    engine = Engine()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(engine), "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(msgspec.json.encode({"port": server.sockets[0].getsockname()[1]}).decode() + "\n")
    sys.stdout.flush()
    stdin = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    await stdin.read()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())
