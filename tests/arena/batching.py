"""An honest engine with continuous batching, in virtual time: what its rows look like under any load, and seed."""

from __future__ import annotations

from collections import deque

import numpy as np

from arena.judging.findings import SECOND_NS, Row

STEP_S, PER_SEQUENCE_S, PREFILL_S = 0.008, 0.0006, 0.020  # a step, each sequence in it, each prompt that enters
MAX_SEQUENCES = 24


def honest_rows(seed: int, *, rate_rps: float, window_s: float, tokens: int = 32, first_seq: int = 0) -> list[Row]:
    """Poisson arrivals; each step decodes all that run and prefills at most one. Steps vary by a tenth."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate_rps, size=int(rate_rps * window_s * 1.5) + 10))
    due = due[due < window_s]
    stamps: list[list[float]] = [[] for _ in due]
    waiting: deque[int] = deque()
    running: list[int] = []
    now, arrived = 0.0, 0
    while arrived < len(due) or waiting or running:
        while arrived < len(due) and due[arrived] <= now:
            waiting.append(arrived)
            arrived += 1
        if not waiting and not running:
            now = float(due[arrived])
            continue
        enters = waiting.popleft() if waiting and len(running) < MAX_SEQUENCES else None
        step = STEP_S + PER_SEQUENCE_S * len(running) + (PREFILL_S if enters is not None else 0)
        now += step * float(rng.lognormal(0, 0.1))
        if enters is not None:
            running.append(enters)
        for each in running:
            stamps[each].append(now)
        running = [each for each in running if len(stamps[each]) < tokens]
    return [_row(first_seq + seq, float(at), came) for seq, (at, came) in enumerate(zip(due, stamps, strict=True))]


def _row(seq: int, due_s: float, stamps_s: list[float]) -> Row:
    gaps = np.diff(stamps_s)
    due_ns = round(due_s * SECOND_NS)
    return Row(
        seq=seq, measured=True, prompt_id=f"p{seq}", scheduled_ns=due_ns, sent_ns=due_ns + 100_000,
        first_gen_ns=round(stamps_s[0] * SECOND_NS), last_gen_ns=round(stamps_s[-1] * SECOND_NS),
        done_ns=round(stamps_s[-1] * SECOND_NS), status="ok", max_tokens=len(stamps_s), in_tokens=130,
        out_tokens=len(stamps_s), cached_tokens=None, finish_reason="length", n_chunks=len(stamps_s), http=200,
        n_reads=len(stamps_s), gap_cv=float(gaps.std() / gaps.mean()),
    )  # fmt: skip
