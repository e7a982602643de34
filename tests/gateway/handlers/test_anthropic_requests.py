"""Anthropic's bodies in our vocabulary: what becomes of every field, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.errors import InvalidRequest
from adapters.types import ChatRequest, set_fields
from gateway.handlers.anthropic_requests import decode_count, decode_messages

ASKED = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}


def chat(**fields: Any) -> ChatRequest:
    return decode_messages(json.dumps({**ASKED, **fields}).encode()).chat()


def turns(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [turn.for_template() for turn in chat(messages=list(messages), **fields).messages]


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content) if len(content) != 1 else content[0]}


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def call(call_id: str = "c1", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": given}


def result(call_id: str = "c1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **fields}


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        chat(**fields)
    return raised.value


def test_what_was_not_asked_is_not_sent_on() -> None:
    assert set_fields(chat()) == {"model", "messages", "max_tokens", "stream"}


def test_the_numbers_keep_their_meaning_and_stop_sequences_are_stop_strings() -> None:
    asked = chat(temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["END", "\n\n"], stream=True)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.token_limit) == (0.5, 0.9, 40, 9)
    assert asked.stop_strings == ["END", "\n\n"]
    assert asked.is_stream


def test_hints_that_change_no_answer_are_taken() -> None:
    asked = chat(
        metadata={"user_id": "u1"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        system=[text("Be brief.", cache_control={"type": "ephemeral", "ttl": "1h"})],
        thinking={"type": "disabled"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    assert asked.user == "u1"
    assert set_fields(asked) == {"model", "messages", "max_tokens", "stream", "user"}


def test_null_means_not_sent() -> None:
    optional = ("system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences", "temperature", "top_p")
    nulls = dict.fromkeys([*optional, "top_k", "stream", "metadata", "service_tier", "cache_control"])
    assert set_fields(chat(**nulls)) == set_fields(chat())


def test_the_system_prompt_comes_first_and_once_wherever_the_client_put_it() -> None:
    first = {"role": "system", "content": [text("Rhyme.")]}
    told = turns(first, user("Hi"), {"role": "system", "content": "Now prose."}, system=[text("Be"), text("brief.")])
    assert told == [
        {"role": "system", "content": "Be\nbrief.\nRhyme."},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "Now prose."},
    ]
    assert turns(user("Hi"), system="")[0]["role"] == "user"


def test_a_history_with_calls_and_results_becomes_turns_of_its_own() -> None:
    history = turns(
        user("Where is it warmer?"),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Two calls.", "signature": "s"},
                {"type": "redacted_thinking", "data": "xx"},
                text("Let me "),
                text("look.", citations=None),
                {**call("c1", city="Paris"), "caller": {"type": "direct"}},
                call("c2"),
            ],
        },
        user(
            result("c1", content="20"),
            result("c2", content=[text("no"), text("answer")], is_error=True),
            text("And?"),
            text("Quick."),
        ),
    )
    assert history[1]["content"] == "Let me look."
    assert [each["id"] for each in history[1]["tool_calls"]] == ["c1", "c2"]
    assert history[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert history[2:] == [
        {"role": "tool", "content": "20", "tool_call_id": "c1"},
        {"role": "tool", "content": "Error: no\nanswer", "tool_call_id": "c2"},
        {"role": "user", "content": "And?\nQuick."},
    ]


def test_arguments_of_calls_leave_as_text() -> None:
    asked = chat(messages=[user("a"), {"role": "assistant", "content": [call(city="Paris")]}, user([result()])])
    assert asked.messages[1].content is None
    assert asked.messages[1].tool_calls == [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
    ]
    assert asked.messages[2].content == ""


@pytest.mark.parametrize(
    ("choice", "told", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        (
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": False},
            {"type": "function", "function": {"name": "weather"}},
            None,
        ),
    ],
)
def test_tools_and_their_choice(choice: dict[str, Any], told: object, parallel: bool | None) -> None:
    asked = chat(tools=[WEATHER, {**WEATHER, "name": "now", "type": "custom", "strict": True}], tool_choice=choice)
    assert asked.tools == [
        {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}},
        {
            "type": "function",
            "function": {"name": "now", "description": "of a city", "parameters": SCHEMA, "strict": True},
        },
    ]
    assert (asked.tool_choice, asked.parallel_tool_calls) == (told, parallel)


def test_thinking_and_effort_become_the_degrees_that_engines_know() -> None:
    def effort(**fields: Any) -> object:
        return chat(**fields).reasoning_effort

    budgets = {budget: effort(thinking={"type": "enabled", "budget_tokens": budget}) for budget in (1024, 4096, 16384)}
    assert budgets == {1024: "low", 4096: "medium", 16384: "high"}
    assert effort(thinking={"type": "adaptive"}) is None
    assert effort(output_config={"effort": "max"}, thinking={"type": "enabled", "budget_tokens": 1024}) == "max"


def test_an_output_format_is_a_response_format() -> None:
    asked = chat(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert isinstance(asked.response_format, dict)
    assert asked.response_format["json_schema"]["schema"] == SCHEMA


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "max_tokens"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"temperature": 1.5}, "temperature", "temperature"),
        ({"messages": []}, "messages", "messages"),
        ({"messages": [user([])]}, "messages", r"messages\[0\].content is empty"),
        ({"messages": [user([IMAGE])]}, "messages", r"messages\[0\].content\[0\] has the type 'image'"),
        ({"messages": [user([text("a"), {"type": "document"}])]}, "messages", r"content\[1\] has the type 'document'"),
        ({"messages": [user([{"text": "a"}])]}, "messages", "the type 'None'"),
        ({"messages": [user([{"type": "text", "text": 5}])]}, "messages", r"content\[0\]: Expected `str`"),
        ({"messages": [user([{**text("a"), "voice": "x"}])]}, "messages", "voice"),
        ({"messages": [user([call()])]}, "messages", "does not belong to its role"),
        ({"messages": [user("a"), {"role": "assistant", "content": [result()]}]}, "messages", "does not belong"),
        ({"messages": [user("a"), {"role": "assistant", "content": "The answer is"}]}, "messages", "cannot continue"),
        ({"messages": [user([result("c9")])]}, "messages", "'c9', which no earlier turn made"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "web_search_20250305"),
        ({"tools": [{"name": "weather"}]}, "tools", r"tools\[0\]: .*input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice", "some"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking", "1024"),
        ({"mcp_servers": []}, "mcp_servers", "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management", "clear_tool"),
    ],
)
def test_what_engines_cannot_be_told_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    with pytest.raises(InvalidRequest, match=words):
        raise error


def test_an_image_inside_a_result_is_refused_too() -> None:
    history = [user("a"), {"role": "assistant", "content": [call()]}, user([result(content=[IMAGE])])]
    assert "'image'" in refusal(messages=history).message


def test_the_prompt_that_is_counted_holds_the_tools_unless_they_may_not_be_called() -> None:
    body = {"model": "m", "messages": ASKED["messages"], "system": "Be brief.", "tools": [WEATHER]}
    counted = decode_count(json.dumps(body).encode()).question()
    assert counted.messages is not None
    assert [turn.role for turn in counted.messages] == ["system", "user"]
    assert counted.tools == chat(tools=[WEATHER]).tools
    assert decode_count(json.dumps({**body, "tool_choice": {"type": "none"}}).encode()).question().tools is None
