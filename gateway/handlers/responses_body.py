"""A body of /v1/responses, as the chat that it asks for. No I/O.

    body = decode_body(data)
    items = [*earlier, *input_items(body)]              # in the form in which OpenAI gives them out again
    chat = chat_request(body, items)                    # the one vocabulary of adapters/types.py

What no engine behind this gateway can do (tools that OpenAI runs itself, images, conversations and prompts that it
keeps, truncation by it) is refused by the name of its field. Source of the shapes: OpenAI's API reference, and its
published description of /v1/responses (openai-openapi 2.3.0).

Reasoning items of earlier turns are taken and stay with the conversation, but no engine is given them: chat templates
drop what a model thought in earlier turns, and encrypted reasoning of somebody else's nobody here can read.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from adapters.errors import GoodgateError, InvalidRequest
from adapters.types import ChatRequest, Label, Message, Metadata, Part, Positive, Text, TextPart, decode_as

S = TypeVar("S", bound=Struct)
Item: TypeAlias = dict[str, Any]  # one of `input` or `output`, as OpenAI gives it out: with its id and its status

Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]

MAX_ITEMS = 4096
LOGPROBS = "message.output_text.logprobs"
# Asked for by clients that send reasoning items back. Ours hold their text in the open, so there is nothing to include.
ENCRYPTED_REASONING = "reasoning.encrypted_content"


class TextFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Label | None = None


class ReasoningOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Label | None = None
    summary: str | None = None
    generate_summary: str | None = None  # its old name


class StreamSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # padding against eavesdroppers who measure events; never changes the text


class FunctionTool(Struct, kw_only=True, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What clients send. Null means the same as absent, as in OpenAI's own clients."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    input: Text | Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)]
    instructions: Text | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamSettings | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Positive | None = None  # of tools that OpenAI runs itself; there are none here
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    truncation: str | None = None
    metadata: Metadata | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: Label | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    client_metadata: dict[str, Any] | None = None  # what Codex says of itself; it says nothing about the answer

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


_decoder = msgspec.json.Decoder(ResponseBody)


def decode_body(data: bytes) -> ResponseBody:
    """Decode and check what can be checked without the earlier turns. `InvalidRequest` names the field at fault."""
    body = decode_as(_decoder, data)
    _check_is_servable(body)
    return body


def _check_is_servable(body: ResponseBody) -> None:
    """Refuse what would need a service that stands beside OpenAI's models, and is not here."""
    reasoning = body.reasoning or ReasoningOptions()
    refusals = {
        "background": "answers come in the open request" if body.background else None,
        "conversation": "chain answers with `previous_response_id` instead" if body.conversation else None,
        "prompt": "send the prompt itself as `input`" if body.prompt else None,
        "moderation": "nothing here moderates" if body.moderation else None,
        "context_management": "nothing here compacts a conversation" if body.context_management else None,
        "truncation": "send a shorter input, or `disabled`" if body.truncation not in (None, "disabled") else None,
        "reasoning.summary": (
            "engines give their reasoning whole; ask for `auto` or leave it out"
            if {reasoning.summary, reasoning.generate_summary} - {None, "auto"}
            else None
        ),
        "top_logprobs": (
            f"it needs `include: [{LOGPROBS!r}]`" if body.top_logprobs and not body.wants_logprobs else None
        ),
    }
    for field, reason in refusals.items():
        if reason is not None:
            raise _unsupported(field, reason)
    check_include(body.include or ())


def check_include(include: Sequence[str]) -> None:
    for name in include:
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            raise _unsupported("include", f"{name[:64]!r} belongs to a tool that is not here")


class NotOffered(InvalidRequest):
    code = "unsupported_parameter"


def _unsupported(field: str, reason: str) -> NotOffered:
    return NotOffered(f"This gateway cannot honour `{field}`: {reason}.", param=field)


# -------------------------------------------------------------------------------------------------------------- items


class _Part(Struct):
    type: str
    text: Text | None = None
    refusal: Text | None = None


class _MessageItem(Struct, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | list[_Part]
    id: Id | None = None


class _CallItem(Struct, kw_only=True):
    call_id: Id
    name: Id
    arguments: Text
    id: Id | None = None


class _CallOutputItem(Struct, kw_only=True):
    call_id: Id
    output: Text | list[_Part]
    id: Id | None = None


class _ReasoningItem(Struct, kw_only=True):
    summary: list[dict[str, Any]]
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None
    id: Id | None = None


def input_items(body: ResponseBody) -> list[Item]:
    """The input in the form in which OpenAI lists it: every item with an id and a status, every text as a part."""
    if isinstance(body.input, str):
        return [_message(_MessageItem(role="user", content=body.input), "input")]
    return [_item(given, f"input[{number}]") for number, given in enumerate(body.input)]


def _item(given: Mapping[str, Any], place: str) -> Item:
    told: Item
    kind = given.get("type", "message")
    if kind == "message":
        return _message(_as(_MessageItem, given, place), place)
    if kind == "function_call":
        call = _as(_CallItem, given, place)
        told = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        return {"id": call.id or new_id("fc"), "type": kind, "status": "completed", **told}
    if kind == "function_call_output":
        output = _as(_CallOutputItem, given, place)
        said = output.output if isinstance(output.output, str) else _parts(output.output, "input_text", place)
        told = {"call_id": output.call_id, "output": said}
        return {"id": output.id or new_id("fco"), "type": kind, "status": "completed", **told}
    if kind == "reasoning":
        reasoning = _as(_ReasoningItem, given, place)
        optional = {"content": reasoning.content, "encrypted_content": reasoning.encrypted_content}
        told = {"summary": reasoning.summary, **{name: each for name, each in optional.items() if each is not None}}
        return {"id": reasoning.id or new_id("rs"), "type": kind, **told}
    if kind == "item_reference":
        raise InvalidRequest(
            f"`{place}` refers to an item; send the item itself, or `previous_response_id`.", param=place
        )
    raise InvalidRequest(
        f"`{place}` has the type {str(kind)[:64]!r}; this gateway knows messages, function calls, their outputs and "
        "reasoning.",
        param=place,
    )


def _message(message: _MessageItem, place: str) -> Item:
    is_answer = message.role == "assistant"
    parts = [_Part("input_text", message.content)] if isinstance(message.content, str) else message.content
    content = _parts(parts, "output_text" if is_answer else "input_text", place)
    return {
        "id": message.id or new_id("msg"),
        "type": "message",
        "status": "completed",
        "role": message.role,
        "content": content,
    }


def _parts(parts: Sequence[_Part], kind: str, place: str) -> list[dict[str, Any]]:
    return [_part(part, kind, f"{place}.content[{number}]") for number, part in enumerate(parts)]


def _part(part: _Part, kind: str, place: str) -> dict[str, Any]:
    if part.type not in ("input_text", "output_text", "refusal"):
        raise InvalidRequest(f"`{place}` has the type {part.type[:64]!r}; this gateway takes text only.", param=place)
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise InvalidRequest(f"`{place}` has no text.", param=place)
    return text_part(text) if kind == "output_text" else {"type": kind, "text": text}


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _as(kind: type[S], given: Mapping[str, Any], place: str) -> S:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        raise InvalidRequest(f"{reason} in {place}{path.strip('`')}.", param=place) from error


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


# --------------------------------------------------------------------------------------------------------------- chat


def chat_request(body: ResponseBody, items: Sequence[Item]) -> ChatRequest:
    """The whole conversation as one chat. `items` are those of the earlier turns and of this one."""
    tools, choice = _tools(body)
    reasoning, text = body.reasoning or ReasoningOptions(), body.text or TextOptions()
    return ChatRequest(
        model=body.model,
        messages=messages(body.instructions, items),
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=True if body.wants_logprobs else None,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(text.format),
        reasoning_effort=reasoning.effort,
        verbosity=text.verbosity,
        user=body.user,
        metadata=body.metadata,
        service_tier=body.service_tier,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        prompt_cache_retention=body.prompt_cache_retention,
    )


def messages(instructions: str | None, items: Sequence[Item]) -> list[Message]:
    """Items as turns: what the assistant says and calls between two turns of others is one turn of its own."""
    turns = [] if instructions is None else [Message(role="system", content=instructions)]
    unanswered: dict[str, None] = {}
    for item in items:
        if item["type"] == "message":
            _add_message(turns, item)
        elif item["type"] == "function_call":
            _add_call(turns, item)
            unanswered[item["call_id"]] = None
        elif item["type"] == "function_call_output":
            if item["call_id"] not in unanswered:
                raise InvalidRequest(f"No function call has the call_id {item['call_id'][:64]!r}.", param="input")
            del unanswered[item["call_id"]]
            turns.append(Message(role="tool", tool_call_id=item["call_id"], content=_content(item["output"])))
    for call_id in unanswered:
        raise InvalidRequest(f"The function call {call_id[:64]!r} has no function_call_output.", param="input")
    if len(turns) == (instructions is not None):
        raise InvalidRequest("`input` holds nothing to answer.", param="input")
    return turns


def _add_message(turns: list[Message], item: Item) -> None:
    content = _content(item["content"])
    if item["role"] == "assistant" and turns and _calls(turns[-1]):
        turns[-1].content = turns[-1].text() + Message(role="assistant", content=content).text()
    else:
        turns.append(Message(role=item["role"], content=content))


def _add_call(turns: list[Message], item: Item) -> None:
    if not turns or turns[-1].role != "assistant":
        turns.append(Message(role="assistant"))
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    turns[-1].tool_calls = [*_calls(turns[-1]), call]


def _calls(turn: Message) -> list[dict[str, Any]]:
    return turn.tool_calls if isinstance(turn.tool_calls, list) else []


def _content(said: str | Sequence[Mapping[str, Any]]) -> str | list[Part]:
    if isinstance(said, str):
        return said
    return said[0]["text"] if len(said) == 1 else [TextPart(part["text"]) for part in said]


def _tools(body: ResponseBody) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """The functions offered and the choice among them, in the words of a chat."""
    functions = function_tools(body)
    names = [function.name for function in functions]
    choice: str | dict[str, Any] | None
    if isinstance(body.tool_choice, dict):
        wanted = list(_chosen(body.tool_choice))
        for name in wanted:
            if name not in names:
                raise InvalidRequest(
                    f"`tool_choice` names {name[:64]!r}, which is not in `tools`.", param="tool_choice"
                )
        if body.tool_choice["type"] == "function":
            choice = {"type": "function", "function": {"name": wanted[0]}}
        else:
            choice = body.tool_choice["mode"]
            functions = [function for function in functions if function.name in wanted]
    else:
        choice = body.tool_choice
        if choice not in (None, "none", "auto", "required"):
            raise InvalidRequest("`tool_choice` must be none, auto, required or an object.", param="tool_choice")
    return [_as_chat_tool(function) for function in functions] or None, choice


def function_tools(body: ResponseBody) -> list[FunctionTool]:
    functions = []
    for number, tool in enumerate(body.tools or ()):
        place, kind = f"tools[{number}]", tool.get("type")
        if kind != "function":
            raise NotOffered(
                f"`{place}` has the type {str(kind)[:64]!r}, a tool that OpenAI runs; offer a function of your own.",
                param=place,
            )
        functions.append(_as(FunctionTool, tool, place))
    return functions


def _chosen(choice: Mapping[str, Any]) -> Iterator[str]:
    """The functions that a choice leaves: the one that has to be called, or those that may be."""
    kind, mode, tools = choice.get("type"), choice.get("mode"), choice.get("tools")
    if kind == "function" and isinstance(choice.get("name"), str):
        yield choice["name"]
    elif kind == "allowed_tools" and mode in ("auto", "required") and isinstance(tools, list) and tools:
        for tool in tools:
            if not (isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str)):
                raise InvalidRequest("`tool_choice.tools` must name functions.", param="tool_choice")
            yield tool["name"]
    else:
        raise InvalidRequest(
            "`tool_choice` must name a function, or be allowed_tools with a mode and tools.", param="tool_choice"
        )


def _as_chat_tool(tool: FunctionTool) -> dict[str, Any]:
    fields = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, **given}}


def _response_format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if not wanted.name or wanted.schema is None:
        raise InvalidRequest("`text.format` needs a name and a schema for json_schema.", param="text.format")
    fields = {"name": wanted.name, "schema": wanted.schema, "strict": wanted.strict, "description": wanted.description}
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "json_schema", "json_schema": given}


_OUR_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


def use_callers_words(error: GoodgateError) -> None:
    """A refusal that names a field of the chat will name the field that the caller sent."""
    name = _OUR_NAMES.get(error.param or "")
    if name is not None:
        error.rename(name)
