"""The first page of a report: who carries how much, how sure that is, and what it means in plain words. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from arena.judging.ranking import told_apart
from arena.judging.results import EngineResult, RaceResult
from arena.reports.axes import nice_ticks
from arena.reports.controls import pairs_table
from arena.reports.document import Fold, Ranking, Section, Standing, Table, Text
from arena.reports.wording import and_words, interval_words, milliseconds, rate_words


def plain_words(result: RaceResult) -> tuple[str, ...]:
    """What the race says, for somebody who knows none of it."""
    slo = result.scenario.slo
    if not result.notes.searched:
        return (
            f"The question: what share of the requests gets its first word within {_time_words(slo.ttft_ms)}, and the "
            f"rest at no more than {slo.tpot_ms:g} ms a token, at a rate that was given? No higher one was looked for.",
        )
    best = result.engines[0] if result.engines else None
    meaning = (
        f"The question: how many requests a second can each engine take, while {slo.percentile:g} of 100 of them get "
        f"their first word within {_time_words(slo.ttft_ms)} and the rest at no less than {1000 / slo.tpot_ms:.0f} "
        f"tokens a second ({slo.tpot_ms:g} ms a token)? That rate is called goodput."
    )
    if best is None or best.goodput is None or best.rank is None or not best.goodput.rate_rps:
        return (meaning,)
    sentences = [meaning, _about_the_best(best, result)]
    return (*sentences, *_about_the_order(result))


def _about_the_best(best: EngineResult, result: RaceResult) -> str:
    goodput = best.goodput
    assert goodput is not None
    shown = "proven" if goodput.proven else "observed, not yet proven"
    limit = (
        f"its true limit lies between {rate_words(goodput.lo)} and {rate_words(goodput.hi)}"
        if goodput.hi is not None
        else f"its true limit lies above {rate_words(goodput.lo)}, for it carried every rate that was tried"
    )
    kept = f"{best.name} kept the limits at up to {rate_words(goodput.rate_rps)} requests a second ({shown})"
    return f"{kept}; {limit} ({_confidence(result)} interval)."


def _about_the_order(result: RaceResult) -> Iterator[str]:
    ranked = [engine for engine in result.engines if engine.rank]
    if len(ranked) < 2:
        return
    groups: dict[str, list[str]] = {}
    for engine in ranked:
        groups.setdefault(str(engine.rank), []).append(engine.name)
    clear = [names[0] for rank, names in groups.items() if len(names) == 1 and rank.isdigit()]
    if len(clear) == len(ranked):
        yield f"The order is certain: {', '.join(clear)}."
        return
    tied = [
        f"{and_words(names)} (rank {rank})"
        for rank, names in groups.items()
        if not (len(names) == 1 and rank.isdigit())
    ]
    certain = f"Certain of their rank: {and_words(clear)}. " if clear else ""
    yield f"{certain}Not told apart from every neighbour, so tied: {and_words(tied)}."


def notices(result: RaceResult) -> Iterator[str]:
    yield from result.invalid_reasons
    yield from (f"Nothing is proven by this race. {words}" for words in result.unproven)
    if not result.notes.quick:
        return
    sizes = [cell.requests for engine in result.engines for cell in engine.cells if cell.is_valid]
    largest, allowed = max(sizes, default=0), 1 - result.scenario.slo.percentile / 100
    needed = math.ceil(math.log(1 - result.scenario.confidence) / math.log(1 - allowed))
    if largest < needed:
        yield (
            f"A quick race: no cell has more than {largest} requests, and p{result.scenario.slo.percentile:g} needs "
            f"{needed} without a miss to be proven. What held was observed, not proven; the intervals say how far "
            "off it may be."
        )


def ranking_section(result: RaceResult) -> Section:
    span = _span(result)
    ranking = Ranking(
        interval_name=f"Where it may lie ({_confidence(result)} interval), requests/s",
        latency_name=f"p50 / p{result.scenario.slo.percentile:g} at that rate",
        ticks=tuple((_at(tick, span), f"{tick:g}") for tick in nice_ticks(*span)),
        rows=tuple(_line(place, engine, result, span) for place, engine in enumerate(result.engines)),
    )
    tables = (("Every pair of engines", _pairs(result)), ("Request by request, on equal plans", pairs_table(result)))
    folds = [Fold(summary, (table,)) for summary, table in tables if table is not None]
    return Section("ranking", "Ranking", (ranking, *folds))


def _line(place: int, engine: EngineResult, result: RaceResult, span: tuple[float, float]) -> Standing:
    slo, goodput = result.scenario.slo, engine.goodput
    known = goodput is not None
    high = goodput.hi if goodput is not None and goodput.hi is not None else span[1]
    good = sum(sample.severity(slo) <= 1 for sample in engine.headline)
    return Standing(
        rank=str(engine.rank) if engine.rank else "\N{EN DASH}",
        engine=place,
        name=engine.name,
        version=engine.version or "version not told",
        rate=rate_words(goodput.rate_rps) if goodput else "\N{EN DASH}",
        proof=("proven" if goodput.proven else "observed") if goodput else "",
        interval=interval_words(engine) if known else "",
        span=(_at(goodput.lo, span), _at(high, span)) if goodput else None,
        point=_at(goodput.rate_rps, span) if goodput else None,
        open_above=goodput is not None and goodput.hi is None,
        latency=tuple(
            f"{metric.upper()} {milliseconds(engine.headline_quantile(metric, 50))} / "
            f"{milliseconds(engine.headline_quantile(metric, slo.percentile))}"
            for metric in ("ttft", "tpot")
        )
        if known
        else (),
        in_time=f"{good} of {len(engine.headline)} requests in time" if known else "",
        unranked=" ".join(engine.unranked),
    )


def _pairs(result: RaceResult) -> Table | None:
    """Every pair of ranked engines: who carries more, and how sure that is."""
    if not result.better:
        return None
    places = {engine.engine_id: (place, engine.name) for place, engine in enumerate(result.engines)}
    names = list(dict.fromkeys(name for pair in result.better for name in pair))
    sure = told_apart(names, result.better)  # the same rule as the ranks'
    rows = []
    for (a, b), probability in result.better.items():
        (first, second), chance = ((a, b), probability) if probability >= 0.5 else ((b, a), 1 - probability)
        is_sure = (first, second) in sure
        verdict = Text("carries more, for sure", "good") if is_sure else Text("cannot be told apart", "soft")
        pair = (
            Text(places[first][1], engine=places[first][0]),
            verdict,
            Text(places[second][1], engine=places[second][0]),
        )
        rows.append((places[first][0], places[second][0], (*pair, _chance_words(chance))))
    ordered = tuple(row for _, _, row in sorted(rows, key=lambda entry: entry[:2]))
    return Table(("engine", "verdict", "than", "chance"), ordered, numeric=(3,))


def _chance_words(chance: float) -> str:
    return "> 99.99 %" if chance > 0.9999 else f"{100 * chance:.2f} %" if chance > 0.99 else f"{100 * chance:.0f} %"


def _span(result: RaceResult) -> tuple[float, float]:
    """Ends of the axis that all intervals share."""
    values = [
        value
        for engine in result.engines
        if engine.goodput
        for value in (engine.goodput.lo, engine.goodput.rate_rps, engine.goodput.hi)
        if value
    ] or [1.0]
    return min(values) / 1.4, max(values) * 1.4


def _at(value: float, span: tuple[float, float]) -> float:
    """Place on the log axis in percent; zero sits at its left end."""
    if value <= span[0]:
        return 0.0
    return min(100.0, 100 * math.log(value / span[0]) / math.log(span[1] / span[0]))


def _confidence(result: RaceResult) -> str:
    return f"{100 * result.scenario.confidence:g} %"


def _time_words(ms: float) -> str:
    return f"{ms / 1000:g} s" if ms >= 1000 else f"{ms:g} ms"
