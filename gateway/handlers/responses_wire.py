"""Chunks to what /v1/responses answers: its events one by one, and the object that they add up to. No I/O.

    reply = Reply(body, id=..., model=..., is_kept=True)
    reply.opening()                      # response.created, response.in_progress
    reply.read(chunk)                    # the events of one chunk; raises what makes the answer unbelievable
    reply.check_whole()                  # raises `StreamInterrupted` for a stream that was cut
    reply.ending()                       # response.completed or response.incomplete
    reply.failure(error)                 # instead: response.failed and an `error` event, after which nothing follows
    reply.response()                     # the object, as far as it has come

Reasoning and text take turns, one item at a time. Function calls stay open until the end, because engines may write
the arguments of several at once. An item is `incomplete` where the answer was cut in it. Every token passes through
`read`, so what does not change within an item is encoded once. Source of the shapes: OpenAI's published description of
/v1/responses (openai-openapi 2.3.0).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct

from adapters.errors import EngineProtocolError, GoodgateError, RequestError, StreamInterrupted
from adapters.types import Chunk, FinishReason, Usage
from gateway.handlers.openai_wire import read_tool_calls
from gateway.handlers.responses_body import (
    Item,
    ReasoningOptions,
    ResponseBody,
    TextOptions,
    function_tools,
    new_id,
    text_part,
)

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]

# Why an answer is not whole, in OpenAI's words.
INCOMPLETE: dict[FinishReason, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}

_encode = msgspec.json.Encoder().encode


class _Numbers:
    """The order of the events, which each of them tells."""

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> int:
        number = self._next
        self._next += 1
        return number


class _OutputItem(ABC):
    """One item of the output, as far as it has come."""

    prefix: str
    delta_event: str

    def __init__(self, index: int, numbers: _Numbers) -> None:
        self.id = new_id(self.prefix)
        self.index = index
        self._pieces: list[str] = []
        self._numbers = numbers
        place = _encode({"type": self.delta_event, **self.place()})
        self._delta_head = b"event: %s\ndata: %s" % (self.delta_event.encode(), place[:-1])

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @abstractmethod
    def place(self) -> dict[str, Any]:
        """Where in the output its deltas belong."""

    @abstractmethod
    def item(self, status: Status) -> Item: ...

    @abstractmethod
    def opened(self) -> bytes: ...

    @abstractmethod
    def closed(self, status: Status) -> bytes: ...

    def delta(self, piece: str, rest: bytes = b"") -> bytes:
        self._pieces.append(piece)
        return self._delta_head + b',"delta":%s%s,"sequence_number":%d}\n\n' % (
            _encode(piece),
            rest,
            self._numbers.take(),
        )

    def _event(self, type: str, **fields: Any) -> bytes:
        return event(type, self._numbers, output_index=self.index, **fields)


class _TextItem(_OutputItem):
    """An item of one part that holds text: what the model says, or what it thinks."""

    done_event: str

    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    @abstractmethod
    def part(self) -> dict[str, Any]: ...

    def opened(self) -> bytes:
        added = self._event("response.output_item.added", item={**self.item("in_progress"), "content": []})
        return added + self._event("response.content_part.added", item_id=self.id, content_index=0, part=self.part())

    def closed(self, status: Status) -> bytes:
        done = self._event(self.done_event, item_id=self.id, content_index=0, **self.said())
        part = self._event("response.content_part.done", item_id=self.id, content_index=0, part=self.part())
        return done + part + self._event("response.output_item.done", item=self.item(status))

    def said(self) -> dict[str, Any]:
        return {"text": self.text}


class _Reasoning(_TextItem):
    prefix = "rs"
    delta_event = "response.reasoning_text.delta"
    done_event = "response.reasoning_text.done"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def item(self, status: Status) -> Item:
        return {"id": self.id, "type": "reasoning", "summary": [], "content": [self.part()], "status": status}


class _Said(_TextItem):
    prefix = "msg"
    delta_event = "response.output_text.delta"
    done_event = "response.output_text.done"

    def __init__(self, index: int, numbers: _Numbers) -> None:
        super().__init__(index, numbers)
        self._logprobs: list[dict[str, Any]] = []

    def say(self, text: str, logprobs: Raw | None) -> bytes:
        read = [] if logprobs is None else _read_logprobs(logprobs)
        self._logprobs.extend(read)
        return self.delta(text, b',"logprobs":%s' % _encode(read) if read else b',"logprobs":[]')

    def said(self) -> dict[str, Any]:
        return {"text": self.text, "logprobs": self._logprobs}

    def part(self) -> dict[str, Any]:
        return text_part(self.text, self._logprobs)

    def item(self, status: Status) -> Item:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": [self.part()]}


class _Call(_OutputItem):
    prefix = "fc"
    delta_event = "response.function_call_arguments.delta"

    def __init__(self, index: int, numbers: _Numbers, *, call_id: str, name: str) -> None:
        super().__init__(index, numbers)
        self._call_id = call_id
        self._name = name

    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}

    def item(self, status: Status) -> Item:
        told = {"call_id": self._call_id, "name": self._name, "arguments": self.text}
        return {"id": self.id, "type": "function_call", "status": status, **told}

    def opened(self) -> bytes:
        return self._event("response.output_item.added", item=self.item("in_progress"))

    def closed(self, status: Status) -> bytes:
        done_event = "response.function_call_arguments.done"
        done = self._event(done_event, item_id=self.id, name=self._name, arguments=self.text)
        return done + self._event("response.output_item.done", item=self.item(status))


class Reply:
    """One answer: what has been said of it, and what is left to say."""

    def __init__(self, body: ResponseBody, *, id: str, model: str, is_kept: bool) -> None:
        self.id = id
        self.is_kept = is_kept
        self._created = int(time.time())
        self._completed: int | None = None
        self._head = _head(body, model)
        self._numbers = _Numbers()
        self._items: list[_OutputItem] = []
        self._text: _TextItem | None = None  # what is being said or thought
        self._calls: dict[int, _Call] = {}
        self._latest: _OutputItem | None = None
        self._finish_reason: FinishReason | None = None
        self._usage: Usage | None = None

    @property
    def output(self) -> list[Item]:
        return [item.item(self._status_of(item)) for item in self._items]

    def opening(self) -> bytes:
        return self._tell("response.created") + self._tell("response.in_progress")

    def read(self, chunk: Chunk) -> bytes:
        if chunk.usage is not None:
            self._usage = chunk.usage
            return b""
        if chunk.index != 0:
            raise EngineProtocolError(f"The engine sent a choice {chunk.index} that nobody asked for.")
        if self._finish_reason is not None:
            raise EngineProtocolError("The engine went on after it had finished.")
        events = b""
        if chunk.reasoning:
            events += self._reason(chunk.reasoning)
        if chunk.text:
            events += self._say(chunk.text, chunk.logprobs)
        if chunk.tool_calls is not None:
            for delta in read_tool_calls(chunk.tool_calls):
                name, arguments = (delta.function.name, delta.function.arguments) if delta.function else (None, None)
                events += self._call(delta.index, delta.id, name, arguments or "")
        if chunk.finish_reason is not None:
            events += self._finish(chunk.finish_reason)
        return events

    def check_whole(self) -> None:
        """A stream that has ended without its finish reason was cut, whatever the engine says."""
        if self._finish_reason is None:
            raise StreamInterrupted("The engine's stream ended before the answer was whole.")

    def ending(self) -> bytes:
        return self._tell("response.incomplete" if self._finish_reason in INCOMPLETE else "response.completed")

    def failure(self, error: GoodgateError) -> bytes:
        """Told twice: as the response's own end, and as the event on which official clients raise. `error` is in there
        twice as well, because the reference has it flat and the clients look for it in a field of its own."""
        is_callers_fault = isinstance(error, RequestError)
        told = {"code": "invalid_prompt" if is_callers_fault else "server_error", "message": error.message}
        failed = event("response.failed", self._numbers, response=self._response("failed", told))
        return failed + _error_event(error, self._numbers)

    def response(self) -> dict[str, Any]:
        """The object as it stands, without what a cut answer would claim."""
        if self._finish_reason is None:
            return self._response("in_progress")
        return self._response("incomplete" if self._finish_reason in INCOMPLETE else "completed")

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        reason = None if self._finish_reason is None else INCOMPLETE.get(self._finish_reason)
        whole = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": self._completed if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "output": self.output,
            "store": self.is_kept,
            **self._head,
        }
        if self._usage is not None:
            whole["usage"] = _usage_object(self._usage)
        return whole

    def _tell(self, type: str) -> bytes:
        return event(type, self._numbers, response=self.response())

    def _reason(self, text: str) -> bytes:
        opened = b""
        if not isinstance(self._text, _Reasoning):
            opened = self._open(_Reasoning(len(self._items), self._numbers))
        assert self._text is not None
        self._latest = self._text
        return opened + self._text.delta(text)

    def _say(self, text: str, logprobs: Raw | None) -> bytes:
        said, opened = self._text, b""
        if not isinstance(said, _Said):
            said = _Said(len(self._items), self._numbers)
            opened = self._open(said)
        self._latest = said
        return opened + said.say(text, logprobs)

    def _call(self, index: int | None, call_id: str | None, name: str | None, arguments: str) -> bytes:
        index = len(self._calls) if index is None else index
        call, opened = self._calls.get(index), b""
        if call is None:
            if not call_id or not name:
                raise EngineProtocolError("The engine sent a tool call without its id and name.")
            opened = self._close_text()
            call = self._calls[index] = _Call(len(self._items), self._numbers, call_id=call_id, name=name)
            self._items.append(call)
            opened += call.opened()
        self._latest = call
        return opened + (call.delta(arguments) if arguments else b"")

    def _open(self, item: _TextItem) -> bytes:
        closed = self._close_text()
        self._items.append(item)
        self._text = self._latest = item
        return closed + item.opened()

    def _close_text(self) -> bytes:
        text, self._text = self._text, None
        return b"" if text is None else text.closed("completed")

    def _finish(self, reason: FinishReason) -> bytes:
        events = b"" if self._items else self._open(_Said(0, self._numbers))  # an empty answer is an answer too
        self._finish_reason = reason
        self._completed = None if reason in INCOMPLETE else int(time.time())
        still_open = [item for item in self._items if item is self._text or isinstance(item, _Call)]
        for item in still_open:
            events += item.closed(self._status_of(item))
        return events

    def _status_of(self, item: _OutputItem) -> Status:
        if self._finish_reason is not None:
            is_cut = self._finish_reason in INCOMPLETE and item is self._latest
            return "incomplete" if is_cut else "completed"
        return "incomplete" if item is self._text or isinstance(item, _Call) else "completed"


def error_event(error: GoodgateError) -> bytes:
    """The whole stream of a response that has not begun."""
    return _error_event(error, _Numbers())


def _error_event(error: GoodgateError, numbers: _Numbers) -> bytes:
    details = {"message": error.message, "code": error.code or error.type, "param": error.param}
    return event("error", numbers, **details, error={"type": error.type, **details})


def event(type: str, numbers: _Numbers, **fields: Any) -> bytes:
    data = {"type": type, "sequence_number": numbers.take(), **fields}
    return b"event: %s\ndata: %s\n\n" % (type.encode(), _encode(data))


def _head(body: ResponseBody, model: str) -> dict[str, Any]:
    """What the caller asked for, as the object repeats it. What was not asked for is the engine's own affair: null."""
    text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
    wanted = text.format
    form: dict[str, Any] = {"type": "text"} if wanted is None else {"type": wanted.type}
    if wanted is not None and wanted.type == "json_schema":
        form |= {"name": wanted.name, "schema": wanted.schema, "strict": wanted.strict}
        form |= {} if wanted.description is None else {"description": wanted.description}
    head = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": body.temperature,
        "text": {"format": form} if text.verbosity is None else {"format": form, "verbosity": text.verbosity},
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {"type": "function", **{name: getattr(tool, name) for name in tool.__struct_fields__}}
            for tool in function_tools(body)
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
    }
    return head if body.user is None else {**head, "user": body.user}


def _usage_object(usage: Usage) -> dict[str, Any]:
    """The details are not optional there. Engines do not tell how many tokens were reasoning or went into a cache."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class _TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Logprob(_TopLogprob):
    top_logprobs: list[_TopLogprob] | None = None


class _Logprobs(Struct):
    content: list[_Logprob] | None = None


_logprobs = msgspec.json.Decoder(_Logprobs)


def _read_logprobs(raw: Raw) -> list[dict[str, Any]]:
    """The chat's log-probabilities; bytes and alternatives, which engines leave out, are not optional here."""
    try:
        told = _logprobs.decode(raw).content or []
    except msgspec.DecodeError as error:
        raise EngineProtocolError("The engine sent log-probabilities that cannot be read.") from error
    return [{**_whole(each), "top_logprobs": [_whole(top) for top in each.top_logprobs or ()]} for each in told]


def _whole(told: _TopLogprob) -> dict[str, Any]:
    spelled = list(told.token.encode()) if told.bytes is None else told.bytes
    return {"token": told.token, "logprob": told.logprob, "bytes": spelled}
