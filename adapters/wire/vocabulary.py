"""What engines say in their answers beside the text, in OpenAI's words: why they ended, how many tokens, how likely.

Pure, and the same for every engine, whether it speaks OpenAI or has a text route of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from adapters.errors import EngineFailed
from adapters.types import FinishReason, GenerateRequest

_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "end": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "word": "stop",
    "repetition": "stop",
    "length": "length",
    "limit": "length",
    "max_tokens": "length",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "refusal": "content_filter",
}
_FAILURES = frozenset({"abort", "error", "timeout", "cancelled"})


def as_finish_reason(engine: str, reason: str | None, on_unknown: Callable[[], None]) -> FinishReason | None:
    """OpenAI's word for an engine's; None where it says none. An unknown one ends the answer like any other, and
    `on_unknown` hears of it. Raises `EngineFailed` for one that means failure.
    """
    if not reason:
        return None
    if reason in _FAILURES:
        raise EngineFailed(f"The engine {engine!r} gave up this request ({reason}).")
    if reason not in _FINISH_REASONS:
        on_unknown()
    return _FINISH_REASONS.get(reason, "stop")


def max_pieces(request: GenerateRequest) -> int | None:
    """More pieces than this are no answer to `request`; None where it sets no limit.

    A piece holds a token or more as a rule, but parsers of tools and reasoning may cut one into several.
    """
    return None if request.token_limit is None else 4 * request.token_limit * request.num_choices + 64


def token_count(told: Any) -> int | None:
    """A number of tokens as engines write it: plain, as a string, or as a list of one. What cannot be one counts as
    not told: an account must not spoil an answer.
    """
    if isinstance(told, list):
        told = told[0] if told else None
    if isinstance(told, str) and told.isdecimal() and len(told) < 16:
        told = int(told)
    is_number = isinstance(told, int) and not isinstance(told, bool)
    return told if is_number and 0 <= told <= 2**53 else None


class _TokenLogprob(Struct):
    token: str
    logprob: float | None = None
    top_logprobs: list[_TokenLogprob] | None = None


class _ChatLogprobs(Struct):
    content: list[_TokenLogprob] | None = None


def as_completion_logprobs(logprobs: Raw, text_offset: int) -> Raw | None:
    """Chat's shape of log-probabilities in that of the completions route, for text that starts at `text_offset`."""
    content = msgspec.json.decode(logprobs, type=_ChatLogprobs).content
    if not content:
        return None
    offsets = [text_offset]
    for each in content:
        offsets.append(offsets[-1] + len(each.token))
    shape = {
        "tokens": [each.token for each in content],
        "token_logprobs": [each.logprob for each in content],
        "top_logprobs": [{top.token: top.logprob for top in each.top_logprobs or ()} for each in content],
        "text_offset": offsets[:-1],
    }
    return Raw(msgspec.json.encode(shape))
