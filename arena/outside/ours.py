"""Our own load generator, told the same as the others; its figures are those of the arena's views over the raw rows."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from arena.load import spool as spools
from arena.load.arrivals import seed_sequence
from arena.load.loadgen import run_cell
from arena.load.plan import STREAM_WITH_USAGE, CellPlan, Prompt, Target, build_plan
from arena.load.spec import Constant
from arena.load.spool import RequestRow
from arena.outside.answers import from_spool
from arena.outside.definitions import Answer, throughput
from arena.outside.tools import Claims, Load, ToolFailed
from arena.records.rows import CellRecord, EngineRecord, RunRecord
from arena.records.store import Store

CELL = "outside"


def measure(load: Load, folder: Path) -> tuple[Claims, list[Answer]]:
    """What the arena says of one cell, and the answers as it stamped them. Like the others it stops at its last
    prompt, so the engine empties at the end."""
    folder.mkdir(parents=True)
    plan = _plan(load)
    target = Target(load.url, load.model, "engine", fields={**STREAM_WITH_USAGE, "ignore_eos": True})
    run = asyncio.run(run_cell(plan, target, folder / "cell.jsonl"))
    if run.aborted is not None or run.ok != len(load.prompts):
        raise ToolFailed(
            f"Goodgate got {run.ok} of {len(load.prompts)} answers: {run.aborted or _first_failure(run.spool)}."
        )
    answers = from_spool(run.spool)
    return _claims(plan, run.spool, folder, answers), answers


def _first_failure(spool: Path) -> str:
    rows = (row for row in spools.read_rows(spool) if isinstance(row, RequestRow) and row.measured)
    failed = next(row for row in rows if row.status != "ok")
    return f"the first failure was {failed.status}, {failed.err_class} {failed.err_message or ''}".strip()


def _plan(load: Load) -> CellPlan:
    return build_plan(
        CELL,
        rate_rps=load.rate_rps,
        duration_s=len(load.prompts) / load.rate_rps,
        warmup_s=0,
        cooldown_s=0,  # the others offer nothing after the last prompt
        arrivals=Constant(),
        prompts=lambda seq: Prompt(str(seq), _body(load.prompts[seq]), load.output_tokens),
        seed=seed_sequence(run=1, cell=0, replicate=0),
    )


def _body(prompt: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": prompt}]}


def _claims(plan: CellPlan, spool: Path, folder: Path, answers: list[Answer]) -> Claims:
    with Store(folder / "arena.duckdb") as store:
        store.record_run(
            RunRecord(run_id="run", started_utc=datetime.now(UTC).isoformat(), scenario="outside", seed=1, host={})
        )
        engine = EngineRecord(engine_id="e", run_id="run", name="e", endpoint="", model="", flags={}, capability={})
        store.record_engine(engine)
        record = CellRecord(cell_id=CELL, run_id="run", engine_id="e", replicate=0, slot=0, rate_rps=plan.rate_rps)
        store.record_cell(record, plan)
        store.ingest(CELL, spool)
        (cell,) = store.query("SELECT * FROM v_cells")
        gaps = [row["chunk_gap_ms"] for row in store.query("SELECT chunk_gap_ms FROM v_itl WHERE measured AND ok")]
    return Claims(
        requests=cell["ok"],
        ttft_p50_ms=cell["ttft_p50_ms"],
        ttft_p99_ms=cell["ttft_p99_ms"],
        tpot_p50_ms=cell["tpot_p50_ms"],
        itl_p50_ms=float(np.median(gaps)) if gaps else None,
        itl_mean_ms=float(np.mean(gaps)) if gaps else None,
        output_tokens_per_s=throughput(answers),
    )
