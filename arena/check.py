"""Are the files of a race what they claim to be? Digests, plans, audits and printed figures, each computed again.

A list of complaints, empty when all is well. Verified: each spool against its marker and its plan, the plan file
against the digest in the store, the rows in the store against the spool, each cell's verdict against a fresh audit,
summary.json and evidence.json against what the store says now.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from arena import audit, results
from arena import spool as spools
from arena.evidence import digest, evidence
from arena.plan import CellPlan
from arena.results import RaceResult, judge_race, summary
from arena.spool import RequestRow, SpoolError
from arena.store import Store


def check_run(store: Store, folder: Path) -> list[str]:
    result = judge_race(store)
    complaints = []
    for cell in store.query("SELECT * FROM cells WHERE ingested_utc IS NOT NULL ORDER BY slot"):
        complaints += _check_spool(store, cell, folder / "spool" / f"{cell['cell_id']}.jsonl")
        complaints += _check_audit(store, cell, result)
    return complaints + _check_documents(result, folder)


def _check_spool(store: Store, cell: dict[str, Any], spool: Path) -> list[str]:
    try:
        spools.verify(spool)
        plan = CellPlan.read(spools.plan_file(spool))
    except (SpoolError, OSError, msgspec.DecodeError) as error:
        return [f"{cell['cell_id']}: the spool is damaged: {error}"]
    if plan.sha256 != cell["plan_sha256"]:
        return [f"{cell['cell_id']}: the plan beside the spool is not the one in the store."]
    spooled = {
        (row.seq, row.status, row.sent_ns, row.first_gen_ns, row.last_gen_ns, row.out_tok_usage)
        for row in spools.read_rows(spool)
        if isinstance(row, RequestRow)
    }
    columns = "seq, status, sent_ns, first_gen_ns, last_gen_ns, out_tok_usage"
    stored = {
        tuple(row.values())
        for row in store.query(f"SELECT {columns} FROM requests WHERE cell_id = ?", [cell["cell_id"]])
    }
    if spooled != stored:
        return [f"{cell['cell_id']}: {len(spooled ^ stored)} rows differ between the spool and the store."]
    return []


def _check_audit(store: Store, cell: dict[str, Any], result: RaceResult) -> list[str]:
    if cell["status"] == "aborted":
        return []
    status, reason = audit.verdict(results.audit_cell(store, cell["cell_id"], result.scenario))
    if status != cell["status"]:
        return [
            f"{cell['cell_id']}: stored as {cell['status']}, a fresh audit says {status} ({reason or 'nothing amiss'})."
        ]
    return []


def _check_documents(result: RaceResult, folder: Path) -> list[str]:
    complaints = []
    for name, expected in (("summary.json", summary(result)), ("evidence.json", evidence(result))):
        try:
            found = msgspec.json.decode((folder / name).read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            complaints.append(f"{name} cannot be read: {error}")
            continue
        if found != msgspec.json.decode(msgspec.json.encode(expected)):
            complaints.append(f"{name} does not say what the store says; `goodgate arena report` writes it anew.")
        elif name == "evidence.json" and found["digest"] != digest(found):
            complaints.append(f"{name} was changed: its digest does not fit.")
    return complaints
