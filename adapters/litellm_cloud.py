"""Cloud providers through litellm, which speaks to each in its own words: Anthropic, Bedrock, Gemini, Azure and others.

    engine: litellm_cloud
    options: {model: anthropic/claude-sonnet-4-5, api_key_env: ANTHROPIC_API_KEY}

litellm runs in a process of its own (servers/litellm_worker.py); nothing here imports it. Endpoints that speak OpenAI
are better served by `openai_compatible`, which adds no process and passes on what they send as it is.

- Which fields are honoured is litellm's own account of the provider and model, asked for at the start; whatever else a
  request asks for is refused by name, and litellm is told to drop nothing.
- `model: PROVIDER/*` passes on what the caller asked for. What is honoured is then what the provider does in general.
- Addresses, keys and versions come from the configuration alone: a request's fields go through by name, and tools are
  functions, because other kinds make providers and litellm connect to servers that the caller names.
- Several choices come in one piece, because litellm's streams lose the finish reasons of all but one.
- Completions are offered where the provider has a route for plain text; token ids as input where it is OpenAI's wire.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from adapters.base import ANY, Capabilities, EngineAdapter, EngineOptions, Health, Load, ModelInfo
from adapters.config import secret
from adapters.errors import (
    ContextLengthExceeded,
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    GoodgateError,
    InvalidRequest,
    StreamInterrupted,
    UnsupportedParameter,
)
from adapters.servers.litellm_process import CallFailed, Facts, Failure, LitellmProcess
from adapters.types import ChatRequest, Chunk, EmbeddingRequest, Embeddings, GenerateRequest
from adapters.wire.engine_client import URL, Seconds
from adapters.wire.openai_wire import Dialect, StreamReader, request_body
from adapters.wire.side_routes import check_vectors
from adapters.wire.wire_errors import as_failure, error_from_response, in_its_words

ENGINE = "litellm_cloud"

SAMPLING = {"temperature", "top_p", "seed", "logit_bias", "presence_penalty", "frequency_penalty"}
OF_BOTH_ROUTES = frozenset({"max_tokens", "stop", "n"} | SAMPLING)
TOOLS = {"tools", "tool_choice", "parallel_tool_calls"}
OF_CHAT = frozenset({"logprobs", "top_logprobs", "response_format", "reasoning_effort", "prediction"} | TOOLS)
LIMITS = frozenset({"max_tokens", "max_completion_tokens"})  # whichever the provider has, both are understood

SPEAK_OPENAI = {"openai", "azure", "text-completion-openai", "azure_text"}
CONNECTION = ("api_base", "api_key", "api_version")
AWS = ("aws_region_name", "aws_access_key_id", "aws_secret_access_key", "aws_session_token")
SECRETS = ("api_key", "aws_secret_access_key", "aws_session_token")


class CloudOptions(EngineOptions):
    model: Annotated[str, Meta(min_length=1)]  # litellm's name, with the provider before it
    api_key: str = ""
    api_key_env: str = ""  # the variable that holds the key, better than the key itself
    api_base: URL | None = None  # the provider's address, where it is not its usual one
    api_version: str = ""  # Azure's
    aws_region_name: str = ""  # the rest is Bedrock's, unless it has an api_key
    aws_access_key_id: str = ""
    aws_secret_access_key: str = ""
    aws_session_token: str = ""
    python: str = ""  # a Python that has litellm; empty: our own
    connect_timeout_s: Seconds = 5.0
    first_token_timeout_s: Seconds = 120.0
    token_timeout_s: Seconds = 60.0

    def __post_init__(self) -> None:
        provider, any_model, rest = self.model.partition(ANY)
        if any_model and ("/" not in provider or ANY in rest):
            raise ValueError("a `*` in `model` stands for a model of one provider: write it as PROVIDER/*")


class _Told(Struct):
    """A vector, or the account at the end."""

    index: Annotated[int, Meta(ge=0)] = 0
    embedding: list[float] = []
    prompt_tokens: int = 0


class Adapter(EngineAdapter[CloudOptions]):
    engine = ENGINE
    hosted = True
    Options: ClassVar[type[CloudOptions]] = CloudOptions
    how_to_reach = "pip install 'goodgate[cloud]', and name its `model` and key in the configuration"

    def __init__(self, options: CloudOptions) -> None:
        super().__init__(options)
        # What some provider honours; `start` narrows it to what this one does.
        self.capabilities = Capabilities(
            embeddings=True, dimensions=True, parameters=OF_BOTH_ROUTES | OF_CHAT | LIMITS, load=frozenset({"running"})
        )
        self.unknown_finish_reasons = 0
        self._worker: LitellmProcess | None = None
        self._facts: Facts | None = None

    # ---------------------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Start the worker and learn what the provider honours; raises `EngineUnavailable` with what to install."""
        worker = self._worker or LitellmProcess(self.options.python, self._setup())
        self._worker = worker
        self._facts = await worker.facts()
        self.capabilities = capabilities(self._facts)

    def _setup(self) -> dict[str, Any]:
        options = self.options
        values = {name: getattr(options, name) for name in (*CONNECTION, *AWS)}
        values["api_key"] = options.api_key or secret(options.api_key_env)
        return {
            "model": options.model,
            "connection": {name: value for name, value in values.items() if value},
            "secrets": [values[name] for name in SECRETS if values[name]],
            "connect_timeout_s": options.connect_timeout_s,
            # Ours come first; this one is for what goes on without us.
            "silence_timeout_s": max(options.first_token_timeout_s, options.token_timeout_s) + 5.0,
        }

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()

    async def health(self) -> Health:
        """Asks nothing of the provider, because an answer costs money. A worker that has ended is started again."""
        try:
            worker, _ = self._started()
            await worker.check_alive()
        except GoodgateError as error:
            return Health(False, error.for_records)
        return Health(True)

    async def models(self) -> list[ModelInfo]:
        return [ModelInfo(self.options.model)]

    async def version(self) -> str:
        return self._facts.version if self._facts is not None else ""

    async def load(self) -> Load:
        return Load() if self._worker is None else Load(running=self._worker.num_open)

    def _started(self) -> tuple[LitellmProcess, Facts]:
        """The worker, and what it has told of the provider: without that, a request could not be judged."""
        if self._worker is None or self._facts is None:
            raise EngineUnavailable(f"The adapter of the engine {ENGINE!r} is not started.")
        return self._worker, self._facts

    # ------------------------------------------------------------------------------------------------------ requests

    def check_parameters(self, request: GenerateRequest) -> None:
        super().check_parameters(request)
        if not isinstance(request, ChatRequest) and isinstance(request.logprobs, int):
            raise UnsupportedParameter("logprobs", ENGINE)  # litellm leaves them out of this route's answers

    def _fields(self, request: GenerateRequest, dialect: Dialect) -> dict[str, Any]:
        """The request as litellm takes it."""
        fields = request_body(request, dialect, self.options.model)
        del fields["model"]
        fields |= self._chosen(request.model)
        for message in fields.get("messages", ()):
            if message.get("tool_calls") and not message["content"]:
                message["content"] = None  # an empty text would be filled up with a sentence of litellm's
        if request.num_choices > 1:
            del fields["stream"], fields["stream_options"]
        return fields

    def _chosen(self, asked: str) -> dict[str, str]:
        """The model where it is for a caller to choose; else the worker has the configuration's."""
        return {"model": self.options.model.replace(ANY, asked)} if ANY in self.options.model else {}

    async def generate(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        worker, facts = self._started()
        self.check_parameters(request)
        dialect = dialect_of(facts, self.capabilities.parameters)
        reader = StreamReader(ENGINE, request, dialect, on_unknown_reason=self._count_unknown_reason)
        route = "chat" if isinstance(request, ChatRequest) else "completion"
        try:
            async with contextlib.aclosing(await worker.ask(route, self._fields(request, dialect))) as events:
                deadline = self._deadline(self.options.first_token_timeout_s)
                while (event := await self._next(events, deadline)) is not None:
                    num_before = reader.num_chunks
                    for chunk in reader.feed(b"data: " + event + b"\n\n"):
                        yield chunk
                    if reader.num_chunks > num_before:  # they have been taken from us: the clock starts now
                        deadline = self._deadline(self.options.token_timeout_s)
        except CallFailed as error:
            raise error_of(error.failure, has_begun=reader.num_chunks > 0) from error
        for chunk in reader.finish():
            yield chunk

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        worker, facts = self._started()
        self.check_embedding(request)
        fields = embedding_fields(request, facts) | self._chosen(request.model)
        vectors: list[list[float]] = [[] for _ in request.input]
        prompt_tokens = 0
        try:
            async with contextlib.aclosing(await worker.ask("embeddings", fields)) as events:
                deadline = self._deadline(self.options.first_token_timeout_s)
                while (event := await self._next(events, deadline)) is not None:
                    told = msgspec.json.decode(event, type=_Told)
                    if told.embedding:
                        vectors[told.index] = told.embedding
                    prompt_tokens = told.prompt_tokens or prompt_tokens
        except CallFailed as error:
            raise error_of(error.failure, has_begun=False) from error
        except (msgspec.DecodeError, IndexError) as error:
            raise _no_vectors() from error
        if not all(vectors):
            raise _no_vectors()
        check_vectors(ENGINE, vectors, request)
        return Embeddings(vectors, prompt_tokens)

    async def _next(self, events: AsyncGenerator[bytes, None], deadline: float) -> bytes | None:
        """The next event, None at the end. Raises `EngineTimeout` when none comes in time."""
        try:
            async with asyncio.timeout_at(deadline):
                return await anext(events, None)
        except TimeoutError as error:
            raise EngineTimeout(f"The provider of {self.options.model!r} was silent for too long.") from error

    def _deadline(self, patience_s: float) -> float:
        return asyncio.get_running_loop().time() + patience_s

    def _count_unknown_reason(self) -> None:
        self.unknown_finish_reasons += 1


def capabilities(facts: Facts) -> Capabilities:
    """What the provider honours of what we can ask for. A model that litellm does not list is believed to do both."""
    supported = facts.parameters
    limits = LIMITS if LIMITS & supported else frozenset[str]()
    is_chat = facts.mode != "embedding" and not facts.provider.startswith("text-completion")
    return Capabilities(
        chat=is_chat,
        completions=facts.has_text_route and facts.mode in ("", "completion"),
        embeddings=facts.mode in ("", "embedding"),
        dimensions=facts.mode in ("", "embedding"),  # litellm knows which models have them, and refuses the others
        token_prompts=facts.provider in SPEAK_OPENAI,
        parameters=(OF_BOTH_ROUTES | (OF_CHAT if is_chat else frozenset())) & supported | limits,
        load=frozenset({"running"}),
    )


def dialect_of(facts: Facts, parameters: frozenset[str]) -> Dialect:
    has_old_name = "max_tokens" in facts.parameters
    return Dialect(parameters=parameters, chat_limit="max_tokens" if has_old_name else "max_completion_tokens")


def embedding_fields(request: EmbeddingRequest, facts: Facts) -> dict[str, Any]:
    fields: dict[str, Any] = {"input": request.input}
    if isinstance(request.dimensions, int):
        fields["dimensions"] = request.dimensions
    if facts.provider in SPEAK_OPENAI or "encoding_format" in facts.embedding_parameters:
        fields["encoding_format"] = "float"
    return fields


def error_of(failure: Failure, *, has_begun: bool) -> GoodgateError:
    """Our error for a failed call. Once text has left, no status can follow: then it is the engine's failure."""
    error = _error(failure)
    if not has_begun:
        return error
    if failure.kind == "connection":
        return StreamInterrupted(f"The provider behind the engine {ENGINE!r} dropped the connection in its answer.")
    return as_failure(ENGINE, error)


def _error(failure: Failure) -> GoodgateError:
    if failure.kind == "unsupported" and failure.param:
        return UnsupportedParameter(failure.param, ENGINE)
    if failure.kind in _BY_KIND:
        return in_its_words(ENGINE, _BY_KIND[failure.kind](failure.message))
    body = msgspec.json.encode({"message": failure.message})
    return error_from_response(ENGINE, failure.status, body, failure.retry_after)


_BY_KIND: Mapping[str, type[GoodgateError]] = {
    "context": ContextLengthExceeded,
    "unsupported": InvalidRequest,
    "timeout": EngineTimeout,
    "connection": EngineUnavailable,
    "protocol": EngineProtocolError,
}


def _no_vectors() -> EngineProtocolError:
    return EngineProtocolError(f"The engine {ENGINE!r} did not answer one vector of numbers for each input.")
