"""Do the statistics keep what they promise? Searches and races on engines of known goodput, in virtual time. Pure.

    row = calibrate(MM1(service_rps=23.0), CHAT, searches=200, seed=1, tick=print)
    row.covered                # share of searches whose interval holds the true goodput: 0.90 is demanded
    table([row])               # Markdown

Cells are judged by the very functions that judge real ones (`arena.judging.cells`): warm-up, stationarity, design
effect, verdicts, search, fit. Two searches with arrivals of their own are a race of two names for one engine, which is
harder than a real one, where both meet the same arrivals. Beside them runs the search that everybody writes first:
bisection on the observed p99 of 200 requests, each time from an idle engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from arena.judging import stats, steady
from arena.judging.knee import Knee, probability_better
from arena.judging.ladder import Outcome, SearchSettings
from arena.judging.queues import MM1, Batching, Cell, Engine, HeavyTailed
from arena.judging.ranking import is_apart
from arena.judging.search import Goodput, estimate, next_probe

LEAST_COVERED, MOST_FALSE, MOST_APART = 0.90, 0.05, 0.05
NAIVE_REQUESTS = 200
COOLDOWN_S = 5.0
SETTINGS = SearchSettings(max_replicates=4)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search may spend: as in the scenario `chat`, as in its quick form, and enough for proofs."""

    name: str
    warmup_s: float
    window_s: float
    max_cells: int


QUICK = Budget("3 cells of 4 s", 2.5, 4.0, 3)
CHAT = Budget("8 cells of 30 s", 5.0, 30.0, 8)
LONG = Budget("8 cells of 300 s", 5.0, 300.0, 8)

ENGINES: tuple[Engine, ...] = (MM1(10.0), MM1(23.0), Batching(), Batching(neighbour=1.5), HeavyTailed(20.0))
BUDGETS = (QUICK, CHAT, LONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Shares of all searches, but `apart` (of all races); ratios are to the true goodput."""

    engine: str
    budget: str
    searches: int
    covered: float
    estimate: float | None  # median ratio
    width: float | None  # median of high end over low end
    proven: float
    false_pass: float
    false_fail: float
    apart: float
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
        if self.apart > MOST_APART:
            missed.append(f"tells equals apart in {self.apart:.1%}")
        return missed


def calibrate(
    engine: Engine, budget: Budget, *, searches: int, seed: int, tick: Callable[[], object] = lambda: None
) -> Row:
    """`tick` is called after each search."""
    truth = engine.goodput(SETTINGS.percentile)
    found: list[tuple[Goodput, Knee]] = []
    naive: list[float] = []
    for number in range(searches):
        rng = np.random.default_rng([seed, number])
        outcomes = search(engine, budget, rng, first_rps=truth * rng.uniform(0.5, 1.5))
        found.append((estimate(outcomes, SETTINGS), Knee(outcomes, SETTINGS)))
        naive.append(naive_bisection(engine, rng, (truth / 4, truth * 4)))
        tick()
    goodputs = [goodput for goodput, _ in found]
    races = [probability_better(a, b) for (_, a), (_, b) in zip(found[::2], found[1::2], strict=False)]

    def share(claim: Callable[[Goodput], bool]) -> float:
        return sum(map(claim, goodputs)) / len(goodputs)

    return Row(
        engine=engine.name,
        budget=budget.name,
        searches=searches,
        covered=share(lambda g: g.lo <= truth and (g.hi is None or truth <= g.hi)),
        estimate=_median([g.estimate_rps / truth for g in goodputs if g.estimate_rps is not None]),
        width=_median([g.hi / g.lo for g in goodputs if g.hi is not None and g.lo > 0]),
        proven=share(lambda g: g.proven_pass_rps is not None),
        false_pass=share(lambda g: g.proven_pass_rps is not None and g.proven_pass_rps > truth),
        false_fail=share(lambda g: g.proven_fail_rps is not None and g.proven_fail_rps < truth),
        apart=sum(map(is_apart, races)) / len(races) if races else 0.0,
        naive=median(naive) / truth,
        naive_above=sum(rate > truth for rate in naive) / len(naive),
    )


def search(engine: Engine, budget: Budget, rng: np.random.Generator, *, first_rps: float) -> list[Outcome]:
    """What a race does with one engine, round and budget apart. The burst's hint is anywhere around the goodput."""
    tried: list[Outcome] = []
    first = SETTINGS.rung_below(first_rps)
    while len(tried) < budget.max_cells and (probe := next_probe(tried, SETTINGS, first_rung=first)):
        seconds = budget.warmup_s + budget.window_s + COOLDOWN_S
        cell = engine.cell(probe.rate_rps, seconds, rng)
        tried.append(judged(cell, probe.rung, probe.rate_rps, budget))
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
        if stats.holds(severity.size, int((severity > 1).sum()), percentile=SETTINGS.percentile):
            low = middle
        else:
            high = middle
    return low


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line a row."""
    head = (
        "| engine | search | interval covers | interval, high / low | estimate / truth | proven a pass | "
        "falsely | falsely a fail | equals told apart | naive bisection / truth, above it |"
    )
    lines = [head, "|---" * 10 + "|"]
    for row in rows:
        cells = (
            row.engine, row.budget, f"{row.covered:.1%}", _ratio(row.width), _ratio(row.estimate), f"{row.proven:.1%}",
            f"{row.false_pass:.1%}", f"{row.false_fail:.1%}", f"{row.apart:.1%}",
            f"{row.naive:.2f}, {row.naive_above:.0%}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
