"""evidence.json: what a later router may believe about the engines, and how long and where it may believe it. Pure.

One entry for each engine that has a goodput: which model, how much load, how sure, under which limits and workload,
measured when and on what kind of machine (`host_fingerprint`; figures of another kind of machine say little). `digest`
covers the rest of the document, so that an edited file is noticed.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from arena.judging.results import RaceResult, engine_summary
from arena.race.config import fingerprint

FORMAT = "goodgate-evidence/1"


def evidence(result: RaceResult) -> dict[str, Any]:
    scenario = result.scenario
    body: dict[str, Any] = {
        "format": FORMAT,
        "run_id": result.run_id,
        "measured_utc": result.started_utc,
        "scenario": scenario.name,
        "quick": result.notes.quick,
        "workload": msgspec.to_builtins(scenario.workload),
        "slo": msgspec.to_builtins(scenario.slo),
        "host_fingerprint": fingerprint(result.host),
        "host": dict(result.host),
        "valid": result.is_valid,
        "engines": [
            {
                "engine": summary["name"],
                "version": summary["version"],
                "model": scenario.model,
                "served_model": engine.model,
                "goodput_rps": summary["goodput_rps"],
                "ci": summary["ci"],
                "proven": summary["proven"],
                "rank": summary["rank"],
                "plans": sorted({cell.plan_sha256 for cell in engine.cells if cell.is_valid}),
            }
            for engine in result.engines
            if engine.goodput is not None and not engine.unranked
            for summary in [engine_summary(engine)]
        ],
    }
    return {**body, "digest": digest(body)}


def digest(document: dict[str, Any]) -> str:
    """SHA-256 over the canonical JSON of everything but the digest itself."""
    body = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()
