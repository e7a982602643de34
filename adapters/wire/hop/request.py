"""The head of a request, as bytes. What is the same for every request to one route is encoded once.

start = opening("POST", "http://10.0.0.5:8000/v1/chat/completions", {"Authorization": "Bearer ..."})
head(start, {"X-Request-Id": "..."}, len(body))
"""

from __future__ import annotations

from collections.abc import Mapping

from yarl import URL


def opening(method: str, url: str, headers: Mapping[str, str]) -> bytes:
    """The first line, and the headers that stay the same."""
    parsed = URL(url)
    first = f"{method} {parsed.raw_path_qs} HTTP/1.1\r\nHost: {parsed.host_port_subcomponent}\r\n"
    return first.encode() + _lines(headers)


def head(start: bytes, headers: Mapping[str, str], length: int) -> bytes:
    return b"%b%bContent-Length: %d\r\n\r\n" % (start, _lines(headers), length)


def _lines(headers: Mapping[str, str]) -> bytes:
    """Raises `ValueError` for a header that would be read as two."""
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers) or "\0" in text:
        raise ValueError("A header holds a line end.")
    return text.encode()
