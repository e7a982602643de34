"""Tools told in words, for models whose chat template makes nothing of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.errors import EngineUnavailable
from adapters.models.chat_template import ChatTemplate
from adapters.tools.tool_calls import for_template, usable_format
from adapters.tools.tool_text import ToolText
from adapters.types import ChatRequest
from tests.adapters.test_native import chat

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}
PLAIN = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}")
RENDERS = ChatTemplate("{{ tools }}<tool_call>")


def turns_of(request: ChatRequest, tool_format: Any = "hermes") -> list[dict[str, Any]]:
    turns, tools = for_template(request, PLAIN, tool_format)
    assert tools is None
    return turns


def test_the_tools_make_a_system_turn_or_end_the_one_that_is_there() -> None:
    made = turns_of(chat("Hi", tools=[WEATHER]))
    assert [turn["role"] for turn in made] == ["system", "user"]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    joined = turns_of(chat(messages=messages, tools=[WEATHER]))
    assert [turn["role"] for turn in joined] == ["system", "user"]
    assert joined[0]["content"] == f"Be brief.\n\n{made[0]['content']}"


def test_every_tool_is_told_whole() -> None:
    lesson = turns_of(chat(tools=[WEATHER, {"type": "function", "function": {"name": "now"}}]))[0]["content"]
    told = [json.loads(line) for line in lesson.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()]
    assert told[0] == WEATHER["function"]
    assert told[1]["name"] == "now"


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
def test_what_is_taught_is_what_is_read(tool_format: Any) -> None:
    """The call in a history is written as the parser reads it, and so is the example."""
    history = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    turns = turns_of(chat(messages=history, tools=[WEATHER]), tool_format)
    parser = ToolText(tool_format, {"get_weather"})
    events = parser.feed(turns[2]["content"]) + parser.finish()
    assert parser.num_complete == 1
    assert "".join(getattr(event, "text", "") for event in events) == '{"city": "Zürich"}'
    example = turns[0]["content"].partition("\n</tools>\n")[2]
    lesson = ToolText(tool_format, {"NAME"})
    lesson.feed(example if tool_format == "hermes" else example[example.index("{") :])
    lesson.finish()
    assert lesson.num_complete == 1


def test_results_in_a_row_are_one_turn_of_the_users() -> None:
    second = {**CALL, "id": "c2"}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, second]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
        {"role": "user", "content": "And?"},
    ]
    turns = turns_of(chat(messages=messages))
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user", "user"]
    assert turns[1]["content"].startswith("Let me see.\n<tool_call>\n")
    assert turns[1]["content"].count("<tool_call>") == 2
    assert turns[2]["content"] == "<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    assert not any("tool_calls" in turn for turn in turns)


def test_without_tools_or_with_none_wanted_the_model_hears_of_none() -> None:
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        assert turns_of(chat("Hi", **fields)) == [{"role": "user", "content": "Hi"}]


def test_a_call_that_is_none_is_told_without_failing() -> None:
    broken = [{"id": "x", "type": "custom"}, {"function": {"name": "f", "arguments": "not json"}}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": broken}]
    assert turns_of(chat(messages=messages))[1]["content"].count("<tool_call>") == 2


def test_a_template_that_renders_tools_is_left_to_it() -> None:
    turns, tools = for_template(chat("Hi", tools=[WEATHER]), RENDERS, "hermes")
    assert turns == [{"role": "user", "content": "Hi"}]
    assert tools is not None


def test_auto_teaches_only_for_engines_that_say_so() -> None:
    assert usable_format("auto", PLAIN) is None
    assert usable_format("auto", PLAIN, teaches=True) == "hermes"
    assert usable_format("none", PLAIN, teaches=True) is None
    assert usable_format("json", PLAIN) == "json"
    assert usable_format("auto", PLAIN, {"<tool_call>"}, teaches=True) is None
    with pytest.raises(EngineUnavailable, match="hides the special tokens"):
        usable_format("hermes", PLAIN, {"<tool_call>"})
    with pytest.raises(EngineUnavailable, match=r"mistral.*taught in words \(hermes, json\)"):
        usable_format("mistral", PLAIN)
