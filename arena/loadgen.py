"""Run one cell: a plan against a target, open loop, in a process of its own.

    run_cell(plan, target, spool) -> writes the plan -> `python -m arena.loadgen_process` -> progress -> spool + CellRun

This is the driver's side and imports neither locust nor gevent. A load process that crashes or overstays is an aborted cell,
not an exception: its spool is closed with a row for every measured request, `unsent` where none was written, so that the
store shows what happened. No process survives `run_cell`, not even when it is cancelled.

>>> run = await run_cell(plan, Target("http://127.0.0.1:8080", "smollm2", "native"), Path("spool/cell-1.jsonl"))
>>> run.aborted, run.lag_p99_ms, lag_budget_ms(slo_ttft_ms=200)
(None, 0.21, 2.0)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from arena.plan import CellPlan, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the client itself allows. Every limit that is reached shows in the rows."""

    request_timeout_s: float = 120.0  # from the send to the last byte; then the row is `timeout`, with what it had got
    connect_timeout_s: float = 5.0
    max_in_flight: int = 1024  # a request beyond it is `unsent`: a miss, and the cell is invalid
    warm_connections: int = 32  # idle connections held ready above the need
    time_limit_s: float | None = None  # of the whole cell; None: the plan's end plus `request_timeout_s` plus a margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Told about twice a second while a cell runs."""

    pid: int  # of the load process
    elapsed_s: float
    sent: int
    done: int
    failed: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """What the client can say of itself and of the count of rows; what the target did is in the spool."""

    cell_id: str
    spool: Path
    aborted: str | None  # why the cell is incomplete, or None
    requests: int  # rows in the spool
    measured: int  # planned requests in the steady window; each has a row
    ok: int  # of the measured
    unsent: int  # of the measured
    lag_p99_ms: float | None  # send behind schedule, measured requests; None when none was sent
    max_in_flight: int
    wall_s: float


def lag_budget_ms(slo_ttft_ms: float) -> float:
    """How late the client's p99 send may be before the cell says more of the client than of the engine."""
    return max(1.0, 0.01 * slo_ttft_ms)


async def run_cell(
    plan: CellPlan,
    target: Target,
    spool: Path,
    *,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    on_progress: Callable[[Progress], None] | None = None,
) -> CellRun:
    """Fire the plan at the target and leave a complete spool. An older spool of that name is replaced."""
    raise NotImplementedError
