"""Whole answers as bytes: one head before one body, on connections that stay and on those that do not."""

from __future__ import annotations

import json

import pytest
from multidict import CIMultiDict

from gateway.web.whole import MAX_AT_ONCE, _head
from tests.gateway.rig import HELLO, Gateway, Start, fake_model, raw


def asked(version: str, *headers: str, **fields: object) -> bytes:
    body = json.dumps({**HELLO, **fields}).encode()
    lines = "".join(f"{header}\r\n" for header in ("Host: x", "Content-Type: application/json", *headers))
    return f"POST /v1/chat/completions {version}\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def split(answer: bytes) -> tuple[bytes, CIMultiDict[str], bytes]:
    """The first line, the headers and all that follows."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return first, CIMultiDict([line.decode().split(": ", 1) for line in lines]), rest


async def text_of(gateway: Gateway, answer: bytes) -> str:
    _, headers, body = split(answer)
    assert len(body) == int(headers["Content-Length"])
    text: str = json.loads(body)["choices"][0]["message"]["content"]
    assert text == (await gateway.chat())[1]["choices"][0]["message"]["content"]
    return text


async def test_a_connection_that_stays_carries_one_answer_after_the_other(start: Start) -> None:
    gateway = await start(fake_model())
    answers = await raw(gateway, asked("HTTP/1.1") + asked("HTTP/1.1", "Connection: close"))
    first, headers, rest = split(answers)
    assert first == b"HTTP/1.1 200 OK"
    assert headers.getall("Content-Type") == ["application/json"]
    assert "Connection" not in headers
    length = int(headers["Content-Length"])
    json.loads(rest[:length])
    first, headers, body = split(rest[length:])
    assert first == b"HTTP/1.1 200 OK"
    assert headers["Connection"] == "close"
    assert len(body) == int(headers["Content-Length"])  # and no more: it was closed


@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",)])
async def test_a_client_of_http_1_0_is_answered_as_it_expects(start: Start, headers: tuple[str, ...]) -> None:
    gateway = await start(fake_model())
    answer = await raw(gateway, asked("HTTP/1.0", *headers), wait_s=1)
    first, told, _ = split(answer)
    assert first == b"HTTP/1.0 200 OK"
    assert told.get("Connection", "close") == ("keep-alive" if headers else "close")
    assert answer.endswith(b"<open>") == bool(headers)
    await text_of(gateway, answer.removesuffix(b"<open>"))


async def test_an_answer_that_is_larger_than_one_write_is_whole(start: Start) -> None:
    gateway = await start(fake_model(tokens=20_000))
    answer = await raw(gateway, asked("HTTP/1.1", "Connection: close", max_tokens=20_000), wait_s=20)
    _, headers, body = split(answer)
    assert len(body) == int(headers["Content-Length"]) > MAX_AT_ONCE
    assert json.loads(body)["usage"]["completion_tokens"] == 20_000


def test_a_header_that_would_be_read_as_two_is_not_sent() -> None:
    with pytest.raises(ValueError, match="line end"):
        _head(CIMultiDict({"x-goodgate-replica": "a\r\nSet-Cookie: b"}).items(), 2)
