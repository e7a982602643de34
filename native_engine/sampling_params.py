"""How the tokens of one request are chosen, and when they end. Checked once, here; nobody downstream checks again.

>>> SamplingParams(temperature=0, max_tokens=16).is_greedy
True
>>> SamplingParams(top_p=1.5)
Traceback (most recent call last):
native_engine.errors.InvalidParams: top_p must be above 0 and at most 1, not 1.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from native_engine.errors import InvalidParams

MOST_URGENT = 1000
COLDEST = 1e-6  # below it the likeliest token has all the weight that fp32 can tell apart
MAX_BIAS = 100.0  # OpenAI's: it forces a token, and -100 bans one
MAX_LOGPROBS = 20  # alternatives at each place


class Grammar(NamedTuple):
    """What the whole text must be (structured.py): a JSON schema, a regular expression or a Lark grammar."""

    kind: Literal["json", "regex", "lark"]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    max_tokens: int | None = None  # None: until the context ends
    min_tokens: int = 0  # before that many, stop tokens (the model's and the request's) are neither sampled nor obeyed
    temperature: float = 1.0  # 0, and below a millionth: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    seed: int | None = None  # None: the engine draws one
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit); no id twice
    bad_words: tuple[str, ...] = ()  # the output holds none of them, however its tokens fall (bad_words.py)
    logprobs: int | None = None  # tell each token's log-probability, and those of so many of the likeliest
    prompt_logprobs: int | None = None  # the same for the prompt, but for its first token
    stop: tuple[str, ...] = ()  # honoured where there is text: in the asynchronous face
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0  # lower comes sooner (pacing.py)
    grammar: Grammar | None = None  # it decides where the text may end, so `min_tokens` and `ignore_eos` do not

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        _check("min_tokens", self.min_tokens, self.min_tokens >= 0, "at least 0")
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "finite and at least 0")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("top_k", self.top_k, self.top_k >= 0, "at least 0 (0 turns it off)")
        _check("priority", self.priority, abs(self.priority) <= MOST_URGENT, f"from -{MOST_URGENT} to {MOST_URGENT}")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        _check(
            "repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "finite and above 0"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, math.isfinite(value), "finite")
        for _, bias in self.logit_bias:
            _check("logit_bias", bias, abs(bias) <= MAX_BIAS, f"from -{MAX_BIAS:g} to {MAX_BIAS:g}")
        ids = [token_id for token_id, _ in self.logit_bias]
        _check("logit_bias", ids, len(set(ids)) == len(ids), "without an id twice")
        _check("bad_words", self.bad_words, all(self.bad_words), "without empty strings")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(name, count, count is None or 0 <= count <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")
        _check("stop", self.stop, all(self.stop), "without empty strings")
        _check("stop_token_ids", self.stop_token_ids, all(i >= 0 for i in self.stop_token_ids), "without negative ids")
        is_free = self.grammar is None
        _check("min_tokens", self.min_tokens, is_free or self.min_tokens == 0, "0 beside a grammar")
        _check("ignore_eos", self.ignore_eos, is_free or not self.ignore_eos, "false beside a grammar")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParams(f"min_tokens must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < COLDEST

    @property
    def has_penalties(self) -> bool:
        """The tokens so far change the next one's chances."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def after(self, num_tokens: int) -> SamplingParams:
        """For the rest of a request that has so many tokens already."""
        if self.max_tokens is not None and num_tokens >= self.max_tokens:
            raise InvalidParams("continuation has no token left to generate.")
        rest = None if self.max_tokens is None else self.max_tokens - num_tokens
        return replace(self, max_tokens=rest, min_tokens=max(self.min_tokens - num_tokens, 0))


def _check(name: str, value: object, ok: bool, wanted: str) -> None:
    if not ok:
        raise InvalidParams(f"{name} must be {wanted}, not {value!r}.")
