"""llama.cpp drops tools in silence, in two ways that were seen on a live server of 11434."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from adapters.base import EngineAdapter
from adapters.errors import InvalidRequest, UnsupportedParameter
from adapters.registry import adapter_class
from tests.contract import transcripts
from tests.contract.conftest import CHAT, chat, collect
from tests.contract.twin import Reply, Twin

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def props(*, supports_tools: bool) -> Reply:
    caps = {"supports_tools": supports_tools}
    return Reply.plain(200, {"default_generation_settings": {"n_ctx": 1024}, "chat_template_caps": caps})


@pytest.fixture
async def twin() -> AsyncIterator[Twin]:
    async with Twin() as twin:
        twin.reply(CHAT, Reply.stream(transcripts.LLAMA_CHAT))
        yield twin


@pytest.fixture
async def adapter(twin: Twin) -> AsyncIterator[EngineAdapter[Any]]:
    cls = adapter_class("llama_cpp")
    adapter = cls(msgspec.convert({"url": twin.url, "model": "small"}, cls.Options))
    await adapter.start()
    yield adapter
    await adapter.close()


async def test_a_named_tool_choice_was_dropped_so_that_tool_alone_is_required(
    twin: Twin, adapter: EngineAdapter[Any]
) -> None:
    await collect(adapter, chat(tools=TOOLS, tool_choice=named("g")))
    assert twin.bodies[-1]["tool_choice"] == "required"
    assert twin.bodies[-1]["tools"] == TOOLS[1:]


async def test_a_tool_choice_that_names_no_tool_is_a_fault_of_the_request(adapter: EngineAdapter[Any]) -> None:
    with pytest.raises(InvalidRequest, match="'h'") as caught:
        await collect(adapter, chat(tools=TOOLS, tool_choice=named("h")))
    assert caught.value.param == "tool_choice"


async def test_tools_without_a_place_in_the_chat_template_were_dropped_so_they_are_refused(
    twin: Twin, adapter: EngineAdapter[Any]
) -> None:
    twin.reply("/props", props(supports_tools=False))
    with pytest.raises(UnsupportedParameter, match=r"'llama_cpp'.*'tool"):
        await collect(adapter, chat(tools=TOOLS, tool_choice="required"))
    assert not twin.bodies
    assert "response_format" in adapter.capabilities.parameters
    await collect(adapter, chat())


async def test_another_model_behind_the_url_may_take_tools(twin: Twin, adapter: EngineAdapter[Any]) -> None:
    twin.reply("/props", props(supports_tools=False), props(supports_tools=True))
    with pytest.raises(UnsupportedParameter):
        await collect(adapter, chat(tools=TOOLS))
    await collect(adapter, chat(tools=TOOLS))
    assert twin.bodies[-1]["tools"] == TOOLS
