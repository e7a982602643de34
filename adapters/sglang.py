"""SGLang, through its OpenAI server or its own `/generate`. Read against 0.5.23.

- It notices a closed socket only about 2 s after the fact, so each request has an id of ours (`rid`), and
  `/abort_request` names it when we leave early. It aborts every id that *begins* with the one named: ids of requests
  must not begin with one another, which those of one length never do.
- Errors of the OpenAI route are flat (`{"object": "error", ...}`) before the stream and nested inside it.
- A chat stream opens with the role, writes `reasoning_content` on every delta, null where there is none, and puts the
  finish reason into an empty delta of its own. `abort` is one of its reasons.
- `cache_salt` keeps prompts apart in the radix cache, on `/generate` under the name `extra_key`.
- `stream_options.continuous_usage_stats` is vLLM's, of the event's choice; `/generate` as we read it has no such thing.
- It has `best_of` in name only, and `suffix` only for models made for infilling: both are refused.
- `/metrics` needs `--enable-metrics`; without it the load is unknown.
- `/generate` (`route: native`) sends the whole text so far with every event, unless the server was told to stream what
  is new (`incremental_output`). Without a limit it stops at 128 tokens; null means "until the context ends". It applies
  no chat template: `chat_template` names one. Nor does it know tools: we read them out of the text, with the special
  tokens that mark them in some formats; the one that ends the answer it leaves out by itself.
- `/v1/tokenize` takes a text or messages; `/v1/detokenize` hides special tokens unless told not to. The context length
  that it tells beside them may be the tokenizer's "none", a number beyond all contexts.
- It embeds only when started with `--is-embedding`, which the option `embeddings` says, and then generates nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct

from adapters.config import goodgate_home
from adapters.errors import EngineFailed, GoodgateError
from adapters.models.model_text import ModelText, text_prompt
from adapters.response_format import wanted_schema
from adapters.tools.think_text import ReasoningParser
from adapters.tools.tool_calls import Offer, ToolParser, call_schema, offered, with_tools
from adapters.types import ChatRequest, GenerateRequest, TokenizeRequest, Tokens, set_fields
from adapters.wire.engine_client import Exchange, Post
from adapters.wire.generate_http import GenerateReader, Parse, Piece, Writing, text_reader
from adapters.wire.openai_http import (
    ContentOptions,
    LoadMetrics,
    OpenAIHTTPAdapter,
    SideRoutes,
    serves_embeddings_only,
)
from adapters.wire.openai_wire import Dialect
from adapters.wire.vocabulary import token_count
from adapters.wire.wire_errors import error_from_response

LIMITS = {"max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "n"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"}
PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
DETAILS = {"logprobs", "top_logprobs", "echo"}
CHAT = {"tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"}

# Our fields in the words of `/generate`; the rest of its list has our names.
NATIVE_NAMES = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}
NATIVE_FIELDS = (LIMITS | SAMPLING | PENALTIES) - {"max_tokens", "max_completion_tokens"}


def top_k(value: int) -> int:
    """It is off at -1 there; 0 is refused."""
    return value or -1


class SGLangOptions(ContentOptions):
    route: Literal["openai", "native"] = "openai"
    chat_template: str = ""  # for route native: a model of the store, a Hugging Face folder or a Jinja file
    tool_parser: ToolParser = "auto"  # for route native: how the model writes tool calls
    reasoning_parser: ReasoningParser = "auto"  # and how it marks what it thinks
    incremental_output: bool = False  # the server was started with --incremental-streaming-output
    content_parts: tuple[Literal["image_url"], ...] = ()  # sounds have words of its own there

    def __post_init__(self) -> None:
        if self.content_parts and self.route == "native":
            raise ValueError("content_parts needs the route openai; the other takes plain text")


class Adapter(OpenAIHTTPAdapter[SGLangOptions]):
    engine = "sglang"
    licence = "Apache-2.0"
    hardware = frozenset({"cpu", "cuda", "rocm", "xpu", "npu"})
    Options: ClassVar[type[SGLangOptions]] = SGLangOptions
    token_prompts = True
    side_routes = SideRoutes(
        version="/server_info",
        tokenize="/v1/tokenize",
        tokenizes_chats=True,
        detokenize="/v1/detokenize",
        detokenize_options={"skip_special_tokens": False},
        detokenized_field="text",
    )
    dialect = Dialect(
        parameters=frozenset(LIMITS | SAMPLING | PENALTIES | DETAILS | CHAT),
        chat_limit="max_completion_tokens",
        thought_field="reasoning_content",
        usage_so_far=True,
        cache_salt=frozenset({"chat", "completions"}),
        conversions={"top_k": top_k},
    )
    load_metrics = LoadMetrics(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        kv_usage="sglang:token_usage",
        prefix_hit_rate="sglang:cache_hit_rate",
    )

    def __init__(self, options: SGLangOptions) -> None:
        super().__init__(options)
        self._text: ModelText | None = None
        self._writing = Writing()
        if options.route == "native":
            self.capabilities = msgspec.structs.replace(
                self.capabilities,
                chat=bool(options.chat_template),
                tokenize_chat=bool(options.chat_template),
                usage_so_far=False,
                parameters=frozenset(LIMITS | SAMPLING | PENALTIES | {"response_format"}),
            )
            self.capabilities = with_tools(self.capabilities, options.tool_parser != "none", can_force=True)
        if options.embeddings:
            self.capabilities = serves_embeddings_only(self.capabilities)

    async def start(self) -> None:
        if self.options.route == "native" and self.options.chat_template:
            self._text = await asyncio.to_thread(ModelText.load, self.options.chat_template, goodgate_home())
            self._writing = Writing(
                self._text.choose_tool_format(self.options.tool_parser, hides_special_tokens=False),
                self._text.reads_thoughts(self.options.reasoning_parser, hides_special_tokens=False),
            )
            self.capabilities = with_tools(self.capabilities, self._writing.tool_format is not None, can_force=True)
        await super().start()

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        self.check_tokenize(request)
        generation = request.as_generation()
        if self._text is not None and isinstance(generation, ChatRequest):  # the template of the route that generates
            request = TokenizeRequest(model=request.model, prompt=self._text.prompt(generation))
        return await super().tokenize(request)

    async def exchange(self, request: GenerateRequest, request_id: str) -> Exchange:
        farewell = Post("/abort_request", {"rid": request_id})
        if self.options.route == "native":
            offer = offered(request, self.engine)
            reader = GenerateReader(
                self.engine,
                request,
                native_parse(is_whole=not self.options.incremental_output),
                on_unknown_reason=self.count_unknown_reason,
            )
            body = native_body(request, self._text, offer)
            return Exchange(
                path="/generate",
                body=body | {"rid": request_id},
                reader=text_reader(reader, request, body.get("text", ""), offer, self._writing),
                farewell=farewell,
            )
        exchange = await super().exchange(request, request_id)
        return Exchange(
            path=exchange.path,
            body={**exchange.body, "rid": request_id},
            reader=exchange.reader,
            farewell=farewell,
        )


def native_body(request: GenerateRequest, text: ModelText | None, offer: Offer | None = None) -> dict[str, Any]:
    prompt: dict[str, Any]
    if not isinstance(request, ChatRequest) and isinstance(request.prompt, list):
        prompt = {"input_ids": request.prompt}
    else:
        prompt = {"text": text_prompt(request, text)}
    sampling: dict[str, Any] = {
        NATIVE_NAMES.get(field, field): getattr(request, field) for field in set_fields(request) & NATIVE_FIELDS
    }
    sampling["max_new_tokens"] = request.token_limit
    if "top_k" in sampling:
        sampling["top_k"] = top_k(sampling["top_k"])
    if (schema := wanted_schema(request, "sglang")) is not None:
        sampling["json_schema"] = msgspec.json.encode(schema).decode()
    if offer is not None and offer.must_call:
        sampling["json_schema"] = msgspec.json.encode(call_schema(offer)).decode()
    elif offer is not None:
        sampling["skip_special_tokens"] = False
    salt = {} if request.salt is None else {"extra_key": request.salt}
    return {**prompt, **salt, "sampling_params": sampling, "stream": True}


class _FinishReason(Struct):
    type: str = ""
    message: str = ""
    status_code: int | None = None


class _Meta(Struct):
    finish_reason: _FinishReason | None = None
    prompt_tokens: Any = None
    completion_tokens: Any = None
    cached_tokens: Any = None


class _Event(Struct):
    text: str = ""
    index: int = 0
    meta_info: _Meta = msgspec.field(default_factory=_Meta)


_events = msgspec.json.Decoder(_Event)


def native_parse(*, is_whole: bool) -> Parse:
    def parse(data: bytes) -> Piece:
        event = _events.decode(data)
        meta = event.meta_info
        reason = meta.finish_reason
        return Piece(
            index=event.index,
            text=event.text,
            is_whole=is_whole,
            finish_reason=reason.type if reason else None,
            failure=_failure(reason) if reason and reason.type == "abort" else None,
            prompt_tokens=token_count(meta.prompt_tokens),
            completion_tokens=token_count(meta.completion_tokens),
            cached_tokens=token_count(meta.cached_tokens),
        )

    return parse


def _failure(reason: _FinishReason) -> GoodgateError:
    if reason.status_code is None or not 400 <= reason.status_code < 600:
        return EngineFailed(f"The engine 'sglang' gave up this request: {reason.message or 'abort'}.")
    return error_from_response("sglang", reason.status_code, msgspec.json.encode({"message": reason.message}))
