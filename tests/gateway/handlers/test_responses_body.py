"""A body of /v1/responses becomes a chat, or is refused; nothing that a client can send makes the gateway fail."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from adapters.errors import InvalidRequest, RequestError
from adapters.types import ChatRequest
from gateway.handlers.responses_body import ResponseBody, chat_request, decode_body, input_items
from gateway.handlers.responses_wire import Reply
from tests.gateway.openai_responses import FOLDER, check, properties

FUNCTIONS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g", "h")]


def chat_of(**fields: Any) -> ChatRequest:
    body = decode_body(json.dumps({"model": "m", "input": "Hi", **fields}).encode())
    return chat_request(body, input_items(body))


def call(id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"}


def output(id: str, said: Any = "x") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": said}


def says(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def asks(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def shape(chat: ChatRequest) -> list[tuple[str, str, list[str]]]:
    """Role, text, and ids of calls, of each turn."""
    turns = [(each, each.tool_calls if isinstance(each.tool_calls, list) else []) for each in chat.messages]
    return [(turn.role, turn.text(), [told["id"] for told in calls]) for turn, calls in turns]


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        (
            [asks("a"), says("let me see"), call("1"), call("2"), output("1"), output("2")],
            [("user", "a", []), ("assistant", "let me see", ["1", "2"]), ("tool", "x", []), ("tool", "x", [])],
        ),
        (  # text after a call is a part of the same turn: between a call and its output there is no other
            [asks("a"), call("1"), says("looking"), output("1")],
            [("user", "a", []), ("assistant", "looking", ["1"]), ("tool", "x", [])],
        ),
        (
            [call("1"), output("1"), call("2"), output("2", [{"type": "input_text", "text": "y"}])],
            [("assistant", "", ["1"]), ("tool", "x", []), ("assistant", "", ["2"]), ("tool", "y", [])],
        ),
        (
            [asks("a"), says("b"), says("c"), asks("d")],
            [("user", "a", []), ("assistant", "b", []), ("assistant", "c", []), ("user", "d", [])],
        ),
        (
            [asks("a"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, asks("b")],
            [("user", "a", []), ("assistant", "no", []), ("user", "b", [])],
        ),
    ],
)  # fmt: skip
def test_items_become_turns(items: list[Any], turns: list[Any]) -> None:
    assert shape(chat_of(input=items)) == turns


def test_an_output_answers_one_call_once() -> None:
    with pytest.raises(InvalidRequest, match="No function call"):
        chat_of(input=[asks("a"), call("1"), output("1"), output("1")])
    with pytest.raises(InvalidRequest, match="'2' has no function_call_output"):
        chat_of(input=[asks("a"), call("1"), call("2"), output("1")])


def test_allowed_tools_are_the_only_ones_that_the_engine_is_told_of() -> None:
    allowed = [{"type": "function", "name": name} for name in ("h", "f")]
    chat = chat_of(tools=FUNCTIONS, tool_choice={"type": "allowed_tools", "mode": "required", "tools": allowed})
    assert isinstance(chat.tools, list)
    assert [tool["function"]["name"] for tool in chat.tools] == ["f", "h"]
    assert chat.tool_choice == "required"


def test_a_forced_function_is_named_and_the_others_stay() -> None:
    chat = chat_of(tools=FUNCTIONS, tool_choice={"type": "function", "name": "g"})
    assert isinstance(chat.tools, list)
    assert len(chat.tools) == 3
    assert chat.tool_choice == {"type": "function", "function": {"name": "g"}}


def test_a_format_of_plain_text_asks_the_engine_for_nothing() -> None:
    assert chat_of(text={"format": {"type": "text"}}).response_format is None
    assert chat_of(text={"format": {"type": "json_object"}}).response_format == {"type": "json_object"}


@pytest.mark.skipif(FOLDER is None, reason="OpenAI's published description is not here (shared/data)")
def test_every_field_of_the_description_is_known() -> None:
    assert set(ResponseBody.__struct_fields__) == properties("CreateResponse") | {"client_metadata"}  # Codex sends it


KEYS = ["type", "role", "content", "text", "name", "mode", "tools", "x"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.sampled_from(["", "auto", "function", "message", "user", "f"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=6,
)  # fmt: skip
items = st.sampled_from([asks("a"), says("b"), call("1"), output("1"), {"type": "reasoning", "summary": []}])
bodies = st.fixed_dictionaries(
    {"model": st.just("m"), "input": st.just("Hi") | st.lists(items, max_size=5) | json_values},
    optional={name: json_values for name in ResponseBody.__struct_fields__ if name not in ("model", "input")}
    | {"tools": st.just(FUNCTIONS) | json_values},
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(bodies)
def test_any_body_is_answered_in_the_form_of_the_description_or_refused(body: dict[str, Any]) -> None:
    try:
        decoded = decode_body(json.dumps(body).encode())
        listed = input_items(decoded)
        chat_request(decoded, listed)
    except RequestError:
        return
    for item in listed:
        check("ItemResource", item)
    reply = Reply(decoded, id="resp_1", model="m", is_kept=True)
    assert msgspec.json.decode(msgspec.json.encode(reply.response()))["status"] == "in_progress"
