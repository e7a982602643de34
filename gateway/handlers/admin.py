"""What operators and their tools ask: is the process alive, can it serve, what has it counted, who is in the fleet.

GET /health    GET /ready    GET /metrics    GET /admin/status    GET /admin/prefixes
POST /admin/reload    POST /admin/models/{name}/load    POST /admin/models/{name}/unload
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from aiohttp import web

from adapters.errors import InvalidRequest, RequestError
from gateway.admission.open_requests import OpenRequests
from gateway.config import ConfigError
from gateway.records.metrics import CONTENT_TYPE, Metrics
from gateway.records.prefixes import PrefixWatch
from gateway.records.trace import TRACE
from gateway.reload.reloader import Reloader
from gateway.replicas.fleet import Fleet
from gateway.replicas.loader import Loader
from gateway.replicas.replica import Replica, ServedModel
from gateway.routing.proofs import Proofs
from gateway.tenants.auth import admin, public
from gateway.web.envelope import JSON


class ConfigRefused(RequestError):
    """The file says what cannot be served."""

    status = 422
    code = "config_error"


class AdminHandlers:
    def __init__(
        self,
        open_requests: OpenRequests,
        fleet: Fleet,
        loader: Loader,
        metrics: Metrics,
        prefixes: PrefixWatch,
        proofs: Proofs,
        reloader: Reloader | None,
    ) -> None:
        self._open_requests = open_requests
        self._fleet = fleet
        self._loader = loader
        self._metrics = metrics
        self._prefixes = prefixes
        self._proofs = proofs
        self._reloader = reloader  # None where the configuration comes from no file

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", public(self.health)),
            web.get("/ready", public(self.ready)),
            web.get("/metrics", admin(self.metrics)),
            web.get("/admin/status", admin(self.status)),
            web.get("/admin/prefixes", admin(self.prefixes)),
            web.post("/admin/reload", admin(self.reload)),
            web.post("/admin/models/{name:.+}/load", admin(self.load)),
            web.post("/admin/models/{name:.+}/unload", admin(self.unload)),
        ]

    async def health(self, _: web.Request) -> web.Response:
        return _json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """200 when every model has a replica that can serve, or would have if it was asked for, and the gateway is not
        shutting down."""
        waiting = {
            model.name: {replica.name: replica.reason for replica in model.replicas}
            for model in self._fleet.models.values()
            if not model.can_serve
        }
        if self._open_requests.is_ending:
            return _json_response({"status": "draining"}, 503)
        return _json_response(
            {"status": "starting", "waiting_for": waiting} if waiting else {"status": "ready"}, 503 if waiting else 200
        )

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def prefixes(self, _: web.Request) -> web.Response:
        """What tenants get from prefix caches, with advice where their prompts spoil it."""
        return _json_response(await asyncio.to_thread(self._prefixes.report))

    async def status(self, _: web.Request) -> web.Response:
        return _json_response(
            {
                "status": "draining" if self._open_requests.is_ending else "serving",
                "uptime_s": round(time.time() - self._fleet.created),
                "in_flight": self._open_requests.in_flight,
                "config": None if self._reloader is None else self._reloader.status(),
                "models": [self._model_status(model) for model in self._fleet.models.values()],
                "groups": [_group_status(group) for group in self._fleet.groups.values()],
                "leaving": [
                    {"model": replica.model, **_replica_status(replica)} for replica in self._fleet.departures.replicas
                ],
            }
        )

    async def reload(self, _: web.Request) -> web.Response:
        """Read the configuration again; answered when it is in force, or with why it is refused."""
        if self._reloader is None:
            raise InvalidRequest("This gateway's configuration comes from no file; start another one with another.")
        try:
            outcome = await self._reloader.reload("request")
        except ConfigError as error:
            raise ConfigRefused(error.message) from error
        return _json_response(outcome)

    async def load(self, request: web.Request) -> web.Response:
        """Load a model before anybody asks for it; answered when it can serve."""
        model, trace = self._fleet.resolve(request.match_info["name"]), request[TRACE]
        trace.model = model.name
        await self._loader.load(model, trace)
        return _json_response(self._model_status(model))

    async def unload(self, request: web.Request) -> web.Response:
        """Unload a model that nobody uses; answered when its memory is free."""
        model = self._fleet.resolve(request.match_info["name"])
        request[TRACE].model = model.name
        await self._loader.unload(model)
        return _json_response(self._model_status(model))

    def _model_status(self, model: ServedModel) -> dict[str, Any]:
        return {
            "name": model.name,
            "aliases": model.config.aliases,
            "routing": model.config.routing,
            "fallbacks": model.config.fallbacks,
            "context_fallbacks": model.config.context_fallbacks,
            "ready": model.is_ready,
            "on_demand": self._loader.status(model),
            "replicas": [
                {**_replica_status(replica), "proven": self._proofs.of(replica, time.perf_counter())}
                for replica in model.replicas
            ],
        }


def _group_status(group: ServedModel) -> dict[str, Any]:
    return {
        "name": group.name,
        "aliases": group.config.aliases,
        "models": list(dict.fromkeys(replica.model for replica in group.replicas)),
        "routing": group.config.routing,
        "fallbacks": group.config.fallbacks,
        "context_fallbacks": group.config.context_fallbacks,
        "ready": group.is_ready,
    }


def _replica_status(replica: Replica) -> dict[str, Any]:
    return {
        "name": replica.name,
        "engine": replica.engine,
        "state": replica.state.value,
        "reason": replica.details or replica.reason,
        "standing": replica.standing.report(time.perf_counter()),
        "in_flight": replica.in_flight,
        "load": replica.load,
        "launched": replica.config.launch,
        "leaving": replica.is_leaving,
        "restarts": replica.num_restarts,
    }


def _json_response(data: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), status=status, content_type=JSON)
