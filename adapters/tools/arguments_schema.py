"""Does a text hold arguments that fit a JSON schema? Answered within bounds, whatever schema and text are. Pure.

    schema = compiled(msgspec.json.encode(parameters))   # `BadSchema` says what is wrong with it
    schema.fault('{"city": 5}')                          # "`properties.city.type` does not hold"; None where it fits

The schema is a caller's and the text a model's, so both are hostile:

- Nothing is fetched: a `$ref` starts with `#` and leads to a schema within the same document.
- A pattern is matched by RE2, in time that grows with the text alone. What RE2 has not (look-around, back references),
  and `patternProperties`, which the library would match by itself, are refused.
- Branches of branches take exponential time in every validator: a check has a number of steps, and fails when it is out
  of them.
- What a fault says names places of the schema, never what the model wrote.

`format` is an annotation, as JSON Schema has it: it is not checked. Drafts: 2020-12, 2019-09 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import jsonschema
import msgspec
import re2
from jsonschema.validators import Draft7Validator, Draft201909Validator, Draft202012Validator, extend
from msgspec import Struct
from referencing import Registry
from referencing.exceptions import Unresolvable

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 64
MAX_STEPS = 50_000  # half a second of one thread; arguments of a hundred fields take some hundred steps
MAX_PATTERN_BYTES = 1 << 20  # of memory that RE2 may take for one
MAX_KEPT = 256  # compiled schemas: an agent sends the same tools with every turn

# Where the schemas within a schema lie.
_ONE = frozenset(
    """additionalItems additionalProperties contains else if items not propertyNames then unevaluatedItems
    unevaluatedProperties""".split()  # noqa: SIM905 - as a list it takes a line for each
)
_MANY = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
_NAMED = frozenset(["$defs", "definitions", "dependencies", "dependentSchemas", "properties"])
_REFUSED = {
    "$dynamicRef": "use `$ref`",
    "$recursiveRef": "use `$ref`",
    "patternProperties": "name the properties",
}


class BadSchema(ValueError):
    """A schema that cannot be used; the text is one clause that says why."""


class _OutOfSteps(Exception):
    pass


_steps_left: ContextVar[int] = ContextVar("steps_left")


class ArgumentsSchema(Struct, frozen=True):
    """A schema that has been found usable."""

    _validator: Any

    def fault(self, arguments: str) -> str | None:
        """The reason why `arguments` is no JSON object that fits; None where it is. No text is an empty object."""
        try:
            told = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, RecursionError):
            return "they are no JSON"
        if not isinstance(told, dict):
            return "they are no JSON object"
        _steps_left.set(MAX_STEPS)
        try:
            error = next(self._validator.iter_errors(told), None)
        except (_OutOfSteps, RecursionError, Unresolvable):
            return "it takes too many steps to tell"
        return None if error is None else f"`{'.'.join(map(str, error.absolute_schema_path))}` does not hold"


@lru_cache(MAX_KEPT)
def compiled(schema: bytes) -> ArgumentsSchema:
    """The schema that this JSON holds. Raises `BadSchema`. Some milliseconds for a new one."""
    if len(schema) > MAX_SCHEMA_BYTES:
        raise BadSchema(f"it has more than {MAX_SCHEMA_BYTES} bytes")
    told = msgspec.json.decode(schema)
    draft = _draft_of(told)
    _check_depth(told)
    try:
        draft.check_schema(told, format_checker=None)  # patterns are RE2's affair
    except jsonschema.SchemaError as error:
        where = ".".join(map(str, error.absolute_path)) or "its root"
        raise BadSchema(f"{where} is not what JSON Schema has there") from error
    parts = list(_schemas_in(told))
    for part in parts:
        _check_part(part, told, parts)
    return ArgumentsSchema(draft(told, registry=Registry()))  # an empty one: the default would fetch


def _draft_of(schema: Any) -> Any:
    named = schema.get("$schema", _NEWEST) if isinstance(schema, dict) else _NEWEST
    draft = _DRAFTS.get(named.rstrip("#")) if isinstance(named, str) else None
    if draft is None:
        raise BadSchema("its `$schema` names none of 2020-12, 2019-09 and draft-07")
    return draft


def _check_depth(told: Any) -> None:
    layer, depth = [told], 0
    while layer:
        if depth > MAX_SCHEMA_DEPTH:
            raise BadSchema(f"it is nested more than {MAX_SCHEMA_DEPTH} deep")
        layer = [child for each in layer for child in _children(each)]
        depth += 1


def _children(told: Any) -> Iterable[Any]:
    if isinstance(told, dict):
        return told.values()
    return told if isinstance(told, list) else ()


def _schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema itself and all within it, but for `true` and `false`."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword, value in schema.items():
        within: Iterable[Any] = ()
        if keyword in _ONE and isinstance(value, dict):
            within = [value]
        elif keyword in _MANY and isinstance(value, list):
            within = value
        elif keyword in _NAMED and isinstance(value, dict):
            within = value.values()
        for each in within:
            yield from _schemas_in(each)


def _check_part(part: dict[str, Any], root: Any, parts: list[dict[str, Any]]) -> None:
    for keyword, instead in _REFUSED.items():
        if keyword in part:
            raise BadSchema(f"`{keyword}` is not checked here; {instead}")
    if "$id" in part and part is not root:
        raise BadSchema("a schema within it has an `$id` of its own")
    if "pattern" in part:
        _pattern(part["pattern"])
    if "$ref" in part:
        _check_reference(part["$ref"], root, parts)


def _check_reference(reference: str, root: Any, parts: list[dict[str, Any]]) -> None:
    if not reference.startswith("#"):
        raise BadSchema("a `$ref` leads out of it; put what it names into `$defs`")
    found = root
    for step in unquote(reference[1:]).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    if (len(reference) > 1 and not reference.startswith("#/")) or not (
        isinstance(found, bool) or any(found is part for part in parts)
    ):
        raise BadSchema(f"the `$ref` {reference[:64]!r} leads to no schema within it")


# --------------------------------------------------------------------------------------------------------- the keywords

Keyword = Callable[[Any, Any, Any, Any], Iterator[jsonschema.ValidationError] | None]


def _options() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PATTERN_BYTES
    return options


@lru_cache(MAX_KEPT)
def _pattern(pattern: str) -> Any:
    try:
        return re2.compile(pattern, options=_options())
    except re2.error as error:
        raise BadSchema(
            f"the pattern {pattern[:64]!r} is none that is matched in linear time; leave out look-around, back "
            "references and large counts"
        ) from error


def _matches(_validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and not _pattern(pattern).search(instance):
        yield jsonschema.ValidationError("does not match")


def _unique(_validator: Any, wanted: bool, instance: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    """In linear time, where the library may compare each with each."""
    if wanted and isinstance(instance, list) and len({_hashable(each) for each in instance}) < len(instance):
        yield jsonschema.ValidationError("is not unique")


def _hashable(value: Any) -> Any:
    """Equal for values that JSON Schema calls equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return frozenset((name, _hashable(each)) for name, each in value.items())
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    return (bool, value) if isinstance(value, bool) else value


def _metered(keyword: Keyword) -> Keyword:
    """The keyword, at the price of a step and one for each thing that it may have to look at."""

    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
        left = _steps_left.get() - 1 - _size(value)
        _steps_left.set(left)
        if left < 0:
            raise _OutOfSteps
        yield from keyword(validator, value, instance, schema) or ()

    return check


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _bounded(draft: Any) -> Any:
    keywords = {**draft.VALIDATORS, "pattern": _matches, "uniqueItems": _unique}
    return extend(draft, {name: _metered(check) for name, check in keywords.items()})


_NEWEST = "https://json-schema.org/draft/2020-12/schema"
_DRAFTS = {
    _NEWEST: _bounded(Draft202012Validator),
    "https://json-schema.org/draft/2019-09/schema": _bounded(Draft201909Validator),
    "http://json-schema.org/draft-07/schema": _bounded(Draft7Validator),
}
