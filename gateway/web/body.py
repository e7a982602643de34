"""Reading a request's body: whether there is room for it is asked first; its type, encoding, size, time and depth are
checked before it is parsed.

body = await read_json(request, config.server)          # bytes of JSON; RequestError, Pressed
"""

from __future__ import annotations

import asyncio
import re
import time
import zlib

from aiohttp import web

from adapters.errors import BodyTooLarge, InvalidRequest, RequestTimeout
from adapters.wire.hop.alarm import patiently
from gateway.config import ServerConfig
from gateway.records.trace import TRACE
from gateway.web.envelope import JSON, BrokenBody, UnsupportedMediaType
from gateway.web.guard import GUARD

# What undoes each encoding: zlib's number for a head of gzip's, and of its own.
ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
MAX_DEPTH = 64
MAX_BRACKETS = 200_000  # objects and lists in one body; bounds the time of the scan, and no honest request comes near
MAX_MEMBERS = 200_000  # of all objects; a million of them take the decoder half a second, in which nothing else goes on

# A whole JSON string; an unfinished one is taken to the end of the text, so that the scan stays linear on any input.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if chr(byte) not in "[]{}")


async def read_json(request: web.Request, limits: ServerConfig) -> bytes:
    """The body's bytes, which claim to be JSON and do not nest too deep."""
    request.app[GUARD].check()
    if request.content_type != JSON:
        raise UnsupportedMediaType(f"Send the request with Content-Type: {JSON}.")
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", *ENCODINGS):
        raise UnsupportedMediaType(f"Send the body plain or with Content-Encoding: {', '.join(ENCODINGS)}.")
    if request.headers.get("Transfer-Encoding", "chunked").lower() != "chunked":
        raise UnsupportedMediaType("Send the body plain or with Transfer-Encoding: chunked.")
    body = await _read(request, limits)
    request[TRACE].body_read = time.perf_counter()
    if encoding in ENCODINGS:
        body = await asyncio.to_thread(_unpack, body, ENCODINGS[encoding], limits.max_body_mib)
    check_depth(body)
    return body


async def _read(request: web.Request, limits: ServerConfig) -> bytes:
    """The body as it came."""
    if request.content_length is not None and request.content_length > limits.max_body_mib << 20:
        raise _too_large(limits.max_body_mib)
    try:
        if request.content.is_eof():  # it came with its headers, as small ones do: no timer is needed
            if request.content_length is not None:
                return request.content.read_nowait()
            return await request.read()
        async with patiently(asyncio.get_running_loop().time() + limits.body_timeout_s):
            return await request.read()
    except TimeoutError as error:
        raise RequestTimeout(f"The body did not arrive within {limits.body_timeout_s:g} s.") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limits.max_body_mib) from error
    except web.RequestPayloadError as error:
        raise BrokenBody from error


def _unpack(body: bytes, window_bits: int, max_mib: int) -> bytes:
    """Undo the encoding of a whole body, and stop as soon as it is too large. Takes up to seconds: not for the loop."""
    unpacker = zlib.decompressobj(window_bits)
    try:
        unpacked = unpacker.decompress(body, (max_mib << 20) + 1)
    except zlib.error as error:
        raise BrokenBody from error
    if len(unpacked) > max_mib << 20:
        raise _too_large(max_mib)
    if not unpacker.eof or unpacker.unused_data:
        raise BrokenBody
    return unpacked


def _too_large(max_mib: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_mib} MiB.")


def check_depth(body: bytes) -> None:
    """Refuse JSON nested deeper than `MAX_DEPTH`, without recursion and in time linear in the body.

    >>> check_depth(b'{"a": [1, 2]}')
    >>> check_depth(b"[" * 65 + b"]" * 65)
    Traceback (most recent call last):
        ...
    adapters.errors.InvalidRequest: The body nests deeper than 64 levels.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH and body.count(b":") <= MAX_MEMBERS:
        return
    without_strings = _STRING.sub(b"", body)
    if without_strings.count(b":") > MAX_MEMBERS:
        raise InvalidRequest(f"The body's objects have more than {MAX_MEMBERS} members.")
    brackets = without_strings.translate(_TO_SQUARE, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_BRACKETS:
        raise InvalidRequest(f"The body holds more than {MAX_BRACKETS} objects and lists.")
    for _ in range(MAX_DEPTH):  # each round takes off the innermost level
        peeled = brackets.replace(b"[]", b"")
        if len(peeled) == len(brackets):
            break
        brackets = peeled
    # What is left is too deep, or was never closed; a few unclosed brackets are for the parser to explain.
    if brackets.count(b"[") > MAX_DEPTH or b"[]" in brackets:
        raise InvalidRequest(f"The body nests deeper than {MAX_DEPTH} levels.")
