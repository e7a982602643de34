"""Folders of races that nobody had to wait for: real plans, real spools, a real store; only the stamps are made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from arena.judging.judge import judge_race
from arena.judging.notes import EngineNotes, RunNotes
from arena.judging.results import RaceResult
from arena.load.loadgen import spool_header
from arena.load.plan import CellPlan, Target, build_plan
from arena.load.spool import HealthRow, MetricRow, RequestRow, SpoolFooter, SpoolWriter, write_metrics
from arena.load.workload import CellKey, prompt_source
from arena.race.cell_runner import judge_cell
from arena.race.scenario_file import parse
from arena.records.rows import CellRecord, EngineRecord, RunRecord
from arena.records.store import Store
from arena.records.verdicts import search_rows, verdict_rows
from arena.reports.report import publish

MS = 1_000_000
TOKENS = 8
SCENARIO = """
name: made up
model: m
workload: {kind: synthetic, prompt: {kind: fixed, tokens: 20}, output: {kind: fixed, tokens: 8}}
slo: {ttft_ms: 200, tpot_ms: 50}
search: {start_rps: 4, step: 2, stride: 1}
cell: {warmup_s: 0.5, duration_s: 8, settle_s: 0}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """An engine that answers after `ttft_ms`, give or take `jitter_ms`, and above `capacity_rps` ten times later."""

    ttft_ms: float = 80
    jitter_ms: float = 10
    tpot_ms: float = 10
    capacity_rps: float = 8
    version: str = "1"


def make_race(
    folder: Path,
    engines: Mapping[str, Speed],
    *,
    seed: int = 1,
    run_id: str = "run-1",
    started_utc: str = "2026-01-01T00:00:00+00:00",
    rates: Sequence[float] = (4, 8, 16),
    text: str = SCENARIO,
    cpu: str = "test",
    has_metrics: bool = True,
) -> RaceResult:
    """Run, judge and publish. Equal seeds give equal plans; `run_id` seeds what the engines make of them."""
    scenario = parse(text, source="test")
    (folder / "spool").mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng([seed, *run_id.encode()])
    with Store(folder / "arena.duckdb") as store:
        notes = RunNotes(scenario=scenario, order=tuple(engines))
        store.record_run(
            RunRecord(
                run_id=run_id,
                started_utc=started_utc,
                scenario=scenario.name,
                seed=seed,
                host={"cpu": cpu, "cores": 2, "memory_gib": 8},
                notes=msgspec.json.encode(notes).decode(),
            )
        )
        for name, speed in engines.items():
            store.record_engine(
                EngineRecord(
                    engine_id=name,
                    run_id=run_id,
                    name=name,
                    version=speed.version,
                    endpoint="http://127.0.0.1:1",
                    model="m",
                    flags={},
                    capability=msgspec.to_builtins(EngineNotes()),
                )
            )
        slot = 0
        for rate in rates:
            for name, speed in engines.items():
                key = CellKey(seed, scenario.settings.nearest_rung(rate), 0)
                plan = build_plan(
                    f"{name}-{rate:g}rps-0",
                    rate_rps=rate,
                    duration_s=scenario.cell.duration_s,
                    warmup_s=scenario.cell.warmup_s,
                    cooldown_s=1,
                    prompts=prompt_source(scenario.workload, key),
                    seed=key.schedule_seed(),
                )
                slot += 1
                store.record_cell(
                    CellRecord(
                        cell_id=plan.cell_id,
                        run_id=run_id,
                        engine_id=name,
                        replicate=0,
                        slot=slot,
                        rate_rps=rate,
                    ),
                    plan,
                )
                spool = spool_of(folder, plan, speed, noise, has_metrics=has_metrics)
                store.ingest(plan.cell_id, spool)
                judge_cell(store, plan.cell_id, scenario, aborted=None)
        result = judge_race(store)
        store.record_verdicts(verdict_rows(result), search_rows(result))
    publish(result, folder)
    return result


def spool_of(folder: Path, plan: CellPlan, speed: Speed, noise: np.random.Generator, *, has_metrics: bool) -> Path:
    path = folder / "spool" / f"{plan.cell_id}.jsonl"
    plan.write(path.with_name(path.name + ".plan"))
    writer = SpoolWriter(path)
    header = spool_header(Target("http://127.0.0.1:1", "m", "engine"), plan)
    header.epoch_unix_ns = header.epoch_monotonic_ns = 1
    writer.write(header)
    for request in plan.requests:
        delay = speed.ttft_ms + float(noise.normal(0, speed.jitter_ms))
        first = request.scheduled_ns + round(max(delay, 1) * MS * (10 if plan.rate_rps > speed.capacity_rps else 1))
        stamps = [first + round(index * speed.tpot_ms * MS) for index in range(TOKENS)]
        writer.write(
            RequestRow(
                seq=request.seq,
                measured=plan.is_measured(request),
                prompt_id=request.prompt_id,
                max_tokens=request.max_tokens,
                scheduled_ns=request.scheduled_ns,
                sent_ns=request.scheduled_ns,
                wrote_ns=request.scheduled_ns,
                first_byte_ns=first,
                first_gen_ns=first,
                first_text_ns=first,
                last_gen_ns=stamps[-1],
                done_ns=stamps[-1],
                status="ok",
                http=200,
                finish_reason="length",
                in_tok_usage=30,
                out_tok_usage=TOKENS,
                cached_tok=0,
                out_tok_counted=TOKENS,
                tokens_known=True,
                n_chunks=TOKENS,
                n_recvs=TOKENS,
                reused=True,
                token_ns=stamps,
                token_n=[1] * TOKENS,
                token_kind=[0] * TOKENS,
            )
        )
    writer.write(HealthRow(t_ns=5, cpu=0.5, loop_lag_ns=7, in_flight=3, sockets=4))
    if has_metrics:
        write_metrics(path, [MetricRow(t_ns=1, metric='running{model="m"}', value=2.0)])
    writer.finish(
        SpoolFooter(requests=writer.num_requests, max_in_flight=3, connections_opened=4, cooldown_exhausted=False)
    )
    return path
