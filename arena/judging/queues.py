"""Engines in virtual time whose goodput is known: what the statistics are tried on. Pure: a seed in, latencies out.

    queue = MM1(service_rps=23.0, limit_s=1.0)
    cell = queue.cell(rate_rps=18.0, seconds=40.0, rng=np.random.default_rng(1))
    queue.goodput(percentile=99)            # 18.4: there, one request in a hundred takes longer than a second

A cell is a list of arrivals in schedule order with how far each came towards its limit (`severity`, above 1 is a miss),
as `arena.judging.cells.Sample.severity` has it for real requests. A queue begins each cell empty, as engines do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapreplace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

TRUTH_SEED = 20240116  # of the long runs that find the goodput of an engine without a formula


@dataclass(frozen=True, slots=True)
class Cell:
    """Times in seconds from the start of the cell, in schedule order."""

    scheduled_s: Series
    ended_s: Series
    severity: Series


class Engine(Protocol):
    @property
    def name(self) -> str: ...

    def cell(
        self, rate_rps: float, seconds: float, rng: np.random.Generator, plan: np.random.Generator | None = None
    ) -> Cell:
        """`plan` draws the arrivals and prompts, `rng` what is the engine's own; None: `rng` draws both."""
        ...

    def goodput(self, percentile: float) -> float: ...


@dataclass(frozen=True, slots=True)
class MM1:
    """Poisson arrivals, exponential service, one server: time in the system is exponential, of rate mu - lambda."""

    service_rps: float
    limit_s: float = 1.0

    @property
    def name(self) -> str:
        return f"M/M/1, goodput at {self.goodput(99) / self.service_rps:.0%} of its capacity"

    def cell(
        self, rate_rps: float, seconds: float, rng: np.random.Generator, plan: np.random.Generator | None = None
    ) -> Cell:
        arrivals = poisson(rate_rps, seconds, plan or rng)
        return served(arrivals, rng.exponential(1 / self.service_rps, arrivals.size), self.limit_s)

    def goodput(self, percentile: float) -> float:
        return self.service_rps + math.log(1 - percentile / 100) / self.limit_s


@dataclass(frozen=True, slots=True)
class HeavyTailed:
    """Service times that vary `variation` times their mean (log-normal): misses come from rare slow requests."""

    service_rps: float
    variation: float = 1.5
    limit_s: float = 1.0

    @property
    def name(self) -> str:
        return f"service times that vary {self.variation:g} times their mean"

    def cell(
        self, rate_rps: float, seconds: float, rng: np.random.Generator, plan: np.random.Generator | None = None
    ) -> Cell:
        arrivals = poisson(rate_rps, seconds, plan or rng)
        sigma = math.sqrt(math.log1p(self.variation**2))
        services = rng.lognormal(-math.log(self.service_rps) - sigma**2 / 2, sigma, arrivals.size)
        return served(arrivals, services, self.limit_s)

    def goodput(self, percentile: float) -> float:
        return long_run_goodput(self, percentile, (0.1 * self.service_rps, self.service_rps))


@dataclass(frozen=True, slots=True)
class Batching:
    """Continuous batching: each step takes `step_s`, more for every request that decodes and every prompt token read.

    Prompts of 111 to 151 tokens, answers of 64, at most 64 requests at once and 256 tokens a step. Every now and then a
    neighbour takes a share of the machine for some seconds (`neighbour` times slower), so that two runs differ.
    """

    step_s: float = 0.004
    decode_s: float = 0.0007
    prompt_s: float = 0.0006
    neighbour: float = 1.0
    ttft_limit_s: float = 1.0
    tpot_limit_s: float = 0.06

    @property
    def name(self) -> str:
        beside = (
            f" beside a neighbour that slows it {self.neighbour:g} times now and then" if self.neighbour > 1 else ""
        )
        return f"continuous batching{beside}"

    def cell(
        self, rate_rps: float, seconds: float, rng: np.random.Generator, plan: np.random.Generator | None = None
    ) -> Cell:
        arrivals = poisson(rate_rps, seconds, plan or rng)
        prompts = (plan or rng).integers(111, 152, arrivals.size)
        slow = _neighbour_times(seconds, rng) if self.neighbour > 1 else ()
        first, last = self._serve(arrivals.tolist(), prompts.tolist(), slow)
        severity = np.maximum((first - arrivals) / self.ttft_limit_s, (last - first) / 63 / self.tpot_limit_s)
        return Cell(arrivals, last, severity)

    def goodput(self, percentile: float) -> float:
        return long_run_goodput(self, percentile, (1.0, 16.0))

    def _serve(
        self, arrivals: Sequence[float], prompts: list[int], slow: Sequence[tuple[float, float]]
    ) -> tuple[Series, Series]:
        """When each request got its first token, and its last."""
        now, due, step, count = 0.0, 0, 0, len(arrivals)
        waiting: deque[int] = deque()
        decoding: deque[tuple[int, int]] = deque()  # (step of its last token, request), in that order
        spells = deque(slow)
        first, last = [0.0] * count, [0.0] * count
        while due < count or waiting or decoding:
            if not waiting and not decoding:
                now = max(now, arrivals[due])
            while due < count and arrivals[due] <= now:
                waiting.append(due)
                due += 1
            started: list[int] = []
            budget, read = 256 - len(decoding), 0
            while waiting and budget > 0 and len(decoding) + len(started) < 64:
                part = min(budget, prompts[waiting[0]])
                prompts[waiting[0]] -= part
                budget -= part
                read += part
                if not prompts[waiting[0]]:
                    started.append(waiting.popleft())
            while spells and spells[0][1] <= now:
                spells.popleft()
            slower = self.neighbour if spells and spells[0][0] <= now else 1.0
            took = slower * (self.step_s + self.decode_s * len(decoding) + self.prompt_s * read)
            steps = 1
            if not read:  # nothing changes until an answer ends, a request comes or a spell turns
                steps = decoding[0][0] - step
                turns = [arrivals[due]] if due < count else []
                turns += spells[0][:2] if spells else ()
                ahead = min((turn for turn in turns if turn > now), default=math.inf)
                steps = max(1, math.ceil(min(steps, (ahead - now) / took)))
            now += steps * took
            step += steps
            while decoding and decoding[0][0] == step:
                last[decoding.popleft()[1]] = now
            for request in started:
                first[request] = now
                decoding.append((step + 63, request))
        return np.asarray(first), np.asarray(last)


@dataclass(frozen=True, slots=True)
class Servers:
    """Several servers behind one queue; now and then a request takes `long` times as long as the others."""

    service_s: float = 0.08
    servers: int = 4
    long: float = 8.0
    share_long: float = 0.05
    limit_s: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.servers} servers, one request in {1 / self.share_long:.0f} takes {self.long:g} times as long"

    def cell(
        self, rate_rps: float, seconds: float, rng: np.random.Generator, plan: np.random.Generator | None = None
    ) -> Cell:
        arrivals = poisson(rate_rps, seconds, plan or rng)
        is_long = (plan or rng).random(arrivals.size) < self.share_long
        services = self.service_s * rng.uniform(0.5, 1.5, arrivals.size) * np.where(is_long, self.long, 1.0)
        free = [0.0] * self.servers
        ended = []
        for arrival, service in zip(arrivals.tolist(), services.tolist(), strict=True):
            end = max(arrival, free[0]) + service
            heapreplace(free, end)
            ended.append(end)
        return Cell(arrivals, np.asarray(ended), (np.asarray(ended) - arrivals) / self.limit_s)

    def goodput(self, percentile: float) -> float:
        return long_run_goodput(self, percentile, (1.0, self.servers / self.service_s))


@dataclass(frozen=True, slots=True)
class Scaled:
    """An engine for which time runs `factor` times as fast, its limits included: all alike, but for its goodput."""

    engine: Engine
    factor: float

    @property
    def name(self) -> str:
        return f"{self.engine.name}, at {self.factor:.3g} times the rate"

    def cell(
        self, rate_rps: float, seconds: float, rng: np.random.Generator, plan: np.random.Generator | None = None
    ) -> Cell:
        cell = self.engine.cell(rate_rps / self.factor, seconds * self.factor, rng, plan)
        return Cell(cell.scheduled_s / self.factor, cell.ended_s / self.factor, cell.severity)

    def goodput(self, percentile: float) -> float:
        return self.factor * self.engine.goodput(percentile)


def poisson(rate_rps: float, seconds: float, rng: np.random.Generator) -> Series:
    return np.sort(rng.uniform(0, seconds, rng.poisson(rate_rps * seconds)))


def served(arrivals: Series, services: Series, limit_s: float) -> Cell:
    """One server, first come first served (Lindley's recursion in closed form)."""
    if not arrivals.size:
        return Cell(arrivals, arrivals, arrivals)
    work = np.cumsum(services)
    ended = work + np.maximum.accumulate(arrivals - (work - services))
    return Cell(arrivals, ended, (ended - arrivals) / limit_s)


def _neighbour_times(seconds: float, rng: np.random.Generator) -> list[tuple[float, float]]:
    """Spells of 2 s on average, 8 s apart on average."""
    spells, now = [], rng.exponential(8.0)
    while now < seconds:
        length = rng.exponential(2.0)
        spells.append((now, now + length))
        now += length + rng.exponential(8.0)
    return spells


@cache
def long_run_goodput(engine: Engine, percentile: float, between: tuple[float, float]) -> float:
    """The rate at which one request in a hundred misses, over 25,000 s; the same random numbers at each rate."""
    low, high = between
    while high / low > 1.004:
        middle = math.sqrt(low * high)
        if _long_run_misses(engine, middle) <= 1 - percentile / 100:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def _long_run_misses(engine: Engine, rate_rps: float) -> float:
    misses = requests = 0
    for part in range(5):
        cell = engine.cell(rate_rps, 5_000.0, np.random.default_rng([TRUTH_SEED, part]))
        settled = cell.severity[cell.scheduled_s >= 100.0]
        misses += int((settled > 1).sum())
        requests += settled.size
    return misses / requests
