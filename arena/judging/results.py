"""From the store to the judged race. Everything that is printed, plotted or handed on is computed here, from raw rows.

    result = judge_race(store)      # at the race's end, and again for `arena report`: the same code, the same answer

`judge_cell` is what the search hears during the race; `judge_race` adds goodput, parity and rank sets over all cells.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import Struct

from arena.judging import audit, stats
from arena.judging.arrival_audit import arrivals_drawn, asked_prompts
from arena.judging.client_audit import Counted, client_findings
from arena.judging.economy import Economy, economy_of, price_of
from arena.judging.parity import Work, disparities
from arena.judging.ranking import RankSet, compare_all, rank_sets
from arena.judging.search import Goodput, Knee, Outcome, estimate
from arena.judging.shape import UNTOLD, Shape, measured_shape
from arena.judging.stats import Verdict
from arena.judging.traces import Traces, read_traces
from arena.load.arrivals import Drawn
from arena.load.calibration import Calibration
from arena.load.loadgen import ClosedLoop, lag_budget_ms
from arena.race.scenario import SLO, Scenario
from arena.records.store import Store

QUANTILES = (50.0, 75.0, 90.0, 95.0, 99.0)


class RunNotes(Struct, frozen=True, kw_only=True):
    """What a run must remember beyond the columns of the store; kept as JSON in `runs.notes`."""

    scenario: Scenario
    quick: bool = False
    order: tuple[str, ...] = ()
    residency: str = "one"
    interrupted: bool = False
    command: str = ""
    calibration: Calibration | None = None  # the client's own errors here, measured before the race
    told: tuple[str, ...] = ()  # what of the scenario's files had to be cut or left out
    energy_missing: tuple[str, ...] = ()  # of each kind of counter that could not be read, why
    searched: bool = True  # for goodput; False: the rate was given, so nothing is known of a higher one


class EngineNotes(Struct, frozen=True, kw_only=True):
    """What became of an engine; kept as JSON in `engines.capability_json`."""

    probe: dict[str, Any] = {}
    launched: bool = True
    start_s: float | None = None
    burst_rps: float | None = None
    failure: str | None = None
    weights: dict[str, Any] = {}  # digests, precision and relation to the model's file; empty where it is not told
    settings: dict[str, Any] = {}  # how it was launched, and its own report of its settings
    tuning: dict[str, Any] = {}  # what `--tune` tried and found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured request under the SLO. Latencies in ms; infinity where it failed, None where it does not apply."""

    scheduled_s: float
    ttft_ms: float
    tpot_ms: float | None
    ok: bool

    def severity(self, slo: SLO) -> float:
        """How far the worse of the two latencies has come towards its limit; above 1 is a miss."""
        if not self.ok:
            return math.inf
        return max(self.ttft_ms / slo.ttft_ms, (self.tpot_ms or 0.0) / slo.tpot_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    cell_id: str
    engine_id: str
    rung: int
    rate_rps: float
    replicate: int
    slot: int
    status: str
    reason: str | None
    samples: tuple[Sample, ...]
    misses: int
    design_effect: float
    verdict: Verdict
    findings: tuple[audit.Finding, ...]
    plan_sha256: str

    @property
    def requests(self) -> int:
        return len(self.samples)

    @property
    def failures(self) -> int:
        return sum(not sample.ok for sample in self.samples)

    @property
    def attainment(self) -> float | None:
        return 1 - self.misses / self.requests if self.requests else None

    @property
    def is_valid(self) -> bool:
        """Whether the engine can be judged by it: the client did its part. An unstable cell is valid, and a fail."""
        return self.status in ("ok", "unstable")

    def ttft(self, percentile: float) -> float | None:
        return stats.quantile([sample.ttft_ms for sample in self.samples], percentile)

    def tpot(self, percentile: float) -> float | None:
        return stats.quantile(tpots(self.samples), percentile)

    def outcome(self) -> Outcome:
        return Outcome(
            self.rung, self.rate_rps, self.requests, self.misses, self.status != "unstable", self.design_effect
        )


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

    @property
    def scenario(self) -> Scenario:
        return self.notes.scenario

    @property
    def is_valid(self) -> bool:
        """A complete race in which every engine could be ranked."""
        return not self.invalid_reasons


def tpots(samples: Sequence[Sample]) -> list[float]:
    """TPOT of each sample, infinity for failures; a one-token answer has none."""
    return [
        sample.tpot_ms if sample.ok and sample.tpot_ms is not None else math.inf
        for sample in samples
        if not (sample.ok and sample.tpot_ms is None)
    ]


def judge_race(store: Store) -> RaceResult:
    run = store.query("SELECT * FROM runs")[0]
    notes = msgspec.json.decode(run["notes"], type=RunNotes)
    scenario = notes.scenario
    cells = [
        read_cell(store, row["cell_id"], scenario) for row in store.query("SELECT cell_id FROM cells ORDER BY slot")
    ]
    engines = store.query("SELECT * FROM engines ORDER BY engine_id")
    mine = {row["engine_id"]: [cell for cell in cells if cell.engine_id == row["engine_id"]] for row in engines}
    reasons, remarks = _compared(store, {row["engine_id"]: row for row in engines}, mine, scenario)
    if loop := scenario.load.closed:
        for words in reasons.values():
            words.append(closed_words(loop))
    knees = {
        engine_id: Knee([cell.outcome() for cell in known if cell.is_valid], scenario.settings)
        for engine_id, known in mine.items()
        if not reasons[engine_id]
    }
    better = compare_all(knees)
    ranks = rank_sets(list(knees), better)
    judged = [
        replace(
            _engine(store, row, mine[row["engine_id"]], scenario, ranks, reasons[row["engine_id"]]),
            remarks=tuple(remarks[row["engine_id"]]),
        )
        for row in engines
    ]
    judged.sort(key=_standing)
    return RaceResult(
        run_id=run["run_id"],
        started_utc=str(run["started_utc"]),
        seed=int(run["seed"]),
        git_sha=run["git_sha"],
        host=_json(run["host_json"]),
        notes=notes,
        engines=tuple(judged),
        better=better,
        invalid_reasons=tuple(_invalid_reasons(notes, judged)),
        prompt_tokens=_median_of(store, "in_tok_usage"),
        answer_tokens=_median_of(store, "out_tok_usage"),
        shape=measured_shape(store),
        traces=read_traces(store, judged, ttft_ms=scenario.slo.ttft_ms, tpot_ms=scenario.slo.tpot_ms),
    )


def read_cell(store: Store, cell_id: str, scenario: Scenario) -> CellResult:
    """Judge one cell from its rows."""
    cell = store.query("SELECT * FROM cells WHERE cell_id = ?", [cell_id])[0]
    samples = read_samples(store, cell_id)
    severities = [sample.severity(scenario.slo) for sample in samples]
    missed = [severity > 1 for severity in severities]
    status, reason = cell["status"], cell["reason"]
    effect = stats.design_effect(missed, severities)
    settings = scenario.settings
    counted = len(missed) if status == "unstable" else sum(missed)
    verdict = stats.judge(
        len(missed) / effect, counted / effect, percentile=settings.percentile, confidence=settings.confidence
    )
    return CellResult(
        cell_id=cell_id,
        engine_id=cell["engine_id"],
        rung=settings.nearest_rung(cell["rate_rps"]),
        rate_rps=cell["rate_rps"],
        replicate=cell["replicate"],
        slot=cell["slot"],
        status=status,
        reason=reason,
        samples=samples,
        misses=sum(missed),
        design_effect=effect,
        verdict=verdict,
        findings=tuple(_findings(store, cell_id)),
        plan_sha256=cell["plan_sha256"],
    )


def read_samples(store: Store, cell_id: str) -> tuple[Sample, ...]:
    rows = store.query(
        "SELECT scheduled_ns, ttft_sched_ms AS ttft_ms, tpot_ms, status FROM v_measured WHERE cell_id = ? ORDER BY seq",
        [cell_id],
    )
    return tuple(
        Sample(
            scheduled_s=row["scheduled_ns"] / 1e9,
            ttft_ms=row["ttft_ms"] if row["status"] == "ok" and row["ttft_ms"] is not None else math.inf,
            tpot_ms=row["tpot_ms"],
            ok=row["status"] == "ok" and row["ttft_ms"] is not None,
        )
        for row in rows
    )


def audit_rows(store: Store, cell_id: str) -> list[audit.Row]:
    columns = (
        "seq, measured, prompt_id, scheduled_ns, sent_ns, first_gen_ns, last_gen_ns, done_ns, status, max_tokens, "
        "in_tok_usage AS in_tokens, out_tok_usage AS out_tokens, cached_tok AS cached_tokens, finish_reason, n_chunks, "
        "http, n_reads, gap_cv"
    )
    rows = store.query(
        f"SELECT {columns} FROM v_requests LEFT JOIN v_arrival_shape USING (cell_id, seq) "
        "WHERE cell_id = ? ORDER BY seq",
        [cell_id],
    )
    return [audit.Row(**row) for row in rows]


def audit_cell(store: Store, cell_id: str, scenario: Scenario) -> list[audit.Finding]:
    """Run the cell's audits from its rows; the caller decides whether to record them."""
    plan = store.query("SELECT p.* FROM cells JOIN plans AS p USING (plan_sha256) WHERE cell_id = ?", [cell_id])[0]
    planned = store.query(
        "SELECT seq, scheduled_ns, prompt_tokens FROM plan_rows WHERE plan_sha256 = ? ORDER BY seq",
        [plan["plan_sha256"]],
    )
    schedule_ns = [row["scheduled_ns"] for row in planned]
    drawn = msgspec.json.decode(plan["drawn_json"], type=Drawn) if plan["drawn_json"] else None
    rows = audit_rows(store, cell_id)
    findings = audit.audit_cell(
        rows,
        schedule_ns=schedule_ns,
        rate_rps=plan["rate_rps"],
        warmup_ns=plan["warmup_ns"],
        horizon_ns=plan["horizon_ns"],
        poisson_arrivals=drawn is None and plan["kind"] == "poisson",
        lag_budget_ms=lag_budget_ms(scenario.slo.ttft_ms),
        warm_cache=scenario.cache == "warm",
        exact_output=scenario.exact_output,
        repeated=store.query("SELECT count(*) AS n FROM v_repeated WHERE cell_id = ?", [cell_id])[0]["n"],
    )
    if drawn is not None:
        findings += arrivals_drawn(drawn, schedule_ns)
    findings.append(asked_prompts(rows, {row["seq"]: row["prompt_tokens"] for row in planned}))
    return findings + _client_findings(store, cell_id, scenario)


def _client_findings(store: Store, cell_id: str, scenario: Scenario) -> list[audit.Finding]:
    cell = store.query(
        "SELECT rate_rps, foreign_cpu, notes FROM cells JOIN runs USING (run_id) WHERE cell_id = ?", [cell_id]
    )[0]
    answers = store.query(
        "SELECT out_tok_usage AS usage, out_tok_counted AS events, tokens_known, n_chunks, n_recvs FROM v_measured "
        "WHERE cell_id = ? AND ok",
        [cell_id],
    )
    lags = store.query("SELECT loop_lag_ns / 1e6 AS lag_ms FROM client_health WHERE cell_id = ?", [cell_id])
    notes = msgspec.json.decode(cell["notes"], type=RunNotes) if cell["notes"] else None
    return client_findings(
        answers=[Counted(**row) for row in answers],
        foreign_cpu=cell["foreign_cpu"],
        max_foreign_cpu=scenario.load.max_foreign_cpu,
        loop_lags_ms=[row["lag_ms"] for row in lags],
        lag_budget_ms=lag_budget_ms(scenario.slo.ttft_ms),
        tokens_per_s=cell["rate_rps"] * scenario.longest_output,
        calibration=notes.calibration if notes else None,
    )


def _findings(store: Store, cell_id: str) -> list[audit.Finding]:
    """Recorded audits, for display; their effect is in the cell's status."""
    rows = store.query("SELECT * FROM audits WHERE cell_id = ? ORDER BY check_name", [cell_id])
    return [audit.Finding(row["check_name"], row["ok"], row["value"], row["threshold"], "note", "") for row in rows]


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
    return reasons + [f"{engine.name}: {reason}" for engine in engines for reason in engine.unranked]


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
