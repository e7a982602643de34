"""Reading one streamed answer without I/O, in two stages that run at different times.

    socket read -> stamp -> `ResponseReader.feed(t_ns, data)`        in the hot path: HTTP framing only
    afterwards           -> `AnswerReader.feed(t_ns, body)`          beside it: events, JSON, token stamps
                         -> `AnswerReader.answer(response)`          what happened, and whether it counts as an answer

The stamp is taken before anything is parsed, and parsing waits until the answer has ended, so that neither delays the
stamp of a neighbour. An event carries the stamp of the read that completed it.

What counts: the first generated event is the first with non-empty text, reasoning or tool-call arguments; a role alone
is not one. A usage event or `[DONE]` after the last generated event does not extend the answer. An answer is ok only if
the engine said that it ended: `[DONE]`, or a finish reason and a whole body. An error event makes it a failure,
whatever else came. Tokens per event are known where every event brings usage of its own; otherwise each event counts as
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from adapters.errors import EngineProtocolError
from adapters.wire.sse import Event, EventSplitter
from arena.load.spool import REASONING, TEXT, TOOL_CALL, Status

MAX_HEAD_BYTES = 64 << 10
MAX_MESSAGE_CHARS = 300
MAX_INTERIM_RESPONSES = 16


class _BadFraming(Exception):
    """The bytes are not HTTP/1.1 as we know it."""


class ResponseReader:
    """Framing of one HTTP/1.1 response. `reads` holds what came of the body, each piece with its stamp."""

    def __init__(self) -> None:
        self.http: int | None = None
        self.headers: dict[str, str] = {}
        self.first_byte_ns: int | None = None
        self.reads: list[tuple[int, bytes]] = []
        self.is_complete = False  # nothing more belongs to this response, for good or ill
        self.keeps_alive = False  # the connection may carry another request
        self.fault: str | None = None  # "bad_http", "cut_off" or "connection_closed"
        self._stage: Callable[[bytes], bytes] = self._head
        self._buffer = b""
        self._left = 0  # of a body with a length
        self._chunk_left = 0
        self._num_interim = 0

    def feed(self, t_ns: int, data: bytes) -> bool:
        """Take one read. True when the response is complete."""
        if self.first_byte_ns is None:
            self.first_byte_ns = t_ns
        try:
            body = self._stage(data)
        except _BadFraming:
            self._fail("bad_http")
            return True
        if body:
            self.reads.append((t_ns, body))
        return self.is_complete

    def end(self) -> None:
        """The connection is gone. A body without length or chunks ends that way; any other is cut off."""
        if self.is_complete:
            return
        if self._stage == self._until_close:
            self.is_complete = True
        else:
            self._fail("cut_off" if self.http is not None else "connection_closed")

    def _fail(self, fault: str) -> None:
        self.fault = fault
        self.is_complete = True
        self.keeps_alive = False

    def _finish(self, rest: bytes) -> None:
        self.is_complete = True
        if rest:  # bytes that nobody asked for: this connection cannot be trusted with another request
            self.keeps_alive = False

    def _head(self, data: bytes) -> bytes:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise _BadFraming
            return b""
        version, code, self.headers = _parse_head(head)
        self._buffer = b""
        if 100 <= code < 200:  # an interim response; the real one follows
            self._num_interim += 1
            if self._num_interim > MAX_INTERIM_RESPONSES:
                raise _BadFraming
            return self._head(rest) if rest else b""
        self.http = code
        connection = self.headers.get("connection", "").lower()
        self.keeps_alive = "close" not in connection and (version == b"HTTP/1.1" or "keep-alive" in connection)
        self._stage = self._body_stage(code)
        if self.is_complete:
            self._finish(rest)
            return b""
        return self._stage(rest) if rest else b""

    def _body_stage(self, code: int) -> Callable[[bytes], bytes]:
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return self._chunks
        if (length := self.headers.get("content-length")) is not None or code in (204, 304):
            if length is not None and not re.fullmatch("[0-9]{1,18}", length):
                raise _BadFraming
            self._left = int(length or 0)
            self.is_complete = self._left == 0
            return self._with_length
        self.keeps_alive = False
        return self._until_close

    def _with_length(self, data: bytes) -> bytes:
        body = data[: self._left]
        self._left -= len(body)
        if not self._left:
            self._finish(data[len(body) :])
        return body

    def _until_close(self, data: bytes) -> bytes:
        return data

    def _chunks(self, data: bytes) -> bytes:
        """Payload of a piece of a chunked body. `_chunk_left` counts a chunk's payload and the line end after it."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        parts: list[bytes] = []
        at = 0
        while at < len(data):
            if self._chunk_left:
                step = min(self._chunk_left, len(data) - at)
                payload = min(step, max(self._chunk_left - 2, 0))
                parts.append(data[at : at + payload])
                self._chunk_left -= step
                at += step
                continue
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                self._hold(data[at:])
                break
            size = _chunk_size(data[at:line_end])
            at = line_end + 2
            if size == 0:
                self._stage = self._trailer
                self._trailer(data[at:])
                break
            self._chunk_left = size + 2
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _trailer(self, data: bytes) -> bytes:
        """After the last chunk: trailer lines, which nobody reads, then an empty one."""
        lines = self._buffer + data
        self._buffer = b""
        while True:
            line, end, lines_left = lines.partition(b"\r\n")
            if not end:
                self._hold(line)
                return b""
            if not line:
                self._finish(lines_left)
                return b""
            lines = lines_left

    def _hold(self, part: bytes) -> None:
        if len(part) > MAX_HEAD_BYTES:
            raise _BadFraming
        self._buffer = part


def _parse_head(head: bytes) -> tuple[bytes, int, dict[str, str]]:
    status_line, *lines = head.split(b"\r\n")
    parts = status_line.split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not re.fullmatch(b"[1-9][0-9]{2}", parts[1]):
        raise _BadFraming
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise _BadFraming
        headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
    return parts[0], int(parts[1]), headers


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not re.fullmatch(b"[0-9a-fA-F]{1,15}", digits):
        raise _BadFraming
    return int(digits, 16)


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
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Payload(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None


_decode = msgspec.json.Decoder(_Payload).decode


@dataclass(slots=True)
class Answer:
    """What one response said, and when. Field names are those of `RequestRow`."""

    status: Status = "ok"
    err_class: str | None = None
    err_message: str | None = None
    http: int | None = None
    first_byte_ns: int | None = None
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

    def answer(self, response: ResponseReader) -> Answer:
        """The response has ended, well or not: judge it."""
        for event in self._events.close():
            self._read(self._last_ns, event)
        answer = self._answer
        answer.http = response.http
        answer.first_byte_ns = response.first_byte_ns
        answer.text = "".join(self._texts) if self._texts else None
        status, err_class = self._verdict(response)
        if status == answer.status and err_class == answer.err_class:
            return answer
        answer.status, answer.err_class = status, err_class
        if answer.err_message is None and err_class is not None and err_class.startswith(("http_", "not_a")):
            answer.err_message = self._start[:MAX_MESSAGE_CHARS].decode("utf-8", "replace")
        return answer

    def _verdict(self, response: ResponseReader) -> tuple[Status, str | None]:
        answer = self._answer
        if response.fault in ("bad_http", "connection_closed"):
            return "error", response.fault
        if response.http != 200:
            return "error", f"http_{response.http}"
        if answer.status == "error":
            return answer.status, answer.err_class
        if self._is_done:
            return "ok", None
        if response.fault == "cut_off":
            return "truncated", "cut_off"
        if answer.finish_reason is not None:
            return "ok", None
        if not self._num_events and "event-stream" not in response.headers.get("content-type", ""):
            return "error", "not_a_stream"
        return "truncated", "no_end"

    def _fail(self, err_class: str, message: str) -> None:
        if self._answer.status == "ok":
            self._answer.status = "error"
            self._answer.err_class = err_class
            self._answer.err_message = message[:MAX_MESSAGE_CHARS]

    def _read(self, t_ns: int, event: Event) -> None:
        self._num_events += 1
        if event.data == b"[DONE]":
            self._is_done = True
            return
        try:
            payload = _decode(event.data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
            answer.finish_reason = choice.finish_reason
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
