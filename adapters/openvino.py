"""OpenVINO GenAI, behind the thin OpenAI server of adapters/servers/openvino_server.py in an environment of its own.

The server is ours, so its wire holds no surprises; the list below is what the server takes, which is what OpenVINO's
continuous batching can honour. It tells no cached tokens, and has no log-probabilities, structured output or
embeddings. Its routes for token ids are vLLM's. It takes tools where the model's chat template renders them, and says
so in its list of models; a forced call would need a grammar.
"""

from __future__ import annotations

import contextlib

from msgspec import Struct

from adapters.base import ModelInfo
from adapters.errors import GoodgateError
from adapters.launching.launch import Installable
from adapters.tools.tool_calls import TOOL_FIELDS, with_tools
from adapters.types import ChatRequest, GenerateRequest
from adapters.wire.openai_http import VLLM_ROUTES, HTTPOptions, LoadMetrics, OpenAIHTTPAdapter
from adapters.wire.openai_wire import Dialect

LIMITS = {"max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "n"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed"}
PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}


class _Model(Struct):
    id: str
    max_model_len: int
    tools: bool = False


class _Models(Struct):
    data: list[_Model]


class Adapter(Installable, OpenAIHTTPAdapter[HTTPOptions]):
    engine = "openvino"
    licence = "Apache-2.0"
    hardware = frozenset({"cpu", "xpu", "npu"})
    Options = HTTPOptions
    token_prompts = True
    side_routes = VLLM_ROUTES
    dialect = Dialect(
        parameters=frozenset(LIMITS | SAMPLING | PENALTIES | TOOL_FIELDS),
        thought_field="reasoning_content",
        usage_so_far=True,
    )
    load_metrics = LoadMetrics(
        running="openvino:requests_running",
        waiting="openvino:requests_waiting",
        kv_usage="openvino:kv_cache_usage",
    )

    def __init__(self, options: HTTPOptions) -> None:
        super().__init__(options)
        self.capabilities = with_tools(self.capabilities, True, can_force=False)

    async def models(self) -> list[ModelInfo]:
        """What the server says of its template on the way decides whether tools are offered."""
        listing = self.decode(await self.get("/v1/models"), _Models).data
        self.capabilities = with_tools(self.capabilities, all(each.tools for each in listing), can_force=False)
        return [ModelInfo(each.id, each.max_model_len) for each in listing]

    async def prepare(self, request: GenerateRequest) -> None:
        if isinstance(request, ChatRequest) and request.tools:
            with contextlib.suppress(GoodgateError):  # an engine that cannot be asked says nothing against tools
                await self.models()  # each time, because the model behind the url may have changed
