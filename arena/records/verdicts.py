"""What judging said of a race, as rows for the store: the verdict on each engine, and each step of its search.

They are computed from the raw rows, and kept beside them so that SQL can read them; `goodgate arena check` computes
them again.
"""

from __future__ import annotations

from typing import Any

from arena.judging.knee import Knee
from arena.judging.results import EngineResult, RaceResult
from arena.race.scenario import SLO
from arena.records.store import Store
from arena.reports.evidence import evidence


def slo_id(slo: SLO) -> str:
    """Names the limits in a column: `ttft1000-tpot60-p99`."""
    return f"ttft{slo.ttft_ms:g}-tpot{slo.tpot_ms:g}-p{slo.percentile:g}"


def verdict_rows(result: RaceResult) -> list[dict[str, Any]]:
    """One for each engine, in the order of its id. An engine without a valid cell has one without figures."""
    proof = evidence(result)["digest"]
    return [_verdict(engine, result, proof) for engine in _in_order(result)]


def search_rows(result: RaceResult) -> list[dict[str, Any]]:
    """One for each valid cell of each engine, in the order they ran. The interval is that of goodput as it was known
    after the step.
    """
    return [row for engine in _in_order(result) for row in _steps(engine, result)]


def stored_verdicts(store: Store) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the store has of both, in the same order."""
    return (
        store.query("SELECT * FROM verdicts ORDER BY engine_id"),
        store.query("SELECT * FROM search_steps ORDER BY engine_id, step"),
    )


def _in_order(result: RaceResult) -> list[EngineResult]:
    return sorted(result.engines, key=lambda engine: engine.engine_id)


def _verdict(engine: EngineResult, result: RaceResult, proof: str) -> dict[str, Any]:
    goodput, rank = engine.goodput, engine.rank
    return {
        "run_id": result.run_id,
        "engine_id": engine.engine_id,
        "slo_id": slo_id(result.scenario.slo),
        "rate_pass": goodput.rate_rps if goodput else None,
        "pass_proven": goodput.proven if goodput else None,
        "rate_fail": goodput.lowest_fail_rps if goodput else None,
        "fail_proven": goodput.fail_proven if goodput else None,
        "est": goodput.rate_rps if goodput else None,
        "lo": goodput.lo if goodput else None,
        "hi": goodput.hi if goodput else None,
        "rank_lo": rank.lo if rank else None,
        "rank_hi": rank.hi if rank else None,
        "evidence_sha": proof if goodput and not engine.unranked else None,
    }


def _steps(engine: EngineResult, result: RaceResult) -> list[dict[str, Any]]:
    cells = sorted((cell for cell in engine.cells if cell.is_valid), key=lambda cell: cell.slot)
    outcomes = [cell.outcome() for cell in cells]
    rows = []
    for step, cell in enumerate(cells, 1):
        low, high = Knee(outcomes[:step], result.scenario.settings).interval()
        rows.append(
            {
                "engine_id": engine.engine_id,
                "step": step,
                "cell_id": cell.cell_id,
                "rate_rps": cell.rate_rps,
                "n": cell.requests,
                "misses": cell.misses,
                "design_effect": cell.design_effect,
                "n_eff": cell.requests / cell.design_effect,
                "verdict": str(cell.verdict),
                "ci_lo": low,
                "ci_hi": high,
            }
        )
    return rows
