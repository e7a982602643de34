"""An engine's own account of its load, read from its Prometheus text. Pure: text and names in, `Load` out.

    read_load(text, LoadMetrics(running="acme_running", waiting='acme_requests{state="waiting"}'))

A name may ask for one label; values of the other label sets add up.
"""

from __future__ import annotations

import re

from msgspec import Struct

from adapters.base import Load


class LoadMetrics(Struct, frozen=True, kw_only=True):
    """An engine's names in its Prometheus text; empty where it does not tell. Hits and queries are counters."""

    path: str = "/metrics"  # or a whole URL, where the metrics have a port of their own
    running: str = ""
    waiting: str = ""
    kv_usage: str = ""
    kv_capacity: str = ""  # what `kv_usage` counts against; empty: it is a share already
    prefix_hits: str = ""
    prefix_queries: str = ""
    prefix_misses: str = ""  # for engines that count misses and not queries
    prefix_hit_rate: str = ""  # for engines that tell the share itself


def told_fields(names: LoadMetrics | None) -> frozenset[str]:
    """The fields of `Load` that these names can fill."""
    if names is None:
        return frozenset()
    has_hit_rate = names.prefix_hit_rate or (names.prefix_hits and (names.prefix_queries or names.prefix_misses))
    told = {"running": names.running, "waiting": names.waiting, "kv_usage": names.kv_usage}
    return frozenset(field for field, name in {**told, "prefix_hit_rate": has_hit_rate}.items() if name)


def read_load(text: str, names: LoadMetrics) -> Load:
    """The load that the text tells. Counts add up over label sets, the fullest cache speaks for all."""
    asked = [value for name in names.__struct_fields__ if name != "path" and (value := getattr(names, name))]
    series = _series(text, {name.partition("{")[0] for name in asked})

    def values(name: str) -> list[float]:
        return series.get(name, []) if name else []

    return Load(
        running=_count(values(names.running)),
        waiting=_count(values(names.waiting)),
        kv_usage=_share(values(names.kv_usage), values(names.kv_capacity) if names.kv_capacity else None),
        prefix_hit_rate=_hit_rate(
            values(names.prefix_hits),
            values(names.prefix_queries),
            values(names.prefix_misses),
            values(names.prefix_hit_rate),
        ),
    )


def _count(values: list[float]) -> int | None:
    return int(sum(values)) if values else None


def _share(used: list[float], capacity: list[float] | None) -> float | None:
    if capacity is None:
        return max(used, default=None)
    return sum(used) / sum(capacity) if used and sum(capacity) else None


def _hit_rate(hits: list[float], queries: list[float], misses: list[float], rates: list[float]) -> float | None:
    total = sum(queries) or (sum(hits) + sum(misses) if misses else 0)
    if hits and total:
        return sum(hits) / total
    return sum(rates) / len(rates) if rates else None


def _series(text: str, wanted: set[str]) -> dict[str, list[float]]:
    """Values by metric name, and by name with each label. A line that is no sample tells nothing; others still do."""
    series: dict[str, list[float]] = {}
    for line in text.splitlines():
        parsed = _SAMPLE.match(line)
        if parsed is None or parsed[1] not in wanted:
            continue
        name, labels, value = parsed[1], parsed[2], float(parsed[3])
        series.setdefault(name, []).append(value)
        for label in _LABEL.findall(labels or ""):
            series.setdefault(f"{name}{{{label}}}", []).append(value)
    return series


_SAMPLE = re.compile(
    r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)(?:\s+-?[0-9]+)?\s*$"
)
_LABEL = re.compile(r'\w+="(?:[^"\\]|\\.)*"')
