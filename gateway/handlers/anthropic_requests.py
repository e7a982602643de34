"""Bodies of Anthropic's Messages API, decoded and put into the one vocabulary of adapters/types.py. No I/O.

    body = decode_messages(data)                 # `InvalidRequest` names the field at fault
    request = body.chat()                        # a ChatRequest, for the dispatcher
    question = decode_count(data).question()     # a TokenizeRequest: how long would the prompt be?

What has no place in an engine's prompt is refused by name, never dropped. Four things say nothing about the answer and
are taken without effect: `cache_control` (engines cache prefixes by themselves), `metadata` and `service_tier`, and the
thoughts of earlier turns, which the models were not trained to read again.

Source of the shapes: the types of the `anthropic` Python package, 2.14.0 (message_create_params.py and around it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct

from adapters.errors import InvalidRequest
from adapters.types import ChatRequest, Count, Message, Positive, StopString, Text, TokenizeRequest, decode_as
from gateway.web.envelope import ThreadsUnsupported

# What clients are told to have asked for, where an engine refuses the field that it became.
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
# Thinking has a budget in tokens; engines that can be told anything know three degrees.
LOW_BELOW, MEDIUM_BELOW = 4096, 16384

# ------------------------------------------------------------------------------------------------------------- content


class TextBlock(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: Text
    citations: Any = None  # of an earlier answer: where its text came from
    cache_control: Any = None


class ToolUse(Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """A call of an earlier answer."""

    id: Annotated[str, Meta(min_length=1)]
    name: str
    input: dict[str, Any]
    caller: Any = None  # who made it: the model itself, or code that Anthropic ran
    toolset_name: None = None
    cache_control: Any = None


class ToolResult(Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    tool_use_id: str
    content: Text | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    toolset_name: None = None
    cache_control: Any = None


class Thinking(Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    thinking: Text
    signature: str | None = None


class RedactedThinking(Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    data: str


Block: TypeAlias = TextBlock | ToolUse | ToolResult | Thinking | RedactedThinking
_IN_A_TURN = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


class Turn(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: Text | list[dict[str, Any]]


# -------------------------------------------------------------------------------------------------------------- fields


class Tool(Struct, forbid_unknown_fields=True):
    """A function of the client's own."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    input_schema: dict[str, Any]
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # arguments always leave as they come
    cache_control: Any = None


class AutoChoice(Struct, tag_field="type", tag="auto", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Struct, tag_field="type", tag="tool", forbid_unknown_fields=True):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, tag_field="type", tag="none", forbid_unknown_fields=True):
    disable_parallel_tool_use: None = None


class ThinkingDisabled(Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    pass


class ThinkingAdaptive(Struct, tag_field="type", tag="adaptive", forbid_unknown_fields=True):
    """As the model sees fit, which is what happens anyway."""

    display: Literal["summarized"] | None = None


class ThinkingEnabled(Struct, tag_field="type", tag="enabled", forbid_unknown_fields=True):
    budget_tokens: Annotated[int, Meta(ge=1024, le=2**31 - 1)]
    display: Literal["summarized"] | None = None

    @property
    def effort(self) -> str:
        if self.budget_tokens < LOW_BELOW:
            return "low"
        return "medium" if self.budget_tokens < MEDIUM_BELOW else "high"


class JsonFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ContextManagement(Struct, forbid_unknown_fields=True):
    """What the server shall take out of the history. Thoughts are out of it anyway."""

    edits: list[dict[str, Any]] | None = None

    def check(self) -> None:
        for edit in self.edits or ():
            kind = str(edit.get("type"))
            if not kind.startswith("clear_thinking_"):
                raise InvalidRequest(
                    f"context_management: {kind[:64]!r} is not done here; send the history as the model shall see it.",
                    param="context_management",
                )


class Metadata(Struct, forbid_unknown_fields=True):
    user_id: Annotated[str, Meta(max_length=4096)] | None = None


# -------------------------------------------------------------------------------------------------------------- bodies


class CountBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """`/v1/messages/count_tokens`: what makes the prompt."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=4096)]
    system: Text | list[TextBlock] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: ThinkingDisabled | ThinkingAdaptive | ThinkingEnabled | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    context_management: ContextManagement | None = None

    def question(self) -> TokenizeRequest:
        """The prompt alone: how a call is chosen and how hard the model thinks are no part of it."""
        tools = None if isinstance(self.tool_choice, NoChoice) else self.functions()
        return TokenizeRequest(model=self.model, messages=self.turns(), tools=tools)

    def turns(self) -> list[Message]:
        """The conversation as engines know it. A turn of the user's may become several: a tool's result is its own."""
        if self.context_management is not None:
            self.context_management.check()
        given = [] if self.system is None else [Message(role="system", content=_system_text(self.system))]
        called: set[str] = set()
        for number, turn in enumerate(self.messages):
            given.extend(_messages(turn, f"messages[{number}]", called))
        if self.messages[-1].role == "assistant":
            raise InvalidRequest(
                "An engine begins a turn of its own and cannot continue yours: end `messages` with the user's turn.",
                param="messages",
            )
        return _with_one_system_first(given)

    def functions(self) -> list[dict[str, Any]] | None:
        if self.tools is None:
            return None
        return [_function(tool, f"tools[{number}]") for number, tool in enumerate(self.tools)]


class MessagesBody(CountBody, kw_only=True, forbid_unknown_fields=True):
    """`/v1/messages`."""

    max_tokens: Positive
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Count | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    thread: Any = None  # a conversation that the server keeps: a beta of Anthropic's

    def chat(self) -> ChatRequest:
        if self.thread is not None:
            raise ThreadsUnsupported
        return ChatRequest(
            model=self.model,
            messages=self.turns(),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stream=self.stream is True,
            user=self.metadata.user_id if self.metadata else None,
            tools=self.functions(),
            tool_choice=self._choice(),
            parallel_tool_calls=False if self._wants_one_call() else None,
            response_format=self._format(),
            reasoning_effort=self._effort(),
        )

    def name_of(self, field: str) -> str:
        """What the client called a field of the chat."""
        if field == "reasoning_effort" and self.output_config is not None and self.output_config.effort is not None:
            return "output_config.effort"
        return _NAMES.get(field, field)

    def _choice(self) -> str | dict[str, Any] | None:
        match self.tool_choice:
            case NamedChoice(name):
                return {"type": "function", "function": {"name": name}}
            case AnyChoice():
                return "required"
            case NoChoice():
                return "none"
            case AutoChoice():
                return "auto"
        return None

    def _wants_one_call(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use is True

    def _format(self) -> dict[str, Any] | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        schema = {"name": "answer", "schema": self.output_config.format.schema, "strict": True}
        return {"type": "json_schema", "json_schema": schema}

    def _effort(self) -> str | None:
        if self.output_config is not None and self.output_config.effort is not None:
            return self.output_config.effort
        return self.thinking.effort if isinstance(self.thinking, ThinkingEnabled) else None


_messages_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountBody)


def decode_messages(data: bytes) -> MessagesBody:
    return decode_as(_messages_decoder, data)


def decode_count(data: bytes) -> CountBody:
    return decode_as(_count_decoder, data)


# ----------------------------------------------------------------------------------------------------------- the turns


def _messages(turn: Turn, where: str, called: set[str]) -> list[Message]:
    """One turn of theirs as ours. `called` holds the ids of all calls so far."""
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    blocks = [_block(told, f"{where}.content[{number}]", _IN_A_TURN) for number, told in enumerate(turn.content)]
    if not blocks:
        raise InvalidRequest(f"{where}.content is empty.", param="messages")
    if turn.role == "assistant":
        return [_assistant(blocks, where, called)]
    if turn.role == "system":
        return [Message(role="system", content="\n".join(_texts(blocks, where)))]
    return list(_user(blocks, where, called))


def _assistant(blocks: Sequence[Block], where: str, called: set[str]) -> Message:
    calls = [block for block in blocks if isinstance(block, ToolUse)]
    called.update(call.id for call in calls)
    texts = _texts([block for block in blocks if not isinstance(block, ToolUse | Thinking | RedactedThinking)], where)
    text = "".join(texts)  # the model wrote it in one go
    return Message(
        role="assistant",
        content=text if text or not calls else None,
        tool_calls=[_call(each) for each in calls] if calls else UNSET,
    )


def _call(call: ToolUse) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.input).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _user(blocks: Sequence[Block], where: str, called: set[str]) -> Iterator[Message]:
    """Results of tools as turns of their own, and what the user says between them."""
    said: list[Block] = []
    for block in blocks:
        if not isinstance(block, ToolResult):
            said.append(block)
            continue
        if block.tool_use_id not in called:
            raise InvalidRequest(
                f"{where} has the result of a call {block.tool_use_id[:64]!r}, which no earlier turn made.",
                param="messages",
            )
        if said:
            yield Message(role="user", content="\n".join(_texts(said, where)))
            said = []
        yield Message(role="tool", tool_call_id=block.tool_use_id, content=_result_text(block, where))
    if said:
        yield Message(role="user", content="\n".join(_texts(said, where)))


def _result_text(result: ToolResult, where: str) -> str:
    """What a tool answered. That it failed has no field in an engine's prompt, so the text says it."""
    content = result.content or ""
    if isinstance(content, list):
        where = f"{where}: tool_result"
        content = "\n".join(_texts([_block(told, where, ("text",)) for told in content], where))
    return f"Error: {content}" if result.is_error else content


def _texts(blocks: Sequence[Block], where: str) -> list[str]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    if len(texts) < len(blocks):
        raise InvalidRequest(
            f"{where} holds content that does not belong to its role: calls and thoughts are the assistant's, results "
            "of tools the user's.",
            param="messages",
        )
    return texts


def _block(told: dict[str, Any], where: str, kinds: Sequence[str]) -> Block:
    kind = told.get("type")
    if kind not in kinds:
        raise InvalidRequest(
            f"{where} has the type {str(kind)[:64]!r}, which engines behind this gateway are not given; send "
            f"{', '.join(kinds)}.",
            param="messages",
        )
    try:
        block: Block = msgspec.convert(told, Block)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}.", param="messages") from error
    return block


def _system_text(system: str | list[TextBlock]) -> str:
    return system if isinstance(system, str) else "\n".join(block.text for block in system)


def _with_one_system_first(turns: list[Message]) -> list[Message]:
    """Many chat templates take one system turn, at the beginning; Anthropic's clients may send it in two places."""
    num_system = next((number for number, turn in enumerate(turns) if turn.role != "system"), len(turns))
    text = "\n".join(text for turn in turns[:num_system] if (text := turn.text()))
    head = [Message(role="system", content=text)] if text else []
    if not (given := head + turns[num_system:]):
        raise InvalidRequest("`messages` hold nothing to answer.", param="messages")
    return given


def _function(told: dict[str, Any], where: str) -> dict[str, Any]:
    kind = told.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequest(
            f"{where} has the type {str(kind)[:64]!r}, which is Anthropic's own; describe a tool of yours with `name` "
            "and `input_schema`.",
            param="tools",
        )
    try:
        tool = msgspec.convert(told, Tool)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}.", param="tools") from error
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
