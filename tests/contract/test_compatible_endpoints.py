"""Any OpenAI-compatible endpoint: what it can do is said in the configuration."""

from __future__ import annotations

import msgspec
import pytest

from adapters.errors import (
    UnsupportedParameter,
)
from adapters.registry import adapter_class
from tests.contract.conftest import (
    CHAT,
    chat,
    collect,
)
from tests.contract.replay import HELLO, engine
from tests.contract.twin import Reply, events


async def test_a_compatible_endpoint_gets_what_its_configuration_lists_and_nothing_else() -> None:
    async with engine("openai_compatible", model="m", parameters=["max_tokens", "top_k"]) as (adapter, twin):
        twin.reply(CHAT, Reply.stream(events(HELLO)))
        await collect(adapter, chat(max_tokens=5, top_k=7))
        assert (twin.bodies[-1]["max_tokens"], twin.bodies[-1]["top_k"]) == (5, 7)
        with pytest.raises(UnsupportedParameter, match="temperature"):
            await collect(adapter, chat(temperature=0.5))


async def test_a_compatible_endpoint_may_know_the_limit_by_its_new_name() -> None:
    async with engine("openai_compatible", model="m", limit_field="max_completion_tokens") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(events(HELLO)))
        await collect(adapter, chat(max_tokens=5))
        assert twin.bodies[-1]["max_completion_tokens"] == 5


def test_a_parameter_that_is_none_is_an_error_of_the_configuration() -> None:
    options = adapter_class("openai_compatible").Options
    with pytest.raises(msgspec.ValidationError, match="'temprature' is no request field"):
        msgspec.convert({"url": "http://a", "parameters": ["temprature"]}, options)


async def test_a_compatible_endpoint_is_well_when_it_lists_its_models() -> None:
    async with engine("openai_compatible", model="m") as (adapter, twin):
        assert not (await adapter.health()).ready
        twin.reply("/v1/models", Reply.plain(200, {"data": [{"id": "m"}]}))
        assert (await adapter.health()).ready
