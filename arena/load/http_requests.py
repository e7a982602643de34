"""A plan's requests as the bytes that will leave: all of them made before the first is due. Pure.

>>> exchanges(plan, Target("http://127.0.0.1:8080", "smollm2", "native"))[0].payload
b'POST /v1/chat/completions HTTP/1.1\\r\\nHost: ...'
"""

from __future__ import annotations

from urllib.parse import urlsplit

from arena.load.connection import Exchange
from arena.load.plan import CellPlan, PlannedRequest, Target, request_body


def exchanges(plan: CellPlan, target: Target) -> list[Exchange]:
    head = _request_head(target)
    return [
        Exchange(request, plan.is_measured(request), _payload(head, plan.cell_id, request, target))
        for request in plan.requests
    ]


def host_and_port(url: str) -> tuple[str, int]:
    """Where to connect. ValueError for what is not plain HTTP."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError(f"The arena measures plain http:// targets, not {url!r}.")
    return parts.hostname, parts.port or 80


def _request_head(target: Target) -> str:
    url = urlsplit(target.url)
    headers = {
        "Host": url.netloc,
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Accept-Encoding": "identity",  # a compressed stream cannot be stamped event by event
        "User-Agent": "goodgate-arena",
        **target.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {url.path.rstrip('/')}{target.path} HTTP/1.1\r\n{lines}"


def _payload(head: str, cell_id: str, request: PlannedRequest, target: Target) -> bytes:
    body = request_body(request, target)
    own = f"X-Request-Id: {cell_id}-{request.seq}\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + own).encode("latin-1") + body
