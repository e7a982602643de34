"""Cells against the scripted engine: what a test says of one request, and how to fire a list of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arena.load import spool
from arena.load.loadgen import CellRun, Limits, Progress, run_cell
from arena.load.plan import CellPlan, PlannedRequest, Target
from arena.load.scripted_engine import Log, RunningEngine, Script
from arena.load.spool import RequestRow

MS = 1_000_000


def plan_of(requests: Sequence[tuple[float, Script]], *, cell_id: str = "cell", warmup_ms: float = 0) -> CellPlan:
    """A plan of requests due at the given milliseconds; all of them are measured, unless they fall into the warm-up."""
    planned = tuple(
        PlannedRequest(seq, round(at_ms * MS), f"prompt-{seq}", msgspec.json.encode({"script": script}), 8)
        for seq, (at_ms, script) in enumerate(requests)
    )
    horizon_ns = max(request.scheduled_ns for request in planned) + 1
    return CellPlan(cell_id, "constant", 1.0, round(warmup_ms * MS), horizon_ns, planned)


@dataclass
class Fired:
    run: CellRun
    rows: dict[int, RequestRow]
    log: Log
    everything: list[spool.SpoolRow]

    @property
    def epoch_ns(self) -> int:
        header = self.everything[0]
        assert isinstance(header, spool.SpoolHeader)
        assert header.epoch_monotonic_ns is not None
        return header.epoch_monotonic_ns

    def left_ms(self, seq: int, step: int) -> float:
        """When the engine let go of a step, on the cell's clock."""
        return (self.log.requests[f"{self.run.cell_id}-{seq}"].left_ns[step] - self.epoch_ns) / MS


async def fire(
    engine: RunningEngine,
    plan: CellPlan,
    folder: Path,
    *,
    limits: Limits | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Fired:
    path = folder / f"{plan.cell_id}.jsonl"
    run = await run_cell(
        plan, Target(engine.url, "scripted", "scripted"), path, limits=limits or Limits(), on_progress=on_progress
    )
    everything = list(spool.read_rows(path))
    rows = {row.seq: row for row in everything if isinstance(row, RequestRow)}
    return Fired(run, rows, engine.take_log(), everything)


def gaps_ms(row: RequestRow) -> list[float]:
    return [(after - before) / MS for before, after in itertools.pairwise(row.token_ns)]
