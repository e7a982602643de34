"""The fake engine over HTTP, exact enough to check a load generator against.

    python -m adapters.servers.fake_server --port 0 --ttft-ms 50 --itl-ms 10 --tokens 64 --record sent.jsonl

It speaks OpenAI's chat, completions and embeddings, and vLLM's `/tokenize`, `/detokenize` and `/version`. It prints its
port as the first line on stdout, and stops on SIGINT and SIGTERM. With `--record` it writes one JSON line a generation
(`Record`), holding when each token left, in nanoseconds of CLOCK_MONOTONIC taken just before the write: a client on the
same machine cannot truthfully claim to have seen a byte earlier than that. The key is the request's `x-request-id`
header. HTTP is written by hand, on one asyncio protocol, so that no framework's buffering stands between the stamp and
the socket.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http
import signal
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import IO, Any, get_args

import msgspec
from msgspec import UNSET, Struct

from adapters.errors import EngineError, GoodgateError, InvalidRequest, ModelNotFound, StreamInterrupted
from adapters.fake import Adapter, FakeOptions, FaultKind
from adapters.servers.side_answers import (
    decode_detokenize,
    decode_embedding,
    decode_tokenize,
    embedding_answer,
    text_answer,
    tokens_answer,
)
from adapters.types import ChatRequest, Chunk, GenerateRequest, Usage, decode_chat, decode_completion
from adapters.wire import sse

MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 64 << 20


class Record(Struct):
    """When the parts of one request came and went, in nanoseconds of CLOCK_MONOTONIC; 0 where it did not happen."""

    request_id: str
    received_ns: int  # the whole request was here
    headers_ns: int = 0  # before the write of the status line
    token_ns: list[int] = msgspec.field(default_factory=list)  # before the write of each piece of text
    done_ns: int = 0  # before the write of the last byte
    outcome: str = ""  # ok, client_gone, or the code of the error


class HTTPRequest(Struct):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Connection(asyncio.Protocol):
    """One client. Requests on it are answered one after the other; a client that leaves ends its request at once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._held = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._held += data
        if self._task is None:
            self._answer_next()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def abort(self) -> None:
        """Drop the client without a goodbye."""
        self._transport.abort()

    def _answer_next(self) -> None:
        try:
            request = take_request(self._held)
        except ValueError as error:
            self.write(_plain(400, _error_body(InvalidRequest(f"Bad HTTP: {error}."))))
            self._transport.close()
            return
        if request is not None and not self._transport.is_closing():
            self._task = asyncio.get_running_loop().create_task(self._server.answer(request, self))
            self._task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            task.result()  # a fault of this program must be heard: the loop's handler logs it
            self._answer_next()


def take_request(held: bytearray) -> HTTPRequest | None:
    """Take one whole request off the front of `held`; None while it is not all there. ValueError: not a request."""
    end = held.find(b"\r\n\r\n")
    if end < 0:
        if len(held) > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")
        return None
    request_line, *lines = held[:end].decode("latin-1").split("\r\n")
    method, _, rest = request_line.partition(" ")
    path, _, version = rest.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("only HTTP/1 is spoken here")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "transfer-encoding" in headers:
        raise ValueError("a body needs Content-Length")
    num_body = int(headers.get("content-length", "0"))
    if not 0 <= num_body <= MAX_BODY_BYTES:
        raise ValueError("the body is too long")
    whole = end + 4 + num_body
    if len(held) < whole:
        return None
    body = bytes(held[end + 4 : whole])
    del held[:whole]
    return HTTPRequest(method, path.partition("?")[0], headers, body)


class Server:
    """The routes, over one in-process fake engine."""

    def __init__(self, dials: FakeOptions, record: IO[bytes] | None = None) -> None:
        self._dials = dials
        self._engine = Adapter(dials)
        self._record = record
        self.connections: set[Connection] = set()
        self._listener: asyncio.Server
        self._questions: dict[str, Callable[[bytes], Awaitable[bytes]]] = {
            "/v1/embeddings": self._embed,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port."""
        await self._engine.start()
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Connection(self), host, port, backlog=4096)
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        self._listener.close()
        for connection in list(self.connections):
            connection.abort()
        await self._engine.close()

    async def answer(self, request: HTTPRequest, connection: Connection) -> None:
        if request.method == "POST" and request.path in _DECODERS:
            await self._generate(request, connection)
        elif request.method == "POST" and request.path in self._questions:
            await self._ask(self._questions[request.path], request.body, connection)
        elif request.method == "GET" and request.path == "/version":
            connection.write(_plain(200, msgspec.json.encode({"version": await self._engine.version()})))
        elif request.method == "GET" and request.path == "/health":
            connection.write(_plain(200, b"{}"))
        elif request.method == "GET" and request.path == "/v1/models":
            model = {"id": self._dials.model, "object": "model", "max_model_len": self._dials.max_model_len}
            connection.write(_plain(200, msgspec.json.encode({"object": "list", "data": [model]})))
        elif request.method == "GET" and request.path == "/metrics":
            load = await self._engine.load()
            text = f"fake:requests_running {load.running}\nfake:requests_waiting {load.waiting}\n"
            connection.write(_plain(200, text.encode(), "text/plain; version=0.0.4"))
        else:
            error = InvalidRequest(f"No such route: {request.method} {request.path}.")
            connection.write(_plain(404, _error_body(error)))

    async def _ask(self, question: Callable[[bytes], Awaitable[bytes]], body: bytes, connection: Connection) -> None:
        try:
            connection.write(_plain(200, await question(body)))
        except StreamInterrupted:
            connection.abort()
        except GoodgateError as error:
            connection.write(_plain(_status(error), _error_body(error)))

    async def _embed(self, data: bytes) -> bytes:
        body = decode_embedding(data)
        self._check_model(body.model)
        return embedding_answer(await self._engine.embed(body.request()), body.model, body.format)

    async def _tokenize(self, data: bytes) -> bytes:
        body = decode_tokenize(data)
        self._check_model(body.model)
        return tokens_answer(await self._engine.tokenize(body.request(self._dials.model)))

    async def _detokenize(self, data: bytes) -> bytes:
        body = decode_detokenize(data)
        self._check_model(body.model)
        return text_answer(await self._engine.detokenize(body.tokens))

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._dials.model):
            raise ModelNotFound(f"The fake engine serves {self._dials.model!r}, not {model!r}.", param="model")

    async def _generate(self, request: HTTPRequest, connection: Connection) -> None:
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        record = Record(request_id, time.monotonic_ns())
        try:
            await self._reply(request, connection, record)
            record.outcome = "ok"
        except GoodgateError as error:
            record.outcome = error.code or error.type
            self._report(error, connection, record)
        except asyncio.CancelledError:
            record.outcome = "client_gone"
            raise
        finally:
            if self._record is not None:
                self._record.write(msgspec.json.encode(record) + b"\n")
                self._record.flush()

    async def _reply(self, request: HTTPRequest, connection: Connection, record: Record) -> None:
        body = _DECODERS[request.path](request.body)
        self._check_model(body.model)
        wire = Wire(body, record.request_id)
        async with contextlib.aclosing(self._engine.generate(body, request_id=record.request_id)) as chunks:
            if body.is_stream:
                await _stream(chunks, wire, connection, record)
            else:
                whole = await _fold(chunks, wire)
                record.headers_ns = record.done_ns = time.monotonic_ns()
                connection.write(_plain(200, whole))

    def _report(self, error: GoodgateError, connection: Connection, record: Record) -> None:
        if isinstance(error, StreamInterrupted):
            connection.abort()
        elif record.headers_ns:
            connection.write(_chunk(sse.encode(_error_body(error))) + _LAST_CHUNK)
        else:
            record.headers_ns = time.monotonic_ns()
            connection.write(_plain(_status(error), _error_body(error)))


async def _stream(chunks: AsyncGenerator[Chunk, None], wire: Wire, connection: Connection, record: Record) -> None:
    """Headers leave with the first token, as those of real engines do; each event is one write of its own."""
    async for chunk in chunks:
        if not record.headers_ns:
            record.headers_ns = time.monotonic_ns()
            connection.write(_STREAM_HEAD + b"".join(_chunk(event) for event in wire.opening()))
        if chunk.usage is None:
            event = _chunk(wire.event(chunk))
            record.token_ns.append(time.monotonic_ns())
            connection.write(event)
        elif wire.wants_usage:
            connection.write(_chunk(wire.usage_event(chunk.usage)))
    record.done_ns = time.monotonic_ns()
    connection.write(_chunk(sse.encode(b"[DONE]")) + _LAST_CHUNK)


async def _fold(chunks: AsyncGenerator[Chunk, None], wire: Wire) -> bytes:
    texts = [""] * wire.num_choices
    reasons = [""] * wire.num_choices
    usage = Usage(0, 0)
    async for chunk in chunks:
        texts[chunk.index] += chunk.text
        reasons[chunk.index] = chunk.finish_reason or reasons[chunk.index]
        usage = chunk.usage or usage
    return wire.whole(texts, reasons, usage)


class Wire:
    """How one request's chunks look on the wire."""

    def __init__(self, request: GenerateRequest, request_id: str) -> None:
        self.wants_usage = request.wants_usage
        self.num_choices = request.num_choices
        self._is_chat = isinstance(request, ChatRequest)
        kind = "chat.completion" if self._is_chat else "text_completion"
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{request_id}", "created": int(time.time()), "model": request.model}
        self._whole_kind = kind
        self._event_kind = f"{kind}.chunk" if self._is_chat else kind

    def opening(self) -> list[bytes]:
        """Chat streams open with a role for each choice."""
        if not self._is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._event([{"index": index, "delta": delta, "finish_reason": None}]) for index in range(self.num_choices)
        ]

    def event(self, chunk: Chunk) -> bytes:
        piece: dict[str, Any] = {"delta": {"content": chunk.text}} if self._is_chat else {"text": chunk.text}
        more = {} if chunk.usage_so_far is None else {"usage": _usage(chunk.usage_so_far)}
        return self._event([{"index": chunk.index, **piece, "finish_reason": chunk.finish_reason}], **more)

    def usage_event(self, usage: Usage) -> bytes:
        return self._event([], usage=_usage(usage))

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: Usage) -> bytes:
        choices = [
            {"index": index, **self._whole_text(text), "finish_reason": reason}
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        body = {**self._head, "object": self._whole_kind, "choices": choices, "usage": _usage(usage)}
        return msgspec.json.encode(body)

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}

    def _event(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        body = {**self._head, "object": self._event_kind, "choices": choices, **more}
        return sse.encode(msgspec.json.encode(body))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
    }


_DECODERS: dict[str, Callable[[bytes], GenerateRequest]] = {
    "/v1/chat/completions": decode_chat,
    "/v1/completions": decode_completion,
}
_STREAM_HEAD = b"\r\n".join(
    [
        b"HTTP/1.1 200 OK",
        b"Content-Type: text/event-stream",
        b"Cache-Control: no-cache",
        b"Transfer-Encoding: chunked",
        b"\r\n",
    ]
)
_LAST_CHUNK = b"0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _plain(status: int, body: bytes, content_type: str = "application/json") -> bytes:
    phrase = http.HTTPStatus(status).phrase
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _status(error: GoodgateError) -> int:
    return 500 if isinstance(error, EngineError) else error.status


def _error_body(error: GoodgateError) -> bytes:
    details = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": details})


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, FakeOptions]:
    parser = argparse.ArgumentParser(
        prog="python -m adapters.servers.fake_server", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument("--record", type=Path, help="file for one JSON line a request, with the time of every token")
    for field in msgspec.structs.fields(FakeOptions):
        kinds = f" (comma separated: {', '.join(get_args(FaultKind))})" if field.name == "fail_kinds" else ""
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        parser.add_argument(_flag(field.name), default=UNSET, help=f"default {default}{kinds}")
    arguments = parser.parse_args(argv)
    given = {name: getattr(arguments, name) for name in FakeOptions.__struct_fields__}
    given = {name: value for name, value in given.items() if value is not UNSET}
    if "fail_kinds" in given:
        given["fail_kinds"] = given["fail_kinds"].split(",")
    try:
        return arguments, msgspec.convert(given, FakeOptions, strict=False)
    except msgspec.ValidationError as error:
        parser.error(str(error))


async def serve(arguments: argparse.Namespace, dials: FakeOptions) -> None:
    with contextlib.ExitStack() as stack:
        record = stack.enter_context(arguments.record.open("ab")) if arguments.record else None
        server = Server(dials, record)
        print(await server.start(arguments.host, arguments.port), flush=True)
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await stopped.wait()
        await server.stop()


if __name__ == "__main__":
    asyncio.run(serve(*parse_arguments(sys.argv[1:])))
