"""Do the statistics keep what they promise? Searches and races on engines of known goodput, in virtual time. Pure.

    row = calibrate(MM1(service_rps=23.0), CHAT, searches=200, seed=1, tick=print)
    row.covered                # share of searches whose interval holds the true goodput: 0.90 is demanded
    table([row])               # Markdown

Cells are judged by the very functions that judge real ones (`arena.judging.cells`): warm-up, stationarity, design
effect, verdicts, search, fit. A race is two searches that meet the same arrivals at the same rung and replicate, as in
real ones: of an engine with itself under another name, with another kind of engine of the same goodput, and with itself
at 1.3, 2 and 4 times the rate (time runs faster for it, limits included, so that its goodput is known). Beside them
runs the search that everybody writes first: bisection on the observed p99 of 200 requests, each time from an idle
engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from arena.judging import stats, steady
from arena.judging.knee import Knee, probability_better
from arena.judging.ladder import Outcome, SearchSettings
from arena.judging.queues import MM1, Batching, Cell, Engine, HeavyTailed, Scaled, Servers
from arena.judging.ranking import SURE, is_apart
from arena.judging.search import Goodput, estimate, next_probe

LEAST_COVERED, MOST_FALSE, MOST_APART = 0.90, 0.05, 0.05
NAIVE_REQUESTS = 200
COOLDOWN_S = 5.0
PERCENTILE = 99.0


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search may spend: as in the scenario `chat`, as in its quick form, and enough for proofs. `factors`: how
    much faster the other engine of a race is; larger ones are told apart in all races.
    """

    name: str
    warmup_s: float
    window_s: float
    max_cells: int
    min_requests: int
    replicates: int
    factors: tuple[float, ...]

    @property
    def settings(self) -> SearchSettings:
        return SearchSettings(stride=2, max_replicates=self.replicates)

    def at(self, rate_rps: float) -> Budget:
        """At a low rate the window is prolonged until so many requests are expected (`Cell.min_requests`)."""
        return replace(self, window_s=max(self.window_s, self.min_requests / rate_rps))


QUICK = Budget("3 cells of 4 s", 2.5, 4.0, 3, 8, 1, (1.3, 2.0, 4.0))
CHAT = Budget("8 cells of 30 s", 5.0, 30.0, 8, 60, 4, (1.3, 2.0, 4.0))
LONG = Budget("8 cells of 300 s", 5.0, 300.0, 8, 60, 4, (1.3, 2.0))

# The constants of the method were set on the first six; the last one, the flattest, decided the least steepness.
ENGINES: tuple[Engine, ...] = (
    MM1(10.0), MM1(23.0), Batching(), Batching(neighbour=1.5), HeavyTailed(20.0), Servers(), MM1(7.0),
)  # fmt: skip
BUDGETS = (QUICK, CHAT, LONG)


@dataclass(frozen=True, slots=True)
class Power:
    """Of all races against an engine of `factor` times the goodput: told apart, and the wrong way round."""

    factor: float
    told: float
    wrong: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Shares of all searches, but `apart` and `power` (of all races); ratios are to the true goodput."""

    engine: str
    budget: str
    searches: int
    covered: float
    estimate: float | None  # median ratio
    width: float | None  # median of high end over low end
    proven: float
    false_pass: float
    false_fail: float
    apart: float  # two names for one engine, on the same arrivals
    apart_alone: float  # the same, each on arrivals of its own
    apart_unlike: float  # beside `unlike`, of the same goodput
    unlike: str
    power: tuple[Power, ...]
    naive: float  # median ratio
    naive_above: float

    @property
    def missed(self) -> list[str]:
        """The targets that this row misses."""
        missed = []
        if self.covered < LEAST_COVERED:
            missed.append(f"covers {self.covered:.1%}")
        if self.false_pass > MOST_FALSE:
            missed.append(f"proves falsely in {self.false_pass:.1%}")
        for words, share in (
            ("equals", self.apart),
            ("equals", self.apart_alone),
            ("unlike equals", self.apart_unlike),
        ):
            if share > MOST_APART:
                missed.append(f"tells {words} apart in {share:.1%}")
        return missed


def calibrate(
    engine: Engine,
    budget: Budget,
    *,
    searches: int,
    seed: int,
    unlike: Engine | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Row:
    """Half as many races as searches. `unlike` is brought to the engine's goodput; None: a second M/M/1. `tick` is
    called after each race.
    """
    truth = engine.goodput(PERCENTILE)
    other = unlike or MM1(23.0)
    rivals = [Scaled(other, truth / other.goodput(PERCENTILE)), *(Scaled(engine, times) for times in budget.factors)]
    found: list[tuple[Goodput, Knee]] = []
    others: list[list[Knee]] = []
    naive: list[float] = []
    for number in range(math.ceil(searches / 2)):
        rngs = np.random.default_rng([seed, number]).spawn(3 + len(rivals))

        def entered(entrant: Engine, rng: np.random.Generator, race: int = number) -> list[Outcome]:
            first_rps = entrant.goodput(PERCENTILE) * rng.uniform(0.5, 1.5)
            return search(entrant, budget, rng, first_rps=first_rps, plan_seed=(seed, race))

        for rng in rngs[:2]:
            outcomes = entered(engine, rng)
            found.append((estimate(outcomes, budget.settings), Knee(outcomes, budget.settings)))
        raced = zip(rivals, rngs[3:], strict=True)
        others.append([Knee(entered(rival, rng), budget.settings) for rival, rng in raced])
        naive += [naive_bisection(engine, rngs[2], (truth / 4, truth * 4)) for _ in range(2)]
        tick()
    goodputs = [goodput for goodput, _ in found]
    knees, twins = [knee for _, knee in found[::2]], [knee for _, knee in found[1::2]]
    better = [[probability_better(rival, knee) for rival in race] for race, knee in zip(others, knees, strict=True)]

    def share(claim: Callable[[Goodput], bool]) -> float:
        return sum(map(claim, goodputs)) / len(goodputs)

    def apart(races: Sequence[tuple[Knee, Knee]]) -> float:
        return sum(is_apart(probability_better(a, b)) for a, b in races) / len(races) if races else 0.0

    def told(rival: int, *, at_least: float = 0.0, at_most: float = 1.0) -> float:
        return sum(at_least <= race[rival] <= at_most for race in better) / len(better)

    return Row(
        engine=engine.name,
        budget=budget.name,
        searches=len(found),
        covered=share(lambda g: g.lo <= truth and (g.hi is None or truth <= g.hi)),
        estimate=_median([g.estimate_rps / truth for g in goodputs if g.estimate_rps is not None]),
        width=_median([g.hi / g.lo for g in goodputs if g.hi is not None and g.lo > 0]),
        proven=share(lambda g: g.proven_pass_rps is not None),
        false_pass=share(lambda g: g.proven_pass_rps is not None and g.proven_pass_rps > truth),
        false_fail=share(lambda g: g.proven_fail_rps is not None and g.proven_fail_rps < truth),
        apart=apart(list(zip(knees, twins, strict=True))),
        apart_alone=apart(list(zip(knees, twins[1:], strict=False))),
        apart_unlike=told(0, at_least=SURE) + told(0, at_most=1 - SURE),
        unlike=other.name,
        power=tuple(
            Power(factor, told(place, at_least=SURE), told(place, at_most=1 - SURE))
            for place, factor in enumerate(budget.factors, 1)
        ),
        naive=median(naive) / truth,
        naive_above=sum(rate > truth for rate in naive) / len(naive),
    )


def search(
    engine: Engine, budget: Budget, rng: np.random.Generator, *, first_rps: float, plan_seed: tuple[int, int]
) -> list[Outcome]:
    """What a race does with one engine, round apart. The burst's hint is anywhere around the goodput. Searches with the
    same `plan_seed` meet the same arrivals at the same rung and replicate; what is the engine's own comes from `rng`.
    """
    tried: list[Outcome] = []
    settings = budget.settings
    first = settings.rung_below(first_rps)
    while len(tried) < budget.max_cells and (probe := next_probe(tried, settings, first_rung=first)):
        here = budget.at(probe.rate_rps)
        seconds = here.warmup_s + here.window_s + COOLDOWN_S
        plan = np.random.default_rng([*plan_seed, probe.rung - settings.min_rung, probe.replicate])
        cell = engine.cell(probe.rate_rps, seconds, rng, plan)
        tried.append(judged(cell, probe.rung, probe.rate_rps, here))
    return tried


def judged(cell: Cell, rung: int, rate_rps: float, budget: Budget) -> Outcome:
    """As `arena.judging.cells.read_cell` and its audits do with rows."""
    horizon_s = budget.warmup_s + budget.window_s
    until = cell.scheduled_s < horizon_s
    ttft_ms = cell.severity * 1000
    window = steady.steady_window(
        cell.scheduled_s[until], ttft_ms[until], warmup_s=budget.warmup_s, horizon_s=horizon_s
    )
    findings = steady.findings(cell.scheduled_s, cell.ended_s, ttft_ms, window, budget.warmup_s)
    severity = cell.severity[(cell.scheduled_s >= window.from_s) & until]
    missed = severity > 1
    return Outcome(
        rung,
        rate_rps,
        severity.size,
        int(missed.sum()),
        all(finding.ok or finding.effect != "unstable" for finding in findings),
        stats.design_effect(missed.tolist(), severity.tolist()),
    )


def naive_bisection(
    engine: Engine, rng: np.random.Generator, between: tuple[float, float], *, requests: int = NAIVE_REQUESTS
) -> float:
    """Eight halvings of the gap between a rate that held and one that did not, each on one look at an idle engine."""
    low, high = between
    for _ in range(8):
        middle = math.sqrt(low * high)
        severity = engine.cell(middle, requests / middle, rng).severity
        if stats.holds(severity.size, int((severity > 1).sum()), percentile=PERCENTILE):
            low = middle
        else:
            high = middle
    return low


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line a row."""
    head = (
        "| engine | search | interval covers | interval, high / low | estimate / truth | proven a pass | falsely | "
        "falsely a fail | equals told apart, on common arrivals | on their own | unlike equals told apart | "
        "1.3 times the goodput told apart | twice | four times | told the wrong way round | "
        "naive bisection / truth, above it |"
    )
    lines = [head, "|---" * 16 + "|"]
    for row in rows:
        power = {part.factor: f"{part.told:.0%}" for part in row.power}
        cells = (
            row.engine, row.budget, f"{row.covered:.1%}", _ratio(row.width), _ratio(row.estimate), f"{row.proven:.1%}",
            f"{row.false_pass:.1%}", f"{row.false_fail:.1%}", f"{row.apart:.1%}", f"{row.apart_alone:.1%}",
            f"{row.apart_unlike:.1%}", *(power.get(factor, "-") for factor in (1.3, 2.0, 4.0)),
            f"{max((part.wrong for part in row.power), default=0.0):.1%}", f"{row.naive:.2f}, {row.naive_above:.0%}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
