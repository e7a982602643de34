"""What a plan would send, in figures, before anything is sent. Pure.

seen = preview(plan)
seen.prompt_tokens          # Spread(p50=.., p95=.., most=..)
seen.shared                 # share of the prompts' words that an endless prefix cache would have seen before
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from arena.load.arrivals import SECOND_NS
from arena.load.plan import CellPlan, PlannedRequest

BLOCK_WORDS = 16  # of shared beginnings: as many as a block has tokens in most engines


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    mean: float
    p50: int
    p95: int
    most: int


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """Of one cell. Lengths are those asked for, over the measured requests; None where the workload states none."""

    kind: str
    asked_rps: float
    window_rps: float  # as drawn
    warmup: int
    measured: int
    cooldown: int
    per_second: tuple[int, ...]  # arrivals over the whole cell
    prompt_tokens: Spread | None
    output_tokens: Spread | None
    shared: float
    conversations: int | None  # that take part
    trace_row: int | None  # the first one that is replayed
    trace_speed: float | None  # times as fast as it was recorded
    sha256: str


def preview(plan: CellPlan) -> Preview:
    due = [request.scheduled_ns for request in plan.requests]
    measured = plan.measured
    warmup = sum(at < plan.warmup_ns for at in due)
    drawn = plan.drawn
    excerpt = drawn.excerpt if drawn else None
    return Preview(
        kind=plan.kind,
        asked_rps=plan.rate_rps,
        window_rps=len(measured) * SECOND_NS / (plan.horizon_ns - plan.warmup_ns),
        warmup=warmup,
        measured=len(measured),
        cooldown=len(due) - warmup - len(measured),
        per_second=tuple(int(count) for count in np.bincount(np.array(due, dtype=np.int64) // SECOND_NS)),
        prompt_tokens=_spread([each.prompt_tokens for each in measured if each.prompt_tokens is not None]),
        output_tokens=_spread([each.max_tokens for each in measured]),
        shared=_shared(plan.requests),
        conversations=len(drawn.starts_ns) if drawn and drawn.starts_ns is not None else None,
        trace_row=excerpt.first_row if excerpt else None,
        trace_speed=excerpt.speed if excerpt else None,
        sha256=plan.sha256,
    )


def _spread(values: Sequence[int]) -> Spread | None:
    if not values:
        return None
    p50, p95 = (int(value) for value in np.quantile(values, [0.5, 0.95], method="inverted_cdf"))
    return Spread(mean=float(np.mean(values)), p50=p50, p95=p95, most=max(values))


def _shared(requests: Sequence[PlannedRequest]) -> float:
    """Words in blocks that began an earlier prompt too, over all words. Roles count as words, as in a chat template."""
    seen: set[int] = set()
    total = shared = 0
    for request in requests:
        words = _words(msgspec.json.decode(request.body))
        total += len(words)
        beginning, is_known = 0, True
        for place in range(0, len(words) - BLOCK_WORDS + 1, BLOCK_WORDS):
            beginning = hash((beginning, *words[place : place + BLOCK_WORDS]))
            is_known = is_known and beginning in seen
            shared += BLOCK_WORDS * is_known
            seen.add(beginning)
    return shared / total if total else 0.0


def _words(body: dict[str, Any]) -> list[str]:
    return [
        word for message in body.get("messages", ()) for word in (message["role"], *str(message["content"]).split())
    ]
