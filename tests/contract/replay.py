"""What the replays share: streams in OpenAI's words, and one question to an engine whose answer is in the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from adapters.errors import (
    GoodgateError,
)
from adapters.registry import adapter_class
from adapters.types import Chunk
from tests.contract.conftest import (
    TwinSubject,
    chat,
    collect,
)
from tests.contract.twin import Reply, Twin


def delta(text: str | None = None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    content = {} if text is None else {"content": text}
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": content, "finish_reason": reason}],
        **more,
    }


HELLO = [
    delta("Hello"),
    delta(" world", "stop"),
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
]


CHAT_FIELDS: dict[str, Any] = {
    "max_tokens": 7, "max_completion_tokens": 8, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
    "min_p": 0.1, "seed": 11, "n": 2, "stop": ["END"], "presence_penalty": 0.5, "frequency_penalty": 0.25,
    "repetition_penalty": 1.1, "ignore_eos": True, "logit_bias": {"5": 1.0}, "bad_words": ["x"],
    "logprobs": True, "top_logprobs": 2,
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required",
    "parallel_tool_calls": False, "response_format": {"type": "json_object"}, "reasoning_effort": "low",
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k",
    "safety_identifier": "s", "verbosity": "low", "stream": True, "stream_options": {"include_usage": False},
}  # fmt: skip


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def reasons_of(chunks: list[Chunk]) -> list[str]:
    return [chunk.finish_reason for chunk in chunks if chunk.finish_reason is not None]


async def answer(subject: TwinSubject, *steps: Any, **fields: Any) -> list[Chunk]:
    """The chunks of a chat that the engine answers with `steps`."""
    subject.twin.reply(subject.path, Reply.stream(*steps))
    return await collect(subject.adapter, chat(**fields))


async def failure(subject: TwinSubject, reply: Reply, **fields: Any) -> GoodgateError:
    """The error of a chat that the engine answers with `reply`."""
    subject.twin.reply(subject.path, reply)
    with pytest.raises(GoodgateError) as caught:
        await collect(subject.adapter, chat(**fields))
    return caught.value


@asynccontextmanager
async def engine(name: str, **options: Any) -> AsyncIterator[tuple[Any, Twin]]:
    """A started adapter and the twin that it speaks to."""
    async with Twin() as twin:
        cls = adapter_class(name)
        adapter = cls(msgspec.convert({"url": twin.url, **options}, cls.Options))
        await adapter.start()
        try:
            yield adapter, twin
        finally:
            await adapter.close()


def listing(*names: str) -> Reply:
    return Reply.plain(200, {"data": [{"id": name, "max_model_len": 4096} for name in names]})


def flat(body: dict[str, Any]) -> dict[str, Any]:
    """A body and what is nested in it, as one."""
    nested = [value for value in body.values() if isinstance(value, dict)]
    return {**body, **{key: value for each in nested for key, value in each.items()}}
