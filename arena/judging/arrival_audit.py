"""Is what was sent what the plan meant? Pure: arrivals, each kind by a test of its own, and the prompts' lengths.

A Poisson process is tested by the gaps, count and dispersion of its arrivals (`audit.arrivals`). One whose rate changes
is tested the same way after its time was rescaled by the known rate, which turns it into one of constant rate (Brown et
al., Neural Computation 14, 2002). Gamma gaps are held against their distribution. Constant and replayed arrivals are no
matter of chance: each has to be where it belongs.

Where conversations arrive, it is their beginnings that are tested; their turns are not independent of each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import assert_never

import numpy as np
import numpy.typing as npt
from scipy.stats import gamma as gamma_distribution
from scipy.stats import kstwo

from arena.judging import audit
from arena.judging.audit import ARRIVAL_ALPHA, Finding, Row
from arena.load.arrivals import SECOND_NS, Drawn, Excerpt, intensity_of
from arena.load.spec import Constant, Gamma, Poisson, Ramp, Steps, TraceArrivals

FEWEST = 20  # arrivals that a test of chance needs
EXACT_NS = 1_000  # offsets were rounded to ns after arithmetic in double precision
# Gaps are whole ns, and gamma gaps of high variation lie below that in great numbers: they are counted, not told apart.
SMALLEST_GAP_NS = 1_000.0

Floats = npt.NDArray[np.float64]


def arrivals_drawn(drawn: Drawn, scheduled_ns: Sequence[int]) -> list[Finding]:
    """`scheduled_ns` is the plan's whole schedule, cool-down included, in the order of its requests."""
    begun = drawn.starts_ns if drawn.starts_ns is not None else scheduled_ns
    spec, times = drawn.spec, np.sort(np.asarray(begun, dtype=float))
    if isinstance(spec, Constant):
        return [equal_gaps(times, drawn)]
    if isinstance(spec, TraceArrivals):
        return [as_recorded(times, drawn.excerpt)]
    if times.size < FEWEST:
        return [Finding("arrivals", True, float(times.size), FEWEST, "note", "Too few arrivals to audit the schedule.")]
    if isinstance(spec, Poisson):
        return audit.arrivals([int(time) for time in times], drawn.rate_rps)
    if isinstance(spec, Gamma):
        return [gamma_gaps(times, spec.cv, drawn), gamma_count(times, spec.cv, drawn)]
    if isinstance(spec, (Ramp, Steps)):
        rate = intensity_of(spec, rate_rps=drawn.rate_rps, span=drawn.span)
        rescaled = rate.cumulated(times / SECOND_NS) / drawn.rate_rps
        return audit.arrivals([int(time * SECOND_NS) for time in rescaled], drawn.rate_rps)
    assert_never(spec)


def gamma_gaps(times_ns: Floats, cv: float, drawn: Drawn) -> Finding:
    """Kolmogorov-Smirnov over the gaps that nanoseconds can tell apart; the smaller ones enter by their number."""
    gaps = np.sort(np.diff(times_ns))
    expected = gamma_distribution.cdf(gaps, cv**-2, scale=SECOND_NS / drawn.rate_rps * cv**2)
    rank = np.arange(1, gaps.size + 1)
    above, below = rank / gaps.size - expected, expected - (rank - 1) / gaps.size
    told_apart = gaps >= SMALLEST_GAP_NS
    distance = max(above[told_apart].max(initial=0.0), below[told_apart].max(initial=0.0))
    p = float(kstwo.sf(distance, gaps.size))
    words = (
        f"The gaps between arrivals are not gamma-distributed with a coefficient of variation of {cv:g} (p = {p:.2g})."
    )
    return Finding("arrival_gaps_p", p >= ARRIVAL_ALPHA, p, ARRIVAL_ALPHA, "invalid_client", words)


def gamma_count(times_ns: Floats, cv: float, drawn: Drawn) -> Finding:
    """From the first arrival on the number is exact: n more fit in if n gamma gaps, a gamma sum, do."""
    more = times_ns.size - 1
    left = (drawn.span.total_ns - times_ns[0]) / SECOND_NS * drawn.rate_rps * cv**-2
    at_least = float(gamma_distribution.cdf(left, more * cv**-2)) if more else 1.0
    more_than = float(gamma_distribution.cdf(left, (more + 1) * cv**-2))
    p = min(1.0, 2 * min(at_least, 1 - more_than))
    words = f"The number of arrivals does not fit the stated rate (p = {p:.2g})."
    return Finding("arrival_count_p", p >= ARRIVAL_ALPHA, p, ARRIVAL_ALPHA, "invalid_client", words)


def equal_gaps(times_ns: Floats, drawn: Drawn) -> Finding:
    """One arrival in every gap of the span, each where the first one puts it."""
    gap_ns = SECOND_NS / drawn.rate_rps
    if not times_ns.size:
        off_ns = 0.0 if drawn.span.total_ns <= gap_ns else float("inf")
    else:
        grid = times_ns[0] + np.arange(times_ns.size) * gap_ns
        missing = max(0.0, drawn.span.total_ns - (grid[-1] + gap_ns), times_ns[0] - gap_ns)
        off_ns = max(float(np.abs(times_ns - grid).max()), missing)
    return _exact(off_ns, "Arrivals are not equally spaced at the stated rate")


def as_recorded(times_ns: Floats, excerpt: Excerpt | None) -> Finding:
    """Each arrival where the trace has it, at the stated speed."""
    recorded = np.asarray(excerpt.recorded_ns if excerpt else (), dtype=float)
    if excerpt is None or recorded.size != times_ns.size:
        off_ns = float("inf")
    else:
        off_ns = float(np.abs(times_ns - recorded / excerpt.speed).max(initial=0.0))
    return _exact(off_ns, "Arrivals are not where the trace has them")


def _exact(off_ns: float, fault: str) -> Finding:
    value = off_ns if np.isfinite(off_ns) else None
    how = f"by up to {off_ns / 1e6:.3f} ms" if value is not None else "in their number"
    ok = off_ns <= EXACT_NS
    return Finding("arrival_error_ns", ok, value, EXACT_NS, "invalid_client", f"{fault}, {how}.")


def asked_prompts(rows: Sequence[Row], asked: Mapping[int, int | None]) -> Finding:
    """How much longer the engine counts the prompts than the workload meant them to be, as a median share.

    A note, since nobody here has the engine's tokenizer, and its chat template is always on top: what a reader of
    lengths has to know. Between engines the counts have to agree, which is judged.
    """
    excess = [
        row.in_tokens / meant - 1
        for row in rows
        if row.measured and row.in_tokens is not None and (meant := asked.get(row.seq))
    ]
    if not excess:
        return Finding("prompt_length_excess", True, None, None, "note", "No prompt length was asked for, or told.")
    share = statistics.median(excess)
    words = f"The engine counts {share:+.0%} tokens against the lengths asked for; its chat template is among them."
    return Finding("prompt_length_excess", True, share, None, "note", words)
