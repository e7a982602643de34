"""The charts of a report as data: points on axes, each chart with a sentence and a table of its figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from arena.judging.cells import Sample, tpots
from arena.judging.results import EngineResult, RaceResult
from arena.judging.stats import attainment_interval, holds, quantile
from arena.judging.traces import comparable_rate
from arena.reports.axes import latency_axis, log_axis
from arena.reports.document import Axis, Chart, Diagonal, Point, Rule, Series, Table
from arena.reports.wording import milliseconds, rate_words, share_words

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
DEPTHS = (
    (0.0, "0"),
    (math.log10(2), "50"),
    (1.0, "90"),
    (2.0, "99"),
    (3.0, "99.9"),
)  # of the tail: -log10(share above)
STEPS = 80


def legend(result: RaceResult) -> tuple[tuple[int, str], ...]:
    return tuple((place, engine.name) for place, engine in enumerate(result.engines) if by_rate(engine))


def rate_charts(result: RaceResult) -> tuple[Chart, ...]:
    """What happens as the offered rate rises."""
    return (
        attainment_chart(result),
        *flow_charts(result),
        latency_by_rate(result, "ttft"),
        latency_by_rate(result, "tpot"),
    )


def attainment_chart(result: RaceResult) -> Chart:
    slo = result.scenario.slo
    series, rows = [], []
    rules = [Rule("y", slo.percentile, f"target {slo.percentile:g} %")]
    for place, engine in _with_cells(result):
        points = []
        for rate, n, misses, stable in by_rate(engine):
            low, high = attainment_interval(n, misses)
            held = stable and holds(n, misses, percentile=slo.percentile)
            share = share_words(1 - misses / n)
            words = f"{n - misses} of {n} in time{'' if stable else ', backlog grows'}"
            hover = f"{engine.name}, {rate_words(rate)} requests/s: {words}"
            points.append(Point(rate, 100 * (1 - misses / n), hover, 100 * low, 100 * high, is_hollow=not held))
            interval = f"{share_words(low)} to {share_words(high)}"
            rows.append((engine.name, rate_words(rate), words, share, interval, "held" if held else "did not hold"))
        series.append(Series(engine.name, place, tuple(points)))
        if engine.goodput and engine.goodput.rate_rps:
            rules.append(Rule("x", engine.goodput.rate_rps, engine=place))
    return Chart(
        title="Requests in time",
        alt=f"Share of requests in time against the offered rate, for each engine; the target is {slo.percentile:g} %.",
        x=rate_axis(result),
        y=Axis("requests in time, %", 0, 100, tuple((value, f"{value}") for value in (0, 25, 50, 75, 100))),
        series=tuple(series),
        rules=tuple(rules),
        table=Table(
            ("engine", "requests/s", "requests", "in time", "95 % interval", "verdict"), tuple(rows), numeric=(1, 3, 4)
        ),
    )


def flow_charts(result: RaceResult) -> Iterator[Chart]:
    """Goodput and throughput inside the cells, against what was offered; nothing where the race has no raw rows."""
    known = {
        place: flows
        for place, engine in _with_cells(result)
        if (
            flows := [
                flow for cell in engine.cells if cell.is_valid and (flow := result.traces.flows.get(cell.cell_id))
            ]
        )
    }
    if not known:
        return
    yield _flow_chart(
        result,
        {place: [(flow.offered_rps, flow.good_rps) for flow in flows] for place, flows in known.items()},
        "Good requests",
        "good requests/s",
        "Requests a second that met both limits, against the requests a second that were due. "
        "An engine that carries the load stays on the diagonal.",
    )
    yield _flow_chart(
        result,
        {place: [(flow.offered_rps, flow.completed_rps) for flow in flows] for place, flows in known.items()},
        "Saturation",
        "answers/s",
        "Answers completed a second, late ones too, against the requests a second that were due. "
        "Where the curve leaves the diagonal, the engine is full.",
    )


def _flow_chart(
    result: RaceResult, known: Mapping[int, Sequence[tuple[float, float]]], title: str, label: str, alt: str
) -> Chart:
    series, rows = [], []
    for place, flows in known.items():
        name = result.engines[place].name
        points = [
            Point(offered, done, f"{name}: {rate_words(done)} of {rate_words(offered)} requests/s")
            for offered, done in sorted(flows)
        ]
        series.append(Series(name, place, tuple(points)))
        rows += [(name, rate_words(point.x), rate_words(point.y)) for point in points]
    offered = [offered for flows in known.values() for offered, _ in flows if offered > 0] or [1.0]
    low, high = min(offered) / 1.25, max(offered) * 1.25  # what falls far behind lies at the lower edge
    return Chart(
        title=title,
        alt=alt,
        x=log_axis("requests due, 1/s", low, high),
        y=log_axis(label, low, high),
        series=tuple(series),
        diagonal=Diagonal("all that was due"),
        table=Table(("engine", "due/s", label), tuple(rows), numeric=(1, 2)),
    )


def latency_by_rate(result: RaceResult, metric: str) -> Chart:
    percentile = result.scenario.slo.percentile
    lines = []
    for place, engine in _with_cells(result):
        values = [(rate, _quantile(samples_at(engine, rate), metric, percentile)) for rate, *_ in by_rate(engine)]
        lines.append((place, [(rate, value) for rate, value in values if value is not None]))
    axis = latency_axis(metric, [value for _, points in lines for _, value in points], limit_of(result, metric))
    series = [
        Series(
            result.engines[place].name,
            place,
            tuple(
                _latency_point(rate, value, axis, f"{result.engines[place].name}, {rate_words(rate)} requests/s")
                for rate, value in points
            ),
        )
        for place, points in lines
    ]
    rows = [
        (result.engines[place].name, rate_words(rate), milliseconds(value))
        for place, points in lines
        for rate, value in points
    ]
    name = f"p{percentile:g} {metric.upper()}"
    return Chart(
        title=name,
        alt=f"{name} against the offered rate, for each engine, with the limit of {limit_of(result, metric):g} ms.",
        x=rate_axis(result),
        y=axis,
        series=tuple(series),
        rules=(_limit(result, metric),),
        table=Table(("engine", "requests/s", name), tuple(rows), numeric=(1, 2)),
    )


def distribution_charts(result: RaceResult) -> Iterator[Chart]:
    """How slow the slowest requests are, each engine at the rate that all can be compared at."""
    for metric in ("ttft", "tpot"):
        values = {}
        for place, engine in _with_cells(result):
            samples = samples_at(engine, comparable_rate(result.engines, engine))
            values[place] = sorted(sample.ttft_ms for sample in samples) if metric == "ttft" else sorted(tpots(samples))
        yield _distribution(result, values, metric.upper(), _limit(result, metric), "requests")
    gaps = {
        place: list(result.traces.gaps_ms[engine.engine_id])
        for place, engine in _with_cells(result)
        if engine.engine_id in result.traces.gaps_ms
    }
    if gaps:
        yield _distribution(result, gaps, "ITL", None, "pauses")


def _distribution(
    result: RaceResult, values: Mapping[int, Sequence[float]], name: str, rule: Rule | None, what: str
) -> Chart:
    limit = rule.value if rule else 1.0
    axis = latency_axis(name, [value for known in values.values() for value in known], limit)
    largest = max((len(known) for known in values.values()), default=1)
    far = max(2.0, min(3.0, math.log10(max(largest, 2))))
    series, rows = [], []
    for place, known in values.items():
        if not known:
            continue
        engine = result.engines[place].name
        deepest = min(far, math.log10(len(known)) if len(known) > 1 else 0.3)
        points = []
        for step in range(STEPS + 1):
            depth = deepest * step / STEPS
            value = _order_statistic(known, 1 - 10**-depth)
            points.append(_latency_point(depth, value, axis, ""))
            if math.isinf(value):
                break
        series.append(Series(engine, place, tuple(points), has_marks=False))
        failed = sum(map(math.isinf, known))
        quantiles = [milliseconds(_order_statistic(known, percentile / 100)) for percentile in PERCENTILES]
        rows.append((engine, *quantiles, str(len(known)), str(failed)))
    return Chart(
        title=f"{name}, from the typical to the slowest",
        alt=f"{name} by percentile, for each engine; failures are infinitely late and leave at the upper edge.",
        x=Axis(
            f"% of {what} that are faster", 0, far,
            tuple((depth, words) for depth, words in DEPTHS if depth <= far),
        ),
        y=axis,
        series=tuple(series),
        rules=(rule,) if rule else (),
        table=Table(
            ("engine", *(f"p{percentile:g}" for percentile in PERCENTILES), "of", "failed"), tuple(rows),
            numeric=(1, 2, 3, 4, 5, 6),
        ),
    )  # fmt: skip


def _order_statistic(ordered: Sequence[float], share: float) -> float:
    """A value that occurred: the one at rank ceil(share * n)."""
    return ordered[min(len(ordered), max(1, math.ceil(share * len(ordered) - 1e-9))) - 1]


def _latency_point(x: float, value: float, axis: Axis, where: str) -> Point:
    """An infinite latency (a failure) is an arrow at the upper edge."""
    words = f"{where}: {milliseconds(value)}" if where else ""
    if math.isinf(value):
        return Point(x, axis.high, words.replace("\N{INFINITY}", "failed"), at_edge=True)
    return Point(x, value, words)


def limit_of(result: RaceResult, metric: str) -> float:
    return result.scenario.slo.ttft_ms if metric == "ttft" else result.scenario.slo.tpot_ms


def _limit(result: RaceResult, metric: str) -> Rule:
    return Rule("y", limit_of(result, metric), f"limit {limit_of(result, metric):g} ms")


def rate_axis(result: RaceResult) -> Axis:
    rates = [cell.rate_rps for engine in result.engines for cell in engine.cells] or [1.0]
    low, high = min(rates) / 1.25, max(rates) * 1.25
    return log_axis("offered requests/s", low, high)


def by_rate(engine: EngineResult) -> list[tuple[float, int, int, bool]]:
    """(rate, requests, misses, stable) over the valid cells of each rate."""
    points = []
    for rate in sorted({cell.rate_rps for cell in engine.cells if cell.is_valid and cell.samples}):
        cells = [cell for cell in engine.cells if cell.is_valid and cell.rate_rps == rate]
        stable = all(cell.status == "ok" for cell in cells)
        points.append((rate, sum(cell.requests for cell in cells), sum(cell.misses for cell in cells), stable))
    return points


def samples_at(engine: EngineResult, rate: float | None) -> list[Sample]:
    return [sample for cell in engine.cells if cell.is_valid and cell.rate_rps == rate for sample in cell.samples]


def _with_cells(result: RaceResult) -> Iterator[tuple[int, EngineResult]]:
    return ((place, engine) for place, engine in enumerate(result.engines) if by_rate(engine))


def _quantile(samples: Sequence[Sample], metric: str, percentile: float) -> float | None:
    return quantile([sample.ttft_ms for sample in samples] if metric == "ttft" else tpots(samples), percentile)
