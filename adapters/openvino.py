"""OpenVINO GenAI, behind the thin OpenAI server of adapters/servers/openvino_server.py in an environment of its own.

The server is ours, so its wire holds no surprises; the list below is what the server takes, which is what OpenVINO's
continuous batching can honour. It tells no cached tokens, and has no log-probabilities, tools, structured output or
embeddings. Its routes for token ids are vLLM's.
"""

from __future__ import annotations

from adapters.launching.launch import Installable
from adapters.wire.openai_http import VLLM_ROUTES, HTTPOptions, LoadMetrics, OpenAIHTTPAdapter
from adapters.wire.openai_wire import Dialect

LIMITS = {"max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "n"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed"}
PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}


class Adapter(Installable, OpenAIHTTPAdapter[HTTPOptions]):
    engine = "openvino"
    Options = HTTPOptions
    token_prompts = True
    side_routes = VLLM_ROUTES
    dialect = Dialect(parameters=frozenset(LIMITS | SAMPLING | PENALTIES))
    load_metrics = LoadMetrics(
        running="openvino:requests_running",
        waiting="openvino:requests_waiting",
        kv_usage="openvino:kv_cache_usage",
    )
