"""The adapter of engines that speak OpenAI over HTTP. An engine's module adds its dialect and its metric names.

    class Adapter(OpenAIHTTPAdapter[HTTPOptions]):
        engine = "acme"
        Options = HTTPOptions
        dialect = Dialect(parameters=frozenset({"max_tokens", "temperature"}))

It joins the client of wire/engine_client.py, which knows sockets and deadlines, with wire/openai_wire.py, which
knows the words. An engine with a route of its own beside OpenAI's overrides `exchange`, one that has to be asked what
it takes `prepare`, one whose errors need words of ours `in_other_words`. What is asked beside generation (embeddings,
token ids, a version) has its words in adapters/wire/side_routes.py, and the class attribute `side_routes`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Struct

from adapters.base import ANY, Capabilities, EngineAdapter, Health, Load, ModelInfo
from adapters.errors import EngineUnavailable, GoodgateError, ModelNotFound, UnsupportedOperation
from adapters.types import (
    ChatRequest,
    Chunk,
    EmbeddingRequest,
    Embeddings,
    GenerateRequest,
    PartKind,
    TokenizeRequest,
    Tokens,
)
from adapters.wire.engine_client import EngineClient, Exchange, HTTPOptions, Post
from adapters.wire.load_metrics import LoadMetrics, told_fields
from adapters.wire.openai_wire import Dialect, StreamReader, request_body
from adapters.wire.side_routes import (
    EMBEDDINGS,
    VLLM_ROUTES,
    SideRoutes,
    embedding_body,
    read_embeddings,
    read_text,
    read_tokens,
    text_body,
)

# All that an engine's module needs, in one place.
__all__ = [
    "VLLM_ROUTES",
    "ContentOptions",
    "EmbeddingOptions",
    "HTTPOptions",
    "LoadMetrics",
    "OpenAIHTTPAdapter",
    "SideRoutes",
    "serves_embeddings_only",
]

H = TypeVar("H", bound=HTTPOptions)
_T = TypeVar("_T")


class EmbeddingOptions(HTTPOptions):
    """Keys of an engine that serves embeddings when it was started for them."""

    embeddings: bool = False


class ContentOptions(EmbeddingOptions):
    """Keys of an engine whose model may read more than text, which only the one who started it knows."""

    content_parts: tuple[PartKind, ...] = ()


class OpenAIHTTPAdapter(EngineAdapter[H]):
    """One engine behind one URL. Subclasses set `engine`, `Options`, `dialect`, and where known `load_metrics`."""

    dialect: Dialect
    load_metrics: ClassVar[LoadMetrics | None] = None
    side_routes: ClassVar[SideRoutes] = SideRoutes()
    health_path: ClassVar[str] = "/health"
    token_prompts: ClassVar[bool] = False
    keeps_connections: ClassVar[bool] = True  # False: it closes them after each stream, so none is pooled

    def __init__(self, options: H) -> None:
        super().__init__(options)
        self.capabilities = Capabilities(
            tokenize=bool(self.side_routes.tokenize),
            tokenize_chat=self.side_routes.tokenizes_chats,
            detokenize=bool(self.side_routes.detokenize),
            token_prompts=self.token_prompts,
            usage_so_far=self.dialect.usage_so_far,
            parameters=self.dialect.parameters,
            parts=frozenset(options.content_parts if isinstance(options, ContentOptions) else ()),
            cache_salt=self.dialect.cache_salt,
            load=told_fields(self.load_metrics),
        )
        self.client = EngineClient(self.engine, options, keeps_connections=self.keeps_connections)
        self.unknown_finish_reasons = 0
        self._served_model = options.model

    async def start(self) -> None:
        """Make the client. The engine itself may come later: its health says when."""
        await self.client.start()

    async def close(self) -> None:
        await self.client.close()

    async def health(self) -> Health:
        return await self.client.health(self.health_path)

    async def models(self) -> list[ModelInfo]:
        listing = self.decode(await self.get("/v1/models"), _ModelList)
        return [ModelInfo(each.id, each.max_model_len) for each in listing.data]

    async def load(self) -> Load:
        return await self.client.load(self.load_metrics)

    async def version(self) -> str:
        routes = self.side_routes
        return read_text(self.engine, await self.get(routes.version), routes.version_field) if routes.version else ""

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        self.check_embedding(request)
        with self._asking():
            model = await self.served_model(request.model)
            body = embedding_body(request, model, as_base64=self.side_routes.embeds_as_base64)
            answer = await self.client.ask(Post(EMBEDDINGS, body))
            # 0.1 s for 2048 vectors of 1024 numbers, in which other streams go on.
            return await asyncio.to_thread(read_embeddings, self.engine, answer, request)

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        self.check_tokenize(request)
        with self._asking():
            body = self.tokenize_body(request, await self.served_model(request.model))
            return read_tokens(self.engine, await self.client.ask(Post(self.side_routes.tokenize, body)))

    async def detokenize(self, ids: Sequence[int]) -> str:
        self.check_detokenize()
        routes = self.side_routes
        with self._asking():
            body = {"model": await self.served_model(), "tokens": ids, **routes.detokenize_options}
            answer = await self.client.ask(Post(routes.detokenize, body))
            return read_text(self.engine, answer, routes.detokenized_field)

    def tokenize_body(self, request: TokenizeRequest, model: str) -> dict[str, Any]:
        generation = request.as_generation()
        if isinstance(generation, ChatRequest):  # the same messages as a generation would send
            body = self.body(generation, model)
            return {"model": model, **{name: body[name] for name in ("messages", "tools") if name in body}}
        return text_body(request, self.side_routes, model)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """The engine behind the url may serve another model by now: then its name is looked up again next time."""
        try:
            yield
        except ModelNotFound:
            self._forget_model()
            raise

    def _forget_model(self) -> None:
        self._served_model = self.options.model

    async def get(self, path: str) -> bytes:
        """The body of a GET that succeeds. Raises our errors."""
        return await self.client.get(path)

    def decode(self, body: bytes, kind: type[_T]) -> _T:
        return self.client.decode(body, kind)

    async def served_model(self, asked: str = "") -> str:
        """The name to ask for: the configured one, with what the caller asked for in the place of a `*`, or the only
        one that the engine serves."""
        if ANY in self.options.model:
            if not asked:
                raise UnsupportedOperation("this route for whichever model is asked for", self.engine)
            return self.options.model.replace(ANY, asked)
        if not self._served_model:
            try:
                names = [model.id for model in await self.models()]
            except UnsupportedOperation as error:  # it is our look-up that failed: the caller has asked for no list
                raise EngineUnavailable(
                    f"The engine {self.engine!r} at {self.client.url} lists no models; set options.model."
                ) from error
            if len(names) != 1:
                raise EngineUnavailable(
                    f"The engine {self.engine!r} at {self.client.url} serves {len(names)} models; "
                    f"set options.model to one of: {', '.join(names) or 'none'}."
                )
            self._served_model = names[0]
        return self._served_model

    def body(self, request: GenerateRequest, model: str) -> dict[str, Any]:
        """The JSON body to send; a place for what a `Dialect` cannot say."""
        return request_body(request, self.dialect, model)

    async def exchange(self, request: GenerateRequest, request_id: str) -> Exchange:
        """What to send, and who reads the answer. Engines that key their state on ids put `request_id` into it."""
        reader = StreamReader(self.engine, request, self.dialect, on_unknown_reason=self.count_unknown_reason)
        return Exchange(
            path="/v1/chat/completions" if isinstance(request, ChatRequest) else "/v1/completions",
            body=self.body(request, await self.served_model(request.model)),
            reader=reader,
            read_whole=None if request.is_stream else reader.read_whole,
        )

    def count_unknown_reason(self) -> None:
        self.unknown_finish_reasons += 1

    async def prepare(self, request: GenerateRequest) -> None:
        """Before anything is checked; a place to learn what the engine takes, where only it knows."""

    def in_other_words(self, error: GoodgateError) -> GoodgateError:
        """What to raise for it; a place for engines whose words say nothing to whoever asked."""
        return error

    async def generate(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        # Everything here is paid with each request and each chunk: subclasses override the steps, not the whole.
        await self.prepare(request)
        self.check_parameters(request)
        try:
            with self.client.reply(await self.exchange(request, request_id), request_id=request_id) as reply:
                while (chunks := await reply.read()) is not None:
                    for chunk in chunks:
                        yield chunk
        except ModelNotFound:
            self._forget_model()
            raise
        except GoodgateError as error:
            told = self.in_other_words(error)
            if told is error:
                raise
            raise told from error


def serves_embeddings_only(capabilities: Capabilities) -> Capabilities:
    """What is left of an engine's abilities when its process was started for embeddings."""
    return msgspec.structs.replace(
        capabilities,
        embeddings=True,
        dimensions=True,
        chat=False,
        completions=False,
        parameters=frozenset(),
        cache_salt=frozenset(),
    )


class _Model(Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(Struct):
    data: list[_Model]
