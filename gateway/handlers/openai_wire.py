"""Chunks to OpenAI's JSON: event by event for a stream, or folded into one object.

The shapes are those of the OpenAI API reference: a chat stream opens with one role event a choice, its last event for
a choice has an empty delta and the finish reason, and the usage event (if asked for) has `choices: []` and comes last,
while the events before it carry `usage: null`.

Every token passes through `event`, so what does not change within an answer is encoded once, as a prefix and a suffix.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from adapters.errors import EngineProtocolError, StreamInterrupted
from adapters.types import Chunk, FinishReason, Usage
from gateway.records.random_ids import random_hex

_encode = msgspec.json.Encoder().encode

UNTOLD_LOGPROB = -9999.0  # OpenAI's own word for "very unlikely"; its schema has no null
REASONING_FIELDS = {  # what a model thinks has no name at OpenAI, and two among its imitators
    "reasoning_content": ("reasoning_content",),  # SGLang, TensorRT-LLM, llama.cpp, DeepSeek's API
    "reasoning": ("reasoning",),  # vLLM, OpenRouter
    "both": ("reasoning_content", "reasoning"),
}


class AnswerHead(Struct, frozen=True, kw_only=True):
    """What all events of an answer share."""

    id: str
    model: str
    created: int

    @classmethod
    def new(cls, prefix: str, model: str) -> AnswerHead:
        return cls(id=f"{prefix}-{random_hex(12)}", model=model, created=int(time.time()))


def usage_object(usage: Usage) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        shown["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens is not None:
        shown["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return shown


class Events(ABC):
    """The events of one streamed answer. Refuses to look whole before every choice has finished."""

    object: str
    text_start: bytes  # of what a choice says, around the JSON of a piece of text
    text_end: bytes

    def __init__(
        self,
        head: AnswerHead,
        *,
        num_choices: int,
        with_usage: bool,
        reasoning_fields: Sequence[str] = REASONING_FIELDS["reasoning_content"],
    ) -> None:
        self._reasoning_fields = reasoning_fields
        head_json = _encode({"id": head.id, "object": self.object, "created": head.created, "model": head.model})
        self._head = b"data: " + head_json[:-1]
        self._end = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._with_usage = with_usage
        self._unfinished = set(range(num_choices))
        self._prefixes = [self._head + b',"choices":[{"index":%d,' % index for index in range(num_choices)]
        self._plain_end = b',"logprobs":null,"finish_reason":null}]' + self._end
        self._text_end = self.text_end + self._plain_end

    def opening(self) -> bytes:
        """What is sent before the first chunk."""
        return b""

    def event(self, chunk: Chunk) -> bytes:
        """The event or events of one chunk; nothing for an empty one."""
        if chunk.text and chunk.finish_reason is None and not _holds_more_than_text(chunk):  # nearly every one
            return self._prefix(chunk.index) + self.text_start + _encode(chunk.text) + self._text_end
        if chunk.usage is not None:
            return self._usage(chunk.usage) if self._with_usage else b""
        pieces = b""
        if chunk.text or chunk.reasoning or chunk.tool_calls is not None or chunk.logprobs is not None:
            pieces = self._piece(chunk)
            if chunk.progress is not None:
                prefix = self._prefix(chunk.index)
                pieces = prefix + b'"progress":' + _encode(chunk.progress) + b"," + pieces.removeprefix(prefix)
        if chunk.finish_reason is None:
            return pieces
        if chunk.index not in self._unfinished:
            raise EngineProtocolError(f"The engine finished choice {chunk.index} twice.")
        self._unfinished.remove(chunk.index)
        return pieces + self._finish(chunk.index, chunk.finish_reason)

    def counted(self, events: bytes, so_far: Usage) -> bytes:
        """Events of this answer with the usage so far in place of their null. Its mark holds line ends, which no JSON
        string does, so it is never part of a text."""
        return events.replace(self._end, b',"usage":' + _encode(usage_object(so_far)) + b"}\n\n")

    def check_whole(self) -> None:
        """A stream that has ended without its finish reasons was cut, whatever the engine says."""
        if self._unfinished:
            raise StreamInterrupted("The engine's stream ended before the answer was whole.")

    @abstractmethod
    def _piece(self, chunk: Chunk) -> bytes: ...

    @abstractmethod
    def _finish(self, index: int, reason: FinishReason) -> bytes: ...

    def _usage(self, usage: Usage) -> bytes:
        return self._head + b',"choices":[],"usage":' + _encode(usage_object(usage)) + b"}\n\n"

    def _prefix(self, index: int) -> bytes:
        if not 0 <= index < len(self._prefixes):
            raise EngineProtocolError(f"The engine sent a choice {index} that nobody asked for.")
        return self._prefixes[index]


class ChatEvents(Events):
    object = "chat.completion.chunk"
    text_start = b'"delta":{"content":'
    text_end = b"}"

    def opening(self) -> bytes:
        role = b'"delta":{"role":"assistant","content":""}'
        return b"".join(prefix + role + self._plain_end for prefix in self._prefixes)

    def _piece(self, chunk: Chunk) -> bytes:
        delta: dict[str, Any] = {}
        if chunk.text:
            delta["content"] = chunk.text
        if chunk.reasoning:
            delta |= dict.fromkeys(self._reasoning_fields, chunk.reasoning)
        if chunk.tool_calls is not None:
            delta["tool_calls"] = chunk.tool_calls
        choice = b'"delta":' + _encode(delta) + b',"logprobs":' + _json(_chat_logprobs(chunk.logprobs))
        return self._prefix(chunk.index) + choice + b',"finish_reason":null}]' + self._end

    def _finish(self, index: int, reason: FinishReason) -> bytes:
        choice = b'"delta":{},"logprobs":null,"finish_reason":' + _encode(reason) + b"}]"
        return self._prefix(index) + choice + self._end


class CompletionEvents(Events):
    object = "text_completion"
    text_start = b'"text":'
    text_end = b""

    def _piece(self, chunk: Chunk) -> bytes:
        choice = self.text_start + _encode(chunk.text) + b',"logprobs":' + _json(chunk.logprobs)
        return self._prefix(chunk.index) + choice + b',"finish_reason":null}]' + self._end

    def _finish(self, index: int, reason: FinishReason) -> bytes:
        choice = b'"text":"","logprobs":null,"finish_reason":' + _encode(reason) + b"}]"
        return self._prefix(index) + choice + self._end


def _holds_more_than_text(chunk: Chunk) -> bool:
    return (
        chunk.tool_calls is not None
        or chunk.logprobs is not None
        or chunk.progress is not None
        or bool(chunk.reasoning)
    )


class _Choice:
    """One choice, as far as it has come."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: dict[int, dict[str, Any]] = {}
        self.logprobs: dict[str, list[Any] | None] | None = None
        self.finish_reason: FinishReason | None = None

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        if chunk.reasoning:
            self.reasoning.append(chunk.reasoning)
        if chunk.tool_calls is not None:
            for delta in read_tool_calls(chunk.tool_calls):
                _merge_tool_call(self.tool_calls, delta)
        if chunk.logprobs is not None:
            self._add_logprobs(chunk.logprobs)
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason

    def _add_logprobs(self, logprobs: Raw) -> None:
        """Chat's `{"content": [...]}` and the completions' four lists are both lists under names: join each."""
        decoded = msgspec.json.decode(logprobs)
        if not isinstance(decoded, dict):
            return
        self.logprobs = self.logprobs or {}
        for name, values in decoded.items():
            joined = self.logprobs.setdefault(name, None)
            if joined is None:
                self.logprobs[name] = values if isinstance(values, list) else None
            elif isinstance(values, list):
                joined.extend(values)


class Fold(ABC):
    """A whole stream as one response object."""

    object: str

    def __init__(
        self,
        head: AnswerHead,
        *,
        num_choices: int,
        reasoning_fields: Sequence[str] = REASONING_FIELDS["reasoning_content"],
    ) -> None:
        self._head = head
        self._reasoning_fields = reasoning_fields
        self._choices = [_Choice() for _ in range(num_choices)]
        self._usage: Usage | None = None

    def add(self, chunk: Chunk) -> None:
        if chunk.usage is not None:
            self._usage = chunk.usage
            return
        if not 0 <= chunk.index < len(self._choices):
            raise EngineProtocolError(f"The engine sent a choice {chunk.index} that nobody asked for.")
        self._choices[chunk.index].add(chunk)

    def body(self) -> bytes:
        """The response, once the stream has ended. `StreamInterrupted` if it ended too early."""
        if any(choice.finish_reason is None for choice in self._choices):
            raise StreamInterrupted("The engine's stream ended before the answer was whole.")
        answer: dict[str, Any] = {
            "id": self._head.id,
            "object": self.object,
            "created": self._head.created,
            "model": self._head.model,
            "choices": [
                {
                    "index": index,
                    **self._content(choice),
                    "logprobs": choice.logprobs,
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(self._choices)
            ],
        }
        if self._usage is not None:
            answer["usage"] = usage_object(self._usage)
        return _encode(answer)

    @abstractmethod
    def _content(self, choice: _Choice) -> Mapping[str, Any]: ...


class ChatFold(Fold):
    object = "chat.completion"

    def add(self, chunk: Chunk) -> None:
        if chunk.logprobs is not None:
            chunk = msgspec.structs.replace(chunk, logprobs=_chat_logprobs(chunk.logprobs))
        super().add(chunk)

    def _content(self, choice: _Choice) -> Mapping[str, Any]:
        text = "".join(choice.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not choice.tool_calls else None,
            "refusal": None,
        }
        if choice.reasoning:
            message |= dict.fromkeys(self._reasoning_fields, "".join(choice.reasoning))
        if choice.tool_calls:
            message["tool_calls"] = [choice.tool_calls[index] for index in sorted(choice.tool_calls)]
        return {"message": message}


class CompletionFold(Fold):
    object = "text_completion"

    def _content(self, choice: _Choice) -> Mapping[str, Any]:
        return {"text": "".join(choice.text)}


class _TopLogprob(Struct):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None


class _TokenLogprob(_TopLogprob):
    top_logprobs: list[_TopLogprob] | None = None


class _ChatLogprobs(Struct):
    content: list[_TokenLogprob] | None = None
    refusal: list[_TokenLogprob] | None = None


_logprobs = msgspec.json.Decoder(_ChatLogprobs)


def _chat_logprobs(raw: Raw | None) -> Raw | None:
    """An engine's log-probabilities with every field that OpenAI's have, and none beside; None for nonsense."""
    if raw is None:
        return None
    try:
        told = _logprobs.decode(raw)
    except msgspec.DecodeError:
        return None
    for token in (*(told.content or ()), *(told.refusal or ())):
        token.top_logprobs = token.top_logprobs or []
        for each in (token, *token.top_logprobs):
            each.logprob = UNTOLD_LOGPROB if each.logprob is None else each.logprob
    return Raw(_encode(told))


class _FunctionDelta(Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCallDelta(Struct):
    index: int | None = None
    id: str | None = None
    function: _FunctionDelta | None = None


_tool_calls = msgspec.json.Decoder(list[_ToolCallDelta])


def read_tool_calls(raw: Raw) -> list[_ToolCallDelta]:
    try:
        return _tool_calls.decode(raw)
    except msgspec.DecodeError as error:
        raise EngineProtocolError("The engine sent a tool call that cannot be read.") from error


def _merge_tool_call(calls: dict[int, dict[str, Any]], delta: _ToolCallDelta) -> None:
    """The first delta of a call names it; later ones bring pieces of its arguments."""
    index = len(calls) if delta.index is None else delta.index
    call = calls.setdefault(index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] = delta.id or call["id"]
    function = delta.function or _FunctionDelta()
    call["function"]["name"] = function.name or call["function"]["name"]
    call["function"]["arguments"] += function.arguments or ""


def _json(raw: Raw | None) -> bytes:
    return b"null" if raw is None else bytes(raw)
