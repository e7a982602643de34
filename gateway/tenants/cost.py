"""What a request may cost in tokens and engine time before it is known, and what it did cost in the end.

    cost = of_generation(request)              # Cost(prompt_tokens=12, completion_tokens=256)

These figures only hold a place in limits and budgets; what engines count takes theirs. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adapters.types import ChatRequest, EmbeddingRequest, GenerateRequest
from gateway.records.trace import CANCELLED, Trace

CHARACTERS_A_TOKEN = 4  # of English, roughly, with the tokenizers of today
DEFAULT_COMPLETION_TOKENS = 256  # of an answer whose length was left to the engine
FIRST_ENGINE_S = 1.0  # of a model's first generation
NEW_WEIGHT = 0.1  # of one generation in the mean of those before


class Cost(NamedTuple):
    prompt_tokens: int
    completion_tokens: int


def of_generation(request: GenerateRequest) -> Cost:
    if isinstance(request, ChatRequest):
        prompt_tokens = sum(_of_text(message.text()) for message in request.messages)
    else:
        prompt_tokens = _of_text(request.prompt)
    limit = DEFAULT_COMPLETION_TOKENS if request.token_limit is None else request.token_limit
    return Cost(prompt_tokens, limit * request.num_choices)


def of_embedding(request: EmbeddingRequest) -> int:
    return sum(map(_of_text, request.input))


def spent(costs: Sequence[Cost], trace: Trace, *, is_whole: bool, has_failed: bool) -> int:
    """What a request has cost that ended. Without a count by the engine each piece was a token, and a request that
    failed before its first piece was none."""
    counted = trace.prompt_tokens + trace.completion_tokens
    if (is_whole and counted) or (has_failed and trace.num_pieces == 0):
        return counted
    return max(counted, sum(cost.prompt_tokens for cost in costs) + trace.num_pieces)


def engine_s(trace: Trace) -> float:
    """The seconds that engines worked for the request. An attempt that failed before its first token was no work."""
    return sum(
        attempt.engine_s
        for attempt in trace.attempts
        if attempt.first_token is not None or attempt.outcome in ("ok", CANCELLED)
    )


class EngineSeconds:
    """What a generation may cost of each model's engines: the running mean of those that have ended."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def expected(self, model: str) -> float:
        return self._means.get(model, FIRST_ENGINE_S)

    def learn(self, model: str, seconds: float) -> None:
        before = self.expected(model)
        self._means[model] = before + (seconds - before) * NEW_WEIGHT


def _of_text(text: str | list[int]) -> int:
    return len(text) if isinstance(text, list) else len(text) // CHARACTERS_A_TOKEN + 1
