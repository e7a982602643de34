"""When requests arrive: pure, seeded schedules of absolute nanosecond offsets.

A schedule is drawn once, before the run, for every engine alike. Poisson means exponential gaps up to a horizon; the
number of arrivals stays random and nothing is rescaled, so counts in disjoint windows are independent, as theory asks.

>>> seed = seed_sequence(run=7, cell=1, replicate=0)
>>> offsets = poisson(rate_rps=50, horizon_ns=60 * 10**9, seed=seed)
"""

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

ArrivalKind: TypeAlias = Literal["poisson", "constant"]
Offsets: TypeAlias = npt.NDArray[np.int64]

SECOND_NS = 1_000_000_000


def seed_sequence(*, run: int, cell: int, replicate: int) -> np.random.SeedSequence:
    """The entropy of one schedule. Distinct triples give independent streams; equal triples give equal schedules."""
    return np.random.SeedSequence([run, cell, replicate])


def arrivals(kind: ArrivalKind, *, rate_rps: float, horizon_ns: int, seed: np.random.SeedSequence) -> Offsets:
    """Offsets from the start of a cell, ascending, each in [0, horizon_ns)."""
    if kind == "poisson":
        return poisson(rate_rps=rate_rps, horizon_ns=horizon_ns, seed=seed)
    if kind == "constant":
        return constant(rate_rps=rate_rps, horizon_ns=horizon_ns)
    assert_never(kind)


def poisson(*, rate_rps: float, horizon_ns: int, seed: np.random.SeedSequence) -> Offsets:
    """A Poisson process of `rate_rps`. A longer horizon only appends: the earlier arrivals stay where they are."""
    _check(rate_rps, horizon_ns)
    rng = np.random.Generator(np.random.PCG64(seed))
    mean_gap_ns = SECOND_NS / rate_rps
    expected = horizon_ns / mean_gap_ns
    block = int(expected + 6 * expected**0.5) + 16  # one block nearly always reaches the horizon
    blocks: list[npt.NDArray[np.float64]] = []
    reached_ns = 0.0
    while reached_ns < horizon_ns:
        times = reached_ns + np.cumsum(rng.exponential(mean_gap_ns, block))
        blocks.append(times)
        reached_ns = float(times[-1])
    offsets: Offsets = np.concatenate(blocks).astype(np.int64)
    return offsets[offsets < horizon_ns]


def constant(*, rate_rps: float, horizon_ns: int) -> Offsets:
    """Equal gaps, the first arrival at 0. Each offset is computed from its index, so that rounding never adds up."""
    _check(rate_rps, horizon_ns)
    count = int(np.ceil(horizon_ns * rate_rps / SECOND_NS)) + 1
    offsets: Offsets = np.floor(np.arange(count) * (SECOND_NS / rate_rps)).astype(np.int64)
    return offsets[offsets < horizon_ns]


def _check(rate_rps: float, horizon_ns: int) -> None:
    if not rate_rps > 0:
        raise ValueError(f"rate_rps must be above 0, not {rate_rps}")
    if horizon_ns <= 0:
        raise ValueError(f"horizon_ns must be above 0, not {horizon_ns}")
