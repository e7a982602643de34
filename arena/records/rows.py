"""The rows that a race writes into its store, and one cell summed up. Field names are those of the columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

CellStatus: TypeAlias = Literal[
    "planned", "unjudged", "ok", "invalid_client", "invalid_cache", "invalid_cold", "unstable", "aborted"
]
"""planned: announced, its spool is not in. unjudged: its rows are in, the audit has not spoken. The rest is the audit's
word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    run_id: str
    started_utc: str
    scenario: str
    seed: int
    git_sha: str | None = None
    host: Mapping[str, Any]
    clock: Mapping[str, Any] = field(default_factory=dict)  # what the stamps were read from
    notes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    engine_id: str
    run_id: str
    name: str
    version: str | None = None
    endpoint: str
    model: str
    weights_sha: str | None = None
    flags: Mapping[str, Any]
    capability: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    cell_id: str
    run_id: str
    engine_id: str
    replicate: int
    slot: int  # place in the interleaved order of the run
    rate_rps: float


def columns_of(row: RunRecord | EngineRecord | CellRecord) -> dict[str, Any]:
    """By the name of the column. Mappings are kept as JSON, in columns that say so."""
    columns: dict[str, Any] = {}
    for each in fields(row):
        value = getattr(row, each.name)
        if isinstance(value, Mapping):
            columns[f"{each.name}_json"] = json.dumps(dict(value))
        else:
            columns[each.name] = value
    return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One cell under one SLO. Percentiles are order statistics; `_inf` ones take every failure as infinitely late."""

    cell_id: str
    engine_id: str
    rate_rps: float
    replicate: int
    status: CellStatus
    requests: int  # every measured request that was scheduled: the denominator
    ok: int
    failures: int
    unsent: int
    good: int  # met both limits
    attainment: float | None  # good / requests
    ttft_misses: int
    tpot_misses: int
    goodput_rps: float | None  # good requests per second of the steady window
    ttft_n: int
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    ttft_p99_inf_ms: float | None
    ttft_send_p99_ms: float | None
    tpot_n: int
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    tpot_p99_inf_ms: float | None
    e2e_p50_ms: float | None
    e2e_p99_ms: float | None
    lag_p99_ms: float | None
    reuse_ratio: float | None
