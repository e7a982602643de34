"""The experiments by name, each with its question. A module each, with the same three things in it.

experiment = load("kv-cache")
found = experiment.measure(bench)       # runs the engine; plain data
experiment.show(found)                  # pure: the figure, the tables and what to see in them
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:  # both need torch, and a list of names does not
    from native_engine.lab.picture import Shown
    from native_engine.lab.workbench import Workbench

QUESTIONS: Mapping[str, str] = {
    "kv-cache": "What does a token cost with and without a KV cache as the text grows, and what does the cache take?",
    "paging": "How much memory do the same requests take in a stretch each, in blocks, and in blocks that they share?",
    "batching": "What does it cost to wait for the longest answer of a batch, where answers differ in length?",
    "chunked-prefill": "How long do running answers stall when a long prompt comes, in one piece and in chunks?",
    "preemption": "What does a request pay to come back after it gave memory away: computed again, or swapped?",
    "prefix": "What does a shared system prompt save before the first token, and what does a timestamp before it undo?",
    "batch-depth": "How do speed and a token's time grow with the depth of a batch, and where does goodput peak?",
    "speculation": "What do guesses from the text itself bring, by their number and by the number of requests at once?",
}


class Experiment(Protocol):
    TITLE: str
    Found: type[Any]  # a dataclass of what was found

    def measure(self, bench: Workbench) -> Any:
        """A `Found`. Raises an `EngineError` where the model does not suit the experiment."""

    def show(self, found: Any) -> Shown: ...


def load(name: str) -> Experiment:
    return cast("Experiment", importlib.import_module(f"native_engine.lab.{name.replace('-', '_')}"))
