"""What callers describe in JSON: functions, the choice among them, calls of earlier turns, the form of an answer.

    check_tools(tools)                     # `InvalidRequest` names the field and the place
    check_choice(choice, tools)
    check_calls(message.tool_calls)
    check_format(response_format)

It is checked as far as all engines agree and passed on as it came: a schema that is none has ended engines before, and
nobody else looks at it on the way there. What only some engines take is theirs to refuse.

>>> check_tools([{"type": "function", "function": {"name": "f", "parameters": {"type": "text"}}}])
Traceback (most recent call last):
    ...
adapters.errors.InvalidRequest: Invalid enum value 'text' at tools[0].function.parameters.type in 'tools'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from adapters.errors import InvalidRequest

T = TypeVar("T")

MAX_REASON = 300  # characters of the decoder's, which may repeat a value of the caller's
MAX_PATTERN = 4096  # characters of a regular expression in a schema
SchemaType: TypeAlias = Literal["null", "boolean", "integer", "number", "string", "array", "object"]
FunctionName: TypeAlias = Annotated[str, Meta(pattern=r"\A[-.:/\w]{1,256}\Z")]
CHOICES = ("none", "auto", "required")


class Pattern(str):
    """A regular expression whose brackets close. In which dialect it is written is the engine's affair.

    >>> Pattern(r"[(]\\)")
    '[(]\\\\)'
    """

    def __new__(cls, text: str) -> Pattern:
        if len(text) > MAX_PATTERN or not _closes(text):
            raise ValueError(f"A pattern needs closed brackets, and at most {MAX_PATTERN} characters")
        return super().__new__(cls, text)


def _pattern(kind: type, told: object) -> Pattern:
    if kind is not Pattern or not isinstance(told, str):
        raise TypeError("A pattern is a text")
    return Pattern(told)


def _closes(pattern: str) -> bool:
    """Whether every bracket is closed and no escape is cut, in one pass."""
    depth, in_class = 0, False
    letters = iter(pattern)
    for letter in letters:
        if letter == "\\":
            if next(letters, None) is None:
                return False
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        elif letter in "()":
            depth += 1 if letter == "(" else -1
            if depth < 0:
                return False
    return depth == 0 and not in_class


class Schema(Struct):
    """The keywords of JSON schema whose value has to be of a kind. All others are passed over."""

    type: SchemaType | list[SchemaType] | None = None
    pattern: Pattern | None = None
    enum: list[Any] | None = None
    properties: dict[str, Schema | bool] | None = None
    pattern_properties: dict[str, Schema | bool] | None = field(name="patternProperties", default=None)
    defs: dict[str, Schema | bool] | None = field(name="$defs", default=None)
    definitions: dict[str, Schema | bool] | None = None
    items: Schema | bool | list[Schema | bool] | None = None
    prefix_items: list[Schema | bool] | None = field(name="prefixItems", default=None)
    additional_properties: Schema | bool | None = field(name="additionalProperties", default=None)
    all_of: list[Schema | bool] | None = field(name="allOf", default=None)
    any_of: list[Schema | bool] | None = field(name="anyOf", default=None)
    one_of: list[Schema | bool] | None = field(name="oneOf", default=None)
    negated: Schema | bool | None = field(name="not", default=None)


class Function(Struct):
    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class AnswerSchema(Struct):
    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class CalledFunction(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class Call(Struct):
    function: CalledFunction
    id: str | None = None


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    for number, tool in enumerate(tools):
        if _kind(tool, "tools", f"tools[{number}]") == "function":
            _as(Function, tool.get("function"), "tools", f"tools[{number}].function")


def check_choice(choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise InvalidRequest("'tool_choice' is none, auto, required, or names a function.", param="tool_choice")
    elif _kind(choice, "tool_choice") == "function":
        chosen = _as(CalledFunction, choice.get("function"), "tool_choice", "function").name
        if chosen not in {tool["function"]["name"] for tool in tools if tool.get("type") == "function"}:
            raise InvalidRequest(
                f"'tool_choice' names {chosen[:64]!r}, which is not among the tools.", param="tool_choice"
            )


def check_calls(calls: Sequence[Mapping[str, Any]]) -> None:
    for number, call in enumerate(calls):
        if call.get("type", "function") == "function":
            _as(Call, call, "messages", f"tool_calls[{number}]")


def check_format(wanted: Mapping[str, Any]) -> None:
    if _kind(wanted, "response_format") == "json_schema":
        _as(AnswerSchema, wanted.get("json_schema"), "response_format", "json_schema")


def _kind(told: Mapping[str, Any], param: str, place: str = "") -> str:
    kind = told.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"A `type` is missing{f' at {place}' if place else ''} in {param!r}.", param=param)
    return kind


def _as(kind: type[T], told: object, param: str, place: str) -> T:
    """The field that is at fault stands in quotes: `GoodgateError.rename` looks for it there."""
    try:
        return msgspec.convert(told, kind, dec_hook=_pattern)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        raise InvalidRequest(
            f"{reason[:MAX_REASON]} at {place}{path.rstrip('`')} in {param!r}.", param=param
        ) from error
