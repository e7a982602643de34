"""From the store to the judged race. Everything that is printed, plotted or handed on is computed here, from raw rows.

    result = judge_race(store)      # at the race's end, and again for `arena report`: the same code, the same answer

A cell is judged by `arena.judging.cells`; `judge_race` adds goodput, parity, rank sets, paired differences and the
race's own controls over all cells.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import msgspec

from arena.judging import stats
from arena.judging.cells import CellResult, Sample, audit_cell, audit_rows, read_cell, read_samples, tpots
from arena.judging.controls import Control, Reading, aa_control, drift_control
from arena.judging.differences import Paired, paired
from arena.judging.economy import Economy, economy_of, price_of
from arena.judging.knee import Knee
from arena.judging.ladder import Rung, monotone_rates, pool
from arena.judging.notes import EngineNotes, RunNotes
from arena.judging.parity import Work, disparities
from arena.judging.ranking import RankSet, compare_all, rank_sets
from arena.judging.search import Goodput, estimate
from arena.judging.shape import UNTOLD, Shape, measured_shape
from arena.judging.traces import Traces, read_traces
from arena.load.loadgen import ClosedLoop
from arena.race.scenario import Scenario
from arena.records.store import Store

__all__ = [
    "QUANTILES", "CellResult", "EngineNotes", "EngineResult", "FitPoint", "RaceResult", "RunNotes", "Sample",
    "audit_cell", "audit_rows", "engine_summary", "judge_race", "read_cell", "read_samples", "summary", "tpots",
]  # fmt: skip

QUANTILES = (50.0, 75.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True)
class FitPoint:
    """A rate, with all of its cells as one."""

    rung: Rung
    miss_rate: float  # by the isotonic fit over all rates; the observed one is misses / requests


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    engine_id: str
    name: str
    version: str | None
    model: str
    endpoint: str
    notes: EngineNotes
    goodput: Goodput | None  # None: no valid cell
    cells: tuple[CellResult, ...]
    headline: tuple[Sample, ...]  # all valid samples at the goodput rate (or at the lowest tried rate, where none held)
    headline_rps: float | None
    rank: RankSet | None
    unranked: tuple[str, ...]  # why there is no rank
    settings: Mapping[str, Any] = field(default_factory=dict)  # launch options: part of what was raced
    fit: tuple[FitPoint, ...] = ()  # by ascending rate
    economy: Economy | None = None  # at the headline rate; None: nothing was delivered there
    remarks: tuple[str, ...] = ()  # differences from its rivals that cost it no rank

    def headline_quantile(self, metric: str, percentile: float) -> float | None:
        values = [sample.ttft_ms for sample in self.headline] if metric == "ttft" else tpots(self.headline)
        return stats.quantile(values, percentile)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    run_id: str
    started_utc: str
    seed: int
    git_sha: str | None
    host: Mapping[str, Any]
    notes: RunNotes
    engines: tuple[EngineResult, ...]  # best first
    better: Mapping[tuple[str, str], float]  # P(first better than second), ranked engines only
    invalid_reasons: tuple[str, ...]
    prompt_tokens: float | None  # medians over all answers, by the engines' own count
    answer_tokens: float | None
    shape: Shape = UNTOLD
    traces: Traces = field(default_factory=Traces)  # what a report draws request by request
    paired: tuple[Paired, ...] = ()  # on equal plans, ranked engines only; simultaneous intervals
    controls: tuple[Control, ...] = ()  # what the race says of what cannot differ
    drift: tuple[Reading, ...] = ()  # the fixed task before each cell, by slot
    floor_ms: float = 0.0  # how far the client may be off; no claim rests on less

    @property
    def unproven(self) -> tuple[str, ...]:
        """Why the race as a whole proves nothing: the controls that failed."""
        return tuple(control.words for control in self.controls if control.ok is False)

    @property
    def scenario(self) -> Scenario:
        return self.notes.scenario

    @property
    def is_valid(self) -> bool:
        """A complete race in which every engine could be ranked."""
        return not self.invalid_reasons


def judge_race(store: Store, *, floor_ms: float | None = None) -> RaceResult:
    """`floor_ms`: how far the client's TTFT may be off; None: as the race's own calibration says, 0 where it has none.
    Claims that rest on less are not made.
    """
    run = store.query("SELECT * FROM runs")[0]
    notes = msgspec.json.decode(run["notes"], type=RunNotes)
    if floor_ms is None:
        floor_ms = notes.calibration.floor_ms("ttft") if notes.calibration else 0.0
    scenario = notes.scenario
    cells = [
        read_cell(store, row["cell_id"], scenario, floor_ms=floor_ms)
        for row in store.query("SELECT cell_id FROM cells ORDER BY slot")
    ]
    engines = store.query("SELECT * FROM engines ORDER BY engine_id")
    mine = {row["engine_id"]: [cell for cell in cells if cell.engine_id == row["engine_id"]] for row in engines}
    reasons, remarks = _compared(store, {row["engine_id"]: row for row in engines}, mine, scenario)
    if loop := scenario.load.closed:
        for words in reasons.values():
            words.append(closed_words(loop))
    better = _compare({engine_id: known for engine_id, known in mine.items() if not reasons[engine_id]}, scenario)
    twin = notes.control[1] if notes.control else None
    if twin in reasons and not reasons[twin]:
        reasons[twin].append("It is the second entry of the A/A control.")
    racers = [engine_id for engine_id, why in reasons.items() if not why]
    ranks = rank_sets(racers, {pair: better[pair] for pair in combinations(racers, 2)})
    drift = [Reading(cell.slot, cell.engine_id, cell.drift_ms) for cell in cells if cell.drift_ms is not None]
    controls = _controls(notes, better, drift)
    judged = [
        replace(
            _engine(store, row, mine[row["engine_id"]], scenario, ranks, reasons[row["engine_id"]]),
            remarks=tuple(remarks[row["engine_id"]]),
        )
        for row in engines
    ]
    if any(control.ok is False for control in controls):
        judged = [_without_proof(engine) for engine in judged]
    judged.sort(key=_standing)
    return RaceResult(
        run_id=run["run_id"],
        started_utc=str(run["started_utc"]),
        seed=int(run["seed"]),
        git_sha=run["git_sha"],
        host=_json(run["host_json"]),
        notes=notes,
        engines=tuple(judged),
        better={pair: better[pair] for pair in combinations(racers, 2)},
        invalid_reasons=tuple(_invalid_reasons(notes, judged)),
        prompt_tokens=_median_of(store, "in_tok_usage"),
        answer_tokens=_median_of(store, "out_tok_usage"),
        shape=measured_shape(store),
        traces=read_traces(store, judged, ttft_ms=scenario.slo.ttft_ms, tpot_ms=scenario.slo.tpot_ms),
        paired=tuple(_pairs(racers, mine, scenario, floor_ms)),
        controls=tuple(controls),
        drift=tuple(drift),
        floor_ms=floor_ms,
    )


def _compare(cells: Mapping[str, Sequence[CellResult]], scenario: Scenario) -> dict[tuple[str, str], float]:
    outcomes = {engine_id: [cell.outcome() for cell in known if cell.is_valid] for engine_id, known in cells.items()}
    strict = {engine_id: Knee(known, scenario.settings) for engine_id, known in outcomes.items()}
    mild = {engine_id: Knee(known, scenario.settings, forgiving=True) for engine_id, known in outcomes.items()}
    return compare_all(strict, mild)


def _pairs(
    racers: Sequence[str], cells: Mapping[str, Sequence[CellResult]], scenario: Scenario, floor_ms: float
) -> list[Paired]:
    """Each pair's intervals hold together with all others' (Bonferroni over the pairs)."""
    pairs = list(combinations(racers, 2))
    confidence = 1 - (1 - scenario.confidence) / max(1, len(pairs))
    return [
        difference
        for a, b in pairs
        for difference in paired(a, cells[a], b, cells[b], scenario.slo, confidence=confidence, floor_ms=floor_ms)
        if difference.requests
    ]


def _controls(notes: RunNotes, better: Mapping[tuple[str, str], float], drift: Sequence[Reading]) -> list[Control]:
    controls = [drift_control(drift)] if drift else []
    if notes.control is not None:
        name, twin = notes.control
        probability = better.get((name, twin))
        controls.append(aa_control(name, twin, probability if probability is not None else better.get((twin, name))))
    return controls


def _without_proof(engine: EngineResult) -> EngineResult:
    """An unproven race keeps what it has observed, and claims nothing."""
    if engine.goodput is None:
        return engine
    goodput = replace(engine.goodput, proven=False, fail_proven=False, proven_pass_rps=None, proven_fail_rps=None)
    return replace(engine, goodput=goodput)


def _compared(
    store: Store,
    engines: Mapping[str, Mapping[str, Any]],
    cells: Mapping[str, Sequence[CellResult]],
    scenario: Scenario,
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Why an engine gets no rank (an empty list where it does), and what else is to be told of it."""
    reasons: dict[str, list[str]] = {engine_id: [] for engine_id in engines}
    remarks: dict[str, list[str]] = {engine_id: [] for engine_id in engines}
    works: dict[str, Work] = {}
    for engine_id, row in engines.items():
        notes = msgspec.json.decode(row["capability_json"], type=EngineNotes)
        valid = [cell for cell in cells[engine_id] if cell.is_valid]
        if notes.failure:
            reasons[engine_id].append(notes.failure)
        if not valid:
            reasons[engine_id].append("It has no valid cell.")
            continue
        rows = [audit_rows(store, cell.cell_id) for cell in valid]
        works[engine_id] = Work(cells=rows, probe=notes.probe, weights=notes.weights)
    for found in disparities(works, weights=scenario.parity.weights, exact_output=scenario.exact_output):
        (reasons if found.blocks else remarks)[found.engine].append(found.words)
    return reasons, remarks


def _engine(
    store: Store,
    row: Mapping[str, Any],
    cells: Sequence[CellResult],
    scenario: Scenario,
    ranks: Mapping[str, RankSet],
    reasons: Sequence[str],
) -> EngineResult:
    valid = [cell for cell in cells if cell.is_valid]
    is_open = scenario.load.closed is None
    goodput = estimate([cell.outcome() for cell in valid], scenario.settings) if valid and is_open else None
    rate = None
    if goodput is not None:
        rate = goodput.rate_rps or min(cell.rate_rps for cell in valid)
    elif valid:  # a closed loop has no rate of its own: what it came to
        rate = statistics.median(cell.rate_rps for cell in valid)
    rungs = pool([cell.outcome() for cell in valid], scenario.settings)
    at_rate = [cell for cell in valid if cell.rate_rps == rate or not is_open]
    return EngineResult(
        engine_id=row["engine_id"],
        name=row["name"],
        version=row["version"],
        model=row["model"],
        endpoint=row["endpoint"],
        notes=msgspec.json.decode(row["capability_json"], type=EngineNotes),
        goodput=goodput,
        cells=tuple(cells),
        headline=tuple(sample for cell in at_rate for sample in cell.samples),
        headline_rps=rate,
        rank=ranks.get(row["engine_id"]),
        unranked=tuple(reasons),
        settings=_json(row["flags_json"]),
        fit=tuple(FitPoint(rung, rate) for rung, rate in zip(rungs, monotone_rates(rungs), strict=True)),
        economy=economy_of(store, [cell.cell_id for cell in at_rate], price_of(row["name"], scenario.cost)),
    )


def closed_words(loop: ClosedLoop) -> str:
    """Why nobody is ranked in a race of closed loops."""
    thought = f", each followed {loop.think_s:g} s after its answer" if loop.think_s else ""
    return (
        f"Closed loop, {loop.concurrency} requests in flight{thought}: a slow engine is offered less than a fast one, "
        "so there is neither goodput nor a rank."
    )


def _standing(engine: EngineResult) -> tuple[int, float, str]:
    rate = engine.goodput.rate_rps if engine.goodput else 0.0
    return (engine.rank.lo if engine.rank else 1000, -rate, engine.name)


def _invalid_reasons(notes: RunNotes, engines: Sequence[EngineResult]) -> list[str]:
    reasons = ["The race was interrupted; what had been measured is shown."] if notes.interrupted else []
    if not engines:
        reasons.append("No engine took part.")
    twin = notes.control[1] if notes.control else None
    return reasons + [
        f"{engine.name}: {reason}" for engine in engines if engine.name != twin for reason in engine.unranked
    ]


def _json(value: Any) -> dict[str, Any]:
    decoded = msgspec.json.decode(value) if isinstance(value, (str, bytes)) else value
    return dict(decoded)


def summary(result: RaceResult) -> dict[str, Any]:
    """summary.json. Its keys are a stable interface; an infinite latency (most requests failed) is null."""
    scenario = result.scenario
    return {
        "run_id": result.run_id,
        "scenario": scenario.name,
        "model": scenario.model,
        "slo": {
            "ttft_ms": scenario.slo.ttft_ms,
            "tpot_ms": scenario.slo.tpot_ms,
            "percentile": scenario.slo.percentile,
        },
        "quick": result.notes.quick,
        "engines": [engine_summary(engine) for engine in result.engines],
        "valid": result.is_valid,
        "invalid_reasons": list(result.invalid_reasons),
        "unproven": list(result.unproven),
        "controls": [{"kind": control.kind, "ok": control.ok, "words": control.words} for control in result.controls],
    }


def engine_summary(engine: EngineResult) -> dict[str, Any]:
    goodput, samples = engine.goodput, engine.headline
    at_rate = [cell for cell in engine.cells if cell.is_valid and cell.rate_rps == engine.headline_rps]
    misses = sum(cell.misses for cell in at_rate)
    return {
        "name": engine.name,
        "version": engine.version,
        "goodput_rps": goodput.rate_rps if goodput else None,
        "proven": goodput.proven if goodput else False,
        "ci": [_round(goodput.lo), _round(goodput.hi)] if goodput else [None, None],
        "estimate_rps": _round(goodput.estimate_rps) if goodput else None,
        "proven_pass_rps": goodput.proven_pass_rps if goodput else None,
        "proven_fail_rps": goodput.proven_fail_rps if goodput else None,
        "cliff_ratio": _round(goodput.cliff_ratio) if goodput else None,
        "rank": [engine.rank.lo, engine.rank.hi] if engine.rank else None,
        "rate_rps": engine.headline_rps,
        "ttft_p50_ms": _round(engine.headline_quantile("ttft", 50)),
        "ttft_p99_ms": _round(engine.headline_quantile("ttft", 99)),
        "tpot_p50_ms": _round(engine.headline_quantile("tpot", 50)),
        "tpot_p99_ms": _round(engine.headline_quantile("tpot", 99)),
        "attainment": _round(1 - misses / len(samples), 4) if samples else None,
        "requests": len(samples),
        "failures": sum(not sample.ok for sample in samples),
        **_economy_summary(engine.economy),
        "unranked": list(engine.unranked),
        "remarks": list(engine.remarks),
        "weights": dict(engine.notes.weights),
        "raced_with": dict(engine.notes.settings),
    }


def _economy_summary(economy: Economy | None) -> dict[str, Any]:
    """Null where no counter could be read, or no price was given."""
    keys = ("tokens_per_s", "joules_per_token", "tokens_per_joule", "tokens_per_money", "currency")
    return {key: getattr(economy, key) if economy else None for key in keys}


def _round(value: float | None, digits: int = 3) -> float | None:
    return None if value is None or math.isinf(value) else round(value, digits)


def _median_of(store: Store, column: str) -> float | None:
    rows = store.query(f"SELECT quantile_disc({column}, 0.5) AS middle FROM v_measured WHERE ok")
    return None if rows[0]["middle"] is None else float(rows[0]["middle"])
