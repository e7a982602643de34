"""From the store to the judged race: every figure is computed here, from raw rows.

    result = judge_race(store)      # at the race's end, and again for `arena report`: the same code, the same answer

A cell is judged by `arena.judging.cells`; `judge_race` adds goodput, parity, rank sets, paired differences and the
race's own controls over all cells.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import msgspec

from arena.judging.cell_audit import audit_rows
from arena.judging.cells import CellResult, read_cell
from arena.judging.claims import INFLATED
from arena.judging.controls import Control, Reading, aa_control, drift_control
from arena.judging.differences import Paired, paired
from arena.judging.economy import economy_of, price_of
from arena.judging.knee import Knee
from arena.judging.ladder import monotone_rates, pool
from arena.judging.notes import EngineNotes, RunNotes
from arena.judging.parity import Work, disparities
from arena.judging.ranking import RankSet, compare_all, rank_sets
from arena.judging.results import EngineResult, FitPoint, RaceResult
from arena.judging.search import estimate
from arena.judging.shape import measured_shape
from arena.judging.traces import read_traces
from arena.load.loadgen import ClosedLoop
from arena.race.scenario import Scenario
from arena.records.store import Store


def judge_race(store: Store, *, floor_ms: float | None = None) -> RaceResult:
    """`floor_ms`: how far the client's TTFT may be off; None: as the race's own calibration says, 0 where it has none.
    Claims that rest on less are not made.
    """
    run = store.query("SELECT * FROM runs")[0]
    notes = msgspec.json.decode(run["notes"], type=RunNotes)
    scenario = notes.scenario
    if floor_ms is None:
        floor_ms = notes.calibration.floor_ms("ttft") if notes.calibration else 0.0
    rows = {row["engine_id"]: row for row in store.query("SELECT * FROM engines ORDER BY engine_id")}
    cells = _cells(store, rows, scenario, floor_ms)
    reasons, remarks = _compared(store, rows, cells, scenario)
    better = _compare({engine_id: cells[engine_id] for engine_id, why in reasons.items() if not why}, scenario)
    twin = notes.control[1] if notes.control else None
    if twin in reasons and not reasons[twin]:
        reasons[twin].append("It is the second entry of the A/A control.")
    racers = [engine_id for engine_id, why in reasons.items() if not why]
    ranked = {pair: better[pair] for pair in combinations(racers, 2)}
    ranks = rank_sets(racers, ranked)
    drift = _drift(cells)
    controls = _controls(notes, better, drift)
    engines = [_engine(store, row, cells[name], scenario, ranks, reasons[name]) for name, row in rows.items()]
    engines = [replace(engine, remarks=tuple(remarks[engine.engine_id])) for engine in engines]
    if any(control.ok is False for control in controls):
        engines = [_without_proof(engine) for engine in engines]
    engines.sort(key=_standing)
    return RaceResult(
        run_id=run["run_id"],
        started_utc=str(run["started_utc"]),
        seed=int(run["seed"]),
        git_sha=run["git_sha"],
        host=_json(run["host_json"]),
        notes=notes,
        engines=tuple(engines),
        better=ranked,
        invalid_reasons=tuple(_invalid_reasons(notes, engines)),
        prompt_tokens=_median_of(store, "in_tok_usage"),
        answer_tokens=_median_of(store, "out_tok_usage"),
        shape=measured_shape(store),
        traces=read_traces(store, engines, ttft_ms=scenario.slo.ttft_ms, tpot_ms=scenario.slo.tpot_ms),
        paired=tuple(_pairs(racers, cells, scenario, floor_ms)),
        controls=tuple(controls),
        drift=tuple(drift),
        floor_ms=floor_ms,
    )


def _cells(store: Store, engines: Iterable[str], scenario: Scenario, floor_ms: float) -> dict[str, list[CellResult]]:
    """The judged cells of each engine, in the order they ran."""
    ids = [row["cell_id"] for row in store.query("SELECT cell_id FROM cells ORDER BY slot")]
    cells = [read_cell(store, cell_id, scenario, floor_ms=floor_ms) for cell_id in ids]
    return {engine_id: [cell for cell in cells if cell.engine_id == engine_id] for engine_id in engines}


def _drift(cells: Mapping[str, Sequence[CellResult]]) -> list[Reading]:
    """The fixed task before each cell, by slot."""
    ordered = sorted((cell for known in cells.values() for cell in known), key=lambda cell: cell.slot)
    return [Reading(cell.slot, cell.engine_id, cell.drift_ms) for cell in ordered if cell.drift_ms is not None]


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
        excesses = [share for cell in valid if (share := cell.value_of(INFLATED)) is not None]
        works[engine_id] = Work(cells=rows, probe=notes.probe, weights=notes.weights, excesses=excesses)
    for found in disparities(works, weights=scenario.parity.weights, exact_output=scenario.exact_output):
        (reasons if found.blocks else remarks)[found.engine].append(found.words)
    if loop := scenario.load.closed:
        for words in reasons.values():
            words.append(closed_words(loop))
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


def _median_of(store: Store, column: str) -> float | None:
    rows = store.query(f"SELECT quantile_disc({column}, 0.5) AS middle FROM v_measured WHERE ok")
    return None if rows[0]["middle"] is None else float(rows[0]["middle"])
