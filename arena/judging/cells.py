"""A cell, judged from its rows: who was in time, since when it was steady, how much it says, and what it proves.

    cell = read_cell(store, "native-8rps-0", scenario)
    cell.verdict                 # of this cell alone; a rate is judged by all of its cells (arena.judging.ladder)

Its status is what `arena.judging.cell_audit` found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arena.judging import stats, steady
from arena.judging.controls import DRIFT_CHECK
from arena.judging.findings import SECOND_NS, Finding
from arena.judging.ladder import Outcome, pool
from arena.judging.stats import Verdict
from arena.race.scenario import SLO, Scenario
from arena.records.store import Store


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

    def surely_missed(self, slo: SLO, floor_ms: float) -> bool:
        """Missed by more than the client may be off: its error only ever adds to a TTFT, and is lost in a TPOT."""
        if not self.ok or (self.tpot_ms or 0.0) > slo.tpot_ms:
            return True
        return self.ttft_ms > slo.ttft_ms + floor_ms


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
    findings: tuple[Finding, ...]
    plan_sha256: str
    sure_misses: int | None = None  # those beyond the client's error; None: all of them
    steady_from_s: float = 0.0  # the window that was judged, in scheduled time from the cell's start
    steady_to_s: float = 0.0
    warmup_found_s: float | None = None  # how long the warm-up really was; None: no end of it was seen
    drift_ms: float | None = None  # what the fixed task took before this cell

    @property
    def effective(self) -> float:
        """How many independent requests would tell as much."""
        return self.requests / self.design_effect

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

    def value_of(self, check: str) -> float | None:
        """What an audit of it found; None where it was not run."""
        return next((finding.value for finding in self.findings if finding.check == check), None)

    def ttft(self, percentile: float) -> float | None:
        return stats.quantile([sample.ttft_ms for sample in self.samples], percentile)

    def tpot(self, percentile: float) -> float | None:
        return stats.quantile(tpots(self.samples), percentile)

    def outcome(self) -> Outcome:
        return Outcome(
            self.rung,
            self.rate_rps,
            self.requests,
            self.misses,
            self.status != "unstable",
            self.design_effect,
            self.sure_misses,
        )


def tpots(samples: Sequence[Sample]) -> list[float]:
    """TPOT of each sample, infinity for failures; a one-token answer has none."""
    return [
        sample.tpot_ms if sample.ok and sample.tpot_ms is not None else math.inf
        for sample in samples
        if not (sample.ok and sample.tpot_ms is None)
    ]


def read_cell(store: Store, cell_id: str, scenario: Scenario, *, floor_ms: float = 0.0) -> CellResult:
    """Judge one cell from its rows. `floor_ms`: how far the client may be off (its calibration says)."""
    cell = store.query("SELECT * FROM cells WHERE cell_id = ?", [cell_id])[0]
    window = read_window(store, cell_id)
    samples = read_samples(store, cell_id, window)
    severities = [sample.severity(scenario.slo) for sample in samples]
    missed = [severity > 1 for severity in severities]
    sure = sum(sample.surely_missed(scenario.slo, floor_ms) for sample in samples)
    findings = tuple(_findings(store, cell_id))
    settings = scenario.settings
    outcome = Outcome(
        settings.nearest_rung(cell["rate_rps"]),
        cell["rate_rps"],
        len(samples),
        sum(missed),
        cell["status"] != "unstable",
        stats.design_effect(missed, severities),
        sure,
    )
    return CellResult(
        cell_id=cell_id,
        engine_id=cell["engine_id"],
        rung=outcome.rung,
        rate_rps=outcome.rate_rps,
        replicate=cell["replicate"],
        slot=cell["slot"],
        status=cell["status"],
        reason=cell["reason"],
        samples=samples,
        misses=outcome.misses,
        design_effect=outcome.design_effect,
        verdict=pool([outcome], settings)[0].verdict,
        findings=findings,
        plan_sha256=cell["plan_sha256"],
        sure_misses=sure,
        steady_from_s=window.from_s,
        steady_to_s=window.to_s,
        warmup_found_s=window.warmup_s,
        drift_ms=next((finding.value for finding in findings if finding.check == DRIFT_CHECK), None),
    )


def read_window(store: Store, cell_id: str) -> steady.Window:
    """The steady window: that of the plan, unless the warm-up turns out to have been longer."""
    plan = read_plan(store, cell_id)
    rows = store.query(
        "SELECT scheduled_ns, ttft_sched_ms AS ttft_ms, status FROM v_requests WHERE cell_id = ? AND scheduled_ns < ? "
        "ORDER BY scheduled_ns, seq",
        [cell_id, plan["horizon_ns"]],
    )
    return steady.steady_window(
        [row["scheduled_ns"] / SECOND_NS for row in rows],
        [_ttft(row) for row in rows],
        warmup_s=plan["warmup_ns"] / SECOND_NS,
        horizon_s=plan["horizon_ns"] / SECOND_NS,
    )


def read_samples(store: Store, cell_id: str, window: steady.Window) -> tuple[Sample, ...]:
    """The measured requests that were due in the window."""
    rows = store.query(
        "SELECT scheduled_ns, ttft_sched_ms AS ttft_ms, tpot_ms, status FROM v_measured WHERE cell_id = ? ORDER BY seq",
        [cell_id],
    )
    return tuple(
        Sample(
            scheduled_s=row["scheduled_ns"] / SECOND_NS,
            ttft_ms=_ttft(row),
            tpot_ms=row["tpot_ms"],
            ok=not math.isinf(_ttft(row)),
        )
        for row in rows
        if window.holds(row["scheduled_ns"] / SECOND_NS)
    )


def _ttft(row: Mapping[str, Any]) -> float:
    """Infinite where the request failed."""
    return float(row["ttft_ms"]) if row["status"] == "ok" and row["ttft_ms"] is not None else math.inf


def read_plan(store: Store, cell_id: str) -> dict[str, Any]:
    """The row of the cell's plan."""
    return store.query("SELECT p.* FROM cells JOIN plans AS p USING (plan_sha256) WHERE cell_id = ?", [cell_id])[0]


def _findings(store: Store, cell_id: str) -> list[Finding]:
    """Recorded audits, for display; their effect is in the cell's status."""
    rows = store.query("SELECT * FROM audits WHERE cell_id = ? ORDER BY check_name", [cell_id])
    return [Finding(row["check_name"], row["ok"], row["value"], row["threshold"], "note", "") for row in rows]
