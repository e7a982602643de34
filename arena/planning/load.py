"""The load that is planned for: when requests come, what kind of work they are, and how bursty they are. Pure.

load = steady(rate_rps=12, cv=1.0, seed=1)          # 1: Poisson; above it bursts, gamma gaps as in vLLM's burstiness
load = recorded(trace, rate_rps=None)               # a trace at its own rate, or at another: time is stretched
load.faster(0.2)                                    # the same requests a fifth faster
burstiness(load, window_s=1.0)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from msgspec import Struct

from arena.judging.shape import UNTOLD, Bucket, Shape
from arena.load.traces import Trace
from arena.planning.queue import Seconds, mean_rate

PERIODS = 10  # of a recorded trace
STEADY_ARRIVALS = 20_000  # 200 misses of a p99 are allowed: enough to tell a share of 1 % to about a tenth


@dataclass(frozen=True, eq=False)
class Load:
    arrivals_s: Seconds
    words: str
    shape: Shape = UNTOLD  # nothing told: every kind of work will do
    periods: int = 1  # each of which has to hold the limits: the rush hour, and not only the day

    @property
    def rate_rps(self) -> float:
        return mean_rate(self.arrivals_s)

    @property
    def bucket(self) -> Bucket | None:
        return self.shape.bucket

    def faster(self, share: float) -> Load:
        """The headroom: all gaps shorter, so that the rate is `1 + share` of what it was."""
        return replace(self, arrivals_s=self.arrivals_s / (1 + share))


class Burstiness(Struct, frozen=True):
    """Counts of arrivals in windows as long as the SLO lets a request wait."""

    window_s: float
    peak_over_mean: float  # of the fullest window
    dispersion: float  # variance over mean of the counts; 1 is Poisson


def steady(*, rate_rps: float, cv: float = 1.0, seed: int = 1, shape: Shape = UNTOLD) -> Load:
    """`cv`: standard deviation of the gaps over their mean."""
    gaps = np.random.Generator(np.random.PCG64(seed)).gamma(1 / cv**2, cv**2 / rate_rps, STEADY_ARRIVALS)
    kind = "Poisson arrivals" if cv == 1 else f"arrivals with gaps of cv {cv:g}"
    return Load(np.cumsum(gaps), f"{rate_rps:g} requests/s, {kind}", shape)


def recorded(trace: Trace, *, rate_rps: float | None = None, shape: Shape | None = None) -> Load:
    arrivals = trace.at_ns / 1e9
    own = mean_rate(arrivals)
    words = f"{len(trace)} requests of {trace.name}, {own:.3g} a second"
    if rate_rps is not None:
        arrivals, words = arrivals * (own / rate_rps), f"{words}, replayed at {rate_rps:g}"
    return Load(arrivals, words, shape if shape is not None else shape_of(trace), PERIODS)


def shape_of(trace: Trace) -> Shape:
    return Shape(
        prompt_tokens=round(float(trace.prompt_tokens.mean()), 1),
        output_tokens=round(float(trace.output_tokens.mean()), 1),
        cached_share=repeated_share(trace.hash_ids) if trace.hash_ids is not None else None,
    )


def repeated_share(hash_ids: tuple[tuple[int, ...], ...]) -> float:
    """Of all blocks of prompts, those that an earlier prompt began with too: what an endless cache would hold."""
    seen: set[int] = set()
    repeated = total = 0
    for blocks in hash_ids:
        repeated += next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
        total += len(blocks)
        seen.update(blocks)
    return round(repeated / total, 3) if total else 0.0


def burstiness(load: Load, window_s: float) -> Burstiness:
    times = load.arrivals_s - load.arrivals_s[0]
    places = (times / window_s).astype(np.int64)
    windows = int(places.max()) + 1  # empty ones, of which a year has many, are counted and not made
    counts = np.unique(places, return_counts=True)[1].astype(np.float64)
    mean = len(times) / windows
    variance = float((counts**2).sum()) / windows - mean**2
    return Burstiness(window_s, round(float(counts.max()) / mean, 2), round(variance / mean, 2))
