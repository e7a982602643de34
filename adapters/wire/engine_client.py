"""The HTTP client under the adapters of engines that are reached over HTTP, whatever they speak.

    client = EngineClient("acme", options)
    await client.start()
    async for chunk in client.stream(Exchange(path="/generate", body={...}, reader=reader), request_id="..."):
        ...
    answer = await client.ask(Post("/v1/embeddings", {...}))      # work that is answered in one piece

What it promises:
- The engine's status is known before the first chunk, because the first event is awaited: errors are true exceptions.
- Three deadlines: to connect, to the first piece of text, and between pieces. Comments do not count as life.
- Closing the generator closes the socket at once, so that the engine stops. Only a finished stream's is used again.
- An engine that notices a closed socket late is told as well: the exchange's `farewell` goes out behind it.
- What an engine sends without being asked is never read as the answer to the next request.
- A pooled connection that the engine had closed meanwhile is replaced once, in silence: nobody has seen a byte yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Annotated, Any, Protocol, TypeVar

import aiohttp
import msgspec
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from msgspec import Meta

from adapters.base import EngineOptions, Load
from adapters.config import secret
from adapters.errors import (
    EngineError,
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    GoodgateError,
    InvalidRequest,
    StreamInterrupted,
    UnsupportedOperation,
)
from adapters.types import Chunk
from adapters.wire import outgoing
from adapters.wire.load_metrics import LoadMetrics, read_load
from adapters.wire.unreachable import why_unreachable
from adapters.wire.wire_errors import error_from_event, error_from_response, knows_no_route, tells_error

KEEPALIVE_S = 4.0  # uvicorn closes idle connections after 5 s, llama.cpp's server too
PROBE_TIMEOUT_S = 2.0
LOOK_AFTER_S = 1.0  # in a silence, between two looks at the connection
DRAIN_TIMEOUT_S = 0.05  # for the empty chunk after [DONE]: it lets the connection be used again
MAX_PLAIN_BYTES = 4 << 20  # of an answer that is not a stream
MAX_ANSWER_BYTES = 64 << 20  # of work answered in one piece: 2048 vectors of 1024 floats as JSON, of 4096 as base64
MAX_STALE = 16  # connections that are closed unused for one request
MAX_BODY_AT_ONCE = 1 << 20  # of a request; larger ones go out piece by piece

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_HOST = r"([^\s/@]+@)?(\[[0-9A-Fa-f:.]+\]|[^\s/:@\[\]?#]+)"  # perhaps a user; a name or an address
URL = Annotated[
    str, Meta(pattern=rf"^(?i:https?)://{_HOST}(:[0-9]{{1,5}})?(/\S*)?\Z", examples=["http://10.0.0.5:8000"])
]


class HTTPOptions(EngineOptions):
    """Keys of every engine that is reached over HTTP."""

    url: URL
    model: str = ""  # the engine's own name for the model; empty: the only one that it serves
    api_key: str = ""
    api_key_env: str = ""  # the variable that holds the key, better than the key itself
    connect_timeout_s: Seconds = 2.0
    first_token_timeout_s: Seconds = 120.0
    token_timeout_s: Seconds = 60.0


def launched_options(kind: type[EngineOptions], url: str, launch_options: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter's options, of the given kind, for an engine that was launched from here.

    An option that launch and adapter both have, such as `embeddings`, says how the engine was started, and so how it
    answers.
    """
    shared = set(kind.__struct_fields__) - set(HTTPOptions.__struct_fields__)
    return {"url": url, **{name: value for name, value in launch_options.items() if name in shared}}


class Reader(Protocol):
    """Turns one stream's bytes into chunks, without I/O."""

    @property
    def is_done(self) -> bool:
        """Nothing that follows matters."""

    @property
    def is_cut(self) -> bool:
        """Done before the engine is, which has to be stopped."""

    @property
    def num_chunks(self) -> int: ...

    def feed(self, data: bytes) -> Iterator[Chunk]: ...

    def finish(self) -> list[Chunk]:
        """The stream is over. Raises `StreamInterrupted` if it ended too early."""


@dataclass(frozen=True, slots=True)
class Post:
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One generation: what to send, who reads the answer, and what to tell an engine that is left before its end."""

    path: str
    body: Mapping[str, Any]
    reader: Reader
    headers: Mapping[str, str] = field(default_factory=dict)
    farewell: Post | None = None
    content_type: str = "text/event-stream"  # what a success looks like


_T = TypeVar("_T")


class EngineClient:
    """One engine behind one URL."""

    def __init__(self, engine: str, options: HTTPOptions, *, keeps_connections: bool = True) -> None:
        self.engine = engine
        self.url = options.url.rstrip("/").removesuffix("/v1")
        self._options = options
        self._keeps_connections = keeps_connections
        self._pooled: aiohttp.ClientSession | None = None
        self._unpooled: aiohttp.ClientSession | None = None
        self._farewells: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        if self._pooled is not None:
            return
        key = self._options.api_key or secret(self._options.api_key_env)
        self._pooled = self._session_for(key, keeps_connections=self._keeps_connections)
        self._unpooled = self._session_for(key, keeps_connections=False)

    def _session_for(self, key: str, *, keeps_connections: bool) -> aiohttp.ClientSession:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        kept = {"keepalive_timeout": KEEPALIVE_S} if keeps_connections else {"force_close": True}
        return aiohttp.ClientSession(
            connector=_Connector(limit=0, **kept),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._options.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[_notes_reuse()],
        )

    async def close(self) -> None:
        if self._farewells:
            await asyncio.wait(self._farewells)
        for session in (self._pooled, self._unpooled):
            if session is not None:
                await session.close()
        self._pooled = self._unpooled = None

    # ------------------------------------------------------------------------------------------------------ questions

    async def get(self, path: str) -> bytes:
        """The body of a GET that succeeds. Raises our errors. `path` may be a whole URL."""
        return await self._ask("GET", path)

    async def post(self, post: Post) -> bytes:
        """The body of a short POST that succeeds. Raises our errors."""
        return await self._ask("POST", post.path, data=msgspec.json.encode(post.body), headers=post.headers)

    async def _ask(self, method: str, path: str, **what: Any) -> bytes:
        session = self._session()
        url = path if path.startswith("http") else self.url + path
        try:
            async with (
                asyncio.timeout(PROBE_TIMEOUT_S),
                # A redirect is not followed: the key is for this engine alone.
                session.request(method, url, allow_redirects=False, **what) as response,
            ):
                body = await read_body(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._translated(error, has_begun=False) from error
        if response.status != 200:
            raise self._refused(response, body)
        return body

    async def ask(self, post: Post) -> bytes:
        """The answer to a POST that makes the engine work, in one piece: as patient as for a generation's first token.

        Whoever leaves early closes the socket, and with it the engine's work.
        """
        deadline = asyncio.get_running_loop().time() + self._options.first_token_timeout_s
        response = await self._send(post, deadline)
        try:
            if response.status != 200:
                raise await self._refusal(response, deadline)
            body = bytearray()
            while data := await self._read(response, deadline, has_begun=False):
                body += data
                if len(body) > MAX_ANSWER_BYTES:
                    raise InvalidRequest(
                        f"The answer of the engine {self.engine!r} is larger than {MAX_ANSWER_BYTES >> 20} MiB; "
                        "ask for less at once."
                    )
            return bytes(body)
        finally:
            response.close()  # at the end of an answer its connection is back in the pool already

    async def load(self, names: LoadMetrics | None) -> Load:
        """The engine's own account; unknown where it offers none or cannot be asked."""
        if names is None:
            return Load()
        try:
            text = await self.get(names.path)
        except GoodgateError:
            return Load()
        return read_load(text.decode("utf-8", "replace"), names)

    def _session(self) -> aiohttp.ClientSession:
        if self._pooled is None:
            raise EngineUnavailable(f"The adapter of the engine {self.engine!r} is not started.")
        return self._pooled

    def decode(self, body: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineProtocolError(
                f"The engine {self.engine!r} answered something unexpected; check that its `url` is right."
            ) from error

    # ----------------------------------------------------------------------------------------------------- generation

    async def stream(self, exchange: Exchange, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        reader, options = exchange.reader, self._options
        deadline = asyncio.get_running_loop().time() + options.first_token_timeout_s
        try:
            async with self._opened(exchange, request_id, deadline) as response:
                while not reader.is_done and (data := await self._read(response, deadline, reader.num_chunks > 0)):
                    num_before = reader.num_chunks
                    for chunk in reader.feed(data):
                        yield chunk
                    if reader.num_chunks > num_before:  # they have been taken from us: the clock starts now
                        deadline = asyncio.get_running_loop().time() + options.token_timeout_s
                last = reader.finish()
                if not reader.is_cut:
                    await _drain(response)
        except (GeneratorExit, asyncio.CancelledError, EngineTimeout, EngineProtocolError):
            self._say_farewell(exchange)
            raise
        if reader.is_cut:
            self._say_farewell(exchange)
        for chunk in last:
            yield chunk

    @contextlib.asynccontextmanager
    async def _opened(
        self, exchange: Exchange, request_id: str, deadline: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to the request, once it is known to be a stream. Its socket is closed on the way out."""
        response = await self._send(exchange, deadline, {"X-Request-Id": request_id})
        try:
            if response.status != 200 or exchange.content_type not in response.content_type:
                raise await self._refusal(response, deadline)
            yield response
        finally:
            response.close()  # `release` would read the rest, and the engine would go on generating

    async def _send(
        self, post: Exchange | Post, deadline: float, headers: Mapping[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        pooled = self._session()
        body = msgspec.json.encode(post.body)
        headers = {**outgoing.HEADERS.get(), **(headers or {}), **post.headers}
        note = SimpleNamespace(reused=False)

        async def send(session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
            return await session.post(
                self.url + post.path, data=_payload(body), headers=headers, allow_redirects=False,
                trace_request_ctx=note,
            )  # fmt: skip

        try:
            async with asyncio.timeout_at(deadline):
                try:
                    return await send(pooled)
                except aiohttp.ClientConnectionError:  # the pool had a connection that the engine was closing
                    if not note.reused or self._unpooled is None:
                        raise
                return await send(self._unpooled)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._translated(error, has_begun=False) from error

    async def _read(self, response: aiohttp.ClientResponse, deadline: float, has_begun: bool) -> bytes:
        now = asyncio.get_running_loop().time
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(min(deadline, now() + LOOK_AFTER_S)):
                        return await response.content.readany()
                _check_connected(response)
                if now() >= deadline:
                    raise TimeoutError
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._translated(error, has_begun) from error

    async def _refusal(self, response: aiohttp.ClientResponse, deadline: float) -> GoodgateError:
        """The error that an answer means which is not a stream."""
        try:
            async with asyncio.timeout_at(min(deadline, asyncio.get_running_loop().time() + PROBE_TIMEOUT_S)):
                body = await read_body(response)
        except (aiohttp.ClientError, OSError, TimeoutError):
            body = b""  # the status alone says enough
        if response.status == 200 and tells_error(body):
            return error_from_event(self.engine, body)  # an error under a success status
        if response.status == 200:
            return EngineProtocolError(f"The engine {self.engine!r} answered {response.content_type}, not a stream.")
        return self._refused(response, body)

    def _refused(self, response: aiohttp.ClientResponse, body: bytes) -> GoodgateError:
        """The error that an answer means which is no success."""
        if response.status == 404 and knows_no_route(body):
            return UnsupportedOperation(f"the route {response.url.path}", self.engine)
        return error_from_response(self.engine, response.status, body, response.headers.get("Retry-After"))

    def _say_farewell(self, exchange: Exchange) -> None:
        """Tell the engine that we are gone, without waiting for its answer: our own end must not depend on it."""
        if exchange.farewell is not None and self._pooled is not None:
            task = asyncio.get_running_loop().create_task(self._send_farewell(exchange.farewell))
            self._farewells.add(task)
            task.add_done_callback(self._farewells.discard)

    async def _send_farewell(self, farewell: Post) -> None:
        with contextlib.suppress(GoodgateError):  # the closed socket says the same, only later
            await self.post(farewell)

    def _translated(self, error: Exception, has_begun: bool) -> EngineError:
        """Our error for one of aiohttp's or the system's, the most specific first."""
        who = f"The engine {self.engine!r} at {self.url}"
        if isinstance(error, aiohttp.ServerTimeoutError):
            return EngineTimeout(f"{who} did not accept a connection in {self._options.connect_timeout_s:g} s.")
        if isinstance(error, TimeoutError):
            waited_for = "between tokens" if has_begun else "before the first piece of its answer"
            return EngineTimeout(f"{who} was silent for too long {waited_for}.")
        if isinstance(error, aiohttp.ClientSSLError | aiohttp.InvalidURL):
            return EngineUnavailable(f"{who} cannot be reached: {why_unreachable(error)}.")
        if isinstance(error, aiohttp.ClientConnectorError):
            return EngineUnavailable(f"{who} does not accept connections.")
        if has_begun or isinstance(error, aiohttp.ClientPayloadError):
            return StreamInterrupted(f"{who} dropped the connection in the middle of its answer.")
        if isinstance(error, aiohttp.ServerDisconnectedError | OSError):
            return EngineUnavailable(f"{who} dropped the connection before it answered.")
        return EngineProtocolError(f"{who} does not speak HTTP as it should.")


def _payload(body: bytes) -> bytes | io.BytesIO:
    """A fresh payload for each try. aiohttp sends a large one piece by piece only if it comes as a file."""
    return body if len(body) <= MAX_BODY_AT_ONCE else io.BytesIO(body)


class _Connector(aiohttp.TCPConnector):
    """Leaves out connections on which something has arrived that nobody asked for: it would be taken for the answer
    to the next request, and one caller would read what was meant for another."""

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - the base class has it
    ) -> Connection:
        for _ in range(MAX_STALE):
            connection = await super().connect(req, traces, timeout)
            if connection.protocol is not None and not connection.protocol.should_close:
                return connection
            connection.close()
        raise aiohttp.ClientConnectionError("What listens there speaks before it is asked.")


def _notes_reuse() -> aiohttp.TraceConfig:
    """Marks the context of a request that got a connection from the pool."""

    async def mark(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.reused = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(mark)
    return trace


def _check_connected(response: aiohttp.ClientResponse) -> None:
    """Notice an end that aiohttp (3.14) does not tell the reader of a body: the one that follows a broken chunk."""
    if response.connection is not None and response.connection.transport is None:
        raise aiohttp.ClientPayloadError("The connection ended before the answer.")


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """The body of an answer that is not a stream, in however many pieces it comes; nothing needs more than the cap."""
    body = bytearray()
    while len(body) < MAX_PLAIN_BYTES and (piece := await response.content.readany()):
        body += piece
    return bytes(body)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the end of a stream whose content is complete. Whatever keeps it from ending costs only the connection."""
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while await response.content.readany():
                pass
