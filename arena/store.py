"""The store: spools in, metrics out. One DuckDB file per run of the arena.

Rows hold raw stamps only; every metric is a view (`views.sql`), so a better definition re-scores old runs. A cell is
ingested in one transaction, as delete and insert: doing it again changes nothing, and a spool stays the truth until its
cell carries `ingested_utc`. One process writes at a time.

>>> with Store(Path("out/arena.duckdb")) as store:
...     store.record_run(RunRecord(...)); store.record_engine(EngineRecord(...)); store.record_cell(CellRecord(...), plan)
...     store.ingest("cell-1", Path("out/spool/cell-1.jsonl"))
...     store.cell_summary("cell-1", slo_ttft_ms=500, slo_tpot_ms=50).attainment
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

from arena.plan import CellPlan

CellStatus: TypeAlias = Literal["planned", "ok", "invalid_client", "invalid_cache", "unstable", "aborted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    run_id: str
    started_utc: str
    scenario: str
    seed: int
    git_sha: str | None = None
    host: Mapping[str, Any]
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


class Store:
    def __init__(self, path: Path, *, read_only: bool = False) -> None: ...
    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...
    def close(self) -> None: ...

    def record_run(self, run: RunRecord) -> None: ...
    def record_engine(self, engine: EngineRecord) -> None: ...
    def record_cell(self, cell: CellRecord, plan: CellPlan) -> None:
        """Announce a cell before it runs: its status is `planned`, and its plan is stored once per sha256."""

    def ingest(self, cell_id: str, spool: Path) -> None:
        """Load a complete spool. Refuses one without its done marker, of another plan, or damaged since."""

    def judge_cell(self, cell_id: str, status: CellStatus, reason: str | None = None) -> None:
        """What the audit says of a cell."""

    def record_audit(
        self, cell_id: str, check: str, value: float | None, threshold: float | None, ok: bool
    ) -> None: ...

    def cell_summary(self, cell_id: str, *, slo_ttft_ms: float, slo_tpot_ms: float) -> CellSummary: ...

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of any SELECT as dictionaries. Views: v_requests, v_itl, v_cells; macro: slo_requests(ttft_ms,
        tpot_ms)."""
        raise NotImplementedError
