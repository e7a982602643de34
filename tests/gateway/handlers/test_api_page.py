"""docs/api.md names every route with who may call it, and every code of an error with its status."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import gateway.app
from adapters.errors import EngineError, GoodgateError, Overloaded, RequestError
from gateway.config import parse_config
from gateway.handlers.response_store import StoreFailed
from gateway.tenants.auth import declared_access
from gateway.tenants.quotas import QuotasUnavailable
from gateway.web.envelope import InternalError
from tests.gateway.rig import fake_model

PAGE = (Path(__file__).parents[3] / "docs/api.md").read_text()
TOLD_TO_CLIENTS = (RequestError, EngineError, Overloaded, QuotasUnavailable, InternalError, StoreFailed)


def rows(page: str) -> Iterator[list[str]]:
    for line in page.splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_page_names_every_route_with_who_may_call_it(tmp_path: Path) -> None:
    app = gateway.app.create_app(parse_config({"models": [fake_model()]}), home=tmp_path)
    served = set()
    for route in app.router.routes():
        access = declared_access(route.handler)
        assert route.resource is not None
        assert access is not None
        if route.method != "HEAD":  # aiohttp adds one to each GET
            served.add((route.method, re.sub(r":[^}]+", "", route.resource.canonical), access.value))
    shown = {
        (method, path, row[1])
        for row in rows(PAGE)
        for method, path in re.findall(r"`(GET|POST|DELETE) ([^`]+)`", row[0])
        if row[1] in ("public", "keyed", "admin")
    }
    assert shown == served


def test_the_page_names_every_code_of_an_error_with_its_status() -> None:
    raised = {(kind.status, kind.code) for root in TOLD_TO_CLIENTS for kind in [root, *kinds_of(root)] if kind.code}
    shown: set[tuple[int, str | None]] = set()
    for statuses, codes, *_ in (row for row in rows(PAGE) if len(row) == 3 and re.match(r"\d{3}", row[0])):
        each, names = [int(status) for status in statuses.split(", ")], re.findall(r"`(\w+)`", codes)
        shown |= set(zip(each * len(names) if len(each) == 1 else each, names, strict=True))
    assert shown == raised


def kinds_of(root: type[GoodgateError]) -> Iterator[type[GoodgateError]]:
    for kind in root.__subclasses__():
        if kind.__module__.startswith(("gateway.", "adapters.")):
            yield kind
            yield from kinds_of(kind)
