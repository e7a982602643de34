"""The gateway as a web application: its routes, what each request passes, and in which order it starts and ends.

request -> recording -> enveloping -> authenticating -> handler -> dispatcher -> fleet's replica -> adapter -> engine
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from adapters import registry
from gateway.config import Config, FindAdapter
from gateway.handlers.admin import AdminHandlers
from gateway.handlers.anthropic import AnthropicHandlers
from gateway.handlers.autoscale import AutoscaleHandlers
from gateway.handlers.models import ModelHandlers
from gateway.handlers.openai import OpenAIHandlers
from gateway.handlers.questions import QuestionHandlers
from gateway.handlers.responses import ResponsesHandlers
from gateway.parts import Parts, parts_of
from gateway.records.trace_context import Sampling
from gateway.reload.reloader import Reloader
from gateway.reload.source import Source
from gateway.replicas import health
from gateway.tenants.auth import authenticating
from gateway.web.guard import GUARD
from gateway.web.middleware import Sink, enveloping, headers_of, log_access, recording

PARTS = web.AppKey("parts", Parts)
RELOADER = web.AppKey("reloader", Reloader)  # absent where the configuration comes from no file


def create_app(
    config: Config,
    *,
    home: Path,
    find_adapter: FindAdapter = registry.adapter_class,
    source: Source | None = None,
    digest: str = "",
) -> web.Application:
    """Keys are known from the first request on. `source` is where the configuration has come from, with `digest`; it is
    looked at again, and what can change while requests are served is read through `live`."""
    parts = parts_of(config, home=home, find_adapter=find_adapter)
    reloader = None if source is None else Reloader(source, parts.live, digest, parts.adopt, parts.metrics)
    app = web.Application(
        middlewares=[
            recording(_sinks(parts), Sampling(is_on=parts.exporter is not None, share=config.tracing.sample)),
            enveloping(parts.open_requests),
            authenticating(parts.ring, config.auth),
        ],
        client_max_size=config.server.max_body_mib << 20,
    )
    app.on_response_prepare.append(headers_of(parts.open_requests))
    app.add_routes(_routes(parts, reloader))
    app.cleanup_ctx.extend([partial(_keeping, parts), partial(_running, parts, reloader)])
    app[PARTS] = parts
    app[GUARD] = parts.guard
    if reloader is not None:
        app[RELOADER] = reloader
    return app


def _sinks(parts: Parts) -> list[Sink]:
    """Who is told of each request when it has ended."""
    sinks: list[Sink] = [parts.metrics.answered, parts.prefixes.answered, parts.autoscale.note]
    if parts.live.config.logs.access:
        sinks.append(log_access)
    if parts.exporter is not None:
        sinks.append(parts.exporter)
    if parts.ledger is not None:
        sinks.append(parts.ledger.note)
    return sinks


def _routes(parts: Parts, reloader: Reloader | None) -> list[web.RouteDef]:
    dispatcher, fleet, live = parts.dispatcher, parts.fleet, parts.live
    admin = AdminHandlers(
        parts.open_requests, fleet, parts.loader, parts.metrics, parts.prefixes, parts.proofs, reloader
    )
    return [
        *OpenAIHandlers(dispatcher, live).routes(),
        *ModelHandlers(fleet).routes(),
        *AnthropicHandlers(dispatcher, fleet, live).routes(),
        *QuestionHandlers(dispatcher, fleet, live).routes(),
        *ResponsesHandlers(dispatcher, live, parts.responses).routes(),
        *admin.routes(),
        *AutoscaleHandlers(parts.autoscale, fleet).routes(),
    ]


async def _keeping(parts: Parts, _: web.Application) -> AsyncIterator[None]:
    """What is kept of requests: open before the first one, and closed after the last."""
    if parts.responses is not None:
        parts.responses.open()
    if parts.exporter is not None:
        parts.exporter.start()
    if parts.ledger is not None:
        parts.ledger.open()
    yield
    if parts.ledger is not None:
        await asyncio.to_thread(parts.ledger.close)
    if parts.exporter is not None:
        await asyncio.to_thread(parts.exporter.close)
    if parts.responses is not None:
        await parts.responses.close()
    await parts.quotas.store.close()


async def _running(parts: Parts, reloader: Reloader | None, _: web.Application) -> AsyncIterator[None]:
    """What goes on beside the requests."""
    parts.fleet.start()
    parts.guard.start()
    watches = [asyncio.create_task(watch, name=name) for name, watch in _watches(parts, reloader).items()]
    yield
    parts.guard.close()
    for watch in watches:
        watch.cancel()
    await asyncio.gather(*watches, return_exceptions=True)
    if parts.ring is not None:
        parts.ring.close()
    await parts.loader.close()
    await parts.fleet.close()


def _watches(parts: Parts, reloader: Reloader | None) -> dict[str, Coroutine[Any, Any, None]]:
    watches = {"health probes": health.watch(parts.fleet, parts.live)}
    if reloader is not None:
        watches["watches the configuration"] = reloader.attend()
    if parts.ring is not None:
        watches["watches the keys"] = parts.ring.watch()
        watches["tends the quotas"] = parts.quotas.store.tend()
    return watches
