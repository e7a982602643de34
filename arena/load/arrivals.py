"""When requests arrive: pure, seeded schedules of absolute nanosecond offsets.

A schedule is drawn once, before the run, for every engine alike. Poisson means exponential gaps up to a horizon; the
number of arrivals stays random and nothing is rescaled, so counts in disjoint windows are independent, as theory asks.
What a schedule was drawn from is kept beside it (`Drawn`), so that an audit can hold the two against each other.

>>> seed = seed_sequence(run=7, cell=1, replicate=0)
>>> offsets = poisson(rate_rps=50, horizon_ns=60 * 10**9, seed=seed)
>>> drawn, offsets = draw(Gamma(cv=2), rate_rps=50, span=Span(0, 60 * 10**9, 0), seed=seed)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

import msgspec
import numpy as np
import numpy.typing as npt

from arena.load import intensity
from arena.load.intensity import Intensity
from arena.load.spec import Arrivals, Constant, Gamma, Poisson, Ramp, Steps, TraceArrivals
from arena.load.traces import Trace

ArrivalKind: TypeAlias = Literal["poisson", "gamma", "constant", "ramp", "steps", "trace"]
Offsets: TypeAlias = npt.NDArray[np.int64]

SECOND_NS = 1_000_000_000
_TRACE_STREAM = 1  # keys of what else is drawn from a schedule's seed
_PHASE_STREAM = 2


@dataclass(frozen=True, slots=True)
class Span:
    """What a schedule covers: before, within and after the measured window."""

    before_ns: int
    window_ns: int
    after_ns: int

    @property
    def total_ns(self) -> int:
        return self.before_ns + self.window_ns + self.after_ns


class Excerpt(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a trace that a schedule replays. `speed` is how many times faster than they were recorded."""

    trace: str
    first_row: int
    speed: float
    recorded_ns: tuple[int, ...]


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """How the arrivals of a plan came about.

    `rate_rps` counts arrivals: of requests, or where the workload has them, of conversations, whose beginnings are then
    in `starts_ns`. Times run from `lead_ns` before the cell, where the conversations begin that are under way at its
    start.
    """

    spec: Arrivals
    rate_rps: float
    before_ns: int
    window_ns: int
    after_ns: int
    lead_ns: int = 0
    starts_ns: tuple[int, ...] | None = None
    excerpt: Excerpt | None = None

    @property
    def kind(self) -> ArrivalKind:
        kind: ArrivalKind = self.spec.__struct_config__.tag  # type: ignore[assignment]  # the tags are the kinds
        return kind

    @property
    def span(self) -> Span:
        return Span(self.before_ns, self.window_ns, self.after_ns)


def seed_sequence(*, run: int, cell: int, replicate: int) -> np.random.SeedSequence:
    """The entropy of one schedule. Distinct triples give independent streams; equal triples give equal schedules."""
    return np.random.SeedSequence([run, cell, replicate])


def draw(
    spec: Arrivals, *, rate_rps: float, span: Span, seed: np.random.SeedSequence, trace: Trace | None = None
) -> tuple[Drawn, Offsets]:
    """Offsets from the start of the span, ascending, each in [0, span.total_ns), and how they were drawn."""
    _check(rate_rps, span.total_ns)
    excerpt = None
    if isinstance(spec, Poisson):
        offsets = poisson(rate_rps=rate_rps, horizon_ns=span.total_ns, seed=seed)
    elif isinstance(spec, Gamma):
        offsets = gamma(cv=spec.cv, rate_rps=rate_rps, horizon_ns=span.total_ns, seed=seed)
    elif isinstance(spec, Constant):
        phase = float(_stream(seed, _PHASE_STREAM).random())
        offsets = constant(rate_rps=rate_rps, horizon_ns=span.total_ns, phase=phase)
    elif isinstance(spec, (Ramp, Steps)):
        offsets = varying(intensity_of(spec, rate_rps=rate_rps, span=span), horizon_ns=span.total_ns, seed=seed)
    elif isinstance(spec, TraceArrivals):
        if trace is None:
            raise ValueError("arrivals of kind `trace` need a trace")
        excerpt, offsets = replay(trace, rate_rps=rate_rps, horizon_ns=span.total_ns, seed=seed)
    else:
        assert_never(spec)
    drawn = Drawn(
        spec=spec,
        rate_rps=rate_rps,
        before_ns=span.before_ns,
        window_ns=span.window_ns,
        after_ns=span.after_ns,
        excerpt=excerpt,
    )
    return drawn, offsets


def poisson(*, rate_rps: float, horizon_ns: int, seed: np.random.SeedSequence) -> Offsets:
    """A Poisson process of `rate_rps`. A longer horizon only appends: the earlier arrivals stay where they are."""
    _check(rate_rps, horizon_ns)
    rng = _stream(seed)
    mean_gap_ns = SECOND_NS / rate_rps
    return _renewal(lambda size: rng.exponential(mean_gap_ns, size), 0.0, horizon_ns, horizon_ns / mean_gap_ns, 1.0)


def gamma(*, cv: float, rate_rps: float, horizon_ns: int, seed: np.random.SeedSequence) -> Offsets:
    """A renewal process with gamma gaps of coefficient of variation `cv`. A longer horizon only appends.

    It is in equilibrium from the start: the first gap is what is left of a gap that time 0 falls into (a uniform part
    of a length-biased one; Cox, Renewal Theory, 1962), so that the rate is `rate_rps` at every moment. Where others
    speak of burstiness (`vllm bench serve --burstiness`), that is the shape, 1 / cv^2.
    """
    _check(rate_rps, horizon_ns)
    rng = _stream(seed)
    shape = cv**-2
    scale = SECOND_NS / rate_rps / shape
    first = float(rng.random() * rng.gamma(shape + 1, scale))
    expected = horizon_ns / (shape * scale)
    rest = _renewal(lambda size: rng.gamma(shape, scale, size), first, horizon_ns, expected, cv)
    return np.concatenate([[np.int64(first)], rest]) if first < horizon_ns else np.empty(0, np.int64)


def constant(*, rate_rps: float, horizon_ns: int, phase: float = 0.0) -> Offsets:
    """Equal gaps, the first arrival after `phase` of a gap. Each offset is computed from its index, so that rounding
    never adds up.
    """
    _check(rate_rps, horizon_ns)
    count = int(np.ceil(horizon_ns * rate_rps / SECOND_NS)) + 1
    offsets: Offsets = np.floor((np.arange(count) + phase) * (SECOND_NS / rate_rps)).astype(np.int64)
    return offsets[offsets < horizon_ns]


def varying(rate: Intensity, *, horizon_ns: int, seed: np.random.SeedSequence) -> Offsets:
    """A Poisson process whose rate changes over time. What comes later in `rate` changes nothing before it."""
    rng = _stream(seed)
    expected = rate.expected
    block = int(expected + 6 * expected**0.5) + 16
    unit = np.cumsum(rng.exponential(1.0, block))
    while unit[-1] < expected:
        unit = np.concatenate([unit, unit[-1] + np.cumsum(rng.exponential(1.0, block))])
    offsets: Offsets = (rate.inverse(unit[unit < expected]) * SECOND_NS).astype(np.int64)
    return offsets[offsets < horizon_ns]


def intensity_of(spec: Ramp | Steps, *, rate_rps: float, span: Span) -> Intensity:
    """The rate over the span; its mean over the window is `rate_rps`."""
    before_s, window_s, after_s = (part / SECOND_NS for part in (span.before_ns, span.window_ns, span.after_ns))
    if isinstance(spec, Ramp):
        return intensity.ramp(spec.from_, spec.to, rate=rate_rps, before_s=before_s, window_s=window_s, after_s=after_s)
    return intensity.steps(
        spec.levels, spec.lengths, rate=rate_rps, before_s=before_s, window_s=window_s, after_s=after_s
    )


def first_row(trace: Trace, seed: np.random.SeedSequence) -> int:
    """Where a replay begins, as the seed has it: at a row after which time goes on, so that an excerpt has a length."""
    last_of_their_time = np.append(np.flatnonzero(np.diff(trace.at_ns) > 0), len(trace) - 1)
    return int(last_of_their_time[_stream(seed, _TRACE_STREAM).integers(len(last_of_their_time))])


def replay(trace: Trace, *, rate_rps: float, horizon_ns: int, seed: np.random.SeedSequence) -> tuple[Excerpt, Offsets]:
    """As many rows of the trace as `rate_rps` asks for over the horizon, with their time stretched to fill it.

    So the mean rate over the horizon is the one asked for, whatever it was in the excerpt, and the shape is the
    trace's. An excerpt longer than the trace goes round.
    """
    _check(rate_rps, horizon_ns)
    count = max(1, round(rate_rps * horizon_ns / SECOND_NS))
    first = first_row(trace, seed)
    recorded = trace.times_from(first, count + 1)
    recorded -= recorded[0]
    span_ns = int(recorded[-1])  # to the row after the last one, which would arrive at the horizon
    offsets: Offsets = np.floor(recorded[:-1] * (horizon_ns / span_ns)).astype(np.int64)
    excerpt = Excerpt(
        trace=trace.name,
        first_row=first,
        speed=span_ns / horizon_ns,
        recorded_ns=tuple(int(at) for at in recorded[:-1]),
    )
    return excerpt, np.minimum(offsets, horizon_ns - 1)


def _renewal(
    gaps: Callable[[int], npt.NDArray[np.float64]], start: float, horizon_ns: int, expected: float, cv: float
) -> Offsets:
    """Arrivals after `start`, gap by gap, up to the horizon. Gaps come from one stream in order."""
    block = int(expected + 6 * cv * expected**0.5) + 16  # one block nearly always reaches the horizon
    blocks: list[npt.NDArray[np.float64]] = []
    reached_ns = start
    while reached_ns < horizon_ns:
        times = reached_ns + np.cumsum(gaps(block))
        blocks.append(times)
        reached_ns = float(times[-1])
    if not blocks:
        return np.empty(0, np.int64)
    offsets: Offsets = np.concatenate(blocks).astype(np.int64)
    return offsets[offsets < horizon_ns]


def _stream(seed: np.random.SeedSequence, *key: int) -> np.random.Generator:
    """The seed's own stream, or one beside it; asking for it leaves the seed as it is."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, *key))))


def _check(rate_rps: float, horizon_ns: int) -> None:
    if not rate_rps > 0:
        raise ValueError(f"rate_rps must be above 0, not {rate_rps}")
    if horizon_ns <= 0:
        raise ValueError(f"horizon_ns must be above 0, not {horizon_ns}")
