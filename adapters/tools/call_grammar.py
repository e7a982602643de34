"""Grammars of tool calls, for an engine that follows Lark with JSON schemas in it (llguidance's dialect).

    forced_call(offer, "hermes")          # one call, and nothing else
    free_calls(offer, "hermes")           # text, in which every call that is begun is one of the offered; or None

A call is written as the model was taught to write it, where the format has a form for that, else as bare JSON: then
`forced_format` says which parser reads it.
"""

from __future__ import annotations

import json
from typing import Any

from adapters.tools.formats import MARKERS, ToolFormat
from adapters.tools.tool_calls import Function, Offer, call_schema

# As the engine has it for `response_format`: little white space, because small models may write nothing else.
WHITE_SPACE = r"[ \t\n\r]{0,16}"


def forced_format(tool_format: ToolFormat) -> ToolFormat:
    return "hermes" if tool_format == "hermes" else "json"


def forced_call(offer: Offer, tool_format: ToolFormat) -> str:
    """Keywords of a schema that no grammar can hold are refused where a tool is strict, and left out elsewhere."""
    is_lenient = not any(function.strict for function in offer.callable)
    call = _json(call_schema(offer), is_lenient=is_lenient)
    if forced_format(tool_format) == "json":
        return f"start: %json {call}\n"
    begin, end = MARKERS["hermes"]
    return f'start: "{begin}\\n" call "\\n{end}"\ncall: %json {call}\n'


def free_calls(offer: Offer, tool_format: ToolFormat) -> str | None:
    """None where nothing has to be held: no tool is strict, or the format has no mark that begins a call. Arguments
    of tools that are not strict are any object.
    """
    if tool_format != "hermes" or not any(function.strict for function in offer.callable):
        return None
    begin, end = MARKERS["hermes"]
    any_object = {"type": "object"}
    functions = [
        function if function.strict else Function(name=function.name, parameters=any_object)
        for function in offer.callable
    ]
    call = _json(call_schema(Offer(callable=functions)), is_lenient=False)
    return (
        f'start: call* text\ncall: begin "\\n" json "\\n{end}"\njson: %json {call}\n'
        f'begin[lazy]: TEXT "{begin}"\ntext: TEXT\nTEXT: /(.|\\n)*/\n'
    )


def _json(schema: dict[str, Any], *, is_lenient: bool) -> str:
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, "lenient": is_lenient}})
