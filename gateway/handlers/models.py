"""Which models there are for the caller, in OpenAI's shape, or in Anthropic's for those who send `anthropic-version`.

GET /v1/models    GET /v1/models/{id}

Listed are the configured models and groups by name; an alias, or a name that a pattern matches, finds its model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from adapters.errors import InvalidRequest
from gateway.records.trace import TRACE
from gateway.replicas.directory import Directory
from gateway.tenants.auth import keyed
from gateway.web import envelope

PAGE_SIZE = 20
MAX_PAGE = 1000


class ModelHandlers:
    def __init__(self, fleet: Directory) -> None:
        self._fleet = fleet
        self._created_at = datetime.fromtimestamp(fleet.created, UTC).isoformat().replace("+00:00", "Z")

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(envelope.MODELS, keyed(self.list_models)),
            web.get(f"{envelope.MODELS}/{{id:.+}}", keyed(self.get_model)),
        ]

    async def list_models(self, request: web.Request) -> web.Response:
        names = [model.name for model in self._fleet.served_to(request[TRACE].caller)]
        if envelope.is_anthropic(request):
            return _json_response(page(list(map(self._anthropic, names)), request.query))
        return _json_response({"object": "list", "data": list(map(self._openai, names))})

    async def get_model(self, request: web.Request) -> web.Response:
        name = self._fleet.resolve(request.match_info["id"], request[TRACE].caller).name
        return _json_response(self._anthropic(name) if envelope.is_anthropic(request) else self._openai(name))

    def _openai(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._fleet.created, "owned_by": "goodgate"}

    def _anthropic(self, name: str) -> dict[str, Any]:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": self._created_at,
            "lifecycle": "active",
            "deprecated_at": None,
        }


def page(models: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Anthropic's page of a list: `limit` models after one id, or before one."""
    limit = _limit(query.get("limit", str(PAGE_SIZE)))
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise InvalidRequest("`after_id` and `before_id` exclude each other; send one.", param="before_id")
    if before is not None:
        rest = models[: _place(models, before, "before_id")]
        shown = rest[-limit:]
    else:
        rest = models if after is None else models[_place(models, after, "after_id") + 1 :]
        shown = rest[:limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"data": shown, "has_more": len(rest) > len(shown), **ends}


def _limit(told: str) -> int:
    if not (told.isascii() and told.isdecimal() and len(told) <= 4 and 1 <= int(told) <= MAX_PAGE):
        raise InvalidRequest(f"`limit` must be a number from 1 to {MAX_PAGE}.", param="limit")
    return int(told)


def _place(models: Sequence[Mapping[str, Any]], id: str, param: str) -> int:
    for place, model in enumerate(models):
        if model["id"] == id:
            return place
    raise InvalidRequest(f"There is no model {id[:64]!r} to go on from.", param=param)


def _json_response(data: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type=envelope.JSON)
