"""What callers describe is checked as far as all engines agree, in time that does not depend on who wrote it."""

from __future__ import annotations

import doctest
import time
from typing import Any

import pytest

from adapters import schemas
from adapters.errors import InvalidRequest
from adapters.schemas import MAX_PATTERN, Pattern, check_calls, check_choice, check_format, check_tools


def test_the_examples_are_true() -> None:
    assert doctest.testmod(schemas).failed == 0


@pytest.mark.parametrize(
    "pattern", ["", "a", r"^\d{4}-\d\d$", r"[(]\)", "(a(b)?)", r"[^\]]", "(?<year>a)", r"\p{L}+", "[[a]", "a]b"]
)
def test_a_pattern_that_some_engine_reads_passes(pattern: str) -> None:
    assert Pattern(pattern) == pattern


@pytest.mark.parametrize("pattern", ["(", ")", "((((", "a)(", "[a", r"[a\]", "a\\", "(" * 5000 + ")" * 5000])
def test_a_pattern_that_no_engine_reads_does_not(pattern: str) -> None:
    with pytest.raises(ValueError, match="closed brackets"):
        Pattern(pattern)


SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "a": {"type": ["string", "null"], "pattern": "^[a-z]+$", "default": None},
        "b": {"anyOf": [{"$ref": "#/$defs/c"}, {"not": {}}, True]},
        "d": {"type": "array", "items": [{"const": 1}, {"enum": [1, "x", None]}], "additionalItems": False},
        "e": {},
    },
    "patternProperties": {"^x-": {"type": "string"}},
    "$defs": {"c": {"oneOf": [{"type": "integer", "minimum": 0}, {"allOf": []}]}},
    "additionalProperties": False,
    "required": ["a"],
    "x-anything": {"type": 5},
}


def test_what_schemas_hold_in_the_wild_passes() -> None:
    tools: list[Any] = [
        {"type": "function", "function": {"name": "mcp__files.read/all", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "function": {"name": "f", "description": None, "parameters": None}},
        {"type": "custom", "custom": {"name": "x"}},
    ]
    check_tools(tools)
    check_choice({"type": "function", "function": {"name": "f"}}, tools)
    check_choice({"type": "allowed_tools", "allowed_tools": {}}, tools)
    check_calls([{"function": {"name": "f", "arguments": {"a": 1}}}, {"id": "a", "type": "custom", "custom": {}}])
    for wanted in ({"type": "text"}, {"type": "json_object"}, {"type": "structural_tag", "format": {}}):
        check_format(wanted)
    check_format({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}})


def test_the_place_of_a_fault_is_told() -> None:
    told = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"items": {"type": 5}}}}}}
    with pytest.raises(
        InvalidRequest, match=r"at tools\[1\]\.function\.parameters\.properties\[\.\.\.\]\.items\.type in 'tools'"
    ) as refused:
        check_tools([{"type": "function", "function": {"name": "f"}}, told])
    assert refused.value.param == "tools"


def test_a_thousand_large_tools_take_a_fraction_of_a_second() -> None:
    pattern = "(" * (MAX_PATTERN // 2) + ")" * (MAX_PATTERN // 2)
    properties = {str(number): {"type": "string", "enum": ["a", "b"]} for number in range(50)}
    parameters = {"type": "object", "properties": {**properties, "p": {"pattern": pattern}}}
    begun = time.process_time()
    check_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}] * 1000)
    assert time.process_time() - begun < 2
