"""Rows that no race writes, found before anything is computed from them: a store may have been edited, or be another's.

refuse_nonsense(store, path)        # StoreError, with the first that is found

What judging takes for granted stands here as SQL, each with the sentence that says what is wrong. Rows that make sense
and are not true are another matter: `arena.records.check` compares them with the spools.
"""

from __future__ import annotations

from pathlib import Path

from arena.records.schema import StoreError
from arena.records.store import Store

_NO_OBJECT = "CASE WHEN json_valid({0}) THEN json_type({0}) <> 'OBJECT' ELSE true END"

NONSENSE = {
    "more than one race": "SELECT 1 FROM runs HAVING count(*) > 1",
    "a race without notes": "SELECT 1 FROM runs WHERE notes IS NULL",
    "a race that began at no time": "SELECT 1 FROM runs WHERE try_cast(started_utc AS TIMESTAMPTZ) IS NULL",
    "a machine that is not told": f"SELECT 1 FROM runs WHERE {_NO_OBJECT.format('host_json')}",
    "an engine without its flags": f"SELECT 1 FROM engines WHERE {_NO_OBJECT.format('flags_json')}",
    "an engine without its notes": f"SELECT 1 FROM engines WHERE {_NO_OBJECT.format('capability_json')}",
    "a plan that lasts no time": "SELECT 1 FROM plans WHERE warmup_ns < 0 OR horizon_ns < warmup_ns",
    "a plan without a rate": "SELECT 1 FROM plans WHERE NOT (rate_rps > 0 AND isfinite(rate_rps))",
    "a cell without a rate": "SELECT 1 FROM cells WHERE NOT (rate_rps >= 0 AND isfinite(rate_rps))",
    "a cell of another race": "SELECT 1 FROM cells ANTI JOIN runs USING (run_id)",
    "a cell without its plan": "SELECT 1 FROM cells ANTI JOIN plans USING (plan_sha256)",
    "a cell of no engine": "SELECT 1 FROM cells ANTI JOIN engines USING (engine_id)",
    "a cell whose name is no file's": "SELECT 1 FROM cells WHERE NOT regexp_full_match(cell_id, '[A-Za-z0-9_.+-]+')",
}


def refuse_nonsense(store: Store, path: Path) -> None:
    for what, rows in NONSENSE.items():
        if store.query(f"{rows} LIMIT 1"):
            raise StoreError(f"{path} has {what}, which no race writes; it was changed, or is another program's.")
