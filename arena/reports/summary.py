"""summary.json: the race in figures, for programs. Its keys are a stable interface; an infinite latency (most requests
failed) is null.
"""

from __future__ import annotations

import math
from typing import Any

from arena.judging.economy import Economy
from arena.judging.results import EngineResult, RaceResult


def summary(result: RaceResult) -> dict[str, Any]:
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
