"""Detectors: does an engine look faster than it is? Pure: rows in, a finding or a sentence out.

Each knows one trick, or one mishap with the same look:

- *fake streaming*: the answer is made in silence and then sent at once, so its TPOT means nothing
- *lumps*: tokens are held back and come many at a time, so a user sees stalls that a mean over the answer hides
- *an even pace*: tokens are held back to a clock; what a user sees is true, but it does not show the engine's own pace
- *dropped load*: requests are refused, or answers end early, while the load is high
- *cold start*: the tail of a cell is its first wave, which met kernels that were not compiled yet

An accusation needs a trait that an honest engine does not have under any load; how often honest ones are accused is
counted in tests/arena/judging/test_detectors.py and told in docs/fairness.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from arena.judging import stats
from arena.judging.findings import Disparity, Finding, Row

FAKE_STREAM_SHARE = 0.05  # the answer's tokens all come within this share of its time
FAKE_STREAM_TOKENS = 20
IMPOSSIBLE_PACE = 0.25  # a decoding step takes about as long as a prompt token's part of a prefill, or longer

LUMP_EVENTS = 4.0  # events that come together, in the median answer
LUMP_TOKENS = 8.0  # tokens an event: more than speculation brings
SEVERAL_TOKENS = 1.5
LONG_ANSWER = 20

EVEN_CV = 0.1
EVEN_SPREAD = 1.03  # p95 over p5 of TPOT, while the load moves
LOAD_MOVES = 1.5  # p90 over p10 of TTFT that shows it did
EVEN_ANSWERS = 100

REFUSALS = (429, 503)

FIRST_WAVE_SHARE = 0.1
FIRST_WAVE_MIN = 5
COLD_FACTOR = 5.0
COLD_REQUESTS = 2
COLD_NEEDS = 30


def fake_streaming(engine: str, rows: Sequence[Row]) -> list[Disparity]:
    """Whole answers at the end. Looked at where waiting was least: a queue makes any stream short beside its wait.

    A long prompt with a short answer has the same shape and is honest, so the pace must be impossible, too: prefill is
    the cheaper way to work on a token, and no decoding step can be much faster than a prompt token's share of it.
    """
    shapes = []
    for row in rows:
        if row.status != "ok" or row.first_gen_ns is None or row.last_gen_ns is None or row.sent_ns is None:
            continue
        tokens = row.out_tokens or row.n_chunks
        if tokens > FAKE_STREAM_TOKENS and row.last_gen_ns > row.sent_ns:
            stream_ns, wait_ns = row.last_gen_ns - row.first_gen_ns, row.first_gen_ns - row.sent_ns
            impossible = IMPOSSIBLE_PACE * wait_ns / row.in_tokens if row.in_tokens else math.inf
            looks_fake = stream_ns < FAKE_STREAM_SHARE * (stream_ns + wait_ns) and stream_ns / (tokens - 1) < impossible
            shapes.append((wait_ns, looks_fake))
    shapes.sort()
    least_waiting = shapes[: max(1, len(shapes) // 4)]
    if shapes and sum(fake for _, fake in least_waiting) > len(least_waiting) / 2:
        words = "It does not stream: the answers arrive in one piece at the end, so its TPOT means nothing."
        return [Disparity(engine, "streaming", words)]
    return []


def lumps(engine: str, rows: Sequence[Row]) -> list[Disparity]:
    """Tokens that come together. Several events in one read were held back by somebody; several tokens in one event may
    be speculation, which is told and blocks nothing up to `LUMP_TOKENS`.
    """
    long = [row for row in rows if row.status == "ok" and (row.out_tokens or row.n_chunks) > LONG_ANSWER]
    together = [row.n_chunks / row.n_reads for row in long if row.n_reads]
    an_event = [row.out_tokens / row.n_chunks for row in long if row.out_tokens and row.n_chunks]
    if together and (events := statistics.median(together)) >= LUMP_EVENTS:
        words = f"It holds its tokens back: about {events:.0f} events come at a time, and nothing between."
        return [Disparity(engine, "buffering", words)]
    if an_event and (tokens := statistics.median(an_event)) >= SEVERAL_TOKENS:
        words = f"It sends about {tokens:.0f} tokens an event"
        if tokens >= LUMP_TOKENS:
            return [Disparity(engine, "buffering", f"{words}, more than speculation brings: it holds them back.")]
        return [Disparity(engine, "several_tokens", f"{words} (speculation, or several steps at once).", blocks=False)]
    return []


def even_pace(engine: str, rows: Sequence[Row]) -> list[Disparity]:
    """Every token on the same beat, whatever the load. Told and not held against it: whoever paces its tokens shows
    them later than they were made, which wins nothing under limits on TTFT and on the mean TPOT. An engine with a whole
    machine for each request looks the same.
    """
    waits, paces, spreads = [], [], []
    for row in rows:
        if row.status != "ok" or row.first_gen_ns is None or row.last_gen_ns is None or row.gap_cv is None:
            continue
        if (row.out_tokens or row.n_chunks) > LONG_ANSWER:
            waits.append(float(row.first_gen_ns - row.scheduled_ns))
            paces.append((row.last_gen_ns - row.first_gen_ns) / ((row.out_tokens or row.n_chunks) - 1))
            spreads.append(row.gap_cv)
    if len(paces) < EVEN_ANSWERS or statistics.median(spreads) > EVEN_CV:
        return []
    if _ratio(waits, 90, 10) < LOAD_MOVES or _ratio(paces, 95, 5) > EVEN_SPREAD:
        return []
    words = (
        f"Its tokens come every {statistics.median(paces) / 1e6:.1f} ms, whatever the load: they may be held back to a "
        "clock, or it has room to spare."
    )
    return [Disparity(engine, "even_pace", words, blocks=False)]


def _ratio(values: Sequence[float], high: float, low: float) -> float:
    top, bottom = stats.quantile(values, high), stats.quantile(values, low)
    return top / bottom if top is not None and bottom else math.inf


def refused(measured: Sequence[Row]) -> Finding:
    """Requests that the engine turned away. They are misses; the latencies of the others must be read beside them."""
    count = sum(row.http in REFUSALS for row in measured)
    words = f"{count} of {len(measured)} requests were turned away (HTTP 429 or 503)." if count else ""
    return Finding("refused_requests", count == 0, count, 0, "note", words)


def dropped_load(engine: str, cells: Sequence[Sequence[Row]]) -> list[Disparity]:
    """The cell in which it refused most, in words. Refusals are in the denominator, so its rank is what it earned."""
    shares = [(sum(row.http in REFUSALS for row in cell) / len(cell), len(cell)) for cell in cells if cell]
    share, count = max(shares, default=(0.0, 0))
    if not share:
        return []
    words = f"Under load it turns requests away, up to {share:.0%} of {count} in a cell; each counts as a miss."
    return [Disparity(engine, "dropped_load", words, blocks=False)]


def ended_early(measured: Sequence[Row]) -> Finding:
    """Answers that ended before the length that was asked for."""
    known = [row for row in measured if row.status == "ok" and row.out_tokens is not None]
    share = sum(row.out_tokens < row.max_tokens for row in known if row.out_tokens is not None) / max(1, len(known))
    words = f"{share:.0%} of the answers ended before the length that was asked for." if share else ""
    return Finding("short_answer_share", share <= 0.01, share if known else None, 0.01, "note", words)


def one_token(measured: Sequence[Row]) -> Finding:
    """Answers of one token where more were asked for have no TPOT: their limit on it is met by having none."""
    known = [row for row in measured if row.status == "ok" and row.max_tokens > 1]
    count = sum((row.out_tokens if row.out_tokens is not None else row.n_chunks) <= 1 for row in known)
    words = f"{count} of {len(known)} answers have a single token, and no TPOT." if count else ""
    return Finding("one_token_answers", count == 0, count, 0, "note", words)


def first_wave(measured: Sequence[Row]) -> Finding:
    """Is the tail of this cell its beginning? The first tenth of the window must hold at least two requests that are
    five times as slow as the slowest hundredth of all later ones, in two ways: by TTFT, and by TTFT for each request
    ahead in the queue, since a queue that happens to be long at first makes its requests wait and is not cold.
    """
    check = "first_wave_slowness"
    rows = sorted((row for row in measured if row.status != "unsent"), key=lambda row: row.scheduled_ns)
    if len(rows) < COLD_NEEDS:
        return Finding(check, True, None, COLD_FACTOR, "note", "Too few requests to see whether the first were cold.")
    ratios = [_wave_over_later(each) for each in _waits(rows)]
    slowness = min((ratio for ratio in ratios if ratio is not None), default=None)
    if slowness is None:
        return Finding(check, True, None, COLD_FACTOR, "note", "The later requests give nothing to compare with.")
    told = "failed" if math.isinf(slowness) else f"were {slowness:.0f} times as slow as the slowest of the later ones"
    words = f"The window began cold: some of its first requests {told}."
    value = None if math.isinf(slowness) else slowness
    return Finding(check, slowness < COLD_FACTOR, value, COLD_FACTOR, "invalid_cold", words)


def _wave_over_later(waits: Sequence[float]) -> float | None:
    size = max(FIRST_WAVE_MIN, math.ceil(FIRST_WAVE_SHARE * len(waits)))
    later = stats.quantile(waits[size:], 99)
    return sorted(waits[:size])[-COLD_REQUESTS] / later if later and not math.isinf(later) else None


def _waits(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """TTFT of each, and TTFT over the number that were waiting for a first token when it came, itself included."""
    due = np.array([row.scheduled_ns for row in rows], dtype=float)
    # One that never got a token has left no sign of when it stopped waiting, and counts as never having waited.
    first = np.array([-math.inf if row.first_gen_ns is None else row.first_gen_ns for row in rows], dtype=float)
    ahead = np.array([np.count_nonzero(first[:index] > due[index]) for index in range(len(rows))])
    failed = np.array([row.first_gen_ns is None or row.status != "ok" for row in rows])
    waits = np.where(failed, math.inf, first - due)
    return waits.tolist(), (waits / (1 + ahead)).tolist()
