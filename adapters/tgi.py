"""Hugging Face's text-generation-inference. Read against 3.3.7, the last release: it is not maintained any more.

Its own `/generate_stream` is preferred, with our chat template; its OpenAI route is the fallback. `route` says which;
left out, it is the first where `chat_template` names a template.

Both routes:
- Errors after the request was accepted come under HTTP 200; their `error_type` holds the status they would have had.
- A stop string stays in the text, and one that ends in the middle of a token is not seen at all: we cut.
- `n` is not there: choices are generations of their own.
- `top_p` must lie below 1. Temperature 0 is greedy decoding; any sampling field beside it would turn sampling on again,
  so none is sent.
- The seed has 64 bits without a sign.
- It drops a request only at the token after its client has left.

`/generate_stream`: one token an event, special ones included (they are no text, but some mark tool calls); the finish
reason and the counts are in the `details` of the last; EOF ends the stream. Unless told otherwise it is greedy and
stops at 100 tokens, so `do_sample` is always sent, and null for "until the context ends". It adds a
beginning-of-sequence token itself. At most five alternatives, and four stop strings. Of tools it knows nothing: we read
them out of the text, and its grammar forces a call.

The OpenAI route: `model` chooses a LoRA adapter, so the name there is `tgi`; `stop` must be a list; presence_penalty x
would become a repetition penalty of x + 2, so it is refused, and so are fields that it ignores. Finish reasons of
completions are its own words, and of chats too: `tool_calls` is never among them, and a stream that calls a tool ends
with the account and no reason at all. A message with content loses its tool calls, even if the content is empty, so
beside tool calls none is sent.

Token ids: `/tokenize` always adds the special tokens, and `/chat_tokenize` applies its own template, which is that of
the OpenAI route; for the other, messages become text here first. There is no way back to text, and no embeddings.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Raw, Struct

from adapters.base import ModelInfo
from adapters.config import goodgate_home
from adapters.errors import GoodgateError, InvalidRequest, UnsupportedParameter
from adapters.models.model_text import ModelText, text_prompt
from adapters.tools.formats import TOOL_TOKENS
from adapters.tools.think_text import ReasoningParser
from adapters.tools.tool_calls import Offer, ToolParser, call_schema, offered, with_tools
from adapters.types import ChatRequest, Chunk, GenerateRequest, TokenizeRequest, Tokens, Usage
from adapters.wire.engine_client import Exchange, Post
from adapters.wire.generate_http import GenerateReader, Piece, StopCutter, Writing, choices_apart, text_reader
from adapters.wire.openai_http import HTTPOptions, LoadMetrics, OpenAIHTTPAdapter, SideRoutes
from adapters.wire.openai_wire import Dialect, StreamReader, request_body
from adapters.wire.vocabulary import token_count

COMMON = {"max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "n", "stop", "frequency_penalty"}
DETAILS = {"logprobs", "top_logprobs"}
NATIVE = frozenset(COMMON | DETAILS | {"top_k", "repetition_penalty", "response_format"})
OPENAI = frozenset(COMMON | DETAILS | {"tools", "tool_choice", "response_format"})

MAX_ALTERNATIVES = 5


class TGIOptions(HTTPOptions):
    route: Literal["generate", "openai"] | None = None
    chat_template: str = ""  # a model of the store, a Hugging Face folder or a Jinja file
    tool_parser: ToolParser = "auto"  # for /generate_stream: how the model writes tool calls
    reasoning_parser: ReasoningParser = "auto"  # and how it marks what it thinks
    adapter_id: str = ""  # a LoRA adapter that the server has loaded


class Adapter(OpenAIHTTPAdapter[TGIOptions]):
    engine = "tgi"
    licence = "Apache-2.0"
    hardware = frozenset({"cpu", "cuda", "rocm", "gaudi"})
    Options: ClassVar[type[TGIOptions]] = TGIOptions
    dialect = Dialect(parameters=OPENAI, leaves_out_tool_reason=True)
    side_routes = SideRoutes(version="/info", tokenize="/tokenize", tokenizes_chats=True)
    load_metrics = LoadMetrics(
        running="tgi_batch_current_size",
        waiting="tgi_queue_size",
        kv_usage="tgi_batch_current_max_tokens",
        kv_capacity="tgi_batch_max_total_tokens",
    )

    def __init__(self, options: TGIOptions) -> None:
        super().__init__(options)
        self._is_native = (options.route or ("generate" if options.chat_template else "openai")) == "generate"
        self._text: ModelText | None = None
        self._writing = Writing()
        if self._is_native:
            has_chat = bool(options.chat_template)
            self.capabilities = msgspec.structs.replace(
                self.capabilities, chat=has_chat, tokenize_chat=has_chat, parameters=NATIVE
            )
            self.capabilities = with_tools(self.capabilities, options.tool_parser != "none", can_force=True)

    async def start(self) -> None:
        if self._is_native and self.options.chat_template:
            self._text = await asyncio.to_thread(ModelText.load, self.options.chat_template, goodgate_home())
            self._writing = Writing(
                self._text.choose_tool_format(self.options.tool_parser, hides_special_tokens=False),
                self._text.reads_thoughts(self.options.reasoning_parser, hides_special_tokens=False),
            )
            self.capabilities = with_tools(self.capabilities, self._writing.tool_format is not None, can_force=True)
        await super().start()

    async def models(self) -> list[ModelInfo]:
        info = self.decode(await self.get("/info"), _Info)
        return [ModelInfo(self.options.model or info.model_id, info.max_total_tokens)]

    async def served_model(self, asked: str = "") -> str:
        del asked  # it serves one model
        return self.options.adapter_id or "tgi"

    def generate(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        return choices_apart(self._generate_choice, request, request_id=request_id)

    async def _generate_choice(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        async with contextlib.aclosing(super().generate(request, request_id=request_id)) as chunks:
            async for chunk in chunks:
                if chunk.usage is not None and not chunk.usage.prompt_tokens:
                    chunk = Chunk(usage=await self._with_prompt_tokens(chunk.usage, request))
                yield chunk

    async def _with_prompt_tokens(self, usage: Usage, request: GenerateRequest) -> Usage:
        """The account of a stream that was left before its details came: the engine's tokenizer counts the prompt."""
        try:
            num_tokens = len(await self._prompt_ids(request, self.client.post))
        except GoodgateError:  # the answer is whole; only its price is not known
            return usage
        return msgspec.structs.replace(usage, prompt_tokens=num_tokens)

    def check_tokenize(self, request: TokenizeRequest) -> None:
        super().check_tokenize(request)
        if request.messages is None and not request.add_special_tokens:
            raise UnsupportedParameter("add_special_tokens", self.engine)

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        self.check_tokenize(request)
        ids = await self._prompt_ids(request.as_generation(), self.client.ask)
        (model,) = await self.models()
        return Tokens(ids, model.max_model_len)

    async def _prompt_ids(self, request: GenerateRequest, ask: Callable[[Post], Awaitable[bytes]]) -> list[int]:
        """The prompt as the route sees it that generates."""
        if self._is_native or not isinstance(request, ChatRequest):
            tokens = self.decode(await ask(Post("/tokenize", {"inputs": text_prompt(request, self._text)})), list[_Id])
        else:
            templated = await ask(Post("/chat_tokenize", self.body(request, "tgi")))
            tokens = self.decode(templated, _Templated).tokenize_response
        return [token.id for token in tokens]

    async def exchange(self, request: GenerateRequest, request_id: str) -> Exchange:
        if self._is_native:
            offer = offered(request, self.engine)
            own_parse = partial(parse, with_logprobs=_wants_logprobs(request), with_tool_tokens=offer is not None)
            reader = GenerateReader(self.engine, request, own_parse, on_unknown_reason=self.count_unknown_reason)
            prompt = text_prompt(request, self._text)
            return Exchange(
                path="/generate_stream",
                body=native_body(request, prompt, self.options.adapter_id, offer),
                reader=text_reader(reader, request, prompt, offer, self._writing),
            )
        openai = await super().exchange(request, request_id)
        assert isinstance(openai.reader, StreamReader)
        reader_with_stops = StopCutter(openai.reader, request.stop_strings)
        return Exchange(path=openai.path, body=openai.body, reader=reader_with_stops)

    def body(self, request: GenerateRequest, model: str) -> dict[str, Any]:
        body = request_body(request, self.dialect, model)
        if request.stop_strings:
            body["stop"] = request.stop_strings
        for message in body.get("messages", ()):
            if "tool_calls" in message:
                del message["content"]
        if "seed" in body:
            body["seed"] = seed64(body["seed"])
        for field in _to_leave_out(request):
            body.pop(field, None)
        return body


def seed64(seed: int) -> int:
    return seed % 2**64


def _is_greedy(request: GenerateRequest) -> bool:
    return request.temperature == 0


def _to_leave_out(request: GenerateRequest) -> set[str]:
    """Fields that would be refused, or undo greedy decoding. None of them changes what was asked for."""
    names = {"top_p"} if request.top_p == 1 else set()
    return names | {"top_p", "top_k", "seed"} if _is_greedy(request) else names


def native_body(
    request: GenerateRequest, prompt: str, adapter_id: str = "", offer: Offer | None = None
) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "max_new_tokens": request.token_limit,
        "do_sample": not _is_greedy(request),
        "details": True,
    }
    for field in ("top_p", "top_k", "seed", "frequency_penalty", "repetition_penalty"):
        value = getattr(request, field)
        if isinstance(value, int | float) and field not in _to_leave_out(request):
            parameters[field] = value
    if isinstance(request.temperature, int | float) and not _is_greedy(request):
        parameters["temperature"] = request.temperature
    if parameters.get("top_k", 1) <= 0:
        del parameters["top_k"]
    if "seed" in parameters:
        parameters["seed"] = seed64(parameters["seed"])
    if request.stop_strings:
        parameters["stop"] = request.stop_strings
    if alternatives := _num_alternatives(request):
        parameters["top_n_tokens"] = alternatives
    if isinstance(request, ChatRequest) and (grammar := _grammar(request)) is not None:
        parameters["grammar"] = grammar
    if offer is not None and offer.must_call:
        parameters["grammar"] = {"type": "json", "value": call_schema(offer)}
    if adapter_id:
        parameters["adapter_id"] = adapter_id
    return {"inputs": prompt, "parameters": parameters}


def _wants_logprobs(request: GenerateRequest) -> bool:
    if isinstance(request, ChatRequest):
        return request.logprobs is True
    return isinstance(request.logprobs, int)


def _num_alternatives(request: GenerateRequest) -> int:
    if isinstance(request, ChatRequest):
        field, wanted = "top_logprobs", request.top_logprobs if request.logprobs is True else 0
    else:
        field, wanted = "logprobs", request.logprobs
    number = wanted if isinstance(wanted, int) else 0
    if number > MAX_ALTERNATIVES:
        raise InvalidRequest(f"The engine 'tgi' gives at most {MAX_ALTERNATIVES} alternatives.", param=field)
    return number


def _grammar(request: ChatRequest) -> dict[str, Any] | None:
    wanted = request.response_format
    if not isinstance(wanted, dict) or wanted.get("type") == "text":
        return None
    schema = wanted.get("json_schema")
    if wanted.get("type") != "json_schema" or not isinstance(schema, dict) or "schema" not in schema:
        raise UnsupportedParameter("response_format", "tgi")  # it constrains to a schema, never to "some JSON"
    return {"type": "json", "value": schema["schema"]}


class _Info(Struct):
    model_id: str
    max_total_tokens: int | None = None


class _Id(Struct):
    id: int


class _Templated(Struct):
    tokenize_response: list[_Id]


class _Token(Struct):
    text: str = ""
    logprob: float | None = None
    special: bool = False


class _StreamDetails(Struct):
    finish_reason: str
    generated_tokens: Any = None
    input_length: Any = None


class _Event(Struct):
    token: _Token
    top_tokens: list[_Token] | None = None
    details: _StreamDetails | None = None


_events = msgspec.json.Decoder(_Event)


def parse(data: bytes, *, with_logprobs: bool = False, with_tool_tokens: bool = False) -> Piece:
    event = _events.decode(data)
    token, details = event.token, event.details
    is_text = not token.special or (with_tool_tokens and token.text in TOOL_TOKENS)
    return Piece(
        text=token.text if is_text else "",
        finish_reason=details.finish_reason if details else None,
        prompt_tokens=token_count(details.input_length) if details else None,
        completion_tokens=token_count(details.generated_tokens) if details else None,
        logprobs=_logprobs(token, event.top_tokens or []) if with_logprobs and is_text else None,
    )


def _logprobs(token: _Token, alternatives: list[_Token]) -> Raw:
    """Chat's shape of log-probabilities."""
    content = {**_logprob(token), "top_logprobs": [_logprob(each) for each in alternatives]}
    return Raw(msgspec.json.encode({"content": [content]}))


def _logprob(token: _Token) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode())}
