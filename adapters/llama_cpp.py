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
- What a slot can hold is in `/props`, not in the list of models.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from adapters.base import ModelInfo
from adapters.launch import Installable
from adapters.openai_http import HTTPOptions, LoadMetrics, OpenAIHTTPAdapter
from adapters.openai_wire import Dialect
from adapters.types import CompletionRequest, GenerateRequest

LIMITS = {"max_tokens", "max_completion_tokens", "ignore_eos", "stop", "n"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"}
PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
DETAILS = {"logprobs", "top_logprobs"}
CHAT = {"tools", "tool_choice", "parallel_tool_calls", "response_format"}

RANDOM_SEED = 0xFFFF_FFFF
LOOK_BACK_TOKENS = 131_072  # it keeps a ring of that many ids, half a MiB, for each request with penalties


def seed32(seed: int) -> int:
    """The seed in the bits that the engine has, never the value that means "random"."""
    short = seed & 0xFFFF_FFFF
    return 0 if short == RANDOM_SEED else short


class _Settings(Struct):
    n_ctx: int


class _Props(Struct):
    default_generation_settings: _Settings


class Adapter(Installable, OpenAIHTTPAdapter[HTTPOptions]):
    engine = "llama_cpp"
    Options = HTTPOptions
    token_prompts = True
    keeps_connections = False
    dialect = Dialect(
        parameters=frozenset(LIMITS | SAMPLING | PENALTIES | DETAILS | CHAT),
        renames={"repetition_penalty": "repeat_penalty"},
        defaults={"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0},
        conversions={"seed": seed32, "top_k": lambda top_k: max(top_k, 0)},
        completion_logprobs_look_like_chat=True,
        counts_each_choice=True,
    )
    load_metrics = LoadMetrics(running="llamacpp:requests_processing", waiting="llamacpp:requests_deferred")

    def body(self, request: GenerateRequest, model: str) -> dict[str, Any]:
        body = super().body(request, model)
        if body.get("presence_penalty") or body.get("frequency_penalty") or body["repeat_penalty"] != 1:
            body["repeat_last_n"] = LOOK_BACK_TOKENS
        if body.get("logprobs") is True:
            body["top_logprobs"] = max(body.get("top_logprobs", 0), 1)
        elif body.get("logprobs") == 0 and isinstance(request, CompletionRequest):
            body["logprobs"] = 1
        return body

    async def models(self) -> list[ModelInfo]:
        props = self.decode(await self.get("/props"), _Props)
        context = props.default_generation_settings.n_ctx
        return [ModelInfo(each.id, context) for each in await super().models()]
