"""What one streamed answer said, and when: body pieces with their stamps in, an `Answer` out. No I/O.

    reader = AnswerReader()
    reader.feed(t_ns, body)                       # events, JSON, token stamps
    reader.answer(http=200, fault=None)           # what happened, and whether it counts as an answer

Whoever reads an engine's stream reads it here: a cell's recorder from the pieces of `arena.load.response_reader`, and
probes and bursts as it comes, so that an engine is probed for what will be counted. The cells' stamps are taken before
anything is parsed, and parsing waits until the answer has ended, so that neither delays the stamp of a neighbour. An
event carries the stamp of the read that completed it.

What counts: the first generated event is the first with non-empty text, reasoning or tool-call arguments; a role alone
is not one. A usage event or `[DONE]` after the last generated event does not extend the answer. An answer is ok only if
the engine said that it ended: `[DONE]`, or a finish reason and a whole body. An error event makes it a failure,
whatever else came. Tokens per event are known where every event brings usage of its own; otherwise each event counts as
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from adapters.errors import EngineProtocolError
from adapters.wire.sse import Event, EventSplitter
from arena.load.spool import REASONING, TEXT, TOOL_CALL, UNREADABLE, Status

MAX_MESSAGE_CHARS = 300
MAX_TEXT_CHARS = 1 << 20  # of a kept text: more than any count of tokens that could be believed needs to bear it out

Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]  # the store's INTEGER


class _Function(msgspec.Struct):
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None  # the completions route
    finish_reason: str | None = None


def _text_of(choice: _Choice) -> str:
    delta = choice.delta
    if delta is None:
        return choice.text or ""
    calls = "".join((call.function.arguments or "") for call in delta.tool_calls or () if call.function)
    return (delta.reasoning_content or delta.reasoning or "") + (choice.text or delta.content or "") + calls


class _PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Payload(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None


_decode = msgspec.json.Decoder(_Payload).decode


def shown(words: str) -> str:
    """The start of foreign words, in one line, without what would move a terminal's cursor."""
    return "".join(each if each.isprintable() else " " for each in words[:MAX_MESSAGE_CHARS])


@dataclass(slots=True)
class Answer:
    """What one response said, and when. Field names are those of `RequestRow`."""

    status: Status = "ok"
    err_class: str | None = None
    err_message: str | None = None
    role_ns: int | None = None
    first_reason_ns: int | None = None
    first_text_ns: int | None = None
    first_gen_ns: int | None = None
    last_gen_ns: int | None = None
    usage_ns: int | None = None
    finish_reason: str | None = None
    in_tok_usage: int | None = None
    out_tok_usage: int | None = None
    reason_tok_usage: int | None = None
    cached_tok: int | None = None
    out_tok_counted: int = 0
    tokens_known: bool = False
    n_chunks: int = 0
    n_recvs: int = 0
    text: str | None = None
    token_ns: list[int] = field(default_factory=list)
    token_n: list[int] = field(default_factory=list)
    token_kind: list[int] = field(default_factory=list)


class AnswerReader:
    """Body pieces of one response in, an `Answer` out. `keeps_text` has it hold what was generated, of every kind."""

    def __init__(self, *, keeps_text: bool = False) -> None:
        self._answer = Answer()
        self._texts: list[str] | None = [] if keeps_text else None
        self._events = EventSplitter()
        self._num_events = 0
        self._is_done = False
        self._start = b""  # of the body, for the message of a refusal
        self._last_ns = 0

    def feed(self, t_ns: int, body: bytes) -> None:
        self._last_ns = t_ns
        self._answer.n_recvs += 1
        if len(self._start) < MAX_MESSAGE_CHARS:
            self._start += body[:MAX_MESSAGE_CHARS]
        try:
            events = self._events.feed(body)
        except EngineProtocolError as error:
            self._fail("bad_event", error.message)
            return
        for event in events:
            self._read(t_ns, event)

    @property
    def has_failed(self) -> bool:
        """An error or something unreadable has come: whatever follows, this is a failure."""
        return self._answer.status == "error"

    def answer(self, *, http: int | None, fault: str | None, is_event_stream: bool = True) -> Answer:
        """The response has ended, well or not: judge it. `http`: its status, None where none came. `fault`: what was
        wrong with its framing, as `ResponseReader.fault` has it. `is_event_stream`: its content type said so.
        """
        for event in self._events.close():
            self._read(self._last_ns, event)
        answer = self._answer
        answer.text = "".join(self._texts)[:MAX_TEXT_CHARS] if self._texts else None
        status, err_class = self._verdict(http, fault, is_event_stream)
        if status == answer.status and err_class == answer.err_class:
            return answer
        answer.status, answer.err_class = status, err_class
        if answer.err_message is None and err_class is not None and err_class.startswith(("http_", "not_a")):
            answer.err_message = shown(self._start.decode("utf-8", "replace"))
        return answer

    def _verdict(self, http: int | None, fault: str | None, is_event_stream: bool) -> tuple[Status, str | None]:
        answer = self._answer
        if fault in ("bad_http", "too_long", "connection_closed"):
            return "error", fault
        if http != 200:
            return "error", f"http_{http}"
        if answer.status == "error":
            return answer.status, answer.err_class
        if self._is_done:
            return "ok", None
        if fault == "cut_off":
            return "truncated", "cut_off"
        if answer.finish_reason is not None:
            return "ok", None
        if not self._num_events and not is_event_stream:
            return "error", "not_a_stream"
        return "truncated", "no_end"

    def _fail(self, err_class: str, message: str) -> None:
        if self._answer.status == "ok":
            self._answer.status = "error"
            self._answer.err_class = err_class
            self._answer.err_message = shown(message)

    def _read(self, t_ns: int, event: Event) -> None:
        self._num_events += 1
        if event.data.strip() == b"[DONE]":
            self._is_done = True
            return
        try:
            payload = _decode(event.data)
        except UNREADABLE as error:
            self._fail("error_event" if event.event == "error" else "bad_event", str(error))
            return
        if payload.error is not None or payload.object == "error" or event.event == "error":
            self._fail("error_event", event.data.decode("utf-8", "replace"))
            return
        kinds = [kind for choice in payload.choices or () if (kind := self._read_choice(t_ns, choice)) is not None]
        if kinds:
            self._generated(t_ns, kinds[0], payload.usage)
        if payload.usage is not None:
            self._account(t_ns, payload.usage)

    def _read_choice(self, t_ns: int, choice: _Choice) -> int | None:
        """Stamp what one choice of an event brings; the kind of its text, or None where it generated nothing."""
        answer = self._answer
        if choice.finish_reason:
            answer.finish_reason = shown(choice.finish_reason)
        delta = choice.delta
        if delta is not None and delta.role and answer.role_ns is None:
            answer.role_ns = t_ns
        if choice.text or (delta is not None and delta.content):
            kind = TEXT
        elif delta is None:
            return None
        elif delta.reasoning_content or delta.reasoning:
            kind = REASONING
        elif any(call.function is not None and call.function.arguments for call in delta.tool_calls or ()):
            kind = TOOL_CALL
        else:
            return None
        if self._texts is not None:
            self._texts.append(_text_of(choice))
        if kind == TEXT and answer.first_text_ns is None:
            answer.first_text_ns = t_ns
        if delta is not None and (delta.reasoning_content or delta.reasoning) and answer.first_reason_ns is None:
            answer.first_reason_ns = t_ns
        return kind

    def _generated(self, t_ns: int, kind: int, usage: _Usage | None) -> None:
        answer = self._answer
        total = usage.completion_tokens if usage is not None else None
        if answer.first_gen_ns is None:
            answer.first_gen_ns = t_ns
            answer.tokens_known = total is not None
        elif total is None:
            answer.tokens_known = False
        count = max(total - answer.out_tok_counted, 0) if answer.tokens_known and total is not None else 1
        answer.last_gen_ns = t_ns
        answer.n_chunks += 1
        answer.out_tok_counted += count
        answer.token_ns.append(t_ns)
        answer.token_n.append(count)
        answer.token_kind.append(kind)

    def _account(self, t_ns: int, usage: _Usage) -> None:
        answer = self._answer
        answer.usage_ns = t_ns
        answer.in_tok_usage = usage.prompt_tokens
        answer.out_tok_usage = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            answer.cached_tok = usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens_details is not None:
            answer.reason_tok_usage = usage.completion_tokens_details.reasoning_tokens
