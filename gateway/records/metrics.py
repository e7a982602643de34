"""What the gateway counts, for Prometheus. Labels come from the configuration only, so their number is bounded.

A model that clients ask for and nobody serves is counted as "other": a label must never hold what a client chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from adapters.types import Usage
from gateway.fleet import Fleet, Replica
from gateway.records.trace import Trace

OTHER = "other"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_REPLICA = ("model", "engine", "replica")


class Metrics:
    """One registry a gateway, so that two gateways in one process do not meet."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self._models = frozenset(fleet.models)
        self._requests = Counter(
            "goodgate_requests", "Requests answered.", ("model", "route", "status"), registry=self.registry
        )
        self._errors = Counter("goodgate_errors", "Requests that failed.", ("model", "code"), registry=self.registry)
        self._attempts = Counter(
            "goodgate_attempts", "Tries on one replica.", (*_REPLICA, "outcome"), registry=self.registry
        )
        self._first_token = Histogram(
            "goodgate_time_to_first_token_seconds",
            "From the request to the first chunk of the attempt that answered.",
            _REPLICA,
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._duration = Histogram(
            "goodgate_request_duration_seconds",
            "From the request to the end of its answer.",
            ("model", "route"),
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._prompt_tokens = Counter("goodgate_prompt_tokens", "Tokens read.", _REPLICA, registry=self.registry)
        self._completion_tokens = Counter(
            "goodgate_completion_tokens", "Tokens written.", _REPLICA, registry=self.registry
        )
        self._watch(fleet)

    def _watch(self, fleet: Fleet) -> None:
        """Gauges that read the fleet when they are scraped: no second copy of a count, so no drift."""
        in_flight = Gauge("goodgate_in_flight", "Open generations.", _REPLICA, registry=self.registry)
        ready = Gauge("goodgate_replica_ready", "1 if the replica can serve.", _REPLICA, registry=self.registry)
        for replica in fleet.replicas:
            labels = _labels(replica)
            in_flight.labels(*labels).set_function(partial(_in_flight, replica))
            ready.labels(*labels).set_function(partial(_is_ready, replica))
        self.registry.register(_Restarts(fleet))

    def answered(self, trace: Trace) -> None:
        model = trace.model if trace.model in self._models else OTHER
        self._requests.labels(model, trace.route, str(trace.status)).inc()
        self._duration.labels(model, trace.route).observe(trace.elapsed_s)
        if trace.code:
            self._errors.labels(model, trace.code).inc()

    def attempted(self, replica: Replica, outcome: str) -> None:
        self._attempts.labels(*_labels(replica), outcome).inc()

    def first_token(self, replica: Replica, elapsed_s: float) -> None:
        self._first_token.labels(*_labels(replica)).observe(elapsed_s)

    def tokens(self, replica: Replica, usage: Usage) -> None:
        self._prompt_tokens.labels(*_labels(replica)).inc(usage.prompt_tokens)
        self._completion_tokens.labels(*_labels(replica)).inc(usage.completion_tokens)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Restarts(Collector):
    """A counter that reads the fleet when it is scraped, for the replicas that the gateway launches."""

    def __init__(self, fleet: Fleet) -> None:
        self._launched = [replica for replica in fleet.replicas if replica.config.launch]

    def collect(self) -> Iterator[CounterMetricFamily]:
        restarts = CounterMetricFamily(
            "goodgate_replica_restarts", "Ends of a launched engine after which it was started again.", labels=_REPLICA
        )
        for replica in self._launched:
            restarts.add_metric(_labels(replica), replica.num_restarts)
        yield restarts


def _in_flight(replica: Replica) -> float:
    return replica.in_flight


def _is_ready(replica: Replica) -> float:
    return float(replica.is_ready)


def _labels(replica: Replica) -> tuple[str, str, str]:
    return replica.model, replica.engine, replica.name
