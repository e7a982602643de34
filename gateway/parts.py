"""What a gateway is made of, by its configuration. Nothing of it runs yet: app.py starts and ends it.

    parts = parts_of(config, home=home, find_adapter=registry.adapter_class)
    parts.dispatcher.open(...)                     # requests
    await parts.adopt(other)                       # another configuration, while requests are served

What is not configured is None here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

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
from gateway.handlers.response_store import ResponseStore, store_of
from gateway.records import logs
from gateway.records.ledger import Ledger
from gateway.records.ledger_files import FOLDER
from gateway.records.metrics import Metrics
from gateway.records.prefixes import PrefixWatch
from gateway.records.spans import SpanExporter
from gateway.replicas.fleet import Fleet
from gateway.replicas.loader import Loader
from gateway.routing.autoscale import Autoscale
from gateway.routing.evidence import ProvenGoodput
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.proofs import Proofs
from gateway.tenants.keys import KeyRing, KeyStore
from gateway.tenants.quotas import Quotas, Store
from gateway.tenants.quotas_file import FileStore
from gateway.tenants.salts import Salts
from gateway.web.guard import Guard


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    live: Live
    guard: Guard
    ring: KeyRing | None
    quotas: Quotas
    fleet: Fleet
    loader: Loader
    gates: Gates
    proofs: Proofs
    autoscale: Autoscale
    dispatcher: Dispatcher
    metrics: Metrics
    prefixes: PrefixWatch
    ledger: Ledger | None
    exporter: SpanExporter | None
    responses: ResponseStore | None

    @property
    def open_requests(self) -> OpenRequests:
        return self.dispatcher.open_requests

    async def adopt(self, other: Config) -> list[str]:
        """What can fail comes first; then all of it changes before another request is looked at. Returns the replicas
        of which only a secret is another."""
        plan = await asyncio.to_thread(self.fleet.plan, other)
        self.live.config = other
        self.open_requests.max_in_flight = other.server.max_in_flight
        rotated = self.fleet.adopt(other, plan)
        self.gates.adopt()
        self.loader.adopt()
        self.proofs.look_at_once()
        logs.set_level(other.logs)
        return [f"models.{replica.model}.replicas.{replica.name} (secret)" for replica in rotated]


def parts_of(config: Config, *, home: Path, find_adapter: FindAdapter) -> Parts:
    live = Live(config)
    fleet = Fleet(live, find_adapter=find_adapter, home=home)
    metrics = Metrics(fleet)
    proven = None if config.evidence is None else ProvenGoodput(Path(config.evidence).expanduser(), fleet)
    proofs = Proofs(proven, fleet, live)
    quotas = Quotas(_store_of_quotas(config.quotas, home))
    prefixes = PrefixWatch(gives_advice=config.prefixes.advice)
    index = PrefixIndex(config.prefixes.index_mib << 20)
    loader = Loader(fleet, live, metrics)
    gates = Gates(live, metrics)
    dispatcher = Dispatcher(
        fleet,
        loader,
        gates,
        metrics,
        max_in_flight=config.server.max_in_flight,
        quotas=quotas,
        salts=Salts(config.tenants.isolate_prefix_cache, home, cache_salt_secret(config.tenants)),
        prefixes=prefixes,
        proofs=proofs,
        live=live,
        index=index,
        is_verbatim=config.logs.verbatim,
    )
    parts = Parts(
        live=live,
        guard=Guard(live, metrics),
        ring=None if config.auth.required is False else KeyRing(KeyStore(home)),
        quotas=quotas,
        fleet=fleet,
        loader=loader,
        gates=gates,
        proofs=proofs,
        autoscale=Autoscale(fleet, proofs, live),
        dispatcher=dispatcher,
        metrics=metrics,
        prefixes=prefixes,
        ledger=_ledger(config, home, proven),
        exporter=_exporter(config, fleet, metrics),
        responses=store_of(config.responses, home),
    )
    _watch(parts, proven, index)
    return parts


def _watch(parts: Parts, proven: ProvenGoodput | None, index: PrefixIndex) -> None:
    """The figures that are read when somebody scrapes them, of parts that do not say so themselves."""
    watch = parts.metrics.watch
    watch("goodgate_tasks", lambda: (((), len(asyncio.all_tasks())),))
    watch("goodgate_unmetered_requests", lambda: (((how,), n) for how, n in parts.quotas.unmetered.items()))
    watch("goodgate_prefix_index_bytes", lambda: (((), index.num_bytes),))
    watch("goodgate_prefix_index_evictions", lambda: (((), index.num_evicted),))
    watch("goodgate_evidence_trusted", parts.proofs.trusted)
    parts.autoscale.watched_by(parts.metrics)
    if proven is not None:
        watch("goodgate_goodput_proven_rps", proven.rates)
        watch("goodgate_evidence_timestamp_seconds", proven.measured)
    if parts.ledger is not None:
        watch("goodgate_ledger_records", parts.ledger.written)
        watch("goodgate_ledger_dropped", parts.ledger.dropped)


def _ledger(config: Config, home: Path, proven: ProvenGoodput | None) -> Ledger | None:
    if config.ledger.keep == "none":
        return None
    return Ledger(config.ledger, home / FOLDER, proven=tuple if proven is None else proven.rates)


def _exporter(config: Config, fleet: Fleet, metrics: Metrics) -> SpanExporter | None:
    if config.tracing.exporter == "none":
        return None
    return SpanExporter(config.tracing.endpoint, tracing_headers(config.tracing), fleet, metrics)


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
