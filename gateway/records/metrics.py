"""What the gateway counts, for Prometheus: collectors made out of the table in `metric_table`, and nothing beside it.

    metrics = Metrics(fleet)
    metrics.add("goodgate_requests", "m", "/v1/models", "200")                # + 1
    metrics.add("goodgate_prompt_tokens", "m", "vllm", "vllm-0", by=17)
    metrics.observe("goodgate_wait_seconds", 0.002, "m")
    metrics.watch("goodgate_in_flight", lambda: [(("m", "vllm", "vllm-0"), 3)])   # read when it is scraped
    metrics.render()

Label values come in the order of the metric's row. Each is held to its label's cap, so series stay bounded whatever
clients and engines send. Counting costs a third of a microsecond: a series is a sum that is found by one look in a
dictionary, and only a scrape makes Prometheus' objects of it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import inf
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from adapters.types import Usage
from gateway.records.metric_table import LABELS, MAX_SERIES, METRICS, OTHER, Kind, Label, Metric
from gateway.records.trace import Attempt, Trace
from gateway.replicas.directory import Directory
from gateway.replicas.replica import Replica, State
from gateway.tenants import cost
from gateway.tenants.cost import Spent

ANONYMOUS = "anonymous"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Values: TypeAlias = tuple[str, ...]
Read: TypeAlias = Callable[[], Iterable[tuple[Values, float]]]


class Metrics:
    """One registry a gateway, so that two gateways in one process do not meet."""

    def __init__(self, fleet: Directory) -> None:
        self.registry = CollectorRegistry()
        bounds = {name: Bounded(label) for name, label in LABELS.items()}
        self._families = {metric.name: _Family(metric, bounds) for metric in METRICS}
        for family in self._families.values():
            self.registry.register(family)
        self._watch_fleet(fleet)

    def add(self, name: str, *values: str, by: float = 1) -> None:
        """Count on a counter."""
        self._families[name].add(values, by)

    def observe(self, name: str, value: float, *values: str) -> None:
        """One more observation for a histogram."""
        self._families[name].observe(values, value)

    def watch(self, name: str, read: Read) -> None:
        """Have a gauge or a counter read when it is scraped: no second copy of a count, so no drift."""
        self._families[name].read = read

    def render(self) -> bytes:
        """Everything, as Prometheus' text."""
        return generate_latest(self.registry)

    # ---------------------------------------------------------------------------------------- what is counted, and when

    def answered(self, trace: Trace) -> None:
        model, families = trace.model or OTHER, self._families
        families["goodgate_requests"].add((model, trace.route, str(trace.status)))
        families["goodgate_request_duration_seconds"].observe((model, trace.route), trace.elapsed_s)
        if trace.code:
            families["goodgate_errors"].add((model, trace.code))
        if trace.attempts:
            families["goodgate_wait_seconds"].observe((model,), trace.attempts[0].started - trace.started)
        if (spent := cost.spent(trace)).tokens:
            self._spent(trace, spent)

    def _spent(self, trace: Trace, spent: Spent) -> None:
        tenant, model = ANONYMOUS if trace.caller is None else trace.caller.tenant, trace.model
        tokens = self._families["goodgate_tenant_tokens"]
        tokens.add((tenant, model, "prompt"), spent.prompt_tokens)
        tokens.add((tenant, model, "completion"), spent.completion_tokens)
        if trace.cached_tokens is not None:
            of_prefixes = self._families["goodgate_prefix_tokens"]
            of_prefixes.add((tenant, model, "hit"), trace.cached_tokens)
            of_prefixes.add((tenant, model, "miss"), max(trace.prompt_tokens - trace.cached_tokens, 0))

    def attempted(self, replica: Replica, attempt: Attempt) -> None:
        labels = _labels(replica)
        self._families["goodgate_attempts"].add((*labels, attempt.outcome))
        if (token_time_s := attempt.token_time_s) is not None:
            self._families["goodgate_time_per_output_token_seconds"].observe(labels, token_time_s)

    def first_token(self, replica: Replica, elapsed_s: float) -> None:
        self._families["goodgate_time_to_first_token_seconds"].observe(_labels(replica), elapsed_s)

    def tokens(self, replica: Replica, usage: Usage) -> None:
        labels, families = _labels(replica), self._families
        families["goodgate_prompt_tokens"].add(labels, usage.prompt_tokens)
        families["goodgate_completion_tokens"].add(labels, usage.completion_tokens)
        if usage.cached_tokens is not None:
            families["goodgate_cached_prompt_tokens"].add(labels, usage.cached_tokens)

    def _watch_fleet(self, fleet: Directory) -> None:
        for name, read in {
            "goodgate_in_flight": lambda replica: replica.in_flight,
            "goodgate_replica_ready": lambda replica: replica.is_ready or replica.state is State.UNLOADED,
            "goodgate_replica_trust": lambda replica: replica.standing.trust(time.perf_counter()),
            "goodgate_replica_breaker": lambda replica: replica.standing.breaker.position(time.perf_counter()),
            "goodgate_replica_ejections": lambda replica: replica.standing.breaker.num_openings,
            "goodgate_replica_restarts": lambda replica: replica.num_restarts if replica.config.launch else None,
            "goodgate_engine_running": lambda replica: replica.load.running,
            "goodgate_engine_waiting": lambda replica: replica.load.waiting,
            "goodgate_engine_kv_usage_ratio": lambda replica: replica.load.kv_usage,
            "goodgate_engine_prefix_hit_ratio": lambda replica: replica.load.prefix_hit_rate,
            "goodgate_engine_draft_tokens": lambda replica: replica.load.draft_tokens,
            "goodgate_engine_accepted_draft_tokens": lambda replica: replica.load.accepted_draft_tokens,
        }.items():
            self.watch(name, partial(_of_replicas, fleet, read))
        self.watch("goodgate_replica_state", partial(_states, fleet))


class Bounded:
    """The values that a label has: the first ones, as many as it may have, and "other" for the rest."""

    def __init__(self, label: Label) -> None:
        self.label = label
        self._known = {OTHER}

    def __call__(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) > self.label.cap:  # "other" is one more
            return OTHER
        self._known.add(value)
        return value


class _Series:
    """One series: the sum of what was counted or observed and, of a histogram, how often each bucket was hit."""

    __slots__ = ("hits", "sum")

    def __init__(self, num_buckets: int) -> None:
        self.sum = 0.0
        self.hits = [0] * num_buckets


class _Family(Collector):
    """One metric's series: counted as things happen, or read when they are scraped."""

    def __init__(self, metric: Metric, bounds: Mapping[str, Bounded]) -> None:
        self.read: Read | None = tuple if metric.kind == "gauge" else None  # gauges are always read, perhaps empty
        self._metric = metric
        self._bounds = [bounds[label] for label in metric.labels]
        self._limits = (*metric.buckets, inf) if metric.kind == "histogram" else ()
        self._series: dict[Values, _Series] = {}  # by the values that were asked for, within the caps
        if not metric.labels:
            self._new_series(())  # it shows its zero from the beginning

    def add(self, values: Values, by: float = 1) -> None:
        (self._series.get(values) or self._new_series(values)).sum += by

    def observe(self, values: Values, value: float) -> None:
        series = self._series.get(values) or self._new_series(values)
        series.sum += value
        series.hits[bisect_left(self._limits, value)] += 1

    def _new_series(self, values: Values) -> _Series:
        """The one series for these label values, or the one that stands for all those beyond the caps."""
        bounded = self._bounded(values)
        if bounded not in self._series:
            if len(self._series) >= MAX_SERIES:
                bounded = (OTHER,) * len(bounded)
            self._series.setdefault(bounded, _Series(len(self._limits)))
        return self._series[bounded]

    def _bounded(self, values: Values) -> Values:
        return tuple(bound(value) for bound, value in zip(self._bounds, values, strict=True))

    def collect(self) -> Iterator[Any]:
        family = self._empty_family()
        if self.read is not None:
            for values, value in _within(self._bounds, self.read()):
                family.add_metric(values, value)
        else:
            for values, series in self._series.items():
                family.add_metric(values, *self._told(series))
        yield family

    def _told(self, series: _Series) -> tuple[Any, ...]:
        """A series as its family takes it: buckets and sum, or the sum alone."""
        if not series.hits:
            return (series.sum,)
        counts = zip(map(floatToGoString, self._limits), accumulate(series.hits), strict=True)
        return list(counts), series.sum

    def describe(self) -> Iterator[Any]:
        """The names, for the registry, which would otherwise collect everything to learn them."""
        yield self._empty_family()

    def _empty_family(self) -> Any:
        return _FAMILIES[self._metric.kind](self._metric.name, self._metric.help, labels=self._metric.labels)


def _within(bounds: Sequence[Bounded], readings: Iterable[tuple[Values, float]]) -> Iterable[tuple[Values, float]]:
    """What is read, within the caps as of now: names that a reload has taken out make room for those that came. What is
    beyond them is one series, of the sum."""
    fresh = [Bounded(bound.label) for bound in bounds]
    told: dict[Values, float] = {}
    for values, value in readings:
        within = tuple(bound(each) for bound, each in zip(fresh, values, strict=True))
        told[within] = told.get(within, 0) + value
    return told.items()


_FAMILIES: Mapping[Kind, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _of_replicas(fleet: Directory, read: Callable[[Replica], float | None]) -> Iterator[tuple[Values, float]]:
    """What each replica tells, where it does."""
    for replica in fleet.replicas:
        value = read(replica)
        if value is not None:
            yield _labels(replica), value


def _states(fleet: Directory) -> Iterator[tuple[Values, float]]:
    for replica in fleet.replicas:
        for state in State:
            yield (*_labels(replica), state.value), replica.state is state


def _labels(replica: Replica) -> tuple[str, str, str]:
    return replica.model, replica.engine, replica.name
