"""What each engine puts on the wire, written from its documented behaviour: the same short answer in three accents.

Every transcript says "Hello world" in two pieces and ends at a limit of two tokens, after a prompt of nine, four of
them from a cache where the engine tells.
"""

from __future__ import annotations

from typing import Any

from tests.contract.twin import events


def _chat(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_790_000_000, "model": "small"}
    return {**head, "choices": choices, **more}


def _delta(delta: dict[str, Any], reason: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, **more}


def _text(text: str, reason: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason, **more}


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 4}}

# vLLM: unset fields are left out; the finish reason comes with text, and a stop reason with it; usage by itself.
VLLM_CHAT = events(
    [
        _chat([{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]),
        _chat(
            [{"index": 0, "delta": {"content": "Hello"}, "logprobs": None, "finish_reason": None, "token_ids": None}]
        ),
        _chat([{"index": 0, "delta": {"content": " world"}, "finish_reason": "length", "stop_reason": None}]),
        _chat([], usage=USAGE),
    ]
)
VLLM_CHAT_TWO = events(
    [
        *(_chat([_delta({"role": "assistant", "content": ""}, index=i)]) for i in (0, 1)),
        _chat([_delta({"content": "Hello"}, index=1)]),
        _chat([_delta({"content": "Hello"}, index=0)]),
        _chat([_delta({"content": " world"}, "length", index=0)]),
        _chat([_delta({"content": " world"}, "length", index=1)]),
        _chat([], usage={**USAGE, "completion_tokens": 4}),
    ]
)
VLLM_COMPLETION = events(
    [
        {"id": "cmpl-1", "object": "text_completion", "choices": [_text("Hello")]},
        {"id": "cmpl-1", "object": "text_completion", "choices": [_text(" world", "length", stop_reason=None)]},
        {"id": "cmpl-1", "object": "text_completion", "choices": [], "usage": USAGE},
    ]
)

# OpenAI, asked for two choices in one piece.
TWO_AT_ONCE = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_790_000_000,
    "model": "small",
    "choices": [
        {"index": i, "message": {"role": "assistant", "content": "Hello world"}, "finish_reason": "length"}
        for i in (0, 1)
    ],
    "usage": {**USAGE, "completion_tokens": 4},
}

# llama.cpp: null content in the role delta; the finish reason in an empty delta; timings; pings as comments.
_TIMINGS = {"prompt_n": 9, "predicted_n": 2, "predicted_per_second": 41.5}
LLAMA_CHAT = (
    b":\n\n"
    + events([_chat([_delta({"role": "assistant", "content": None})])], done=False)
    + b":\n\n"
    + events(
        [
            _chat([_delta({"content": "Hello"})]),
            _chat([_delta({"content": " world"})]),
            _chat([_delta({}, "length")]),
            _chat([], usage=USAGE, timings=_TIMINGS),
        ]
    )
)
LLAMA_CHAT_TWO = events(
    [
        _chat([_delta({"role": "assistant", "content": None}, index=0)]),
        _chat([_delta({"role": "assistant", "content": None}, index=1)]),
        _chat([_delta({"content": "Hello"}, index=0)]),
        _chat([_delta({"content": "Hello"}, index=1)]),
        _chat([_delta({"content": " world"}, index=1)]),
        _chat([_delta({}, "length", index=1)]),
        _chat([], usage=USAGE, timings=_TIMINGS),  # one for each choice
        _chat([_delta({"content": " world"}, index=0)]),
        _chat([_delta({}, "length", index=0)]),
        _chat([], usage=USAGE, timings=_TIMINGS),
    ]
)
LLAMA_COMPLETION = events(
    [
        {"choices": [_text("Hello")], "created": 1, "model": "small", "object": "text_completion"},
        {"choices": [_text(" world")], "created": 1, "model": "small", "object": "text_completion"},
        {"choices": [_text("", "length")], "object": "text_completion", "usage": USAGE, "timings": _TIMINGS},
    ]
)

# Our own thin server in front of OpenVINO: plain OpenAI; a finish reason may come with text; no cached tokens.
_PLAIN_USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
OPENVINO_CHAT = events(
    [
        _chat([_delta({"role": "assistant", "content": ""})]),
        _chat([_delta({"content": "Hello"})]),
        _chat([_delta({"content": " world"}, "length")]),
        _chat([], usage=_PLAIN_USAGE),
    ]
)
OPENVINO_CHAT_TWO = events(
    [
        _chat([_delta({"role": "assistant", "content": ""}, index=1)]),
        _chat([_delta({"content": "Hello"}, index=1)]),
        _chat([_delta({"role": "assistant", "content": ""}, index=0)]),
        _chat([_delta({"content": "Hello world"}, "length", index=0)]),
        _chat([_delta({"content": " world"}, "length", index=1)]),
        _chat([], usage={"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}),
    ]
)
OPENVINO_COMPLETION = events(
    [
        {"id": "cmpl-1", "object": "text_completion", "choices": [_text("Hello")]},
        {"id": "cmpl-1", "object": "text_completion", "choices": [_text(" world", "length")]},
        {"id": "cmpl-1", "object": "text_completion", "choices": [], "usage": _PLAIN_USAGE},
    ]
)

# Another Goodgate: an opening role, deltas, an empty delta with the finish reason, heartbeats as comments.
_HEARTBEAT = b": keep-alive\n\n"
PEER_CHAT = _HEARTBEAT + LLAMA_CHAT.replace(b":\n\n", _HEARTBEAT)
PEER_CHAT_TWO, PEER_COMPLETION = VLLM_CHAT_TWO, VLLM_COMPLETION

METRICS = {
    "openvino": (
        "# TYPE openvino:requests_running gauge\nopenvino:requests_running 3\n"
        "# TYPE openvino:requests_waiting gauge\nopenvino:requests_waiting 1\n"
        "# TYPE openvino:kv_cache_usage gauge\nopenvino:kv_cache_usage 0.25\n"
    ),
    "vllm": (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="small"} 3.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="small"} 1.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="small",reason="capacity"} 9.0\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="small"} 0.25\n'
        'vllm:prefix_cache_queries_total{engine="0",model_name="small"} 200.0\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="small"} 50.0\n'
    ),
    "llama_cpp": (
        "llamacpp:requests_processing 3\nllamacpp:requests_deferred 1\nllamacpp:predicted_tokens_seconds 4e1\n"
    ),
}
