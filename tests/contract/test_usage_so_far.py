"""`stream_options.continuous_usage_stats`: sent only where it was asked for, and read as what each piece brings."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.types import Usage
from tests.contract.conftest import CHAT, HTTP_ENGINES, HTTPSubject, chat, collect
from tests.contract.twin import Reply, events

OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
CAN = [engine for engine in HTTP_ENGINES if engine in {"vllm", "sglang", "tensorrt_llm", "openvino", "goodgate_peer"}]


def counted(delta: dict[str, Any], num_tokens: int, reason: str | None = None) -> dict[str, Any]:
    """An event as vLLM writes it, with the usage up to it."""
    usage = {"prompt_tokens": 7, "completion_tokens": num_tokens, "total_tokens": 7 + num_tokens}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], "usage": usage}


TWO_TOKENS_AN_EVENT = [
    counted({"role": "assistant", "content": ""}, 0),
    counted({"content": "Hello wo"}, 2),
    counted({"content": "rld"}, 3),
    counted({}, 4, "stop"),
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}},
]


@pytest.mark.parametrize("http_subject", CAN, indirect=True)
async def test_each_piece_has_the_engines_own_count_so_far(http_subject: HTTPSubject) -> None:
    http_subject.twin.reply(CHAT, Reply.stream(events(TWO_TOKENS_AN_EVENT)))
    await http_subject.adapter.start()
    chunks = await collect(http_subject.adapter, chat(max_tokens=4, stream=True, stream_options=OPTIONS))
    assert http_subject.twin.bodies[-1]["stream_options"] == OPTIONS
    assert [(chunk.text, chunk.usage_so_far) for chunk in chunks] == [
        ("Hello wo", Usage(7, 2)), ("rld", Usage(7, 3)), ("", Usage(7, 4)), ("", None),
    ]  # fmt: skip
    assert chunks[-1].usage == Usage(7, 4)


@pytest.mark.parametrize("http_subject", CAN, indirect=True)
async def test_it_is_not_asked_for_by_itself_and_what_nobody_asked_for_is_not_told(http_subject: HTTPSubject) -> None:
    http_subject.twin.reply(CHAT, Reply.stream(events(TWO_TOKENS_AN_EVENT)))
    await http_subject.adapter.start()
    chunks = await collect(
        http_subject.adapter, chat(max_tokens=4, stream=True, stream_options={"include_usage": True})
    )
    assert http_subject.twin.bodies[-1]["stream_options"] == {"include_usage": True}
    assert [chunk.usage_so_far for chunk in chunks] == [None] * 4


@pytest.mark.parametrize("http_subject", CAN, indirect=True)
async def test_an_engine_that_leaves_the_counts_out_has_none_made_up(http_subject: HTTPSubject) -> None:
    plain = [{key: value for key, value in each.items() if key != "usage"} for each in TWO_TOKENS_AN_EVENT[:-1]]
    http_subject.twin.reply(CHAT, Reply.stream(events([*plain, TWO_TOKENS_AN_EVENT[-1]])))
    await http_subject.adapter.start()
    chunks = await collect(http_subject.adapter, chat(max_tokens=4, stream=True, stream_options=OPTIONS))
    assert [chunk.usage_so_far for chunk in chunks] == [None] * 4
