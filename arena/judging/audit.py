"""Can a cell be believed? Pure: rows in, findings out. What differs between engines is parity.py's to say.

A cell passes or it is out: `invalid_client` (the load generator was late or full, so the numbers say more of the
client), `invalid_cache` (prompts were served from a prefix cache that real traffic would not have, or had been sent
before), `invalid_cold` (its tail is its first wave, which met a cold engine), `unstable` (the backlog grew: the queue
would have grown without end, so it counts as a fail whatever its percentiles say). What cannot be decided from a short
cell is a note, with the reason, and blocks nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from scipy.stats import chi2, kstest, poisson

from arena.judging import detectors, stats
from arena.judging.findings import SECOND_NS, Effect, Finding, Row

__all__ = ["Finding", "Row", "audit_cell", "verdict"]

ARRIVAL_ALPHA = 0.0005  # of a self-audit that is right to fail once in 2000 honest plans
CACHED_SHARE = 0.35  # a chat template's constant head may be cached; of a ~130-token prompt that is at most a quarter
UNSERVED_SHARE = 0.10  # backlog grows by more than this share of the offered load
DAMNING: tuple[Effect, ...] = ("invalid_client", "invalid_cache", "invalid_cold", "unstable")


def audit_cell(
    rows: Sequence[Row],
    *,
    schedule_ns: Sequence[int],
    rate_rps: float,
    warmup_ns: int,
    horizon_ns: int,
    poisson_arrivals: bool,
    lag_budget_ms: float,
    warm_cache: bool = False,
    repeated: int = 0,
    exact_output: bool = True,
) -> list[Finding]:
    """All findings of a cell, the damning and the harmless. `schedule_ns` is the whole plan, cool-down included.

    `repeated` counts its measured prompts that the engine had been sent before: it is zero, unless the scenario wants
    the cache warm (`warm_cache`). With `exact_output`, answers are to have the length that was asked for.
    """
    measured = [row for row in rows if row.measured]
    findings = [is_measured(measured), client_lag(measured, lag_budget_ms), unsent(measured)]
    findings += [cached_prompts(measured, warm=warm_cache), repeated_prompts(repeated, warm=warm_cache)]
    findings += [detectors.first_wave(measured), detectors.refused(measured)]
    if exact_output:
        findings += [detectors.ended_early(measured), detectors.one_token(measured)]
    findings.append(backlog(rows, rate_rps=rate_rps, from_ns=warmup_ns, to_ns=horizon_ns))
    if poisson_arrivals:
        findings += arrivals(schedule_ns, rate_rps)
    return findings


def verdict(
    findings: Sequence[Finding],
) -> tuple[Literal["ok", "invalid_client", "invalid_cache", "invalid_cold", "unstable"], str | None]:
    """The status of a cell and why. A cell that cannot be believed is not also called unstable."""
    for effect in DAMNING:
        failed = [finding for finding in findings if finding.effect == effect and not finding.ok]
        if failed and effect != "note":
            return effect, " ".join(finding.words for finding in failed)
    return "ok", None


def is_measured(measured: Sequence[Row]) -> Finding:
    """At a low rate, chance may put no arrival into the window; such a cell says nothing."""
    count = len(measured)
    return Finding(
        "measured_requests", count > 0, count, 1, "invalid_client", "No request fell into the measured window."
    )


def client_lag(measured: Sequence[Row], budget_ms: float) -> Finding:
    lags = [(row.sent_ns - row.scheduled_ns) / 1e6 for row in measured if row.sent_ns is not None]
    p99 = stats.quantile(lags, 99)
    ok = p99 is None or p99 <= budget_ms
    words = (
        f"p99 of the sends was {p99:.2f} ms behind schedule, allowed are {budget_ms:.2f} ms." if p99 is not None else ""
    )
    return Finding("client_lag_p99_ms", ok, p99, budget_ms, "invalid_client", words)


def unsent(measured: Sequence[Row]) -> Finding:
    count = sum(row.status == "unsent" for row in measured)
    return Finding(
        "unsent_requests", count == 0, count, 0, "invalid_client", f"{count} requests never left the client."
    )


def cached_prompts(measured: Sequence[Row], *, warm: bool) -> Finding:
    """Median share of the prompt that the engine says it had in its prefix cache. Told only where it is to be warm."""
    shares = [row.cached_tokens / row.in_tokens for row in measured if row.cached_tokens is not None and row.in_tokens]
    share = statistics.median(shares) if shares else None
    ok = warm or share is None or share <= CACHED_SHARE
    words = (
        f"{share:.0%} of the prompt tokens came from the prefix cache; if they are meant to, the scenario has to say "
        "`cache: warm`."
        if share is not None
        else "Not reported."
    )
    return Finding("cached_prompt_share", ok, share, 1.0 if warm else CACHED_SHARE, "invalid_cache", words)


def repeated_prompts(count: int, *, warm: bool) -> Finding:
    """Prompts that were sent before, to warm the engine up or in an earlier cell, are not measured."""
    words = f"{count} measured prompts had been sent to this engine before." if count else ""
    return Finding("repeated_prompts", warm or count == 0, count, 0, "invalid_cache", words)


def backlog(rows: Sequence[Row], *, rate_rps: float, from_ns: int, to_ns: int) -> Finding:
    """Does the number of requests in the system grow over the window? As a share of the offered load.

    Needs a window of three typical request lives, for until then the number grows in every system. Growth must be
    steady over the quarters of the window and larger than chance moves a queue (three times the root of its length).
    """
    check = "unserved_share"
    ended = {row.seq: _end_ns(row) for row in rows}
    lives = [
        (end - row.scheduled_ns) / SECOND_NS for row in rows if row.measured and (end := ended[row.seq]) is not None
    ]
    window_s = (to_ns - from_ns) / SECOND_NS
    if not lives or window_s < 3 * statistics.median(lives):
        return Finding(
            check, True, None, UNSERVED_SHARE, "note", "The window is too short to see whether a backlog grows."
        )
    times = np.linspace(from_ns, to_ns, 41)
    levels = [_in_flight(rows, ended, float(at)) for at in times]
    gradient, _ = stats.slope([float(at) / SECOND_NS for at in times], levels)
    share, growth = gradient / rate_rps, gradient * window_s
    quarters = [statistics.fmean(levels[i * 10 : i * 10 + 11]) for i in range(4)]
    grows = all(a < b for a, b in pairwise(quarters))
    beyond_chance = growth > 3 * math.sqrt(max(1.0, statistics.fmean(levels)))
    ok = not (grows and beyond_chance and share > UNSERVED_SHARE)
    growth_words = f"from {levels[0]:.0f} to {levels[-1]:.0f} requests in the system"
    words = f"The backlog grew by {share:.0%} of the offered load, {growth_words}."
    return Finding(check, ok, share, UNSERVED_SHARE, "unstable", words)


def arrivals(scheduled_ns: Sequence[int], rate_rps: float) -> list[Finding]:
    """Is the schedule a Poisson process of the stated rate? Count, gaps (Kolmogorov-Smirnov) and dispersion per
    second.
    """
    times = np.sort(np.asarray(scheduled_ns, dtype=float)) / SECOND_NS
    if times.size < 20:
        return [Finding("arrivals", True, float(times.size), 20, "note", "Too few arrivals to audit the schedule.")]
    gaps = np.diff(times, prepend=0.0)
    p_gaps = float(kstest(gaps * rate_rps, "expon").pvalue)
    counts = np.bincount(times.astype(int), minlength=int(times[-1]) + 1)[: max(1, int(times[-1]))]
    found = [
        Finding(
            "arrival_gaps_p", p_gaps >= ARRIVAL_ALPHA, p_gaps, ARRIVAL_ALPHA, "invalid_client",
            f"The gaps between arrivals are not exponential (p = {p_gaps:.2g}).",
        )
    ]  # fmt: skip
    if counts.size >= 5:
        expected = rate_rps * counts.size
        p_count = 2 * min(poisson.cdf(counts.sum(), expected), poisson.sf(counts.sum() - 1, expected))
        statistic = float(((counts - counts.mean()) ** 2).sum() / counts.mean())
        p_dispersion = 2 * min(chi2.cdf(statistic, counts.size - 1), chi2.sf(statistic, counts.size - 1))
        for check, p, words in (
            ("arrival_count_p", float(p_count), "The number of arrivals does not fit the stated rate"),
            ("arrival_dispersion_p", float(p_dispersion), "Arrivals are burstier or smoother than a Poisson process"),
        ):
            found.append(
                Finding(check, p >= ARRIVAL_ALPHA, p, ARRIVAL_ALPHA, "invalid_client", f"{words} (p = {p:.2g}).")
            )
    return found


def _end_ns(row: Row) -> int | None:
    """When the request left the system; None for one that was still in it when the cell ended."""
    if row.status == "ok":
        return row.last_gen_ns if row.last_gen_ns is not None else row.done_ns
    return row.scheduled_ns if row.status == "unsent" else row.done_ns


def _in_flight(rows: Sequence[Row], ended: Mapping[int, int | None], at_ns: float) -> int:
    return sum(row.scheduled_ns <= at_ns and ((end := ended[row.seq]) is None or end > at_ns) for row in rows)
