"""OpenVINO GenAI, behind the thin OpenAI server of adapters/openvino_server.py in an environment of its own.

The server is ours, so its wire holds no surprises; the list below is what the server takes, which is what OpenVINO's
continuous batching can honour. It tells no cached tokens, and has no log-probabilities, tools or structured output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.openai_http import HTTPOptions, LoadMetrics, OpenAIHTTPAdapter
from adapters.openai_wire import Dialect

if TYPE_CHECKING:
    from adapters.launch import Installation, LaunchSpec
    from adapters.model_store import Model

LIMITS = {"max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "n"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed"}
PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}


class Adapter(OpenAIHTTPAdapter[HTTPOptions]):
    engine = "openvino"
    Options = HTTPOptions
    token_prompts = True
    dialect = Dialect(parameters=frozenset(LIMITS | SAMPLING | PENALTIES))
    load_metrics = LoadMetrics(
        running="openvino:requests_running",
        waiting="openvino:requests_waiting",
        kv_usage="openvino:kv_cache_usage",
    )

    @classmethod
    def installed(cls, home: Path) -> Installation:
        from adapters.recipes import openvino as recipe

        return recipe.installed(home)

    @classmethod
    def install(cls, home: Path, say: Callable[[str], None]) -> None:
        from adapters.recipes import openvino as recipe

        recipe.install(home, say)

    @classmethod
    def launch_spec(cls, *, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
        from adapters.recipes import openvino as recipe

        return recipe.launch_spec(home=home, model=model, port=port, options=options)
