"""Any endpoint that speaks OpenAI, where no adapter knows it better: what it honours is said in the configuration.

    engine: openai_compatible
    options: {url: "https://api.example.com/v1", model: their-name, api_key_env: EXAMPLE_KEY,
              parameters: [max_tokens, temperature, top_p, stop, seed]}

- `parameters` lists the request fields that are passed on; without it, those that OpenAI documents. Everything else is
  refused by name, because an endpoint that ignores a field says nothing.
- The wanted length goes out as `max_tokens`, which the most servers know; those that do not say so (OpenAI's reasoning
  models answer 400), and get `limit_field: max_completion_tokens`. A server that ignores its limit would not say so.
- `embeddings: true` says that it has `/v1/embeddings`. No such endpoint is known to tell token ids or its version.
- Its health is that its models can be listed, because there is no other route that every such server has.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from adapters.types import INFORMATIONAL, ChatRequest, CompletionRequest
from adapters.wire.openai_http import ContentOptions, OpenAIHTTPAdapter
from adapters.wire.openai_wire import Dialect

LIMITS = {"max_tokens", "max_completion_tokens", "stop", "n", "best_of"}
SAMPLING = {"temperature", "top_p", "seed", "logit_bias", "presence_penalty", "frequency_penalty"}
DETAILS = {"logprobs", "top_logprobs", "echo", "suffix"}
CHAT = {"tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"}
DOCUMENTED = frozenset(LIMITS | SAMPLING | DETAILS | CHAT)

FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__} - INFORMATIONAL - {"messages", "prompt"}
LOSES_ITS_ANSWER = {"functions", "function_call", "modalities", "audio", "web_search_options"}  # no `Chunk` carries it
POSSIBLE = frozenset(FIELDS - LOSES_ITS_ANSWER)


class CompatibleOptions(ContentOptions):
    parameters: list[str] | None = None
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    token_prompts: bool = False  # it takes lists of token ids as a prompt
    usage_so_far: bool = False  # it has vLLM's `stream_options.continuous_usage_stats`

    def __post_init__(self) -> None:
        unknown = sorted(set(self.parameters or ()) - POSSIBLE)
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no request field; there are: {', '.join(sorted(POSSIBLE))}")


class Adapter(OpenAIHTTPAdapter[CompatibleOptions]):
    engine = "openai_compatible"
    hosted = None
    Options: ClassVar[type[CompatibleOptions]] = CompatibleOptions
    health_path = "/v1/models"
    dialect = Dialect(parameters=DOCUMENTED)

    def __init__(self, options: CompatibleOptions) -> None:
        self.dialect = Dialect(
            parameters=DOCUMENTED if options.parameters is None else frozenset(options.parameters),
            chat_limit=options.limit_field,
            usage_so_far=options.usage_so_far,
        )
        super().__init__(options)
        self.capabilities = msgspec.structs.replace(
            self.capabilities,
            token_prompts=options.token_prompts,
            embeddings=options.embeddings,
            dimensions=options.embeddings,
        )
