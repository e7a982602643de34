"""vLLM, through its OpenAI server. Read against 0.32; each quirk with the place in its source.

- `max_completion_tokens` is its name for the limit in chats (openai/chat_completion/protocol.py).
- It ignores fields that it does not know, so only those of the list below are sent. `best_of` and `suffix` are gone.
- The seed -1 means "random" there; to the caller it is a seed like any other, so another number stands for it.
- At most four stop strings (VLLM_MAX_STOP_STRINGS): more is its own 400, which names the field.
- The finish reason may come with text, and `repetition` is one of its reasons for stopping.
- The port opens after the model is loaded, so `/health` means ready; it turns 503 when the engine behind it has died.
- `stream_options.continuous_usage_stats` puts the usage so far into every event, the role's too: of the event's choice.
- Cached prompt tokens are told only with `--enable-prompt-tokens-details`, which our launch recipe sets.
- Tools need `--enable-auto-tool-choice --tool-call-parser NAME`, which our launch recipe sets; without them it answers
  400 to every `tool_choice` and names the flag. Seen on 0.32.0.
- It holds the arguments of a call to their schema only for a tool with `strict: true`, even where the call is forced
  (tool_parsers/tool_strict_level.py); without it, it has answered `"Paris"` where an object was asked for.
- `/tokenize` takes a text, or messages and tools, and `/detokenize` spells special tokens (serve/tokenize/protocol.py).
- A process embeds only when it was started for it (`--runner pooling`), and then generates nothing: the option
  `embeddings` says which of the two it is. How many `dimensions` a model allows is its own 400 to say.
- `cache_salt` keeps prompts apart in the prefix cache, in chats and completions; it may not be empty.
- Thoughts of earlier answers are `reasoning` in its messages (openai/chat_completion/protocol.py).
- Which parts beside text a message may have is the model's affair: the option `content_parts` says it.
- When the client leaves, it aborts the request (serve/utils/api_utils.py).
"""

from __future__ import annotations

from typing import ClassVar

from adapters.errors import GoodgateError, InvalidRequest
from adapters.launching.launch import Installable
from adapters.wire.openai_http import (
    VLLM_ROUTES,
    ContentOptions,
    LoadMetrics,
    OpenAIHTTPAdapter,
    serves_embeddings_only,
)
from adapters.wire.openai_wire import Dialect

LIMITS = {"max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "n"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"}
PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
DETAILS = {"logprobs", "top_logprobs", "echo"}
CHAT = {"tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"}


class Adapter(Installable, OpenAIHTTPAdapter[ContentOptions]):
    engine = "vllm"
    licence = "Apache-2.0"
    hardware = frozenset({"cpu", "cuda", "rocm", "xpu", "tpu"})
    Options: ClassVar[type[ContentOptions]] = ContentOptions
    token_prompts = True
    tokenizes_tools = True
    side_routes = VLLM_ROUTES
    dialect = Dialect(
        parameters=frozenset(LIMITS | SAMPLING | PENALTIES | DETAILS | CHAT),
        chat_limit="max_completion_tokens",
        thought_field="reasoning",
        usage_so_far=True,
        cache_salt=frozenset({"chat", "completions"}),
        conversions={"seed": lambda seed: 2**63 - 1 if seed == -1 else seed},
    )
    load_metrics = LoadMetrics(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        kv_usage="vllm:kv_cache_usage_perc",
        prefix_hits="vllm:prefix_cache_hits_total",
        prefix_queries="vllm:prefix_cache_queries_total",
    )

    def __init__(self, options: ContentOptions) -> None:
        super().__init__(options)
        if options.embeddings:
            self.capabilities = serves_embeddings_only(self.capabilities)

    def in_other_words(self, error: GoodgateError) -> GoodgateError:
        """vLLM names its flags; the one who asked needs the field, and the one who launched it our option."""
        if not isinstance(error, InvalidRequest) or "--tool-call-parser" not in error.message:
            return error
        return InvalidRequest(
            "This vLLM was started without a tool parser: start it with --enable-auto-tool-choice --tool-call-parser "
            "NAME (the launch option tool_call_parser), or leave `tools` out.",
            param="tools",
        )
