"""Chunks to Anthropic's JSON: event by event for a stream, or folded into one message. No I/O.

    events = MessageEvents(head, stop_sequences)
    events.opening() + events.event(chunk) + ... + events.closing()      # message_start ... message_delta
    fold = MessageFold(head, stop_sequences); fold.add(chunk); ...; fold.body()

An answer is a list of content blocks: thinking, text, and one for each call. In a stream one block is open at a time,
while OpenAI's deltas of several calls may interleave; so a block waits until the one before it is whole. A message and
a stream are made of the same `Blocks` and so say the same.

An engine tells the tokens of the prompt at the end, so `message_start` says 0 and `message_delta` the true count;
Anthropic's clients take the later one (`accumulate_event` in the `anthropic` package, 2.14.0). `input_tokens` leaves
out those that came from the cache, as Anthropic counts them.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from adapters.errors import EngineProtocolError, StreamInterrupted
from adapters.types import Chunk, FinishReason, Usage
from gateway.handlers.openai_wire import read_tool_calls

Kind: TypeAlias = Literal["text", "thinking", "tool_use"]
StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]

MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_STOP_REASONS: dict[FinishReason, StopReason] = {
    "stop": "end_turn",
    "tool_calls": "end_turn",  # with a call it is `tool_use`, whatever the engine says
    "length": "max_tokens",
    "content_filter": "refusal",
}
_encode = msgspec.json.Encoder().encode


# -------------------------------------------------------------------------------------------------------------- blocks


class Begun(Struct, frozen=True):
    index: int
    kind: Kind
    id: str = ""
    name: str = ""


class Piece(Struct, frozen=True):
    index: int
    kind: Kind
    text: str


class Ended(Struct, frozen=True):
    index: int


Step: TypeAlias = Begun | Piece | Ended


class _Block:
    """One content block, as far as it has come. `waiting` is what has not been told yet."""

    def __init__(self, begun: Begun) -> None:
        self.begun = begun
        self.is_told = False
        self.waiting: list[str] = []
        self.arguments: list[str] = []  # of a call, all so far

    def add(self, text: str) -> None:
        self.waiting.append(text)
        if self.begun.kind == "tool_use":
            self.arguments.append(text)

    @property
    def is_valid(self) -> bool:
        """Whether it may end with the answer."""
        return self.begun.kind != "tool_use" or read_arguments("".join(self.arguments)) is not None

    @property
    def is_whole(self) -> bool:
        """Whether it may end once another has begun: a call without arguments may still be given some."""
        return self.begun.kind != "tool_use" or (self.is_valid and any(map(str.strip, self.arguments)))


class Blocks:
    """The content blocks of one answer, out of its chunks."""

    def __init__(self) -> None:
        self._blocks: deque[_Block] = deque()  # the open one, and those that wait for its end
        self._last: _Block | None = None
        self._calls: dict[int, _Block] = {}
        self._num_blocks = 0
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None

    @property
    def has_called(self) -> bool:
        return bool(self._calls)

    def feed(self, chunk: Chunk) -> Iterator[Step]:
        if chunk.index != 0:
            raise EngineProtocolError(f"The engine sent a choice {chunk.index} that nobody asked for.")
        if self.finish_reason is not None:
            raise EngineProtocolError("The engine went on after the end of its answer.")
        if chunk.reasoning:
            self._flowing("thinking").add(chunk.reasoning)
        if chunk.text:
            self._flowing("text").add(chunk.text)
        if chunk.tool_calls is not None:
            self._add_calls(chunk)
        yield from self._told()
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_string = chunk.finish_reason, chunk.stop_string
            yield from self._rest()

    def _flowing(self, kind: Kind) -> _Block:
        """The block that text of this kind belongs to: the last one, or a new one."""
        if self._last is None or self._last.begun.kind != kind:
            return self._begin(kind)
        return self._last

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> _Block:
        block = self._last = _Block(Begun(self._num_blocks, kind, call_id, name))
        self._num_blocks += 1
        self._blocks.append(block)
        return block

    def _add_calls(self, chunk: Chunk) -> None:
        assert chunk.tool_calls is not None
        for delta in read_tool_calls(chunk.tool_calls):
            number = len(self._calls) if delta.index is None else delta.index
            call = self._calls.get(number)
            if call is None:
                name = delta.function.name if delta.function else None
                if not delta.id or not name:
                    raise EngineProtocolError("The engine sent a tool call without an id or a name.")
                call = self._calls[number] = self._begin("tool_use", delta.id, name)
            arguments = (delta.function.arguments if delta.function else None) or ""
            if call in self._blocks:
                call.add(arguments)
            elif arguments.strip():
                raise EngineProtocolError("The engine went on with a tool call whose arguments were whole.")

    def _told(self) -> Iterator[Step]:
        """What can leave now: all of the open block, and of those after it while the one before is whole."""
        while self._blocks:
            block = self._blocks[0]
            yield from _news(block)
            if len(self._blocks) == 1 or not block.is_whole:
                return
            self._blocks.popleft()
            yield Ended(block.begun.index)

    def _rest(self) -> Iterator[Step]:
        """Nothing more will come. A call that the limit of tokens has cut stays as it is; any other has to be whole."""
        for block in self._blocks:
            yield from _news(block)
            if not block.is_valid and self.finish_reason != "length":
                raise EngineProtocolError(
                    f"The model called {block.begun.name[:64]!r} with arguments that are no JSON object."
                )
            yield Ended(block.begun.index)
        self._blocks.clear()


def _news(block: _Block) -> Iterator[Step]:
    if not block.is_told:
        block.is_told = True
        yield block.begun
    if news := "".join(block.waiting):
        yield Piece(block.begun.index, block.begun.kind, news)
    block.waiting.clear()


def read_arguments(text: str) -> dict[str, Any] | None:
    """Arguments of a call as the object that they are; None where they are not one (yet). No text at all is none given.

    >>> read_arguments('{"city": "Paris"}'), read_arguments(""), read_arguments('{"city": "Pa')
    ({'city': 'Paris'}, {}, None)
    """
    if not text.strip():
        return {}
    try:
        told = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


# ------------------------------------------------------------------------------------------------------------- answers


class MessageHead(Struct, frozen=True, kw_only=True):
    id: str
    model: str

    @classmethod
    def new(cls, model: str) -> MessageHead:
        return cls(id=f"msg_{secrets.token_hex(12)}", model=model)

    def message(self, content: list[dict[str, Any]], ending: dict[str, Any], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **ending,
            "usage": usage_object(usage),
        }


def usage_object(usage: Usage) -> dict[str, int]:
    """What Anthropic calls input is what was not read from a cache. An engine that does not tell has no such field."""
    told = {"input_tokens": usage.prompt_tokens - (usage.cached_tokens or 0), "output_tokens": usage.completion_tokens}
    if usage.cached_tokens is not None:
        told |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": usage.cached_tokens}
    return told


def ending_of(blocks: Blocks, stop_sequences: Collection[str]) -> dict[str, Any]:
    """Why the answer ended. `StreamInterrupted` where it has not."""
    if blocks.finish_reason is None:
        raise StreamInterrupted("The engine's stream ended before the answer was whole.")
    reason = _STOP_REASONS[blocks.finish_reason]
    if reason == "end_turn" and blocks.has_called:
        reason = "tool_use"
    elif reason == "end_turn" and blocks.stop_string in stop_sequences:
        return {"stop_reason": "stop_sequence", "stop_sequence": blocks.stop_string}
    return {"stop_reason": reason, "stop_sequence": None}


class MessageEvents:
    """The events of one streamed answer, but for `message_stop`, which whoever sends them puts at the end."""

    def __init__(self, head: MessageHead, stop_sequences: Collection[str]) -> None:
        self._head = head
        self._stop_sequences = stop_sequences
        self._blocks = Blocks()
        self._usage = Usage(0, 0)

    def opening(self) -> bytes:
        unknown_yet = {"stop_reason": None, "stop_sequence": None}
        return _event({"type": "message_start", "message": self._head.message([], unknown_yet, Usage(0, 0))})

    def event(self, chunk: Chunk) -> bytes:
        """The events of one chunk; nothing for one that completes none."""
        if chunk.usage is not None:
            self._usage = chunk.usage
            return b""
        return b"".join(map(_step_event, self._blocks.feed(chunk)))

    def closing(self) -> bytes:
        """Why it ended and what it took, once the stream is over. `StreamInterrupted` if it ended too early."""
        delta = ending_of(self._blocks, self._stop_sequences)
        return _event({"type": "message_delta", "delta": delta, "usage": usage_object(self._usage)})


class MessageFold:
    """A whole stream as one message."""

    def __init__(self, head: MessageHead, stop_sequences: Collection[str]) -> None:
        self._head = head
        self._stop_sequences = stop_sequences
        self._blocks = Blocks()
        self._content: list[tuple[Begun, list[str]]] = []
        self._usage = Usage(0, 0)

    def add(self, chunk: Chunk) -> None:
        if chunk.usage is not None:
            self._usage = chunk.usage
            return
        for step in self._blocks.feed(chunk):
            if isinstance(step, Begun):
                self._content.append((step, []))
            elif isinstance(step, Piece):
                self._content[step.index][1].append(step.text)

    def body(self) -> bytes:
        ending = ending_of(self._blocks, self._stop_sequences)
        content = [_content_block(begun, "".join(pieces)) for begun, pieces in self._content]
        return _encode(self._head.message(content, ending, self._usage))


def _content_block(begun: Begun, text: str) -> dict[str, Any]:
    """A block with its content; of a call that was cut by the limit nothing can be given but that it began."""
    if begun.kind == "tool_use":
        return {"type": "tool_use", "id": begun.id, "name": begun.name, "input": read_arguments(text) or {}}
    if begun.kind == "thinking":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


_DELTAS: dict[Kind, bytes] = {
    "text": b'"delta":{"type":"text_delta","text":',
    "thinking": b'"delta":{"type":"thinking_delta","thinking":',
    "tool_use": b'"delta":{"type":"input_json_delta","partial_json":',
}
_DELTA_HEAD = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'


def _step_event(step: Step) -> bytes:
    match step:
        case Piece(index, kind, text):  # every token passes here
            return _DELTA_HEAD % index + _DELTAS[kind] + _encode(text) + b"}}\n\n"
        case Begun(index):
            return _event({"type": "content_block_start", "index": index, "content_block": _content_block(step, "")})
        case Ended(index):
            return _event({"type": "content_block_stop", "index": index})


def _event(data: dict[str, Any]) -> bytes:
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + _encode(data) + b"\n\n"
