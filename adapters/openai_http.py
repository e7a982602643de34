"""The shared client for engines that speak OpenAI over HTTP. An engine's module adds its dialect and its metric names.

    class Adapter(OpenAIHTTPAdapter[HTTPOptions]):
        engine = "acme"
        Options = HTTPOptions
        dialect = Dialect(parameters=frozenset({"max_tokens", "temperature"}))

What it promises, beyond the contract of adapters/base.py:
- The engine's status is known before the first chunk, because the first event is awaited: errors are true exceptions.
- Three deadlines: to connect, to the first piece of text, and between pieces. Comments do not count as life.
- Closing the generator closes the socket at once, so that the engine stops. Only a finished stream's is used again.
- A pooled connection that the engine had closed meanwhile is replaced once, in silence: nobody has seen a byte yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, TypeVar

import aiohttp
import msgspec
from msgspec import Meta, Struct

from adapters.base import Capabilities, EngineAdapter, EngineOptions, Health, Load, ModelInfo
from adapters.config import secret
from adapters.errors import (
    EngineError,
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    GoodgateError,
    ModelNotFound,
    StreamInterrupted,
)
from adapters.openai_wire import Dialect, StreamReader, request_body
from adapters.types import ChatRequest, Chunk, GenerateRequest
from adapters.wire_errors import error_from_event, error_from_response, read_complaint

KEEPALIVE_S = 4.0  # uvicorn closes idle connections after 5 s, llama.cpp's server too
PROBE_TIMEOUT_S = 2.0
DRAIN_TIMEOUT_S = 0.05  # for the empty chunk after [DONE]: it lets the connection be used again
MAX_PLAIN_BYTES = 4 << 20  # of an answer that is not a stream
MAX_BODY_AT_ONCE = 1 << 20  # of a request; larger ones go out piece by piece

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class HTTPOptions(EngineOptions):
    """Keys of every engine that is reached over HTTP."""

    url: Annotated[str, Meta(pattern="^https?://")]
    model: str = ""  # the engine's own name for the model; empty: the only one that it serves
    api_key: str = ""
    api_key_env: str = ""  # the variable that holds the key, better than the key itself
    connect_timeout_s: Seconds = 2.0
    first_token_timeout_s: Seconds = 120.0
    token_timeout_s: Seconds = 60.0


class LoadMetrics(Struct, frozen=True, kw_only=True):
    """An engine's names in its Prometheus text; empty where it does not tell. Hits and queries are counters."""

    path: str = "/metrics"
    running: str = ""
    waiting: str = ""
    kv_usage: str = ""
    prefix_hits: str = ""
    prefix_queries: str = ""


H = TypeVar("H", bound=HTTPOptions)
_T = TypeVar("_T")


class OpenAIHTTPAdapter(EngineAdapter[H]):
    """One engine behind one URL. Subclasses set `engine`, `Options`, `dialect`, and where known `load_metrics`."""

    dialect: ClassVar[Dialect]
    load_metrics: ClassVar[LoadMetrics | None] = None
    health_path: ClassVar[str] = "/health"
    token_prompts: ClassVar[bool] = False
    keeps_connections: ClassVar[bool] = True  # False: it closes them after each stream, so none is pooled

    def __init__(self, options: H) -> None:
        super().__init__(options)
        self.capabilities = Capabilities(token_prompts=self.token_prompts, parameters=self.dialect.parameters)
        self.unknown_finish_reasons = 0
        self._url = options.url.rstrip("/").removesuffix("/v1")
        self._served_model = options.model
        self._pooled: aiohttp.ClientSession | None = None
        self._unpooled: aiohttp.ClientSession | None = None

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def start(self) -> None:
        """Make the client. The engine itself may come later: its health says when."""
        if self._pooled is not None:
            return
        key = self.options.api_key or secret(self.options.api_key_env)
        self._pooled = self._client(key, keeps_connections=self.keeps_connections)
        self._unpooled = self._client(key, keeps_connections=False)

    def _client(self, key: str, *, keeps_connections: bool) -> aiohttp.ClientSession:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        kept = {"keepalive_timeout": KEEPALIVE_S} if keeps_connections else {"force_close": True}
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, **kept),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.options.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[_notes_reuse()],
        )

    async def close(self) -> None:
        for session in (self._pooled, self._unpooled):
            if session is not None:
                await session.close()
        self._pooled = self._unpooled = None

    # ------------------------------------------------------------------------------------------------------ questions

    async def health(self) -> Health:
        try:
            await self.get(self.health_path)
        except GoodgateError as error:
            return Health(False, error.message)
        return Health(True)

    async def models(self) -> list[ModelInfo]:
        listing = self.decode(await self.get("/v1/models"), _ModelList)
        return [ModelInfo(each.id, each.max_model_len) for each in listing.data]

    async def load(self) -> Load:
        """The engine's own account; unknown where it offers none or cannot be asked."""
        if self.load_metrics is None:
            return Load()
        try:
            text = await self.get(self.load_metrics.path)
        except GoodgateError:
            return Load()
        return read_load(text.decode("utf-8", "replace"), self.load_metrics)

    async def get(self, path: str) -> bytes:
        """The body of a GET that succeeds. Raises our errors."""
        session = self._session()
        try:
            async with (
                asyncio.timeout(PROBE_TIMEOUT_S),
                session.get(self._url + path, allow_redirects=False) as response,  # the key is for this engine alone
            ):
                body = await _whole(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._translated(error, has_begun=False) from error
        if response.status != 200:
            raise error_from_response(self.engine, response.status, body)
        return body

    def _session(self) -> aiohttp.ClientSession:
        if self._pooled is None:
            raise EngineUnavailable(f"The adapter of the engine {self.engine!r} is not started.")
        return self._pooled

    def decode(self, body: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineProtocolError(f"The engine {self.engine!r} answered something that is not OpenAI's.") from error

    async def _model(self) -> str:
        """The name to ask for: the configured one, or the only one that the engine serves."""
        if not self._served_model:
            names = [model.id for model in await self.models()]
            if len(names) != 1:
                raise EngineUnavailable(
                    f"The engine {self.engine!r} at {self._url} serves {len(names)} models; "
                    f"set options.model to one of: {', '.join(names) or 'none'}."
                )
            self._served_model = names[0]
        return self._served_model

    # ----------------------------------------------------------------------------------------------------- generation

    def body(self, request: GenerateRequest, model: str) -> dict[str, Any]:
        """The JSON body to send; a place for what a `Dialect` cannot say."""
        return request_body(request, self.dialect, model)

    async def generate(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        self.check_parameters(request)
        reader = StreamReader(self.engine, request, self.dialect)
        deadline = asyncio.get_running_loop().time() + self.options.first_token_timeout_s
        async with self._opened(request, request_id, deadline) as response:
            while not reader.is_done and (data := await self._read(response, deadline, reader.num_chunks > 0)):
                num_before = reader.num_chunks
                for chunk in reader.feed(data):
                    yield chunk
                if reader.num_chunks > num_before:  # the reader of this generator has taken them: the clock starts now
                    deadline = asyncio.get_running_loop().time() + self.options.token_timeout_s
            last = reader.finish()
            self.unknown_finish_reasons += reader.unknown_finish_reasons
            await _drain(response)
        for chunk in last:
            yield chunk

    @contextlib.asynccontextmanager
    async def _opened(
        self, request: GenerateRequest, request_id: str, deadline: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to the request, once it is known to be a stream. Its socket is closed on the way out."""
        response = await self._send(request, request_id, deadline)
        try:
            if response.status != 200 or "text/event-stream" not in response.content_type:
                raise await self._refusal(response, deadline)
            yield response
        finally:
            response.close()  # `release` would read the rest, and the engine would go on generating

    async def _send(self, request: GenerateRequest, request_id: str, deadline: float) -> aiohttp.ClientResponse:
        session = self._session()
        try:
            async with asyncio.timeout_at(deadline):
                body = msgspec.json.encode(self.body(request, await self._model()))
                url = self._url + ("/v1/chat/completions" if isinstance(request, ChatRequest) else "/v1/completions")
                return await self._post(session, url, body, request_id)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._translated(error, has_begun=False) from error

    async def _post(
        self, session: aiohttp.ClientSession, url: str, body: bytes, request_id: str
    ) -> aiohttp.ClientResponse:
        note = SimpleNamespace(reused=False)

        async def send(client: aiohttp.ClientSession) -> aiohttp.ClientResponse:
            headers = {"X-Request-Id": request_id}
            return await client.post(
                url, data=_payload(body), headers=headers, allow_redirects=False, trace_request_ctx=note
            )

        try:
            return await send(session)
        except aiohttp.ClientConnectionError:  # the pool had a connection that the engine was closing
            if not note.reused or self._unpooled is None:
                raise
        return await send(self._unpooled)

    async def _read(self, response: aiohttp.ClientResponse, deadline: float, has_begun: bool) -> bytes:
        try:
            async with asyncio.timeout_at(deadline):
                return await response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._translated(error, has_begun) from error

    async def _refusal(self, response: aiohttp.ClientResponse, deadline: float) -> GoodgateError:
        """The error that an answer means which is not a stream."""
        try:
            async with asyncio.timeout_at(min(deadline, asyncio.get_running_loop().time() + PROBE_TIMEOUT_S)):
                body = await _whole(response)
        except (aiohttp.ClientError, OSError, TimeoutError):
            body = b""  # the status alone says enough
        if response.status == 200 and read_complaint(body).message:
            return error_from_event(self.engine, body)  # an error under a success status
        if response.status == 200:
            return EngineProtocolError(f"The engine {self.engine!r} answered {response.content_type}, not a stream.")
        error = error_from_response(self.engine, response.status, body, response.headers.get("Retry-After"))
        if isinstance(error, ModelNotFound):
            self._served_model = self.options.model  # the engine behind the url may serve another model now
        return error

    def _translated(self, error: Exception, has_begun: bool) -> EngineError:
        """Our error for one of aiohttp's or the system's, the most specific first."""
        who = f"The engine {self.engine!r} at {self._url}"
        if isinstance(error, aiohttp.ServerTimeoutError):
            return EngineTimeout(f"{who} did not accept a connection in {self.options.connect_timeout_s:g} s.")
        if isinstance(error, TimeoutError):
            return EngineTimeout(
                f"{who} was silent for too long {'between tokens' if has_begun else 'before the first'}."
            )
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


def _notes_reuse() -> aiohttp.TraceConfig:
    """Marks the context of a request that got a connection from the pool."""

    async def mark(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.reused = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(mark)
    return trace


async def _whole(response: aiohttp.ClientResponse) -> bytes:
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


# --------------------------------------------------------------------------------------------------------- questions


class _Model(Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(Struct):
    data: list[_Model]


def read_load(text: str, names: LoadMetrics) -> Load:
    """The load that Prometheus text tells. Counts add up over label sets, the fullest cache speaks for all."""
    series = _series(text)
    hits, queries = series.get(names.prefix_hits, []), series.get(names.prefix_queries, [])
    return Load(
        running=_count(series.get(names.running)),
        waiting=_count(series.get(names.waiting)),
        kv_usage=max(series.get(names.kv_usage, []), default=None),
        prefix_hit_rate=sum(hits) / sum(queries) if hits and sum(queries) else None,
    )


def _count(values: list[float] | None) -> int | None:
    return int(sum(values)) if values else None


def _series(text: str) -> dict[str, list[float]]:
    """Values by metric name. A line that is none of `name{labels} value [time]` tells nothing; the others still do."""
    series: dict[str, list[float]] = {}
    for line in text.splitlines():
        parsed = _SAMPLE.match(line)
        if parsed is not None:
            series.setdefault(parsed[1], []).append(float(parsed[2]))
    return series


_SAMPLE = re.compile(
    r"([a-zA-Z_:][\w:]*)(?:\{.*\})?[ \t]+([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)(?:\s+-?[0-9]+)?\s*$"
)
