"""What this client is worth on this machine, right before a race: one short cell against the scripted engine.

The engine that computes nothing remembers when each piece left it (`arena.load.truth`), so what is measured beyond
that is the client's own error: the floor under every claim about latency. The floor is taken off the claims, never off
the data: a difference between two engines that is smaller than it is not claimed.

`calibrate` begins at the highest rate that the race may use, but not above `CEILING_CHUNKS_PER_S`, about what two cores
carry with client and engine together. A rate whose errors are beyond the budget is followed by a quarter of it, for a
machine that cannot keep time at the top may well do so where the race will be. The highest rate within the budget is
the result; cells above it are noted. Where even the lowest fails, the client cannot measure here: the race is refused.

>>> found = await calibrate(Demand(rate_rps=64, tokens=64), Budget(ttft_ms=5, gap_ms=5, lag_ms=5))
>>> found.verdict.ok, found.floor_ms("ttft")
(True, 0.21)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from arena.load.loadgen import Crew
from arena.load.truth import Truth, measure_cell, percentile

Metric: TypeAlias = Literal["ttft", "gap", "tpot"]

CEILING_CHUNKS_PER_S = 10_000.0
STEPS = 3  # rates before a machine is given up,
STEP = 4  # each so much lower than the one before
WINDOW_S = 1.5
LEAST_REQUESTS = 10


class Demand(Struct, frozen=True, kw_only=True):
    """The most that a race may ask of the client: requests a second, and their shape."""

    rate_rps: float
    tokens: int
    ttft_ms: float = 50.0
    itl_ms: float = 20.0

    @property
    def within_ceiling(self) -> Demand:
        return self.at(min(self.rate_rps, CEILING_CHUNKS_PER_S / self.tokens))

    def at(self, rate_rps: float) -> Demand:
        return Demand(rate_rps=rate_rps, tokens=self.tokens, ttft_ms=self.ttft_ms, itl_ms=self.itl_ms)


class Budget(Struct, frozen=True, kw_only=True):
    """How wrong the client may be at p99, in ms: of a TTFT, of a single gap between chunks, of a send."""

    ttft_ms: float
    gap_ms: float
    lag_ms: float


class Floor(Struct, frozen=True, kw_only=True):
    """The client's own errors at one rate, in milliseconds."""

    rate_rps: float
    chunks_per_s: float
    requests: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float | None  # of answers that have gaps
    gap_p99_ms: float | None
    lag_p99_ms: float
    cpu: float  # the load process's highest share of one core
    foreign_cpu: float | None = None  # share of all cores that others took meanwhile

    @property
    def events_per_core_s(self) -> float | None:
        """Events a second that would fill one core with the client, in proportion: about what a process can carry."""
        return self.chunks_per_s / self.cpu if self.cpu > 0 else None


def worst_floor_ms(*known: Calibration | None) -> float:
    """The largest error that clients had, of any latency; 0 where nobody was calibrated."""
    return max((found.floor_ms(metric) for found in known if found for metric in ("ttft", "gap")), default=0.0)


class CalibrationFailed(Exception):
    """The scripted engine could not be measured at all; one sentence says why."""


class CalibrationVerdict(NamedTuple):
    ok: bool
    words: str


class Calibration(Struct, frozen=True, kw_only=True):
    """The floors that were measured, the highest rate first; kept with the run."""

    asked_rps: float
    budget: Budget
    floors: tuple[Floor, ...]

    @property
    def floor(self) -> Floor:
        """The one that counts: at the highest rate within the budget, or where there is none, at the lowest tried."""
        return next((floor for floor in self.floors if not misses(floor, self.budget)), self.floors[-1])

    @property
    def verdict(self) -> CalibrationVerdict:
        return judge(self)

    def floor_ms(self, metric: Metric) -> float:
        """Differences of p99 latencies below this are the client's. A TPOT is a mean of gaps, so theirs bounds it."""
        return self.floor.ttft_p99_ms if metric == "ttft" else self.floor.gap_p99_ms or 0.0

    def may_claim(self, metric: Metric, difference_ms: float) -> bool:
        """Whether a difference between two engines is larger than what the client itself may have made of it."""
        return abs(difference_ms) > self.floor_ms(metric)


def misses(floor: Floor, budget: Budget) -> list[str]:
    """What of a floor is beyond the budget, in words; an empty list where nothing is."""
    known = (
        ("TTFT error", floor.ttft_p99_ms, budget.ttft_ms),
        ("gap error", floor.gap_p99_ms, budget.gap_ms),
        ("send lag", floor.lag_p99_ms, budget.lag_ms),
    )
    return [
        f"p99 {name} {value:.2f} ms, allowed {limit:.2f}"
        for name, value, limit in known
        if value is not None and value > limit
    ]


def judge(calibration: Calibration) -> CalibrationVerdict:
    floor = calibration.floor
    if beyond := misses(floor, calibration.budget):
        return CalibrationVerdict(
            False,
            f"The client cannot keep time on this machine, even at {floor.rate_rps:.3g} requests/s "
            f"({floor.chunks_per_s:.0f} tokens/s): {'; '.join(beyond)}.",
        )
    return CalibrationVerdict(True, describe(calibration))


def describe(calibration: Calibration) -> str:
    """One sentence for people."""
    floor = calibration.floor
    gap = f" and {floor.gap_p99_ms:.2f} ms of a gap" if floor.gap_p99_ms is not None else ""
    reach = "" if floor.rate_rps >= calibration.asked_rps else " (cells may ask for more, and are noted then)"
    return (
        f"Against an engine that computes nothing, at {floor.chunks_per_s:.0f} tokens/s{reach}, the client's error was "
        f"at p99 {floor.ttft_p99_ms:.2f} ms of TTFT{gap}, and its sends were {floor.lag_p99_ms:.2f} ms late; "
        "smaller differences are not claimed."
    )


async def calibrate(
    demand: Demand,
    budget: Budget,
    *,
    workers: int = 1,
    window_s: float = WINDOW_S,
    on_try: Callable[[Demand], None] | None = None,
) -> Calibration:
    """Measure floors from the highest rate downwards until one is within the budget. Takes about 4 s a try."""
    floors: list[Floor] = []
    crew = Crew(workers=workers) if workers > 1 else None
    for step in range(STEPS):
        tried = demand.at(demand.within_ceiling.rate_rps / STEP**step)
        if on_try is not None:
            on_try(tried)
        floors.append(await _floor(tried, window_s, crew))
        if not misses(floors[-1], budget):
            break
    return Calibration(asked_rps=demand.rate_rps, budget=budget, floors=tuple(floors))


async def _floor(demand: Demand, window_s: float, crew: Crew | None) -> Floor:
    truth = await measure_cell(
        rate_rps=demand.rate_rps,
        duration_s=max(window_s, LEAST_REQUESTS / demand.rate_rps),
        ttft_ms=demand.ttft_ms,
        itl_ms=demand.itl_ms,
        tokens=demand.tokens,
        crew=crew,
    )
    return floor_of(truth, demand)


def floor_of(truth: Truth, demand: Demand) -> Floor:
    """Out of what was measured."""
    if truth.aborted or not truth.ttft_errors_ms:
        raise CalibrationFailed(f"The client could not be calibrated: {truth.aborted or 'no request was answered.'}")
    gaps = truth.gap_errors_ms
    return Floor(
        rate_rps=demand.rate_rps,
        chunks_per_s=demand.rate_rps * demand.tokens,
        requests=truth.requests,
        ttft_p50_ms=percentile(truth.ttft_errors_ms, 50),
        ttft_p99_ms=percentile(truth.ttft_errors_ms, 99),
        gap_p50_ms=percentile(gaps, 50) if gaps else None,
        gap_p99_ms=percentile(gaps, 99) if gaps else None,
        lag_p99_ms=percentile(truth.send_lags_ms, 99),
        cpu=truth.cpu,
        foreign_cpu=truth.foreign_cpu,
    )
