"""What a request may cost in tokens and engine time before it is known, and what it did cost in the end.

    cost = of_generation(request)              # Cost(prompt_tokens=12, completion_tokens=256)

These figures only hold a place in limits and budgets; what engines count takes theirs. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from adapters.types import ChatRequest, EmbeddingRequest, GenerateRequest
from gateway.records.trace import CANCELLED, LOST, Attempt, Trace

CHARACTERS_A_TOKEN = 4  # of English, roughly, with the tokenizers of today
DEFAULT_COMPLETION_TOKENS = 256  # of an answer whose length was left to the engine
FIRST_ENGINE_S = 1.0  # of a model's first generation
NEW_WEIGHT = 0.1  # of one generation in the mean of those before
MAX_TOKENS = 10**12  # more is an engine's mistake, and would break sums


class Cost(NamedTuple):
    prompt_tokens: int
    completion_tokens: int


class Spent(NamedTuple):
    """`is_estimated`: no engine has counted all of it."""

    prompt_tokens: int
    completion_tokens: int
    is_estimated: bool

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def of_generation(request: GenerateRequest) -> Cost:
    if isinstance(request, ChatRequest):
        prompt_tokens = sum([_of_text(message.text()) for message in request.messages])
    else:
        prompt_tokens = _of_text(request.prompt)
    limit = DEFAULT_COMPLETION_TOKENS if request.token_limit is None else request.token_limit
    return Cost(prompt_tokens, limit * request.num_choices)


def of_embedding(request: EmbeddingRequest) -> int:
    return sum(map(_of_text, request.input))


def spent(trace: Trace) -> Spent:
    """What a request has cost that ended, for its budgets as for the ledger. Where an engine has worked on it and has
    not counted it, because the client left or it never does, that is the prompt's estimate and a token a piece."""
    counted = Spent(bounded(trace.prompt_tokens), bounded(trace.completion_tokens), False)
    num_counted = sum([attempt.usage is not None and attempt.usage.prompt_tokens > 0 for attempt in trace.attempts])
    may_cost = trace.expected_prompt_tokens or trace.num_pieces
    if num_counted >= trace.num_prompts or not may_cost or not any(map(has_worked, trace.attempts)):
        return counted
    return Spent(
        max(counted.prompt_tokens, trace.expected_prompt_tokens),
        max(counted.completion_tokens, trace.num_pieces),
        True,
    )


def bounded(tokens: int) -> int:
    return tokens if 0 <= tokens <= MAX_TOKENS else min(max(tokens, 0), MAX_TOKENS)


def engine_s(trace: Trace) -> float:
    """The seconds that engines worked for the request."""
    return sum([attempt.engine_s for attempt in trace.attempts if has_worked(attempt)])


def has_worked(attempt: Attempt) -> bool:
    """An attempt that failed before its first token was no work; one whose client did not wait for that was."""
    return attempt.first_token is not None or attempt.outcome in ("ok", CANCELLED, LOST)


def of_attempt(attempt: Attempt) -> Cost:
    """What one attempt has cost its engine: by its count, or the prompt's estimate where it worked and told nothing."""
    if attempt.usage is not None:
        return Cost(bounded(attempt.usage.prompt_tokens), bounded(attempt.usage.completion_tokens))
    return Cost(attempt.expected_prompt_tokens if has_worked(attempt) else 0, 0)


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
