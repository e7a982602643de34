"""TGI's wire, written from its documented behaviour: "Hello world" in two pieces, ended by a limit of two tokens."""

from __future__ import annotations

from typing import Any

from tests.contract.twin import events

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}


def _chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = {"id": "", "object": "chat.completion.chunk", "created": 1_790_000_000, "model": "org/small"}
    return {**head, "system_fingerprint": "3.3.7-native", "choices": choices, "usage": None, **more}


def _delta(text: str, reason: str | None = None) -> dict[str, Any]:
    delta = {"role": "assistant", "content": text, "tool_calls": None}
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


# The role in every delta, `usage: null` on every chunk, an empty id.
CHAT = b":\n\n" + events([_chunk([_delta("Hello")]), _chunk([_delta(" world", "length")]), _chunk([], usage=USAGE)])
CHAT_TWO = CHAT  # it has no `n`: each choice is a request


def _text(text: str, reason: str, usage: Any = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return {"id": "", "object": "text_completion", "choices": [choice], "usage": usage}


COMPLETION = events([_text("Hello", ""), _text(" world", "length", USAGE)])


def token(text: str, index: int = 1, *, special: bool = False, **more: Any) -> dict[str, Any]:
    """One event of `/generate_stream`."""
    each = {"id": 7, "text": text, "logprob": -0.5, "special": special}
    return {"index": index, "token": each, "generated_text": None, "details": None, **more}


def details(reason: str, tokens: int = 2) -> dict[str, Any]:
    return {"finish_reason": reason, "generated_tokens": tokens, "seed": None, "input_length": 9}


NATIVE = b":\n\n" + events(
    [token("Hello", 1), token(" world", 2, generated_text="Hello world", details=details("length"))], done=False
)

METRICS = (
    "# TYPE tgi_batch_current_size gauge\ntgi_batch_current_size 3\n"
    "# TYPE tgi_queue_size gauge\ntgi_queue_size 1\n"
    "tgi_batch_current_max_tokens 1024\ntgi_batch_max_total_tokens 4096\n"
)
