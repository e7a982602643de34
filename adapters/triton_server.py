"""Triton Inference Server with a TensorRT-LLM model, through its generate endpoint. Read against server 2026-08.

`dialect` says which of the two kinds of model answers:

- `llmapi`, the model `tensorrt_llm` of the LLM API. Inputs are `sampling_param_*`; its own `stop` is a switch that
  means "cancel", so stop strings go into `sampling_param_stop` and nowhere else. The text of each event is all so far,
  and its finish reason is the word "None" until the end. It counts no tokens: where `chat_template` brings a tokenizer
  we count, else an event with text counts as one and the prompt as none.
- `ensemble`, the older C++ pipeline (`ensemble`, `tensorrt_llm_bls`). The text of each event is what is new,
  detokenised token by token: spaces may be lost and a character of several tokens may arrive as U+FFFD, which no client
  can repair (`tensorrt_llm_bls` with `accumulate_tokens` avoids it). There is no finish reason: a clean end of the
  stream is the end, and it was the limit if the limit was reached.

Both:
- A key that names no input becomes a request parameter without effect, so only known ones are sent.
- The engine would be greedy unless told otherwise, and stop early: temperature, top_p and a limit are always sent.
  Where the caller gives none, `default_max_tokens` is the limit.
- `n` is not there: choices are generations of their own.
- Tools are not there either: `chat_template` renders them, and calls are read out of the text. Special tokens are never
  in it, so models that mark their calls with those get no tools; nor can a call be forced.
- The status is that of the first event; later errors come as `{"error": "..."}`. There is no `[DONE]`.
- A closed socket is often not noticed, so a POST with the same `triton-request-id` and `stop: true` cancels. It is
  answered with an error, "cancelled", which means success.
- Numbers may arrive as strings, and scalars as lists of one.
- It tells no token ids: with `chat_template` the model's tokenizer does, here. No embeddings.
- The metrics have a port of their own, usually 8002: `metrics_url`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from adapters.base import Capabilities, Health, Load, ModelInfo
from adapters.models.model_text import LocalTokenizer, text_prompt
from adapters.tools.think_text import ReasoningParser
from adapters.tools.tool_calls import ToolParser, offered, with_tools
from adapters.types import Chunk, GenerateRequest
from adapters.wire.engine_client import EngineClient, Exchange, HTTPOptions, Post
from adapters.wire.generate_http import GenerateReader, Piece, Writing, choices_apart, text_reader
from adapters.wire.load_metrics import LoadMetrics, told_fields
from adapters.wire.side_routes import read_text
from adapters.wire.vocabulary import token_count

LIMITS = {"max_tokens", "max_completion_tokens", "stop", "n"}
SAMPLING = {"temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty"}
PARAMETERS = {
    "llmapi": frozenset(LIMITS | SAMPLING),
    "ensemble": frozenset(LIMITS | SAMPLING | {"min_tokens", "repetition_penalty"}),
}
DEFAULT_MODEL = {"llmapi": "tensorrt_llm", "ensemble": "ensemble"}


class TritonOptions(HTTPOptions):
    dialect: Literal["llmapi", "ensemble"] = "llmapi"
    chat_template: str = ""  # a model of the store, a Hugging Face folder or a Jinja file; without one, no chats
    tool_parser: ToolParser = "auto"  # how the model writes tool calls
    reasoning_parser: ReasoningParser = "auto"  # and how it marks what it thinks
    default_max_tokens: Annotated[int, Meta(ge=1)] = 1024
    metrics_url: Annotated[str, Meta(pattern=r"^(https?://.*)?\Z")] = ""


class Adapter(LocalTokenizer[TritonOptions]):
    engine = "triton_server"
    licence = "BSD-3-Clause"
    hardware = frozenset({"cuda"})
    Options: ClassVar[type[TritonOptions]] = TritonOptions

    def __init__(self, options: TritonOptions) -> None:
        super().__init__(options)
        self._load_metrics = load_metrics(options.metrics_url) if options.metrics_url else None
        self.capabilities = Capabilities(
            chat=bool(options.chat_template),
            parameters=PARAMETERS[options.dialect],
            load=told_fields(self._load_metrics),
        )
        self.declare_tokens(bool(options.chat_template))
        self.capabilities = with_tools(self.capabilities, options.tool_parser != "none", can_force=False)
        self.client = EngineClient(self.engine, options)
        self.unknown_finish_reasons = 0
        self._model = options.model or DEFAULT_MODEL[options.dialect]
        self._path = f"/v2/models/{self._model}"
        self._writing = Writing()

    async def start(self) -> None:
        if self.options.chat_template:
            text = await self.load_text(self.options.chat_template)
            self._writing = Writing(
                text.choose_tool_format(self.options.tool_parser, hides_special_tokens=True),
                text.reads_thoughts(self.options.reasoning_parser, hides_special_tokens=True),
            )
            self.capabilities = with_tools(self.capabilities, self._writing.tool_format is not None, can_force=False)
        await self.client.start()

    async def close(self) -> None:
        await self.client.close()

    async def health(self) -> Health:
        return await self.client.health(f"{self._path}/ready")

    async def models(self) -> list[ModelInfo]:
        return [ModelInfo(self._model)]

    async def load(self) -> Load:
        return await self.client.load(self._load_metrics)

    async def version(self) -> str:
        return read_text(self.engine, await self.client.get("/v2"), "version")

    def generate(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        return choices_apart(self._generate_choice, request, request_id=request_id)

    async def _generate_choice(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        self.check_parameters(request)
        exchange = self.exchange(request, request_id)
        async with contextlib.aclosing(self.client.stream(exchange, request_id=request_id)) as chunks:
            async for chunk in chunks:
                yield chunk

    def exchange(self, request: GenerateRequest, request_id: str) -> Exchange:
        offer = offered(request, self.engine)
        prompt = text_prompt(request, self._text)
        limit = request.token_limit or self.options.default_max_tokens
        is_ensemble = self.options.dialect == "ensemble"
        headers = {"triton-request-id": request_id}
        reader = GenerateReader(
            self.engine,
            request,
            parse_ensemble if is_ensemble else parse_llmapi,
            ends_without_reason=is_ensemble,
            limit=limit,
            prompt_tokens=None if is_ensemble or self._text is None else self._text.count(prompt, is_prompt=True),
            count=self._text.count if self._text is not None else lambda _: None,
            on_unknown_reason=self._count_unknown_reason,
        )
        return Exchange(
            path=f"{self._path}/generate_stream",
            body=(ensemble_body if is_ensemble else llmapi_body)(request, prompt, limit),
            reader=text_reader(reader, request, prompt, offer, self._writing),
            headers=headers,
            farewell=Post(f"{self._path}/generate", cancellation(self.options.dialect), headers),
        )

    def _count_unknown_reason(self) -> None:
        self.unknown_finish_reasons += 1


def load_metrics(url: str) -> LoadMetrics:
    return LoadMetrics(
        path=url,
        running='nv_trt_llm_request_metrics{request_type="active"}',
        waiting='nv_trt_llm_request_metrics{request_type="waiting"}',
        kv_usage='nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}',
    )


def cancellation(dialect: str) -> dict[str, Any]:
    required = {"max_tokens": 1} if dialect == "ensemble" else {}
    return {"text_input": "", "stop": True, **required}


def sampling(request: GenerateRequest) -> dict[str, Any]:
    """What both dialects call by our names, but for the prefix."""
    values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}
    for field in SAMPLING:
        value = getattr(request, field)
        if isinstance(value, int | float):
            values[field] = value
    if values.get("top_k", 1) <= 0:
        del values["top_k"]
    if "seed" in values:
        values["seed"] %= 2**64
    if values["temperature"] == 0:  # the one most likely token, whatever the temperature
        del values["temperature"]
        values["top_k"] = 1
    return values


def llmapi_body(request: GenerateRequest, prompt: str, limit: int) -> dict[str, Any]:
    fields = {**sampling(request), "max_tokens": limit, "exclude_input_from_output": True}
    if request.stop_strings:
        fields["stop"] = request.stop_strings
    named = {f"sampling_param_{name}": value for name, value in fields.items()}
    return {"text_input": prompt, "streaming": True, "return_finish_reason": True, **named}


def ensemble_body(request: GenerateRequest, prompt: str, limit: int) -> dict[str, Any]:
    body = {
        "text_input": prompt,
        "max_tokens": limit,
        "stream": True,
        "exclude_input_in_output": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        **sampling(request),
    }
    if request.stop_strings:
        body["stop_words"] = request.stop_strings
    for field in ("min_tokens", "repetition_penalty"):
        if isinstance(value := getattr(request, field), int | float):
            body[field] = value
    return body


class _Event(Struct):
    text_output: str | list[str] = ""
    finish_reason: str | list[str] | None = None
    num_input_tokens: Any = None
    num_output_tokens: Any = None


_events = msgspec.json.Decoder(_Event)


def parse_llmapi(data: bytes) -> Piece:
    event = _events.decode(data)
    reason = "".join(event.finish_reason or "")
    return Piece(text="".join(event.text_output), is_whole=True, finish_reason=None if reason == "None" else reason)


def parse_ensemble(data: bytes) -> Piece:
    event = _events.decode(data)
    return Piece(
        text="".join(event.text_output),
        prompt_tokens=token_count(event.num_input_tokens),
        completion_tokens=token_count(event.num_output_tokens),
    )
