"""SGLang's wire, written from its documented behaviour: "Hello world" in two pieces, ended by a limit of two tokens."""

from __future__ import annotations

from typing import Any

from tests.contract.twin import events

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 4}}


def _chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = {"id": "6a1f", "object": "chat.completion.chunk", "created": 1_790_000_000, "model": "small"}
    return {**head, "choices": choices, "usage": None, **more}


def _delta(text: str | None, reason: str | None = None, index: int = 0, role: str | None = None) -> dict[str, Any]:
    """Every delta has all its keys; the finish chunk is a delta of its own, without text."""
    delta = {"role": role, "content": text, "reasoning_content": None, "tool_calls": None}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason, "matched_stop": None}


CHAT = events(
    [
        _chunk([_delta("", role="assistant")]),
        _chunk([_delta("Hello")]),
        _chunk([_delta(" world")]),
        _chunk([_delta(None, "length")]),
        _chunk([], usage=USAGE),
    ]
)
CHAT_TWO = events(
    [
        _chunk([_delta("", role="assistant", index=1)]),
        _chunk([_delta("Hello", index=1)]),
        _chunk([_delta("", role="assistant", index=0)]),
        _chunk([_delta("Hello", index=0)]),
        _chunk([_delta(" world", index=1)]),
        _chunk([_delta(" world", index=0)]),
        _chunk([_delta(None, "length", index=0)]),
        _chunk([_delta(None, "length", index=1)]),
        _chunk([], usage={**USAGE, "completion_tokens": 4}),
    ]
)


def _text(text: str, reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "matched_stop": None}
    return {"id": "6a1f", "object": "text_completion", "choices": [choice], "usage": None}


COMPLETION = events([_text("Hello"), _text(" world"), _text("", "length"), {"choices": [], "usage": USAGE}])


def native(text: str, tokens: int, reason: Any = None, *, index: int = 0) -> dict[str, Any]:
    """One event of `/generate`: the text is all so far."""
    meta = {"id": "r-1", "finish_reason": reason, "prompt_tokens": 9, "completion_tokens": tokens, "cached_tokens": 4}
    return {"text": text, "output_ids": list(range(tokens)), "meta_info": meta, "index": index}


AT_LIMIT = {"type": "length", "length": 2}
NATIVE = events([native("Hello", 1), native("Hello world", 2, AT_LIMIT)])
NATIVE_TWO = events(
    [
        native("Hello", 1, index=1),
        native("Hello", 1, index=0),
        native("Hello world", 2, AT_LIMIT, index=1),
        native("Hello world", 2, AT_LIMIT, index=0),
    ]
)

METRICS = (
    "# TYPE sglang:num_running_reqs gauge\n"
    'sglang:num_running_reqs{model_name="small",tp_rank="0"} 3.0\n'
    'sglang:num_queue_reqs{model_name="small",tp_rank="0"} 1.0\n'
    'sglang:token_usage{model_name="small",tp_rank="0"} 0.25\n'
    'sglang:cache_hit_rate{model_name="small",tp_rank="0"} 0.25\n'
)
