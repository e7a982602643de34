"""What broken engines answer, as replies of a twin, and what a caller should be told instead of it.

    for name, bad in BAD_ANSWERS.items():
        twin.reply(path, bad.reply(first))      # `first`: one well-formed event in the engine's words

None of them holds anything that may reach a caller: `LEAK` is in whatever has room for it.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from dataclasses import dataclass

from adapters.errors import (
    EngineFailed,
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    GoodgateError,
    StreamInterrupted,
)
from tests.contract.twin import Reply

LEAK = "xyzzy"
MIB = 1 << 20
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@dataclass(frozen=True)
class BadAnswer:
    """`kind` is the error that a caller sees. `has_begun`: the first event had passed before it went wrong."""

    kind: type[GoodgateError]
    reply: Callable[[bytes], Reply]
    has_begun: bool = False


def in_event(data: bytes) -> Callable[[bytes], Reply]:
    return lambda _: Reply.stream(b"data: " + data + b"\n\n", "hold")


def after_first(*steps: bytes | float | str) -> Callable[[bytes], Reply]:
    return lambda first: Reply.stream(first, *steps)  # type: ignore[arg-type]


def with_text(replaced: bytes) -> Callable[[bytes], Reply]:
    """The first event, with its text replaced by bytes that JSON does not allow there."""
    return lambda first: Reply.stream(re.sub(rb'"x+"', lambda _: b'"' + replaced + b'"', first), "hold")


def sized(length: int, *steps: bytes | str) -> Callable[[bytes], Reply]:
    head = SSE_HEAD + b"Content-Length: %d\r\n\r\n" % length
    return lambda first: Reply.raw(head + first, *steps)  # type: ignore[arg-type]


Protocol, Failed, Cut = EngineProtocolError, EngineFailed, StreamInterrupted

BAD_ANSWERS: dict[str, BadAnswer] = {
    # Instead of an answer
    "a page of HTML": BadAnswer(Protocol, lambda _: Reply.plain(200, f"<html>{LEAK}</html>".encode(), "text/html")),
    "plain text": BadAnswer(Protocol, lambda _: Reply.plain(200, LEAK.encode(), "text/plain")),
    "JSON instead of a stream": BadAnswer(Protocol, lambda _: Reply.plain(200, {LEAK: LEAK})),
    "nothing at all": BadAnswer(Protocol, lambda _: Reply.plain(200, b"")),
    "no content": BadAnswer(Protocol, lambda _: Reply.plain(204, b"")),
    "a redirect": BadAnswer(Protocol, lambda _: Reply.plain(302, b"", Location=f"http://127.0.0.1:1/{LEAK}")),
    "500 with a page of HTML": BadAnswer(Failed, lambda _: Reply.plain(500, f"<b>{LEAK}".encode(), "text/html")),
    "500 with half a JSON object": BadAnswer(Failed, lambda _: Reply.plain(500, b'{"error": {"message": ')),
    "500 with 100,000 brackets": BadAnswer(Failed, lambda _: Reply.plain(500, b"[" * 100_000)),
    "100,000 brackets": BadAnswer(Protocol, lambda _: Reply.plain(200, b"[" * 100_000)),
    "502 of a proxy": BadAnswer(Failed, lambda _: Reply.plain(502, f"<html>{LEAK}</html>".encode(), "text/html")),
    # Instead of HTTP
    "bytes of TLS": BadAnswer(Protocol, lambda _: Reply.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")),
    "a status that is no number": BadAnswer(Protocol, lambda _: Reply.raw(b"HTTP/1.1 OK xyzzy\r\n\r\n")),
    "a header of 1 MiB": BadAnswer(Protocol, lambda _: Reply.raw(SSE_HEAD + b"X-A: " + b"y" * MIB, "hold")),
    "headers without end": BadAnswer(
        Protocol, lambda _: Reply.raw(SSE_HEAD, *([b"".join(b"X-%d: y\r\n" % n for n in range(5000))] * 40), "hold")
    ),
    "two lengths": BadAnswer(
        Protocol, lambda _: Reply.raw(SSE_HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "hold")
    ),
    "a closed connection": BadAnswer(EngineUnavailable, lambda _: Reply.dropped()),
    "half a head": BadAnswer(EngineUnavailable, lambda _: Reply.raw(SSE_HEAD)),
    "silence": BadAnswer(EngineTimeout, lambda _: Reply.silent()),
    # Inside the stream
    "HTML in an event": BadAnswer(Protocol, in_event(f"<html>{LEAK}</html>".encode())),
    "half a JSON object in an event": BadAnswer(Protocol, in_event(b'{"choices": [{"delta": {"content": "xyzzy')),
    "a number in an event": BadAnswer(Protocol, in_event(b"17")),
    "a list in an event": BadAnswer(Protocol, in_event(b'["xyzzy"]')),
    "100,000 brackets in an event": BadAnswer(Protocol, in_event(b"[" * 100_000)),
    "an event of 16 MiB": BadAnswer(Protocol, in_event(b'{"x": "' + b"y" * (16 * MIB) + b'"}')),
    "a NUL byte in the text": BadAnswer(Protocol, with_text(b"a\x00b")),
    "invalid UTF-8 in the text": BadAnswer(Protocol, with_text(b"a\xff\xfeb")),
    "half a character in the text": BadAnswer(Protocol, with_text(b"a\xc3")),
    "NaN in an event": BadAnswer(Protocol, lambda first: Reply.stream(first[:-3] + b', "extra": NaN}\n\n', "hold")),
    "comments only": BadAnswer(EngineTimeout, lambda _: Reply.stream(*[b": keep-alive\n\n"] * 2000, "hold")),
    "events that say nothing": BadAnswer(Cut, lambda _: Reply.stream(b"event: ping\n\nid: 7\n\n:\n\n")),
    # How it ends
    "an end in front of the first event": BadAnswer(Cut, lambda _: Reply.stream()),
    "a chunk that is cut": BadAnswer(
        Cut,
        lambda first: Reply.raw(
            SSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(first), first) + b"ffff\r\ndata: "
        ),
        has_begun=True,
    ),
    "a chunk size that is no number": BadAnswer(
        Cut,
        lambda first: Reply.raw(
            SSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(first), first),
            0.02,
            b"xyzzy\r\n",
            "hold",
        ),
        has_begun=True,
    ),
    "fewer bytes than announced": BadAnswer(Cut, sized(10_000), has_begun=True),
    "a reset": BadAnswer(Cut, after_first(0.05, "reset"), has_begun=True),
    "an end without a reason": BadAnswer(Cut, after_first(), has_begun=True),
    "gzip that is none": BadAnswer(Cut, lambda first: Reply.stream(first, Content_Encoding="gzip")),
    "gzip that is cut": BadAnswer(
        Cut, lambda first: Reply.stream(gzip.compress(first * 1000)[:40], Content_Encoding="gzip")
    ),
}
