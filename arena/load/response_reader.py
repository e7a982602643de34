"""HTTP/1.1 framing of one response, without I/O: what of each read belongs to the body, with the read's stamp.

    socket read -> stamp -> `ResponseReader.feed(t_ns, data)`    in the hot path: nothing but framing

What the body says is read when the answer has ended, by `arena.load.answer_reader`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 16 << 20  # 32,000 tokens in events of 500 bytes; a thousand endless answers must not fill the memory
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
        self.fault: str | None = None  # "bad_http", "too_long", "cut_off" or "connection_closed"
        self._stage: Callable[[bytes], bytes] = self._head
        self._buffer = b""
        self._left = 0  # of a body with a length
        self._chunk_left = 0
        self._num_interim = 0
        self._body_bytes = 0

    @property
    def is_event_stream(self) -> bool:
        return "event-stream" in self.headers.get("content-type", "")

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
            self._body_bytes += len(body)
            if self._body_bytes > MAX_BODY_BYTES:
                self.reads.clear()
                self._fail("too_long")
                return True
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
