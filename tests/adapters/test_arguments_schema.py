"""Arguments against their schema: what fits, what is no schema to hold them to, and what must not take long."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from adapters.tools.arguments_schema import MAX_SCHEMA_BYTES, ArgumentsSchema, BadSchema, compiled

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 2}, "days": {"type": "integer", "maximum": 7}},
    "required": ["city"],
    "additionalProperties": False,
}
LONG = 2.0  # seconds; without its bound a case below takes minutes, or for ever


def schema(told: Any) -> ArgumentsSchema:
    return compiled(json.dumps(told).encode())


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ('{"city": "Rome"}', None),
        (' {"city": "Rome", "days": 7}\n', None),
        ("", "`required` does not hold"),
        ("{}", "`required` does not hold"),
        ('{"city": 5}', "`properties.city.type` does not hold"),
        ('{"city": "R"}', "`properties.city.minLength` does not hold"),
        ('{"city": "Rome", "days": 8}', "`properties.days.maximum` does not hold"),
        ('{"city": "Rome", "secret": 1}', "`additionalProperties` does not hold"),
        ('{"city": "Ro', "they are no JSON"),
        ('["Rome"]', "they are no JSON object"),
        ("[" * 5000, "they are no JSON"),
    ],
)
def test_a_fault_names_the_place_in_the_schema_and_nothing_that_the_model_wrote(
    arguments: str, fault: str | None
) -> None:
    assert schema(CITY).fault(arguments) == fault


def test_numbers_are_equal_by_their_value_and_true_is_no_number() -> None:
    unique = schema({"properties": {"a": {"uniqueItems": True}}})
    assert unique.fault('{"a": [1, true, "1", [1], {"b": 1}]}') is None
    assert unique.fault('{"a": [{"b": [1]}, {"b": [1.0]}]}') == "`properties.a.uniqueItems` does not hold"


def test_references_within_the_schema_are_followed_also_round_and_round() -> None:
    tree = {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}, "maxProperties": 1}},
    }
    assert schema(tree).fault('{"next": {"next": {}}}') is None
    assert "maxProperties" in (schema(tree).fault('{"next": {"next": {"a": 1, "b": 2}}}') or "")


@pytest.mark.parametrize(
    "draft", ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"]
)
def test_the_drafts_that_schema_makers_write_are_known(draft: str) -> None:
    assert schema({"$schema": draft, **CITY}).fault('{"city": "Rome"}') is None


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    names = {"type": "object", "properties": {"$ref": {"type": "string"}, "pattern": {"const": "("}}}
    assert schema(names).fault('{"$ref": "http://x", "pattern": "("}') is None


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"type": "objekt"}, "type is not what JSON Schema has there"),
        ({"properties": {"a": {"minimum": "1"}}}, "properties.a.minimum is not"),
        ("object", "its root is not"),
        ({"$ref": "http://127.0.0.1:9/schema"}, "leads out of it"),
        ({"$ref": "other.json"}, "leads out of it"),
        ({"$ref": "#/$defs/none"}, "leads to no schema"),
        ({"$ref": "#anchor"}, "leads to no schema"),
        ({"$ref": "#/properties", "properties": {"a": {"type": "string"}}}, "leads to no schema"),
        ({"$dynamicRef": "#a"}, "use `$ref`"),
        ({"properties": {"a": {"$id": "http://x/y"}}}, "`$id` of its own"),
        ({"patternProperties": {"(a+)+$": {}}}, "name the properties"),
        ({"properties": {"a": {"pattern": "(?=x)"}}}, "linear time"),
        ({"properties": {"a": {"pattern": "("}}}, "linear time"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "names none of"),
        ({"$schema": 5}, "names none of"),
        ({"description": "x" * MAX_SCHEMA_BYTES}, "bytes"),
    ],
)
def test_a_schema_that_nothing_can_be_held_to_is_refused_with_the_reason(told: Any, words: str) -> None:
    with pytest.raises(BadSchema, match=words.replace("$", r"\$").replace("`", "`")):
        schema(told)


def test_a_schema_of_brackets_is_refused() -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"not": deep}
    with pytest.raises(BadSchema, match="deep"):
        schema(deep)


def test_nothing_is_ever_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object) -> None:
        raise AssertionError("a schema asked for the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    with pytest.raises(BadSchema):
        schema({"properties": {"a": {"$ref": "http://example.com/a.json"}}})
    assert schema({"$id": "http://example.com/tool.json", **CITY}).fault('{"city": "Rome"}') is None


def doubling() -> Any:
    """Each definition asks the next one twice: 2 to the 40 checks of one value."""
    defs = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, "d40": {"required": ["never"]}}}


@pytest.mark.parametrize(
    ("told", "arguments"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}, json.dumps({"a": "a" * 5000 + "!"})),
        ({"properties": {"a": {"pattern": "(x+x+)+y"}}}, json.dumps({"a": "x" * 5000})),
        (doubling(), "{}"),
        ({"$ref": "#"}, "{}"),
        ({"properties": {"a": {"uniqueItems": True}}}, json.dumps({"a": [[n] for n in range(20_000)] + ["x", [0.0]]})),
        ({"properties": {"a": {"items": {"enum": list(range(5000))}}}}, json.dumps({"a": [-1] * 5000})),
        (
            {
                "$defs": {"n": {"anyOf": [{"properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["x"]}] * 2}},
                "$ref": "#/$defs/n",
            },
            '{"c":' * 60 + "{}" + "}" * 60,
        ),
    ],
)
def test_no_schema_and_no_text_take_long(told: Any, arguments: str) -> None:
    """Each of these takes exponential or quadratic time where nothing bounds it."""
    checked, started = schema(told), time.perf_counter()
    assert checked.fault(arguments) is not None
    assert time.perf_counter() - started < LONG
