"""The official client asks our own engine for structured answers and tool calls. A model of random weights knows
nothing of either, so whatever comes out right is the engine's doing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.gateway.rig import Gateway, Start, model
from tests.native_engine.tiny_llama import CHAT_TEMPLATE, tiny_config, write_tiny_llama

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 6}, "maxItems": 3},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS},
}
NOW: Any = {"type": "function", "function": {"name": "now", "description": "The time."}}
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 300}


class Place(pydantic.BaseModel):
    kind: Literal["city", "village"]
    lit: bool
    rooms: list[bool] = pydantic.Field(max_length=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(max_model_len=4096)
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), config, chat_template=CHAT_TEMPLATE)


@pytest.fixture
async def gateway(start: Start, folder: Path, native_home: Path) -> Gateway:
    options = {"model": str(folder), "home": str(native_home), "kv_cache_mib": 32, "num_threads": 1}
    return await start(model({"engine": "native", "options": options}))


async def test_a_pydantic_model_comes_back_parsed_whole_and_streamed(gateway: Gateway) -> None:
    completions = gateway.openai.chat.completions
    whole = await completions.parse(**ASKED, response_format=Place, seed=1)
    async with completions.stream(**ASKED, response_format=Place, seed=1) as stream:
        streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        assert isinstance(answer.choices[0].message.parsed, Place)
        assert answer.choices[0].finish_reason == "stop"
    assert whole.choices[0].message.content == streamed.choices[0].message.content


async def test_a_required_call_has_valid_arguments_whatever_the_seed(gateway: Gateway) -> None:
    for seed in range(4):
        answer = await gateway.openai.chat.completions.create(
            **ASKED, tools=[WEATHER, NOW], tool_choice="required", seed=seed, n=2, temperature=1.5
        )
        for choice in answer.choices:
            (call,) = choice.message.tool_calls or []
            assert choice.finish_reason == "tool_calls"
            assert not choice.message.content
            assert call.function.name in ("get_weather", "now")
            if call.function.name == "get_weather":
                jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


async def test_a_named_call_is_the_same_whole_and_streamed(gateway: Gateway) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    fields: dict[str, Any] = {**ASKED, "tools": [WEATHER, NOW], "tool_choice": named, "seed": 5}
    whole = await gateway.openai.chat.completions.create(**fields)
    async with gateway.openai.chat.completions.stream(**fields) as stream:
        streamed = await stream.get_final_completion()
    told = []
    for answer in (whole, streamed):
        choice = answer.choices[0]
        (call,) = choice.message.tool_calls or []
        assert (call.function.name, choice.finish_reason) == ("get_weather", "stop")
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
        told.append(call.function.arguments)
    assert told[0] == told[1]


async def test_a_conversation_with_calls_and_results_goes_on(gateway: Gateway) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    history: Any = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    answer = await gateway.openai.chat.completions.create(
        **{**ASKED, "messages": history, "max_tokens": 5}, tools=[WEATHER]
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > len(json.dumps([WEATHER["function"], call["function"]]))  # a byte is a token


async def test_a_call_that_is_cut_by_its_limit_says_so(gateway: Gateway) -> None:
    answer = await gateway.openai.chat.completions.create(
        **{**ASKED, "max_tokens": 60}, tools=[WEATHER], tool_choice="required", seed=1
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}}, "response"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_what_cannot_be_held_is_a_400_that_names_the_field(
    gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await gateway.openai.chat.completions.create(**ASKED, **fields)
    assert str(refusal.value.param).startswith(param)
