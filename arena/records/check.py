"""Are the files of a race what they claim to be? Digests, plans, audits and printed figures, each computed again.

A list of complaints, empty when all is well. `check_files`: every file against the manifest, byte by byte. `check_run`:
each spool against its marker and its plan, the plan file against the digest in the store, every row and token stamp in
the store against the spool, each cell's verdict against a fresh audit, the verdicts in the store against the rows, and
every document, report.html included, against the one that the rows give now. A finished spool that the store does not
know is told, too: a cell may not disappear.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from arena.judging import audit
from arena.judging.cell_audit import audit_cell
from arena.judging.judge import judge_race
from arena.judging.results import RaceResult
from arena.load import spool as spools
from arena.load.plan import CellPlan
from arena.load.spool import UNREADABLE, HealthRow, RequestRow, SpoolError
from arena.records.manifest import NAME as MANIFEST
from arena.records.manifest import changed_files
from arena.records.spool_sql import HEALTH_COLUMNS, METRIC_COLUMNS, REQUEST_COLUMNS
from arena.records.store import Store
from arena.records.verdicts import search_rows, stored_verdicts, verdict_rows
from arena.reports.report import documents


def check_files(folder: Path) -> list[str]:
    """The manifest of the race, and that of each folder in it that has one, such as an export."""
    complaints = changed_files(folder)
    for manifest in sorted(folder.rglob(MANIFEST)):
        if manifest.parent != folder:
            inner = manifest.parent
            complaints += [f"{inner.relative_to(folder)}/{complaint}" for complaint in changed_files(inner)]
    return complaints


def check_run(store: Store, folder: Path) -> list[str]:
    result = judge_race(store)
    complaints = []
    cells = store.query("SELECT c.*, p.* FROM cells AS c JOIN plans AS p USING (plan_sha256) ORDER BY slot")
    for cell in cells:
        if cell["ingested_utc"] is not None:
            complaints += _check_spool(store, cell, folder / "spool" / f"{cell['cell_id']}.jsonl")
            complaints += _check_audit(store, cell, result)
    known = {cell["cell_id"] for cell in cells if cell["ingested_utc"] is not None}
    complaints += [
        f"{path.stem}: there is a finished spool, but the store has no such cell; try `goodgate arena check --repair`."
        for path in sorted((folder / "spool").glob("*.jsonl"))
        if spools.is_complete(path) and path.stem not in known
    ]
    if stored_verdicts(store) != (verdict_rows(result), search_rows(result)):
        complaints.append("arena.duckdb keeps verdicts that its rows do not give; `goodgate arena report` writes them.")
    return complaints + _check_documents(result, folder)


def _check_spool(store: Store, cell: dict[str, Any], spool: Path) -> list[str]:
    cell_id = cell["cell_id"]
    try:
        spools.verify(spool)
        plan = CellPlan.read(spools.plan_file(spool))
        everything = list(spools.read_rows(spool))
        metrics = spools.read_metrics(spool)
    except (SpoolError, OSError, *UNREADABLE) as error:
        return [f"{cell_id}: the spool is damaged: {error}"]
    rows = [row for row in everything if isinstance(row, RequestRow)]
    complaints = []
    stored_plan = (cell["plan_sha256"], cell["rate_rps"], cell["warmup_ns"], cell["horizon_ns"])
    if stored_plan != (plan.sha256, plan.rate_rps, plan.warmup_ns, plan.horizon_ns):
        complaints.append(f"{cell_id}: the plan beside the spool is not the one in the store.")
    due = {
        request.seq: (request.scheduled_ns, plan.is_measured(request), request.max_tokens) for request in plan.requests
    }
    if plan.kind == "closed":  # its requests have no times of their own
        due = {row.seq: (row.scheduled_ns, row.measured, row.max_tokens) for row in rows if row.seq in due}
    if any((row.scheduled_ns, row.measured, row.max_tokens) != due.get(row.seq) for row in rows):
        complaints.append(f"{cell_id}: the spool holds requests that its plan does not.")
    health = [row for row in everything if isinstance(row, HealthRow)]
    events = {(row.seq, *map(tuple, (row.token_ns, row.token_n, row.token_kind))) for row in rows if row.token_ns}
    differing = events ^ _stored(store, "token_events", ("seq", "t_ns", "n_tok", "kind"), cell_id)
    for table, columns, spooled in (
        ("requests", REQUEST_COLUMNS, rows),
        ("client_health", HEALTH_COLUMNS, health),
        ("engine_health", METRIC_COLUMNS, metrics),
    ):
        differing |= {_values(row, columns) for row in spooled} ^ _stored(store, table, columns, cell_id)
    if differing:
        complaints.append(f"{cell_id}: {len(differing)} rows differ between the spool and the store.")
    return complaints


def _values(row: object, columns: Iterable[str]) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in columns)


def _stored(store: Store, table: str, columns: Iterable[str], cell_id: str) -> set[tuple[Any, ...]]:
    rows = store.query(f"SELECT {', '.join(columns)} FROM {table} WHERE cell_id = ?", [cell_id])
    return {tuple(tuple(value) if isinstance(value, list) else value for value in row.values()) for row in rows}


def _check_audit(store: Store, cell: dict[str, Any], result: RaceResult) -> list[str]:
    if cell["status"] == "aborted":
        return []
    if cell["status"] == "unjudged":
        return [f"{cell['cell_id']}: it was never judged; `goodgate arena check --repair` does that."]
    status, reason = audit.verdict(audit_cell(store, cell["cell_id"], result.scenario))
    if status != cell["status"]:
        return [
            f"{cell['cell_id']}: stored as {cell['status']}, a fresh audit says {status} ({reason or 'nothing amiss'})."
        ]
    return []


def _check_documents(result: RaceResult, folder: Path) -> list[str]:
    complaints = []
    for name, expected in documents(result).items():
        try:
            found = (folder / name).read_bytes()
        except OSError as error:
            complaints.append(f"{name} cannot be read: {error}")
            continue
        if found != expected.encode("utf-8"):
            complaints.append(f"{name} does not say what the store says; `goodgate arena report` writes it anew.")
    return complaints
