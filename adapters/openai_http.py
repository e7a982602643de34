"""The adapter of engines that speak OpenAI over HTTP. An engine's module adds its dialect and its metric names.

    class Adapter(OpenAIHTTPAdapter[HTTPOptions]):
        engine = "acme"
        Options = HTTPOptions
        dialect = Dialect(parameters=frozenset({"max_tokens", "temperature"}))

It joins the client of adapters/engine_client.py, which knows sockets and deadlines, with adapters/openai_wire.py, which
knows the words. An engine with a route of its own beside OpenAI's overrides `exchange`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, TypeVar

from msgspec import Struct

from adapters.base import Capabilities, EngineAdapter, Health, Load, ModelInfo
from adapters.engine_client import EngineClient, Exchange, HTTPOptions
from adapters.errors import EngineUnavailable, GoodgateError, ModelNotFound
from adapters.load_metrics import LoadMetrics
from adapters.openai_wire import Dialect, StreamReader, request_body
from adapters.types import ChatRequest, Chunk, GenerateRequest

__all__ = ["HTTPOptions", "LoadMetrics", "OpenAIHTTPAdapter"]  # all that an engine's module needs, in one place

H = TypeVar("H", bound=HTTPOptions)
_T = TypeVar("_T")


class OpenAIHTTPAdapter(EngineAdapter[H]):
    """One engine behind one URL. Subclasses set `engine`, `Options`, `dialect`, and where known `load_metrics`."""

    dialect: Dialect
    load_metrics: ClassVar[LoadMetrics | None] = None
    health_path: ClassVar[str] = "/health"
    token_prompts: ClassVar[bool] = False
    keeps_connections: ClassVar[bool] = True  # False: it closes them after each stream, so none is pooled

    def __init__(self, options: H) -> None:
        super().__init__(options)
        self.capabilities = Capabilities(token_prompts=self.token_prompts, parameters=self.dialect.parameters)
        self.client = EngineClient(self.engine, options, keeps_connections=self.keeps_connections)
        self.unknown_finish_reasons = 0
        self._served_model = options.model

    async def start(self) -> None:
        """Make the client. The engine itself may come later: its health says when."""
        await self.client.start()

    async def close(self) -> None:
        await self.client.close()

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
        return await self.client.load(self.load_metrics)

    async def get(self, path: str) -> bytes:
        """The body of a GET that succeeds. Raises our errors."""
        return await self.client.get(path)

    def decode(self, body: bytes, kind: type[_T]) -> _T:
        return self.client.decode(body, kind)

    async def served_model(self) -> str:
        """The name to ask for: the configured one, or the only one that the engine serves."""
        if not self._served_model:
            names = [model.id for model in await self.models()]
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
        return Exchange(
            path="/v1/chat/completions" if isinstance(request, ChatRequest) else "/v1/completions",
            body=self.body(request, await self.served_model()),
            reader=StreamReader(self.engine, request, self.dialect, on_unknown_reason=self.count_unknown_reason),
        )

    def count_unknown_reason(self) -> None:
        self.unknown_finish_reasons += 1

    async def generate(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        self.check_parameters(request)
        try:
            exchange = await self.exchange(request, request_id)
            async with contextlib.aclosing(self.client.stream(exchange, request_id=request_id)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ModelNotFound:
            self._served_model = self.options.model  # the engine behind the url may serve another model now
            raise


class _Model(Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(Struct):
    data: list[_Model]
