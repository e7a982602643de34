"""Tools for engines that take and give plain text: what a request offers its model, and calls out of its chunks.

    offer = offered(request, "tgi")                      # None where there is nothing to call
    calls = CallChunks(offer, "hermes", num_choices=1)
    for chunk in chunks: yield from calls.feed(chunk)    # `with_tool_calls` does it for a whole stream

A free choice (`auto`) is left to the model, whose text tools/tool_text.py reads. A forced one (`required`, or a
function by name) needs an engine with grammars: the answer is constrained to `call_schema`, one call and nothing else.

The finish reason is `tool_calls` where the engine stopped by itself after at least one complete call, and `stop` where
a function was named: that is what OpenAI documents ("if we forced the model to call one of our functions, the
finish_reason will actually be "stop"", guide on structured outputs) and what it answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct

from adapters.base import Capabilities
from adapters.errors import EngineUnavailable, InvalidRequest
from adapters.schemas import FunctionName
from adapters.tools.call_text import Arguments, CallBegun, Event, Said, Thought
from adapters.tools.formats import MARKERS, ToolFormat, format_of, mistral_id
from adapters.tools.taught import TAUGHT, taught_turns
from adapters.tools.tool_text import ToolText
from adapters.types import ChatRequest, Chunk, FinishReason, GenerateRequest, Usage

if TYPE_CHECKING:
    from adapters.models.chat_template import ChatTemplate

TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
ToolParser: TypeAlias = ToolFormat | Literal["auto", "none"]  # an engine's option: `auto` asks the chat template


# ---------------------------------------------------------------------------------------------------------- requests


class Function(Struct):
    """A function as OpenAI describes it."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Struct):
    type: Literal["function"]
    function: Function


class _Named(Struct):
    name: str


class _NamedChoice(Struct):
    type: Literal["function"]
    function: _Named


class Offer(Struct, frozen=True, kw_only=True):
    """The functions that a model may call, or one of which it must."""

    callable: list[Function]
    must_call: bool = False
    is_named: bool = False
    only_one: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.callable)


def offered(request: GenerateRequest, engine: str) -> Offer | None:
    """What the model may call; None where there is nothing. Raises `InvalidRequest` for what makes no sense."""
    if not isinstance(request, ChatRequest):
        return None
    choice = request.tool_choice
    if not isinstance(request.tools, list) or not request.tools:
        if not isinstance(choice, str | dict) or choice in ("none", "auto"):
            return None
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
    functions = _functions(request.tools)
    if choice == "none":
        return None
    named = _named(choice, functions) if isinstance(choice, dict) else None
    if isinstance(choice, str) and choice not in ("auto", "required"):
        raise InvalidRequest("tool_choice is none, auto, required, or names a function.", param="tool_choice")
    must_call = named is not None or choice == "required"
    if isinstance(request.response_format, dict) and request.response_format.get("type") != "text":
        raise InvalidRequest(
            f"The engine {engine!r} cannot both constrain its answer and offer tools; send one of the two.",
            param="response_format",
        )
    return Offer(
        callable=functions if named is None else [named],
        must_call=must_call,
        is_named=named is not None,
        only_one=request.parallel_tool_calls is False,
    )


def _functions(tools: list[dict[str, Any]]) -> list[Function]:
    try:
        functions = [tool.function for tool in msgspec.convert(tools, list[_Tool])]
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"tools must hold functions as OpenAI describes them: {error}.", param="tools") from error
    if len({function.name for function in functions}) < len(functions):
        raise InvalidRequest("Two tools have the same name.", param="tools")
    for function in functions:
        if _parameters(function).get("type", "object") != "object":
            raise InvalidRequest(f"The parameters of {function.name!r} must be of type object.", param="tools")
    return functions


def _named(choice: dict[str, Any], functions: list[Function]) -> Function:
    try:
        wanted = msgspec.convert(choice, _NamedChoice).function.name
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"tool_choice must name a function: {error}.", param="tool_choice") from error
    found = next((function for function in functions if function.name == wanted), None)
    if found is None:
        raise InvalidRequest(f"tool_choice names {wanted!r}, which is none of the tools.", param="tool_choice")
    return found


def _parameters(function: Function) -> dict[str, Any]:
    """Left out, they are those of a function without any."""
    return {"type": "object", "properties": {}} if function.parameters is None else function.parameters


def rendered_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """What the chat template gets: every tool, with all that templates take for granted."""
    if not isinstance(request.tools, list) or not request.tools or request.tool_choice == "none":
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description or "",
                "parameters": _parameters(function),
            },
        }
        for function in _functions(request.tools)
    ]


def for_template(
    request: ChatRequest, template: ChatTemplate, tool_format: ToolFormat | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The turns and the tools for the chat template. One that makes nothing of tools gets turns that tell of them."""
    turns, tools = turns_for_template(request, tool_format), rendered_tools(request)
    if tool_format is None or template.renders_tools:
        return turns, tools
    return taught_turns(turns, tools, tool_format), None


def turns_for_template(request: ChatRequest, tool_format: ToolFormat | None) -> list[dict[str, Any]]:
    """The conversation as the chat template reads it. Templates of Mistral refuse ids of calls that are not theirs."""
    turns = [message.for_template() for message in request.messages]
    if tool_format != "mistral":
        return turns
    for turn in turns:
        if "tool_call_id" in turn:
            turn["tool_call_id"] = mistral_id(turn["tool_call_id"])
        if "tool_calls" in turn:
            turn["tool_calls"] = [{**call, "id": mistral_id(str(call.get("id", "")))} for call in turn["tool_calls"]]
    return turns


def usable_format(
    wanted: ToolParser, template: ChatTemplate, hidden: Collection[str] = (), *, teaches: bool = False
) -> ToolFormat | None:
    """How a model with this template writes its calls, where they can be read; None where tools have to be refused.

    A template that makes nothing of tools leaves a form to be taught in words (tools/taught.py): one that is named, or
    for an engine that `teaches`, because its grammar can force a call of any model, the first of them. `hidden` are the
    special tokens, for an engine that leaves them out of its text. Raises `EngineUnavailable` where the wanted parser
    cannot work.
    """
    if wanted == "none":
        return None
    if wanted != "auto":
        tool_format: ToolFormat | None = wanted
    elif template.renders_tools:
        tool_format = format_of(template.source)
    else:
        tool_format = TAUGHT[0] if teaches else None
    fault = _fault_of(tool_format, template, hidden)
    if fault and wanted != "auto":
        raise EngineUnavailable(f"tool_parser {wanted!r} cannot work: {fault}.")
    return None if fault else tool_format


def _fault_of(tool_format: ToolFormat | None, template: ChatTemplate, hidden: Collection[str]) -> str:
    if tool_format is None:
        return ""
    if not template.renders_tools and tool_format not in TAUGHT:
        return (
            "the model's chat template makes nothing of tools; name a template that renders them, or one of the "
            f"parsers that are taught in words ({', '.join(TAUGHT)})"
        )
    if not set(MARKERS[tool_format]).isdisjoint(hidden):
        return "the engine hides the special tokens that mark such calls; leave it out"
    return ""


def with_tools(capabilities: Capabilities, can: bool, *, can_force: bool) -> Capabilities:
    """What an adapter of a text engine declares. Whether its chat template has tools is known once it has started; a
    forced call needs an engine with grammars, and the choices `none` and `auto` nothing at all.
    """
    others = capabilities.parameters - TOOL_FIELDS
    fields = TOOL_FIELDS if can_force else TOOL_FIELDS - {"tool_choice"}
    return msgspec.structs.replace(capabilities, parameters=others | fields if can and capabilities.chat else others)


def call_schema(offer: Offer) -> dict[str, Any]:
    """The JSON schema of one call, in the form that the parser `json` reads.

    References inside a function's parameters begin at their root, which is not that of the call: parameters with such
    references become a definition, and the references begin there.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for number, function in enumerate(offer.callable):
        parameters = {"type": "object", **_parameters(function)}
        moved = with_root_at(f"#/$defs/{number}", parameters)
        if moved != parameters:
            definitions[str(number)] = moved
            parameters = {"$ref": f"#/$defs/{number}"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "const": function.name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**call, "$defs": definitions} if definitions else call


_VALUES = frozenset({"const", "default", "enum", "examples"})  # keywords that hold values, not schemas
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})  # schemas by name


def with_root_at(place: str, schema: Any) -> Any:
    """The schema with its references from the root of the document led to `place`.

    >>> with_root_at("#/$defs/0", {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/city"}], "default": {"$ref": "#"}})
    {'anyOf': [{'$ref': '#/$defs/0'}, {'$ref': '#/$defs/0/$defs/city'}], 'default': {'$ref': '#'}}
    """
    if isinstance(schema, list):
        return [with_root_at(place, each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = dict(schema)
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = place + value[1:]
        elif key in _NAMED and isinstance(value, dict):
            moved[key] = {name: with_root_at(place, each) for name, each in value.items()}
        elif key not in _VALUES:
            moved[key] = with_root_at(place, value)
    return moved


# ------------------------------------------------------------------------------------------------------------ chunks


class CallChunks:
    """The chunks of one request, with tool calls in place of the text that makes them."""

    def __init__(
        self, offer: Offer, tool_format: ToolFormat, *, num_choices: int, forced_format: ToolFormat = "json"
    ) -> None:
        """`forced_format`: how a call is written that the engine's grammar forces."""
        self._is_named = offer.is_named
        self._must_call = offer.must_call
        self._parsers = [
            ToolText(forced_format if offer.must_call else tool_format, offer.names, only_first=offer.only_one)
            for _ in range(num_choices)
        ]
        self._finished = [False] * num_choices
        self._num_running = num_choices  # choices that the engine has not ended

    @property
    def has_enough(self) -> bool:
        """Nothing more is wanted of the engine, which goes on."""
        return all(self._finished) and self._num_running > 0

    def feed(self, chunk: Chunk) -> Iterator[Chunk]:
        if chunk.usage is not None:
            yield chunk
            return
        index = chunk.index
        self._num_running -= chunk.finish_reason is not None
        if self._finished[index]:
            return
        parser = self._parsers[index]
        events = parser.feed(chunk.text)
        reason: FinishReason | None = "stop" if parser.is_over else chunk.finish_reason
        if reason is not None:
            is_cut = reason == "length" or chunk.stop_string is not None
            rest = parser.finish()
            # The beginning of a call that had to come is no answer in words.
            events += [event for event in rest if not (self._must_call and is_cut and isinstance(event, Said))]
        if chunk.reasoning or chunk.logprobs is not None:
            yield Chunk(index=index, reasoning=chunk.reasoning, logprobs=chunk.logprobs)
        for event in events:
            yield _chunk(index, event)
        if reason is not None:
            self._finished[index] = True
            yield Chunk(index=index, finish_reason=self._reason(reason, parser), stop_string=chunk.stop_string)

    def _reason(self, reason: FinishReason, parser: ToolText) -> FinishReason:
        if reason != "stop" or not parser.num_complete or self._is_named:
            return reason
        return "tool_calls"


def _chunk(index: int, event: Event) -> Chunk:
    match event:
        case Said(text):
            return Chunk(index=index, text=text)
        case Thought(text):
            return Chunk(index=index, reasoning=text)
        case CallBegun(number, call_id, name):
            return Chunk(index=index, tool_calls=_encoded(call_head(number, call_id, name)))
        case Arguments(number, text):
            return Chunk(index=index, tool_calls=_encoded(call_rest(number, text)))


def call_head(number: int, call_id: str, name: str) -> dict[str, Any]:
    """The first delta of a call."""
    return {"index": number, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def call_rest(number: int, arguments: str) -> dict[str, Any]:
    """A later one."""
    return {"index": number, "function": {"arguments": arguments}}


def whole_calls(deltas: Iterable[Raw]) -> list[dict[str, Any]]:
    """The calls of one choice in one piece, from what `CallChunks` made of them."""
    calls: list[dict[str, Any]] = []
    for delta in (delta for raw in deltas for delta in msgspec.json.decode(raw)):
        if delta["index"] == len(calls):
            calls.append({"id": delta["id"], "type": delta["type"], "function": delta["function"]})
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


def _encoded(delta: dict[str, Any]) -> Raw:
    return Raw(msgspec.json.encode([delta]))


async def with_tool_calls(
    chunks: AsyncGenerator[Chunk, None], calls: CallChunks, account: Callable[[], Usage]
) -> AsyncGenerator[Chunk, None]:
    """A stream with its calls. Where one call is all that is wanted the stream is closed after it, and `account` says
    what it took.
    """
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            for passed in calls.feed(chunk):
                yield passed
            if calls.has_enough:
                break
        else:
            return
    yield Chunk(usage=account())
