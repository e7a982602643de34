"""What autoscalers ask: how much more can the models carry, and how many replicas do they want?

GET /admin/autoscale    GET /admin/autoscale/{model}
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.records.trace import TRACE
from gateway.replicas.directory import Directory
from gateway.routing.autoscale import Autoscale
from gateway.tenants.auth import admin
from gateway.web.envelope import JSON


class AutoscaleHandlers:
    def __init__(self, autoscale: Autoscale, fleet: Directory) -> None:
        self._autoscale = autoscale
        self._fleet = fleet

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/admin/autoscale", admin(self.all)),
            web.get("/admin/autoscale/{name:.+}", admin(self.one)),
        ]

    async def all(self, _: web.Request) -> web.Response:
        return _json({"models": self._autoscale.all()})

    async def one(self, request: web.Request) -> web.Response:
        """Of a group it is the first model: groups have no replicas of their own."""
        model = self._fleet.resolve_one(request.match_info["name"])
        request[TRACE].model = model.name
        return _json(self._autoscale.of(model))


def _json(data: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type=JSON)
