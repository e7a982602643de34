"""Server-sent events without I/O: bytes in, events out, whatever the cuts between reads.

    splitter = EventSplitter()
    async for chunk in response.content.iter_any():
        for event in splitter.feed(chunk):
            ...
    for event in splitter.close():      # only what the last whole lines still held
        ...

Engines differ more than the standard suggests: CR, LF or CRLF line ends (and a CRLF cut between two reads), `data:`
with or without a space, comments, blocks that hold only `event:` or `id:`. All are read; `id`, `retry` and unknown
fields are dropped. Nothing is decoded here, so a UTF-8 character cut in two is whole again when its event is. The
rules are those of https://html.spec.whatwg.org/multipage/server-sent-events.html, with one addition: whole lines
before the end of the stream count as an event even without the blank line, because some engines end `data: [DONE]`
that way. A cut line never does.
"""

from __future__ import annotations

from msgspec import Struct

from adapters.errors import EngineProtocolError

MAX_EVENT_BYTES = 8 << 20
_BOM = b"\xef\xbb\xbf"


class Event(Struct, frozen=True, gc=False):
    """One event. `data` keeps trailing spaces, as the standard says; `event` is empty where the stream names none."""

    data: bytes
    event: str = ""


class EventSplitter:
    """Feed it whatever was read. It holds at most one unfinished event, of at most `max_event_bytes`."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES, *, who: str = "The engine") -> None:
        self._max_event_bytes = max_event_bytes
        self._who = who  # for the message of an error
        self._parts: list[bytes] = []  # the unfinished event, joined only when it ends: long ones stay linear
        self._num_held = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[Event]:
        """Every event that `chunk` completes. Raises `EngineProtocolError` for one that is too large."""
        is_one_event = (  # nearly every read of a stream: of one line, with nothing before it and nothing after
            not self._parts
            and not self._after_cr
            and chunk.startswith(b"data: ")
            and chunk.endswith(b"\n\n")
            and chunk.find(b"\n") == len(chunk) - 2 <= self._max_event_bytes
            and b"\r" not in chunk
        )
        if is_one_event:
            self._at_start = False
            return [Event(chunk[6:-2])]
        chunk = self._with_lf_only(chunk)
        if not chunk:
            return []
        ends_here = b"\n\n" in chunk or (chunk[0] == 10 and bool(self._parts) and self._parts[-1][-1] == 10)
        if not ends_here:
            self._hold(chunk)
            return []
        blocks = b"".join([*self._parts, chunk]).split(b"\n\n")
        self._parts, self._num_held = [], 0
        if blocks[-1]:
            self._hold(blocks[-1])
        return self._events(blocks[:-1])

    def close(self) -> list[Event]:
        """The stream has ended: the whole lines still held make the last event, a cut line is dropped."""
        held = b"".join(self._parts)
        self._parts, self._num_held = [], 0
        lines, newline, _cut = held.rpartition(b"\n")
        return self._events([lines]) if newline else []

    def _with_lf_only(self, chunk: bytes) -> bytes:
        """Line ends become LF. A CR counts at once, and an LF that opens the next read is dropped as part of it."""
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if b"\r" not in chunk:
            return chunk
        self._after_cr = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _hold(self, part: bytes) -> None:
        self._parts.append(part)
        self._num_held += len(part)
        if self._num_held - part.endswith(b"\n") > self._max_event_bytes:
            raise self._too_large()

    def _events(self, blocks: list[bytes]) -> list[Event]:
        events: list[Event] = []
        for block in blocks:
            if len(block) > self._max_event_bytes:
                raise self._too_large()
            if block.startswith(b"data: ") and b"\n" not in block:  # nearly every event of every engine
                events.append(Event(block[6:]))
            else:
                event = _parse(block.removeprefix(_BOM) if self._at_start else block)
                if event is not None:
                    events.append(event)
            self._at_start = False
        return events

    def _too_large(self) -> EngineProtocolError:
        return EngineProtocolError(f"{self._who} sent a stream event larger than {self._max_event_bytes} bytes.")


def _parse(block: bytes) -> Event | None:
    """An event from its lines; None where no line holds data."""
    data: list[bytes] = []
    name = b""
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return Event(b"\n".join(data), name.decode("utf-8", "replace")) if data else None


def encode(data: bytes, event: str = "") -> bytes:
    """One event as bytes. Line ends inside `data` become further `data:` lines, so nothing in it can forge an event."""
    name = f"event: {event}\n".encode() if event else b""
    if b"\n" in data or b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    return name + b"data: " + data + b"\n\n"
