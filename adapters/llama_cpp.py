"""llama.cpp's server, through its OpenAI routes (tools/server). What differs from OpenAI, and is set right here:

- Its sampling defaults are its own (temperature 0.8, top_k 40, top_p 0.95, min_p 0.05), so each is always sent.
- `repeat_penalty` is its name, and penalties look back 64 tokens only unless told otherwise; other engines look back
  over everything. -1 used to mean that and is refused today, so a number larger than most contexts is sent.
- `top_k` is off at 0, not at -1. The seed has 32 bits, and all ones mean "random".
- It has no `min_tokens`, `echo`, `suffix` or `best_of`. `n` may not exceed its slots: its own 400 says so.
- Log-probabilities of completions come in chat's shape. Asking for no alternatives would turn them off, and saying
  nothing gives 20 of them: it is always asked for one at least.
- With several choices the usage comes once for each, counting that one's tokens.
- It closes the connection after every stream, in spite of its `Keep-Alive` header.
- A later error is an event and the end of the stream, without `[DONE]`.
- `/health` answers 503 while the model loads.
- What a slot can hold is in `/props`, not in the list of models; so is its version, as a build.
- `/tokenize` takes texts only and adds no special tokens unless told to. The text of a chat is what `/apply-template`
  makes of it, without the beginning-of-sequence token that tokenising adds again.
- `tool_choice` must be a word: an object that names a tool is logged and dropped. So that tool alone is sent, with
  `required`. Where the model's chat template has no place for tools, it drops them all, and `required` with them: its
  `/props` says so (`chat_template_caps`), and then tools are refused here. Seen on 11434.
- The name of a tool call may grow from delta to delta (`common_chat_msg_diff` in common/chat.cpp).
- It embeds only when started with `--embeddings`, which the option `embeddings` says, and never in fewer dimensions.
  Its help calls that a restriction, but such a server generates as well. Seen on 11434; older builds answer 501.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from adapters.base import ModelInfo
from adapters.errors import EngineFailed, GoodgateError, InvalidRequest
from adapters.launching.launch import Installable
from adapters.types import ChatRequest, CompletionRequest, GenerateRequest, TokenizeRequest, Tokens
from adapters.wire.engine_client import Post
from adapters.wire.openai_http import (
    ContentOptions,
    LoadMetrics,
    OpenAIHTTPAdapter,
    SideRoutes,
)
from adapters.wire.openai_wire import Dialect
from adapters.wire.side_routes import read_text

LIMITS = {"max_tokens", "max_completion_tokens", "ignore_eos", "stop", "n"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"}
PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
DETAILS = {"logprobs", "top_logprobs"}
TOOLS = {"tools", "tool_choice", "parallel_tool_calls"}
CHAT = TOOLS | {"response_format"}

RANDOM_SEED = 0xFFFF_FFFF
LOOK_BACK_TOKENS = 131_072  # it keeps a ring of that many ids, half a MiB, for each request with penalties


def seed32(seed: int) -> int:
    """The seed in the bits that the engine has, never the value that means "random"."""
    short = seed & 0xFFFF_FFFF
    return 0 if short == RANDOM_SEED else short


def only_tool(tools: list[dict[str, Any]], choice: dict[str, Any]) -> list[dict[str, Any]]:
    """The tool that `choice` names, as the only one to choose from."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    named = [tool for tool in tools if isinstance(tool.get("function"), dict) and tool["function"].get("name") == name]
    if choice.get("type") != "function" or not named:
        raise InvalidRequest(f"tool_choice names {name!r}, which is none of the tools.", param="tool_choice")
    return named


class _Settings(Struct):
    n_ctx: int


class _TemplateCaps(Struct, frozen=True):
    supports_tools: bool = True


class _Props(Struct):
    default_generation_settings: _Settings
    chat_template_caps: _TemplateCaps = _TemplateCaps()


class Adapter(Installable, OpenAIHTTPAdapter[ContentOptions]):
    engine = "llama_cpp"
    licence = "MIT"
    hardware = frozenset({"cpu", "cuda", "rocm", "metal", "vulkan", "sycl"})
    Options: ClassVar[type[ContentOptions]] = ContentOptions
    token_prompts = True
    tokenizes_tools = True
    keeps_connections = False
    side_routes = SideRoutes(
        version="/props",
        version_field="build_info",
        tokenize="/tokenize",
        text_field="content",
        special_field="add_special",
        detokenize="/detokenize",
        detokenized_field="content",
        embeds_as_base64=True,
    )
    dialect = Dialect(
        parameters=frozenset(LIMITS | SAMPLING | PENALTIES | DETAILS | CHAT),
        renames={"repetition_penalty": "repeat_penalty"},
        defaults={"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0},
        conversions={"seed": seed32, "top_k": lambda top_k: max(top_k, 0)},
        thought_field="reasoning_content",
        completion_logprobs_look_like_chat=True,
        counts_each_choice=True,
        tool_names_grow=True,
    )
    load_metrics = LoadMetrics(running="llamacpp:requests_processing", waiting="llamacpp:requests_deferred")

    def __init__(self, options: ContentOptions) -> None:
        super().__init__(options)
        self.capabilities = msgspec.structs.replace(
            self.capabilities, tokenize_chat=True, embeddings=options.embeddings
        )
        self._capabilities_with_tools = self.capabilities

    def body(self, request: GenerateRequest, model: str) -> dict[str, Any]:
        body = super().body(request, model)
        if body.get("presence_penalty") or body.get("frequency_penalty") or body["repeat_penalty"] != 1:
            body["repeat_last_n"] = LOOK_BACK_TOKENS
        if body.get("logprobs") is True:
            body["top_logprobs"] = max(body.get("top_logprobs", 0), 1)
        elif body.get("logprobs") == 0 and isinstance(request, CompletionRequest):
            body["logprobs"] = 1
        if isinstance(body.get("tool_choice"), dict):
            body["tools"] = only_tool(body["tools"], body["tool_choice"])
            body["tool_choice"] = "required"
        return body

    async def prepare(self, request: GenerateRequest) -> None:
        if isinstance(request, ChatRequest) and request.tools:
            with contextlib.suppress(GoodgateError):  # an engine that cannot be asked says nothing against tools
                await self._context()  # each time, because the model behind the url may have changed

    async def models(self) -> list[ModelInfo]:
        context = await self._context()
        return [ModelInfo(each.id, context) for each in await super().models()]

    async def _context(self) -> int:
        """The tokens that a slot holds. What the engine says of its template on the way decides whether tools are."""
        props = self.decode(await self.get("/props"), _Props)
        offered = self._capabilities_with_tools
        if not props.chat_template_caps.supports_tools:
            offered = msgspec.structs.replace(offered, parameters=offered.parameters - TOOLS)
        self.capabilities = offered
        return props.default_generation_settings.n_ctx

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        self.check_tokenize(request)
        if request.messages is not None:
            body = self.tokenize_body(request, await self.served_model(request.model))
            prompt = read_text(self.engine, await self.client.ask(Post("/apply-template", body)), "prompt")
            request = TokenizeRequest(model=request.model, prompt=prompt)
        tokens = await super().tokenize(request)
        return Tokens(tokens.ids, await self._context())

    async def detokenize(self, ids: Sequence[int]) -> str:
        """An id beyond the vocabulary is the caller's fault. llama.cpp (b11434) looks it up all the same, and passes on
        what the C++ library says of that as a failure of its own: `vector::_M_range_check`, or just `vector` (libc++).
        """
        try:
            return await super().detokenize(ids)
        except EngineFailed as error:
            if "vector" not in error.message:
                raise
            raise InvalidRequest(f"The model has no token {max(ids)}.", param="tokens") from error
