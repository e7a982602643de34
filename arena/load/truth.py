"""How far the load generator is from the truth: it measures an engine that remembers when each piece left.

    python -m arena.load.truth --rate 50 --duration 10

The stamps of both sides come from one clock (CLOCK_MONOTONIC of this machine), so an error is a plain difference:

    TTFT error   stamp of the first generated event, minus the moment the engine handed it to the kernel
    gap error    |measured gap - true gap|, for each pair of neighbouring events
    send lag     sent - scheduled; part of TTFT_sched by intent, and shown for what it is

Run it before a race: what it prints is the floor under every claim about latency on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arena.load import scripted_engine, spool
from arena.load.arrivals import seed_sequence
from arena.load.loadgen import run_cell
from arena.load.plan import Prompt, Target, build_plan
from arena.load.spool import HealthRow, RequestRow, SpoolHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Errors in milliseconds, in no order. `cpu` is the load process's highest share of one core."""

    requests: int
    chunks_per_s: float
    ttft_errors_ms: list[float]
    gap_errors_ms: list[float]
    send_lags_ms: list[float]
    cpu: float
    aborted: str | None


def measure(
    *, rate_rps: float, duration_s: float, ttft_ms: float = 200.0, itl_ms: float = 20.0, tokens: int = 20, seed: int = 1
) -> Truth:
    """One cell against a scripted engine of its own."""
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
    with scripted_engine.running() as engine, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "truth.jsonl"
        run = asyncio.run(run_cell(plan, Target(engine.url, "scripted", "scripted"), path))
        return compare(
            list(spool.read_rows(path)), engine.take_log(), chunks_per_s=rate_rps * tokens, aborted=run.aborted
        )


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
        aborted=aborted,
    )


def percentile(values: list[float], percent: float) -> float:
    """An order statistic: a value that occurred."""
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def table(truth: Truth) -> str:
    lines = [
        f"{truth.requests} requests, {truth.chunks_per_s:g} chunks/s offered, "
        f"load process at most {truth.cpu:.0%} of a core",
        f"{'ms':<12}{'p50':>9}{'p99':>9}{'max':>9}{'n':>9}",
    ]
    series = {"TTFT error": truth.ttft_errors_ms, "gap error": truth.gap_errors_ms, "send lag": truth.send_lags_ms}
    for name, values in series.items():
        figures = "".join(f"{percentile(values, percent):9.3f}" for percent in (50, 99, 100))
        lines.append(f"{name:<12}{figures}{len(values):9d}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m arena.load.truth", description="Measure the load generator's own errors."
    )
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second (50)")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds of measuring (10)")
    parser.add_argument("--ttft-ms", type=float, default=200.0, help="the engine's TTFT (200)")
    parser.add_argument("--itl-ms", type=float, default=20.0, help="the engine's gap between tokens (20)")
    parser.add_argument("--tokens", type=int, default=20, help="tokens an answer (20)")
    asked = parser.parse_args()
    truth = measure(
        rate_rps=asked.rate, duration_s=asked.duration, ttft_ms=asked.ttft_ms, itl_ms=asked.itl_ms, tokens=asked.tokens
    )
    if truth.aborted or not truth.requests:
        print(truth.aborted or "No request was answered.")
        return 1
    print(table(truth))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
