"""A judged race as evidence: one entry for each engine that has a goodput. Pure; `arena/evidence/` has the format.

Figures of an engine that could not be ranked are no evidence: it did other work than its rivals, or failed. Nor are
those of a rate that was given and not searched for.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from arena.evidence.document import Entry, Limits, document
from arena.judging.results import EngineResult, RaceResult
from arena.load.describe import process_words
from arena.race.config import fingerprint
from arena.reports.summary import engine_summary


def evidence(result: RaceResult) -> dict[str, Any]:
    """evidence.json of one race."""
    entries = [
        _entry(engine, result)
        for engine in result.engines
        if engine.goodput is not None and not engine.unranked and result.notes.searched
    ]
    return document(entries, {fingerprint(result.host): result.host})


def _entry(engine: EngineResult, result: RaceResult) -> Entry:
    scenario, summary = result.scenario, engine_summary(engine)
    measured = datetime.fromisoformat(result.started_utc)
    measured = measured if measured.tzinfo else measured.replace(tzinfo=UTC)
    return Entry(
        engine=engine.name,
        version=engine.version,
        settings=dict(engine.settings),
        model=scenario.model,
        served_model=engine.model,
        host=fingerprint(result.host),
        workload=result.shape,
        bucket=result.shape.bucket,
        slo=Limits(ttft_ms=scenario.slo.ttft_ms, tpot_ms=scenario.slo.tpot_ms, percentile=scenario.slo.percentile),
        goodput_rps=summary["goodput_rps"],
        ci=tuple(summary["ci"]),
        confidence=scenario.confidence,
        proven=summary["proven"],
        rank=tuple(summary["rank"]) if summary["rank"] else None,
        run_id=result.run_id,
        measured_utc=measured,
        expires_utc=measured + timedelta(days=scenario.valid_days),
        scenario=scenario.name,
        quick=result.notes.quick,
        complete=not result.notes.interrupted,
        plans=sorted({cell.plan_sha256 for cell in engine.cells if cell.is_valid}),
        arrivals=process_words(scenario.arrivals),
        economy=engine.economy,
    )
