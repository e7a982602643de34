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

The sockets are those of adapters/wire/hop/.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from types import TracebackType
from typing import NamedTuple, TypeVar

import msgspec
import yarl

from adapters.base import Health, Load
from adapters.config import secret
from adapters.errors import (
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    GoodgateError,
    HostExhausted,
    InvalidRequest,
    StreamInterrupted,
    UnsupportedOperation,
)
from adapters.types import Chunk
from adapters.wire import outgoing
from adapters.wire.exchange import Exchange, Post, Reader
from adapters.wire.hop import request
from adapters.wire.hop.errors import (
    BadHTTP,
    ConnectTimeout,
    CutOff,
    Dropped,
    HopError,
    NotAccepting,
    OutOfFiles,
    Unreachable,
)
from adapters.wire.hop.pool import Origin, Pool
from adapters.wire.hop.response import Response
from adapters.wire.http_options import URL, HTTPOptions, Seconds, launched_options
from adapters.wire.load_metrics import LoadMetrics, read_load
from adapters.wire.wire_errors import error_from_event, error_from_response, knows_no_route, tells_error

# All that an engine's module needs, in one place.
__all__ = ["URL", "EngineClient", "Exchange", "HTTPOptions", "Post", "Reader", "Seconds", "launched_options"]

KEEPALIVE_S = 4.0  # uvicorn closes idle connections after 5 s, llama.cpp's server too
PROBE_TIMEOUT_S = 2.0
DRAIN_TIMEOUT_S = 0.05  # for the empty chunk after [DONE]: it lets the connection be used again
MAX_PLAIN_BYTES = 4 << 20  # of an answer that is not a stream
MAX_ANSWER_BYTES = 64 << 20  # of work answered in one piece: 2048 vectors of 1024 floats as JSON, of 4096 as base64
HEADERS = {
    "User-Agent": "goodgate",
    "Accept": "*/*",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
}

_T = TypeVar("_T")


class Way(NamedTuple):
    """To one route: the connections, and how each request on them begins."""

    pool: Pool
    opening: bytes


class EngineClient:
    """One engine behind one URL."""

    def __init__(self, engine: str, options: HTTPOptions, *, keeps_connections: bool = True) -> None:
        self.engine = engine
        self.url = options.url.rstrip("/").removesuffix("/v1")
        self.options = options
        self._keepalive_s = KEEPALIVE_S if keeps_connections else 0.0
        self._is_started = False
        self._headers = HEADERS
        self._pools: dict[Origin, Pool] = {}
        self._ways: dict[tuple[str, str], Way] = {}
        self._farewells: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        key = self.options.api_key or secret(self.options.api_key_env)
        authorization = f"Bearer {key}" if key else _basic(self.url)
        self._headers = {**HEADERS, "Authorization": authorization} if authorization else HEADERS
        self._is_started = True

    async def close(self) -> None:
        if self._farewells:
            await asyncio.wait(self._farewells)
        self._is_started = False
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._ways.clear()

    # ------------------------------------------------------------------------------------------------------ questions

    async def get(self, path: str) -> bytes:
        """The body of a GET that succeeds. Raises our errors. `path` may be a whole URL."""
        return await self._ask("GET", path, b"", {})

    async def post(self, post: Post) -> bytes:
        """The body of a short POST that succeeds. Raises our errors."""
        return await self._ask("POST", post.path, msgspec.json.encode(post.body), post.headers)

    async def _ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        deadline = asyncio.get_running_loop().time() + PROBE_TIMEOUT_S
        response = await self.send(method, path, body, headers, deadline)
        try:
            answer = await _read_plain(response, deadline)
        except (HopError, TimeoutError) as error:
            raise self._translated(error, has_begun=False) from error
        finally:
            response.close()
        if response.status != 200:
            raise self._refused(path, response, answer)
        return answer

    async def ask(self, post: Post) -> bytes:
        """The answer to a POST that makes the engine work, in one piece: as patient as for a generation's first token.

        Whoever leaves early closes the socket, and with it the engine's work.
        """
        deadline = asyncio.get_running_loop().time() + self.options.first_token_timeout_s
        headers = {**outgoing.HEADERS.get(), **post.headers}
        response = await self.send("POST", post.path, msgspec.json.encode(post.body), headers, deadline)
        try:
            if response.status != 200:
                raise await self.refusal(post.path, response, deadline)
            return await self.read_answer(response, deadline)
        finally:
            response.close()  # at the end of an answer its connection is back in the pool already

    async def health(self, path: str) -> Health:
        """Well if that GET succeeds. Raises `HostExhausted`, and nothing else: then it could not be asked."""
        try:
            await self.get(path)
        except HostExhausted:
            raise
        except GoodgateError as error:
            return Health(False, error.for_records)
        return Health(True)

    async def load(self, names: LoadMetrics | None) -> Load:
        """The engine's own account; unknown where it offers none or cannot be asked."""
        if names is None:
            return Load()
        try:
            text = await self.get(names.path)
        except GoodgateError:
            return Load()
        return read_load(text.decode("utf-8", "replace"), names)

    def decode(self, body: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineProtocolError(
                f"The engine {self.engine!r} answered something unexpected; check that its `url` is right."
            ) from error

    # ----------------------------------------------------------------------------------------------------- generation

    def reply(self, exchange: Exchange, *, request_id: str) -> Reply:
        """What the engine answers, read by read."""
        return Reply(self, exchange, request_id)

    async def stream(self, exchange: Exchange, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        """The same, chunk by chunk."""
        with self.reply(exchange, request_id=request_id) as reply:
            while (chunks := await reply.read()) is not None:
                for chunk in chunks:
                    yield chunk

    async def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str], deadline: float) -> Response:
        if not self._is_started:
            raise EngineUnavailable(f"The adapter of the engine {self.engine!r} is not started.")
        try:
            way = self._ways.get((method, path)) or self._way_to(method, path)
            return await way.pool.send(request.head(way.opening, headers, len(body)), body, deadline)
        except (HopError, TimeoutError) as error:
            raise self._translated(error, has_begun=False) from error

    def _way_to(self, method: str, path: str) -> Way:
        """How to get there, from now on. Routes are few, and so are addresses: one, or another for an engine's load."""
        url = path if path.startswith("http") else self.url + path
        origin = Origin.of(url)
        pool = self._pools.get(origin)
        if pool is None:
            timeout_s = self.options.connect_timeout_s
            pool = Pool(origin, connect_timeout_s=timeout_s, keepalive_s=self._keepalive_s)
            self._pools[origin] = pool
        way = Way(pool, request.opening(method, url, self._headers))
        self._ways[method, path] = way
        return way

    async def read(self, response: Response, deadline: float, has_begun: bool) -> bytes:
        try:
            return await response.read(deadline)
        except (HopError, TimeoutError) as error:
            raise self._translated(error, has_begun) from error

    async def read_answer(self, response: Response, deadline: float) -> bytes:
        """The body of work that is answered in one piece."""
        first = await self.read(response, deadline, has_begun=False)
        if response.is_read:  # as small ones are
            return first
        body = bytearray(first)
        while data := await self.read(response, deadline, has_begun=False):
            body += data
            if len(body) > MAX_ANSWER_BYTES:
                raise InvalidRequest(
                    f"The answer of the engine {self.engine!r} is larger than {MAX_ANSWER_BYTES >> 20} MiB; "
                    "ask for less at once."
                )
        return bytes(body)

    async def refusal(self, path: str, response: Response, deadline: float) -> GoodgateError:
        """The error that an answer means which is not a stream."""
        try:
            body = await _read_plain(response, min(deadline, asyncio.get_running_loop().time() + PROBE_TIMEOUT_S))
        except (HopError, TimeoutError):
            body = b""  # the status alone says enough
        if response.status == 200 and tells_error(body):
            return error_from_event(self.engine, body)  # an error under a success status
        if response.status == 200:
            said = response.content_type or "something"
            return EngineProtocolError(f"The engine {self.engine!r} answered {said}, not a stream.")
        return self._refused(path, response, body)

    def _refused(self, path: str, response: Response, body: bytes) -> GoodgateError:
        """The error that an answer means which is no success."""
        if response.status == 404 and knows_no_route(body):
            return UnsupportedOperation(f"the route {path}", self.engine)
        return error_from_response(self.engine, response.status, body, response.header(b"retry-after") or None)

    def say_farewell(self, exchange: Exchange) -> None:
        """Tell the engine that we are gone, without waiting for its answer: our own end must not depend on it."""
        if exchange.farewell is not None and self._is_started:
            task = asyncio.get_running_loop().create_task(self._send_farewell(exchange.farewell))
            self._farewells.add(task)
            task.add_done_callback(self._farewells.discard)

    async def _send_farewell(self, farewell: Post) -> None:
        with contextlib.suppress(GoodgateError):  # the closed socket says the same, only later
            await self.post(farewell)

    def _translated(self, error: Exception, has_begun: bool) -> GoodgateError:
        """Our error for one of the hop's, the most specific first."""
        if isinstance(error, OutOfFiles):
            return HostExhausted("This host has no file descriptor left to reach an engine with; try again shortly.")
        who = f"The engine {self.engine!r} at {self.url}"
        if isinstance(error, ConnectTimeout):
            return EngineTimeout(f"{who} did not accept a connection in {self.options.connect_timeout_s:g} s.")
        if isinstance(error, TimeoutError):
            waited_for = "between tokens" if has_begun else "before the first piece of its answer"
            return EngineTimeout(f"{who} was silent for too long {waited_for}.")
        if isinstance(error, NotAccepting):
            return EngineUnavailable(f"{who} does not accept connections.")
        if isinstance(error, Unreachable):
            return EngineUnavailable(f"{who} cannot be reached: {error}.")
        if isinstance(error, CutOff) or has_begun:
            return StreamInterrupted(f"{who} dropped the connection in the middle of its answer.")
        if isinstance(error, Dropped):
            return EngineUnavailable(f"{who} dropped the connection before it answered.")
        assert isinstance(error, BadHTTP)
        return EngineProtocolError(f"{who} does not speak HTTP as it should.")


class Reply:
    """One generation: sent with the first read. Leaving the block ends it, and what is not whole by then stops the
    engine. Each chunk passes here, and no generator has to be woken for it."""

    __slots__ = ("_client", "_deadline", "_exchange", "_num_chunks", "_request_id", "_response")

    def __init__(self, client: EngineClient, exchange: Exchange, request_id: str) -> None:
        self._client = client
        self._exchange = exchange
        self._request_id = request_id
        self._response: Response | None = None
        self._num_chunks = 0  # before the last read
        self._deadline: float | None = 0.0  # None: it is over

    def __enter__(self) -> Reply:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._response is not None:
            self._response.close()  # where it is not complete: nothing else stops the engine
        if isinstance(error, GeneratorExit | asyncio.CancelledError | EngineTimeout | EngineProtocolError):
            self._client.say_farewell(self._exchange)

    async def read(self) -> Iterable[Chunk] | None:
        """What has come with the next read, made lazily: an error that the engine reports comes after what preceded it.
        None when it is over."""
        if self._deadline is None:
            return None
        if self._response is None:
            self._response = response = await self._sent()
            if response.status != 200 or self._exchange.content_type not in response.content_type:
                return self._at_end(await self._whole(response))
        return await self._next(self._response)

    async def _sent(self) -> Response:
        client, exchange = self._client, self._exchange
        self._deadline = asyncio.get_running_loop().time() + client.options.first_token_timeout_s
        headers = {**outgoing.HEADERS.get(), "X-Request-Id": self._request_id, **exchange.headers}
        return await client.send("POST", exchange.path, msgspec.json.encode(exchange.body), headers, self._deadline)

    async def _next(self, response: Response) -> Iterable[Chunk]:
        reader = self._exchange.reader
        if reader.num_chunks > self._num_chunks:  # they have been taken from us: the clock starts now
            self._deadline = asyncio.get_running_loop().time() + self._client.options.token_timeout_s
            self._num_chunks = reader.num_chunks
        assert self._deadline is not None
        if not reader.is_done and (data := await self._client.read(response, self._deadline, self._num_chunks > 0)):
            return reader.feed(data)  # the read itself is not held here: whoever takes the chunks may be slow
        last = reader.finish()
        if not reader.is_cut:
            await _drain(response)
        return self._at_end(last)

    async def _whole(self, response: Response) -> list[Chunk]:
        """The chunks of an answer that is no stream, where it is one at all."""
        client, exchange = self._client, self._exchange
        assert self._deadline is not None
        if response.status != 200 or exchange.read_whole is None or response.content_type != "application/json":
            raise await client.refusal(exchange.path, response, self._deadline)
        return exchange.read_whole(await client.read_answer(response, self._deadline))

    def _at_end(self, last: list[Chunk]) -> list[Chunk]:
        self._deadline = None
        if self._response is not None:
            self._response.close()
        if self._exchange.reader.is_cut:
            self._client.say_farewell(self._exchange)
        return last


def _basic(url: str) -> str:
    """The authorization of a url with a user in it; empty without one."""
    with contextlib.suppress(ValueError):  # no address at all: whoever sends there is told
        parsed = yarl.URL(url)
        if parsed.user is not None:
            pair = f"{parsed.user}:{parsed.password or ''}"
            return "Basic " + base64.b64encode(pair.encode()).decode()
    return ""


async def _read_plain(response: Response, deadline: float) -> bytes:
    """The body of an answer that is not a stream, in however many pieces it comes; nothing needs more than the cap."""
    body = bytearray()
    while len(body) < MAX_PLAIN_BYTES and (data := await response.read(deadline)):
        body += data
    return bytes(body)


async def _drain(response: Response) -> None:
    """Read the end of a stream whose content is complete. Whatever keeps it from ending costs only the connection."""
    deadline = asyncio.get_running_loop().time() + DRAIN_TIMEOUT_S
    with contextlib.suppress(HopError, TimeoutError):
        while not response.is_complete and await response.read(deadline):
            pass
