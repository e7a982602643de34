"""The wiring: what the gateway is made of, and in which order it starts and stops.

request -> recording -> enveloping -> authenticating -> handler -> dispatcher -> fleet's replica -> adapter -> engine
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from adapters import registry
from gateway.admission.gate import Gates
from gateway.admission.open_requests import OpenRequests
from gateway.config import (
    Config,
    FindAdapter,
    Live,
    QuotasConfig,
    cache_salt_secret,
    quotas_password,
    tracing_headers,
)
from gateway.dispatch import Dispatcher
from gateway.handlers.admin import AdminHandlers
from gateway.handlers.anthropic import AnthropicHandlers
from gateway.handlers.autoscale import AutoscaleHandlers
from gateway.handlers.models import ModelHandlers
from gateway.handlers.openai import OpenAIHandlers
from gateway.handlers.questions import QuestionHandlers
from gateway.handlers.response_store import ResponseStore, store_of
from gateway.handlers.responses import ResponsesHandlers
from gateway.records import logs
from gateway.records.ledger import Ledger
from gateway.records.ledger_files import FOLDER
from gateway.records.metrics import Metrics
from gateway.records.prefixes import PrefixWatch
from gateway.records.spans import SpanExporter
from gateway.records.trace_context import Sampling
from gateway.reload.reloader import Reloader
from gateway.reload.source import Source
from gateway.replicas import health
from gateway.replicas.fleet import Fleet
from gateway.replicas.loader import Loader
from gateway.routing.autoscale import Autoscale
from gateway.routing.evidence import ProvenGoodput
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.proofs import Proofs
from gateway.tenants.auth import authenticating
from gateway.tenants.keys import KeyRing, KeyStore
from gateway.tenants.quotas import Quotas, Store
from gateway.tenants.quotas_file import FileStore
from gateway.tenants.salts import Salts
from gateway.web.guard import GUARD, Guard
from gateway.web.middleware import Sink, enveloping, headers_of, log_access, recording

LIVE = web.AppKey("live", Live)
FLEET = web.AppKey("fleet", Fleet)
LOADER = web.AppKey("loader", Loader)
GATES = web.AppKey("gates", Gates)
OPEN_REQUESTS = web.AppKey("open_requests", OpenRequests)
QUOTAS = web.AppKey("quotas", Quotas)
METRICS = web.AppKey("metrics", Metrics)
PROOFS = web.AppKey("proofs", Proofs)
RESPONSES = web.AppKey("responses", ResponseStore)  # absent where nothing is kept
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
    live = Live(config)
    ring = None if config.auth.required is False else KeyRing(KeyStore(home))
    fleet = Fleet(live, find_adapter=find_adapter, home=home)
    metrics = Metrics(fleet)
    metrics.watch("goodgate_tasks", lambda: (((), len(asyncio.all_tasks())),))
    proven = None
    if config.evidence is not None:
        proven = ProvenGoodput(Path(config.evidence).expanduser(), fleet)
        metrics.watch("goodgate_goodput_proven_rps", proven.rates)
        metrics.watch("goodgate_evidence_timestamp_seconds", proven.measured)
    proofs = Proofs(proven, fleet, live)
    metrics.watch("goodgate_evidence_trusted", proofs.trusted)
    autoscale = Autoscale(fleet, proofs, live)
    autoscale.watched_by(metrics)
    ledger = None
    if config.ledger.keep == "file":
        ledger = Ledger(config.ledger, home / FOLDER, proven=tuple if proven is None else proven.rates)
        metrics.watch("goodgate_ledger_records", ledger.written)
        metrics.watch("goodgate_ledger_dropped", ledger.dropped)
    quotas = Quotas(_store_of_quotas(config.quotas, home))
    metrics.watch("goodgate_unmetered_requests", lambda: (((how,), n) for how, n in quotas.unmetered.items()))
    salts = Salts(config.tenants.isolate_prefix_cache, home, cache_salt_secret(config.tenants))
    prefixes = PrefixWatch(gives_advice=config.prefixes.advice)
    index = PrefixIndex(config.prefixes.index_mib << 20)
    metrics.watch("goodgate_prefix_index_bytes", lambda: (((), index.num_bytes),))
    metrics.watch("goodgate_prefix_index_evictions", lambda: (((), index.num_evicted),))
    guard = Guard(live, metrics)
    loader = Loader(fleet, live, metrics)
    gates = Gates(live, metrics)
    dispatcher = Dispatcher(
        fleet,
        loader,
        gates,
        metrics,
        max_in_flight=config.server.max_in_flight,
        quotas=quotas,
        salts=salts,
        prefixes=prefixes,
        proofs=proofs,
        live=live,
        index=index,
        is_verbatim=config.logs.verbatim,
    )
    store = store_of(config.responses, home)

    exporter = None
    if config.tracing.exporter == "otlp":
        exporter = SpanExporter(config.tracing.endpoint, tracing_headers(config.tracing), fleet, metrics)
    sampling = Sampling(is_on=exporter is not None, share=config.tracing.sample)

    sinks: list[Sink] = [metrics.answered, prefixes.answered, autoscale.note]
    if config.logs.access:
        sinks.append(log_access)
    if exporter is not None:
        sinks.append(exporter)
    if ledger is not None:
        sinks.append(ledger.note)
    app = web.Application(
        middlewares=[
            recording(sinks, sampling),
            enveloping(dispatcher.open_requests),
            authenticating(ring, config.auth),
        ],
        client_max_size=config.server.max_body_mib << 20,
    )
    app.on_response_prepare.append(headers_of(dispatcher.open_requests))
    app.add_routes(OpenAIHandlers(dispatcher, live).routes())
    app.add_routes(ModelHandlers(fleet).routes())
    app.add_routes(AnthropicHandlers(dispatcher, fleet, live).routes())
    app.add_routes(QuestionHandlers(dispatcher, fleet, live).routes())
    app.add_routes(ResponsesHandlers(dispatcher, live, store).routes())

    async def adopt(other: Config) -> list[str]:
        """What can fail comes first; then all of it changes before another request is looked at."""
        plan = await asyncio.to_thread(fleet.plan, other)
        live.config = other
        dispatcher.open_requests.max_in_flight = other.server.max_in_flight
        rotated = fleet.adopt(other, plan)
        gates.adopt()
        loader.adopt()
        proofs.look_at_once()
        logs.set_level(other.logs)
        return [f"models.{replica.model}.replicas.{replica.name} (secret)" for replica in rotated]

    reloader = None if source is None else Reloader(source, live, digest, adopt, metrics)
    app.add_routes(AdminHandlers(dispatcher.open_requests, fleet, loader, metrics, prefixes, proofs, reloader).routes())
    app.add_routes(AutoscaleHandlers(autoscale, fleet).routes())

    async def keeping(_: web.Application) -> AsyncIterator[None]:
        if store is not None:
            store.open()
        if exporter is not None:
            exporter.start()
        if ledger is not None:
            ledger.open()
        yield
        if ledger is not None:
            await asyncio.to_thread(ledger.close)
        if exporter is not None:
            await asyncio.to_thread(exporter.close)
        if store is not None:
            await store.close()
        await quotas.store.close()

    async def running(_: web.Application) -> AsyncIterator[None]:
        fleet.start()
        guard.start()
        probes = asyncio.create_task(health.watch(fleet, live), name="health probes")
        watches = [probes]
        if reloader is not None:
            watches.append(asyncio.create_task(reloader.attend(), name="watches the configuration"))
        if ring is not None:
            watches.append(asyncio.create_task(ring.watch(), name="watches the keys"))
            watches.append(asyncio.create_task(quotas.store.tend(), name="tends the quotas"))
        yield
        guard.close()
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        if ring is not None:
            ring.close()
        await loader.close()
        await fleet.close()

    app.cleanup_ctx.extend([keeping, running])
    app[LIVE] = live
    app[FLEET] = fleet
    app[LOADER] = loader
    app[GATES] = gates
    app[OPEN_REQUESTS] = dispatcher.open_requests
    app[QUOTAS] = quotas
    app[METRICS] = metrics
    app[GUARD] = guard
    app[PROOFS] = proofs
    if store is not None:
        app[RESPONSES] = store
    if reloader is not None:
        app[RELOADER] = reloader
    return app


def _store_of_quotas(config: QuotasConfig, home: Path) -> Store:
    if config.store == "file":
        return FileStore(home)
    from gateway.tenants.quotas_redis import RedisStore  # its library is an extra

    return RedisStore(
        config.store,
        username=config.username,
        password=quotas_password(config),
        prefix=config.prefix,
        timeout_s=config.timeout_s,
        lease_s=config.lease_s,
        allow=config.when_down == "allow",
    )
