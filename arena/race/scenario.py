"""A scenario: what is raced, under which limits, for how long. Frozen structs; `arena.race.scenario_file` reads them.

What is sent and when is said in the words of `arena.load.spec`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from arena.judging.ladder import SearchSettings
from arena.load.loadgen import ClosedLoop
from arena.load.spec import (
    Arrivals,
    Cache,
    Count,
    Poisson,
    Seconds,
    Strict,
    Workload,
    ends_naturally,
    longest_output,
)

# Upper bounds catch typing errors and infinities: far above what anyone wants, far below what breaks arithmetic.
Name: TypeAlias = Annotated[str, Meta(pattern=r"^\w[\w .-]{0,63}\Z")]  # it becomes part of a folder's name
Milliseconds: TypeAlias = Annotated[float, Meta(gt=0, le=3_600_000)]
PositiveSeconds: TypeAlias = Annotated[float, Meta(gt=0, le=86_400)]
Rate: TypeAlias = Annotated[float, Meta(ge=0.001, le=100_000)]
Price: TypeAlias = Annotated[float, Meta(ge=0, le=1_000_000)]


class SLO(Strict, frozen=True, kw_only=True):
    """A request is good when its TTFT and its TPOT are within the limits; `percentile` percent of all scheduled must
    be.
    """

    ttft_ms: Milliseconds
    tpot_ms: Milliseconds
    percentile: Annotated[float, Meta(ge=50, lt=100)] = 99.0

    def deadline_s(self, max_tokens: int) -> float:
        """A request that is not done by then, counted from its schedule, has missed the limits for certain."""
        return (self.ttft_ms + self.tpot_ms * (max_tokens - 1)) / 1000

    @property
    def lag_budget_ms(self) -> float:
        """How late the client's p99 send may be before a cell says more of the client than of the engine."""
        return max(1.0, 0.01 * self.ttft_ms)

    @property
    def gap_budget_ms(self) -> float:
        """As much of a single gap between chunks: a TPOT is the mean of many, so it is a tenth of the limit."""
        return max(1.0, 0.1 * self.tpot_ms)


class Cell(Strict, frozen=True, kw_only=True):
    """One measurement. Load goes on through the cool-down, so that the last measured requests do not meet an idle
    engine.
    """

    warmup_s: Seconds = 4.0
    duration_s: PositiveSeconds = 30.0
    min_requests: Count = 6  # at a low rate the window is prolonged until so many are expected
    settle_s: Seconds = 1.0

    def window_s(self, rate_rps: float) -> float:
        return max(self.duration_s, self.min_requests / rate_rps)


class Parity(Strict, frozen=True, kw_only=True):
    """What may differ between engines that are ranked. `same` weights: one source file for all, served as it is or
    unpacked; `any`: other weights, or the same packed a second time, are told and ranked.
    """

    weights: Literal["same", "any"] = "same"


class Search(Strict, frozen=True, kw_only=True):
    """The ladder of rates, `start_rps * step ** rung`, and how much is spent on walking it."""

    start_rps: Rate = 1.0
    step: Annotated[float, Meta(ge=1.01, le=4)] = 2**0.25
    stride: Annotated[int, Meta(ge=1, le=16)] = 4
    min_rps: Rate = 0.1
    max_rps: Rate = 256.0
    max_replicates: Count = 3
    max_cells: Count = 12  # for each engine, all rounds together
    burst: Annotated[int, Meta(ge=1, le=256)] = 24  # requests at once, to warm the engine up and to find the first rate
    burst_timeout_s: PositiveSeconds = 60.0


class Cost(Strict, frozen=True, kw_only=True):
    """What an hour of the machine costs: for all engines alike, or by engine. It becomes tokens for the money."""

    per_hour: Price | dict[str, Price]
    currency: Annotated[str, Meta(min_length=1, max_length=16)] = "USD"


class Load(Strict, frozen=True, kw_only=True):
    """How it is sent. `open`: at the times of the plan, come what may. `closed`: by `concurrency` users who wait for
    their answers and think for `think_s`; what is offered then depends on the engine, so nobody gets goodput or a rank.
    """

    kind: Literal["open", "closed"] = "open"
    workers: Annotated[int, Meta(ge=1, le=64)] = 1  # load processes
    concurrency: Annotated[int, Meta(ge=1, le=4096)] | None = None
    think_s: Seconds = 0.0
    max_foreign_cpu: Annotated[float, Meta(gt=0, le=1)] | None = None  # a cell is invalid if others took more of it

    @property
    def closed(self) -> ClosedLoop | None:
        if self.kind == "open" or self.concurrency is None:
            return None
        return ClosedLoop(concurrency=self.concurrency, think_s=self.think_s)

    def contradiction(self) -> str | None:
        if self.kind == "closed" and self.concurrency is None:
            return "a closed loop needs `load.concurrency`, the number of requests in flight."
        if self.kind == "closed" and self.workers > 1:
            return "a closed loop runs in one load process; take `load.workers` away."
        if self.kind == "open" and (self.concurrency is not None or self.think_s):
            return "`load.concurrency` and `load.think_s` belong to a closed loop; set `load.kind: closed`."
        return None


class Scenario(Strict, frozen=True, kw_only=True):
    name: Name
    title: str = ""
    model: str
    engines: tuple[str, ...] = ()  # empty: every engine that is installed here
    # Launch options of each engine; they are part of the result.
    options: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    workload: Workload
    arrivals: Arrivals = Poisson()
    cache: Cache = "cold"  # warm: what requests share may come from a prefix cache, and is the same in all cells
    slo: SLO
    search: Search = Search()
    cell: Cell = Cell()
    load: Load = Load()
    rounds: Count = 1  # with `residency: one`; each engine has one turn a round, in an order that balances places
    control: Literal["none", "aa"] = "none"  # aa: the first engine is entered twice, and may not be told from itself
    residency: Literal["one", "all"] = "one"
    confidence: Annotated[float, Meta(ge=0.5, lt=1)] = 0.95
    cost: Cost | None = None
    valid_days: Annotated[float, Meta(gt=0, le=3660)] = 90.0  # how long its evidence is to be believed
    parity: Parity = Parity()
    restart: Literal["never", "round", "replicate"] = "never"  # beyond what `residency` asks for; see docs/fairness.md

    @property
    def settings(self) -> SearchSettings:
        ladder = SearchSettings(start_rps=self.search.start_rps, step=self.search.step)
        # Mirrored at start_rps: the lowest rung whose rate is not below min_rps.
        lowest = -ladder.unclipped_rung_below(self.search.start_rps**2 / self.search.min_rps)
        return SearchSettings(
            start_rps=self.search.start_rps,
            step=self.search.step,
            stride=self.search.stride,
            min_rung=lowest,
            max_rung=ladder.unclipped_rung_below(self.search.max_rps),
            max_replicates=self.search.max_replicates,
            percentile=self.slo.percentile,
            confidence=self.confidence,
        )

    @property
    def longest_output(self) -> int:
        return longest_output(self.workload)

    @property
    def exact_output(self) -> bool:
        """Whether each answer has as many tokens as were asked for; else the model ends it, at most there."""
        return not ends_naturally(self.workload)

    def with_workers(self, workers: int) -> Scenario:
        return msgspec.structs.replace(self, load=msgspec.structs.replace(self.load, workers=workers))

    def with_model(self, model: str) -> Scenario:
        return msgspec.structs.replace(self, model=model)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        return msgspec.json.decode(text, type=cls)
