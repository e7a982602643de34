"""The wire of TensorRT-LLM, alone and behind Triton, written from documented behaviour: "Hello world", two tokens."""

from __future__ import annotations

from typing import Any

from tests.contract.twin import event, events

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 4}}


def _with_space(payloads: list[Any]) -> bytes:
    """trtllm-serve writes a space before the line end."""
    return b"".join(event(payload).replace(b"\n\n", b" \n\n") for payload in payloads) + b"data: [DONE]\n\n"


def _chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_790_000_000, "model": "small"}
    return {**head, "choices": choices, **more}


# Unset fields are left out; the finish reason comes with the last text.
CHAT = _with_space(
    [
        _chunk([{"index": 0, "delta": {"role": "assistant"}}]),
        _chunk([{"index": 0, "delta": {"content": "Hello"}}]),
        _chunk([{"index": 0, "delta": {"content": " world"}, "finish_reason": "length"}]),
        _chunk([], usage=USAGE),
    ]
)
CHAT_TWO = _with_space(
    [
        _chunk([{"index": 0, "delta": {"role": "assistant"}}]),
        _chunk([{"index": 1, "delta": {"role": "assistant"}}]),
        _chunk([{"index": 1, "delta": {"content": "Hello"}}, {"index": 0, "delta": {"content": "Hello"}}]),
        _chunk([{"index": 0, "delta": {"content": " world"}, "finish_reason": "length"}]),
        _chunk([{"index": 1, "delta": {"content": " world"}, "finish_reason": "length"}]),
        _chunk([], usage={**USAGE, "completion_tokens": 4}),
    ]
)
COMPLETION = _with_space(
    [
        {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": "Hello"}]},
        {"object": "text_completion", "choices": [{"index": 0, "text": " world", "finish_reason": "length"}]},
        {"object": "text_completion", "choices": [], "usage": USAGE},
    ]
)

METRICS = (
    'trtllm_num_requests_running{model_name="small"} 3.0\n'
    'trtllm_num_requests_waiting{model_name="small"} 1.0\n'
    'trtllm_kv_cache_utilization{model_name="small"} 0.25\n'
    'trtllm_kv_cache_reused_blocks{model_name="small"} 50.0\n'
    'trtllm_kv_cache_missed_blocks{model_name="small"} 150.0\n'
)


def triton(text: str, **more: Any) -> dict[str, Any]:
    return {"model_name": "tensorrt_llm", "model_version": "1", "text_output": text, **more}


# The LLM-API model: the text is all so far, and "None" is a word.
LLMAPI = events([triton("Hello", finish_reason="None"), triton("Hello world", finish_reason="length")], done=False)
# The older ensemble: what is new, counts as strings, and a clean end.
ENSEMBLE = events(
    [
        triton("Hello", num_input_tokens="9", num_output_tokens="1", sequence_index=0),
        triton(" world", num_input_tokens="9", num_output_tokens="2", sequence_index=0),
    ],
    done=False,
)

TRITON_METRICS = (
    'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 3\n'
    'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 1\n'
    'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 64\n'
    'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.25\n'
    'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 4096\n'
)
