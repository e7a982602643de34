"""How far the load generator is from the truth: it measures an engine that remembers when each piece left.

The stamps of both sides come from one clock (CLOCK_MONOTONIC of this machine), so an error is a plain difference:

    TTFT error   stamp of the first generated event, minus the moment the engine handed it to the kernel
    gap error    |measured gap - true gap|, for each pair of neighbouring events
    send lag     sent - scheduled; part of TTFT_sched by intent, and shown for what it is

`arena.load.calibration` asks this before a race; `goodgate arena truth` shows it over many rates, and what else a load
generator can get wrong (`arena.load.truth_cases`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arena.load import scripted_engine, spool
from arena.load.arrivals import seed_sequence
from arena.load.loadgen import Crew, run_cell
from arena.load.plan import Prompt, Target, build_plan
from arena.load.scripted_engine import RunningEngine
from arena.load.spool import HealthRow, RequestRow, SpoolFooter, SpoolHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Errors in milliseconds, in no order. `cpu` is a load process's highest share of one core."""

    requests: int
    chunks_per_s: float
    ttft_errors_ms: list[float]
    gap_errors_ms: list[float]
    send_lags_ms: list[float]
    cpu: float
    foreign_cpu: float | None
    aborted: str | None


@contextlib.asynccontextmanager
async def scripted() -> AsyncIterator[RunningEngine]:
    """A scripted engine beside an event loop that goes on."""
    running = scripted_engine.running()
    engine = await asyncio.to_thread(running.__enter__)
    try:
        yield engine
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


def measure(
    *, rate_rps: float, duration_s: float, ttft_ms: float = 200.0, itl_ms: float = 20.0, tokens: int = 20, seed: int = 1
) -> Truth:
    """One cell against a scripted engine of its own."""
    return asyncio.run(
        measure_cell(rate_rps=rate_rps, duration_s=duration_s, ttft_ms=ttft_ms, itl_ms=itl_ms, tokens=tokens, seed=seed)
    )


async def measure_cell(
    *,
    rate_rps: float,
    duration_s: float,
    ttft_ms: float,
    itl_ms: float,
    tokens: int,
    seed: int = 1,
    crew: Crew | None = None,
) -> Truth:
    """The same where an event loop runs already."""
    script = msgspec.to_builtins(scripted_engine.stream_script(ttft_ms=ttft_ms, itl_ms=itl_ms, tokens=tokens))
    plan = build_plan(
        "truth",
        rate_rps=rate_rps,
        duration_s=duration_s,
        warmup_s=min(1.0, duration_s),
        cooldown_s=(ttft_ms + tokens * itl_ms) / 1e3 + 1,
        prompts=lambda seq: Prompt(f"scripted-{seq}", {"script": script}, tokens),
        seed=seed_sequence(run=seed, cell=0, replicate=0),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "truth.jsonl"
        async with scripted() as engine:
            run = await run_cell(plan, Target(engine.url, "scripted", "scripted"), path, crew=crew)
            log = await asyncio.to_thread(engine.take_log)
        rows = list(spool.read_rows(path))
    return compare(rows, log, chunks_per_s=rate_rps * tokens, aborted=run.aborted)


def compare(
    rows: list[spool.SpoolRow], log: scripted_engine.Log, *, chunks_per_s: float, aborted: str | None = None
) -> Truth:
    """Hold each ok measured row against the engine's record. Step 0 of a script is the role: event i is step i + 1."""
    header = rows[0]
    assert isinstance(header, SpoolHeader)
    ttft, gaps, lags = [], [], []
    for row in rows:
        if not isinstance(row, RequestRow) or not row.measured or row.status != "ok":
            continue
        left = log.requests[f"{header.cell_id}-{row.seq}"].left_ns[1:]
        seen = [stamp + (header.epoch_monotonic_ns or 0) for stamp in row.token_ns]
        ttft.append((seen[0] - left[0]) / 1e6)
        gaps += [abs((seen[i] - seen[i - 1]) - (left[i] - left[i - 1])) / 1e6 for i in range(1, len(seen))]
        lags.append(((row.sent_ns or 0) - row.scheduled_ns) / 1e6)
    return Truth(
        requests=len(ttft),
        chunks_per_s=chunks_per_s,
        ttft_errors_ms=ttft,
        gap_errors_ms=gaps,
        send_lags_ms=lags,
        cpu=max((row.cpu for row in rows if isinstance(row, HealthRow)), default=0.0),
        foreign_cpu=next((row.foreign_cpu for row in rows if isinstance(row, SpoolFooter)), None),
        aborted=aborted,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """An order statistic: a value that occurred."""
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]
