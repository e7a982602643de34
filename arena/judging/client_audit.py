"""Findings about the client of a cell that its lag does not show. Pure; most are notes: told, and without consequence.

foreign_cpu_share       what processes that are none of the race's took of all cores
loop_lag_p99_ms         how late the client's own timers were; a stall between sends is not in any lag of a send
tokens_counted_percent  tokens of the events against the engine's usage
events_per_read         events that came in one read: somebody buffers, the engine, a proxy, or the client itself
beyond_calibration      tokens a second above those at which the client's floor was measured
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from arena.judging import stats
from arena.judging.audit import Finding
from arena.load.calibration import Calibration

FOREIGN_CPU_NOTED = 0.10
TOKEN_MISMATCH_PERCENT = 1.0
EVENTS_PER_READ = 1.5
LUMP_EVENTS = 8  # answers of fewer events say nothing about lumps


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One ok measured answer: what the engine says of it, and what came."""

    usage: int | None  # completion tokens
    events: int  # tokens as the events told them
    tokens_known: bool  # whether the events said how many tokens each had
    n_chunks: int
    n_recvs: int


def client_findings(
    *,
    answers: Sequence[Counted],
    foreign_cpu: float | None,
    max_foreign_cpu: float | None,
    loop_lags_ms: Sequence[float],
    lag_budget_ms: float,
    tokens_per_s: float,
    calibration: Calibration | None,
) -> list[Finding]:
    findings = [
        foreign_share(foreign_cpu, max_foreign_cpu),
        loop_lag(loop_lags_ms, lag_budget_ms),
        tokens_counted(answers),
        events_per_read(answers),
    ]
    if calibration is not None:
        findings.append(beyond_calibration(tokens_per_s, calibration))
    return findings


def foreign_share(share: float | None, limit: float | None) -> Finding:
    """Without a limit of the scenario's it is a note: the lag of the sends says whether the client suffered."""
    threshold = FOREIGN_CPU_NOTED if limit is None else limit
    ok = share is None or share <= threshold
    words = f"Other processes took {share:.0%} of the processor time." if share is not None else "Not told here."
    return Finding("foreign_cpu_share", ok, share, threshold, "note" if limit is None else "invalid_client", words)


def loop_lag(lags_ms: Sequence[float], budget_ms: float) -> Finding:
    p99 = stats.quantile(list(lags_ms), 99)
    words = f"The client's own timers were up to {p99:.1f} ms late." if p99 is not None else "No sample was taken."
    return Finding("loop_lag_p99_ms", p99 is None or p99 <= budget_ms, p99, budget_ms, "note", words)


def tokens_counted(answers: Sequence[Counted]) -> Finding:
    """By how much the events' tokens differ from the usage, over all answers that tell it, in percent of the usage."""
    check = "tokens_counted_percent"
    told = [answer for answer in answers if answer.usage]
    usage = sum(answer.usage or 0 for answer in told)
    if not usage:
        return Finding(check, True, None, TOKEN_MISMATCH_PERCENT, "note", "No usage to count against.")
    percent = 100 * (sum(answer.events for answer in told) - usage) / usage
    several = (
        "" if all(answer.tokens_known for answer in told) else " (its events do not say how many tokens they bring)"
    )
    words = f"Its events hold {percent:+.1f} % of tokens beside its usage{several}."
    return Finding(check, abs(percent) <= TOKEN_MISMATCH_PERCENT, percent, TOKEN_MISMATCH_PERCENT, "note", words)


def events_per_read(answers: Sequence[Counted]) -> Finding:
    """Median over answers of the events that one read brought."""
    shares = [
        answer.n_chunks / answer.n_recvs for answer in answers if answer.n_recvs and answer.n_chunks >= LUMP_EVENTS
    ]
    middle = statistics.median(shares) if shares else None
    words = (
        f"Its events came {middle:.1f} at a time: they are held back and sent in lumps, or the client reads too late."
        if middle is not None
        else "No answer was long enough to tell."
    )
    return Finding(
        "events_per_read", middle is None or middle <= EVENTS_PER_READ, middle, EVENTS_PER_READ, "note", words
    )


def beyond_calibration(tokens_per_s: float, calibration: Calibration) -> Finding:
    known = calibration.floor.chunks_per_s
    words = f"Up to {tokens_per_s:.0f} tokens/s were asked for; the client was calibrated at {known:.0f}."
    return Finding("beyond_calibration", tokens_per_s <= known, tokens_per_s, known, "note", words)
