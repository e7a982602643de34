"""TensorRT-LLM, through `trtllm-serve`. Read against the server of 1.2 and 1.3.

- Fields that it does not know are refused with 400, so nothing beyond the list below is sent; `parallel_tool_calls`,
  which older releases do not know and newer ones do not honour, is never among them.
- `data: {...} ` has a space before the line end, and unset fields are left out.
- The finish reason comes with the last text. `timeout` and `cancelled` are reasons that mean failure.
- A failure in the middle drops the connection: no error event, no `[DONE]`.
- Structured output has no effect unless the server was started with a `guided_decoding_backend`; what has no effect is
  refused here, so `response_format` is offered only with `guided_decoding: true`.
- `cache_salt` keeps prompts apart in the KV cache, in chats; completions have no such field, and refuse it.
- `top_k` is off at 0. Log-probabilities need the PyTorch backend; without it, its own 400 says so.
- `/metrics` is JSON of the last iterations, emptied by whoever reads it: never polled. `/prometheus/metrics` exists
  with `return_perf_metrics`; without it the load is unknown.
- It has no route for token ids: with `chat_template`, a model of the store or a Hugging Face folder, the tokenizer
  there answers here. No embeddings either.
- When the client leaves, it notices within a second.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from adapters.models.model_text import LocalTokenizer
from adapters.wire.openai_http import HTTPOptions, LoadMetrics, OpenAIHTTPAdapter, SideRoutes
from adapters.wire.openai_wire import Dialect

LIMITS = {"max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "n", "best_of"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"}
PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
DETAILS = {"logprobs", "top_logprobs"}
CHAT = {"tools", "tool_choice", "reasoning_effort"}


class TensorRTOptions(HTTPOptions):
    guided_decoding: bool = False  # the server has a guided_decoding_backend
    chat_template: str = ""  # where the model's tokenizer is, to tell token ids: a model of the store or a folder


class Adapter(LocalTokenizer[TensorRTOptions], OpenAIHTTPAdapter[TensorRTOptions]):
    engine = "tensorrt_llm"
    licence = "Apache-2.0"
    hardware = frozenset({"cuda"})
    Options: ClassVar[type[TensorRTOptions]] = TensorRTOptions
    token_prompts = True
    side_routes = SideRoutes(version="/version")
    dialect = Dialect(
        parameters=frozenset(LIMITS | SAMPLING | PENALTIES | DETAILS | CHAT),
        chat_limit="max_completion_tokens",
        cache_salt=frozenset({"chat"}),
        usage_so_far=True,
        conversions={"top_k": lambda top_k: max(top_k, 0)},
    )
    load_metrics = LoadMetrics(
        path="/prometheus/metrics",
        running="trtllm_num_requests_running",
        waiting="trtllm_num_requests_waiting",
        kv_usage="trtllm_kv_cache_utilization",
        prefix_hits="trtllm_kv_cache_reused_blocks",
        prefix_misses="trtllm_kv_cache_missed_blocks",
        prefix_hit_rate="trtllm_kv_cache_hit_rate",
    )

    def __init__(self, options: TensorRTOptions) -> None:
        if options.guided_decoding:
            parameters = self.dialect.parameters | {"response_format"}
            self.dialect = msgspec.structs.replace(self.dialect, parameters=parameters)
        super().__init__(options)
        self.declare_tokens(bool(options.chat_template))

    async def start(self) -> None:
        if self.options.chat_template:
            await self.load_text(self.options.chat_template)
        await super().start()
