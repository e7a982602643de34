"""What the audits look at and what they say: one request as a row, a finding of a cell, a disparity of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

SECOND_NS = 1_000_000_000

Effect: TypeAlias = Literal["note", "invalid_client", "invalid_cache", "invalid_cold", "unstable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request as the audits see it. Times in ns from the cell's start, None where the thing never happened."""

    seq: int
    measured: bool
    prompt_id: str
    scheduled_ns: int
    sent_ns: int | None
    first_gen_ns: int | None
    last_gen_ns: int | None
    done_ns: int | None
    status: str
    max_tokens: int
    in_tokens: int | None
    out_tokens: int | None
    cached_tokens: int | None
    finish_reason: str | None
    n_chunks: int  # events that generated something
    http: int | None = None
    n_reads: int | None = None  # moments at which such events came: those of one read came together
    gap_cv: float | None = None  # standard deviation of the gaps between these moments, over their mean


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of one cell. `ok=False` with the effect "note" is told and has no consequence."""

    check: str
    ok: bool
    value: float | None
    threshold: float | None
    effect: Effect
    words: str


@dataclass(frozen=True, slots=True)
class Disparity:
    """How an engine's work differs from its rivals'. One that `blocks` takes its rank; any other is told beside it."""

    engine: str
    check: str
    words: str
    blocks: bool = True
