"""Tools for models whose chat template makes nothing of them: told in words, in a form that is read out of the answer.

    turns = taught_turns(turns, tools, "hermes")      # of the chat template, which gets no tools then

The tools go to the end of the system turn, or make one. Calls of earlier answers become text in the form that is
taught, and results a turn of the user's, because such templates drop the former and know no role for the latter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from adapters.tools.formats import MARKERS, ToolFormat

TAUGHT: tuple[ToolFormat, ...] = ("hermes", "json")  # forms that fit into a sentence

Turn: TypeAlias = dict[str, Any]

_HOW: dict[ToolFormat, str] = {
    "hermes": (
        "To call a function, write one line of JSON with its name and its arguments between these tags:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>'
    ),
    "json": (
        "To call a function, answer with one line of JSON that has its name and its arguments, and nothing else:\n"
        '{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}'
    ),
}


def taught_turns(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None, tool_format: ToolFormat
) -> list[Turn]:
    """The conversation with `tools`, as OpenAI writes them, described in it; None: with its earlier calls only."""
    told: list[Turn] = []
    results: list[Turn] = []  # in a row: one turn
    for turn in [*turns, None]:
        if turn is not None and turn["role"] == "tool":
            results.append(turn)
            continue
        told += [_told_results(results)] if results else []
        told += [_with_calls(turn, tool_format)] if turn is not None else []
        results = []
    if not tools:
        return told
    lesson = _lesson(tools, tool_format)
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{lesson}"}, *told[1:]]
    return [{"role": "system", "content": lesson}, *told]


def _lesson(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call the functions between these tags, one a line, each with a JSON schema of its parameters:\n"
        f"<tools>\n{described}\n</tools>\n{_HOW[tool_format]}\n"
        "Its result comes between <tool_response> and </tool_response>. Where no function helps, answer in words."
    )


def _with_calls(turn: Turn, tool_format: ToolFormat) -> Turn:
    calls = turn.get("tool_calls")
    if not isinstance(calls, list):
        return turn
    pieces = [turn["content"], *(_call(call.get("function"), tool_format) for call in calls)]
    rest = {key: value for key, value in turn.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, pieces))}


def _call(function: Any, tool_format: ToolFormat) -> str:
    """As the model is to write it. A call of another type has no function; templates would print it all the same."""
    named = function if isinstance(function, Mapping) else {}
    text = json.dumps({"name": named.get("name"), "arguments": named.get("arguments")}, ensure_ascii=False)
    return "\n".join([MARKERS["hermes"][0], text, MARKERS["hermes"][1]]) if tool_format == "hermes" else text


def _told_results(results: Sequence[Turn]) -> Turn:
    told = [f"<tool_response>\n{turn['content']}\n</tool_response>" for turn in results]
    return {"role": "user", "content": "\n".join(told)}
