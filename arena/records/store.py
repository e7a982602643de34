"""The store: spools in, metrics out. One DuckDB file per run of the arena.

Rows hold raw stamps only; every metric is a view (`views.sql`), so a better definition re-scores old runs. A cell is
ingested in one transaction, as delete and insert: doing it again changes nothing, and a spool stays the truth until its
cell carries `ingested_utc`. Every other change is one transaction too, so that a killed writer leaves nothing half
written, and a cell that it did not come to judge stays `unjudged`, which no verdict counts. One process writes at a
time.

>>> with Store(Path("out/arena.duckdb")) as store:
...     store.record_run(RunRecord(...))
...     store.record_engine(EngineRecord(...))
...     store.record_cell(CellRecord(...), plan)
...     store.ingest("cell-1", Path("out/spool/cell-1.jsonl"))
...     store.cell_summary("cell-1", slo_ttft_ms=500, slo_tpot_ms=50).attainment
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from arena.load import spool as spools
from arena.load.plan import CellPlan
from arena.load.spool import SpoolError, SpoolFooter, SpoolHeader
from arena.records.rows import CellRecord, CellStatus, CellSummary, EngineRecord, RunRecord, columns_of
from arena.records.schema import bring_up, connect
from arena.records.spool_sql import LOAD_METRICS, LOAD_SPOOL, MARK_INGESTED, MISSING


class Store:
    """One DuckDB file. `read_only` opens it beside other readers."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._connection = connect(path, read_only=read_only)
        self._in_transaction = False
        try:
            bring_up(self._connection, path, read_only=read_only)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def record_run(self, run: RunRecord) -> None:
        self._replace("runs", "run_id", columns_of(run))

    def record_engine(self, engine: EngineRecord) -> None:
        self._replace("engines", "engine_id", columns_of(engine))

    def record_cell(self, cell: CellRecord, plan: CellPlan) -> None:
        """Announce a cell before it runs: its status is `planned`, and its plan is stored once per sha256."""
        with self._transaction():
            self._record_plan(plan)
            announced = {**columns_of(cell), "plan_sha256": plan.sha256, "status": "planned"}
            self._replace("cells", "cell_id", announced)

    def ingest(self, cell_id: str, spool: Path) -> None:
        """Load a complete spool. Refuses one without its done marker, of another plan, or damaged since."""
        header, footer = _checked(spool)
        planned = self.query("SELECT plan_sha256 FROM cells WHERE cell_id = ?", [cell_id])
        if not planned:
            raise SpoolError(f"Cell {cell_id!r} was never recorded in this store.")
        if header.cell_id != cell_id or header.plan_sha256 != planned[0]["plan_sha256"]:
            raise SpoolError(f"{spool} belongs to cell {header.cell_id!r} and its plan, not to {cell_id!r}.")
        with self._transaction():
            for table in ("requests", "token_events", "client_health", "engine_health"):
                self._connection.execute(f"DELETE FROM {table} WHERE cell_id = ?", [cell_id])
            for statement in LOAD_SPOOL:
                self._connection.execute(statement, {"cell_id": cell_id, "spool": str(spool)})
            metrics = spools.metrics_file(spool)
            if metrics.exists():
                self._connection.execute(LOAD_METRICS, {"cell_id": cell_id, "spool": str(metrics)})
            loaded = self.query("SELECT count(*) AS n FROM requests WHERE cell_id = ?", [cell_id])[0]["n"]
            if loaded != footer.requests:
                raise SpoolError(f"{spool} promises {footer.requests} requests and holds {loaded}.")
            if missing := self.query(MISSING, [cell_id])[0]["n"]:
                raise SpoolError(f"{spool} has no row for {missing} of the measured requests of its plan.")
            self._mark_ingested(cell_id, header, footer)

    def set_rate(self, cell_id: str, rate_rps: float) -> None:
        """What a closed loop came to; before it ran, only a guess was known."""
        self._connection.execute("UPDATE cells SET rate_rps = ? WHERE cell_id = ?", [rate_rps, cell_id])

    def judge_cell(self, cell_id: str, status: CellStatus, reason: str | None = None) -> None:
        """What the audit says of a cell."""
        self._connection.execute("UPDATE cells SET status = ?, reason = ? WHERE cell_id = ?", [status, reason, cell_id])

    def record_audit(self, cell_id: str, check: str, value: float | None, threshold: float | None, ok: bool) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO audits VALUES (?, ?, ?, ?, ?)", [cell_id, check, value, threshold, ok]
        )

    def record_energy(self, cell_id: str, samples: Sequence[tuple[int, str, float]]) -> None:
        """Samples are (unix ns, source, joules). What was recorded of the cell before is replaced."""
        with self._transaction():
            self._connection.execute("DELETE FROM energy WHERE cell_id = ?", [cell_id])
            for t_unix_ns, source, joules in samples:
                row = {"cell_id": cell_id, "source": source, "t_unix_ns": t_unix_ns, "joules": joules}
                self._insert("energy", row)

    def record_verdicts(self, verdicts: Iterable[Mapping[str, Any]], search_steps: Iterable[Mapping[str, Any]]) -> None:
        """What judging says of the whole run now, in the place of what it said before."""
        with self._transaction():
            for table, rows in (("verdicts", verdicts), ("search_steps", search_steps)):
                self._connection.execute(f"DELETE FROM {table}")
                for row in rows:
                    self._insert(table, row)

    def record_warmup(self, engine_id: str, prompt_ids: Sequence[str]) -> None:
        """Prompts that the engine has been sent outside its cells."""
        self._connection.execute(
            "INSERT INTO warmup_prompts SELECT ?, unnest(?::VARCHAR[])", [engine_id, list(prompt_ids)]
        )

    def cell_summary(self, cell_id: str, *, slo_ttft_ms: float, slo_tpot_ms: float) -> CellSummary:
        rows = self.query(_SUMMARY, [slo_ttft_ms, slo_tpot_ms, cell_id])
        if not rows:
            raise KeyError(f"Cell {cell_id!r} is not in this store.")
        return CellSummary(**{field.name: rows[0][field.name] for field in fields(CellSummary)})

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of any SELECT as dictionaries. Views: v_requests, v_measured, v_itl, v_cells, v_cell_itl;
        table macros: slo_requests(ttft_ms, tpot_ms), slo_cells(ttft_ms, tpot_ms)."""
        result = self._connection.execute(sql, list(parameters))
        names = [column[0] for column in result.description or ()]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        """A statement that brings no rows, such as COPY."""
        self._connection.execute(sql, list(parameters))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing. Inside another one it is a part of that."""
        if self._in_transaction:
            yield
            return
        self._connection.execute("BEGIN")
        self._in_transaction = True
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        else:
            self._connection.execute("COMMIT")
        finally:
            self._in_transaction = False

    def _record_plan(self, plan: CellPlan) -> None:
        if self.query("SELECT n FROM plans WHERE plan_sha256 = ?", [plan.sha256]):
            return
        self._insert(
            "plans",
            {
                "plan_sha256": plan.sha256,
                "kind": plan.kind,
                "rate_rps": plan.rate_rps,
                "warmup_ns": plan.warmup_ns,
                "horizon_ns": plan.horizon_ns,
                "n": len(plan.requests),
                "drawn_json": None if plan.drawn is None else msgspec.json.encode(plan.drawn).decode(),
            },
        )
        columns = [
            [request.seq for request in plan.requests],
            [request.scheduled_ns for request in plan.requests],
            [request.prompt_id for request in plan.requests],
            [hashlib.sha256(request.body).hexdigest() for request in plan.requests],
            [request.max_tokens for request in plan.requests],
            [request.prompt_tokens for request in plan.requests],
        ]
        self._connection.execute(
            "INSERT INTO plan_rows (plan_sha256, seq, scheduled_ns, prompt_id, prompt_sha256, max_tokens, "
            "prompt_tokens) "
            "SELECT ?, unnest(?::INTEGER[]), unnest(?::BIGINT[]), unnest(?::VARCHAR[]), unnest(?::VARCHAR[]), "
            "unnest(?::INTEGER[]), unnest(?::INTEGER[])",
            [plan.sha256, *columns],
        )

    def _mark_ingested(self, cell_id: str, header: SpoolHeader, footer: SpoolFooter) -> None:
        self._connection.execute(
            MARK_INGESTED,
            {
                "cell_id": cell_id,
                "epoch_unix_ns": header.epoch_unix_ns,
                "gc_frozen": header.gc_frozen,
                "timer": header.timer,
                "cpu_slice_ns": header.cpu_slice_ns,
                "workers": header.workers,
                "clock": header.clock,
                "foreign_cpu": footer.foreign_cpu,
                "max_in_flight": footer.max_in_flight,
                "connections_opened": footer.connections_opened,
                "cooldown_exhausted": footer.cooldown_exhausted,
                "reason": footer.aborted,
                "status": "unjudged" if footer.aborted is None else "aborted",
            },
        )

    def _replace(self, table: str, key: str, row: Mapping[str, Any]) -> None:
        with self._transaction():
            self._connection.execute(f"DELETE FROM {table} WHERE {key} = ?", [row[key]])
            self._insert(table, row)

    def _insert(self, table: str, row: Mapping[str, Any]) -> None:
        places = ", ".join("?" * len(row))
        self._connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", list(row.values()))


def _checked(spool: Path) -> tuple[SpoolHeader, SpoolFooter]:
    spools.verify(spool)
    rows = spools.read_rows(spool)
    header = next(rows, None)
    footer: spools.SpoolRow | None = None
    for footer in rows:  # noqa: B007  (the last row is what is wanted)
        pass
    if not isinstance(header, SpoolHeader) or not isinstance(footer, SpoolFooter):
        raise SpoolError(f"{spool} has no header or no footer.")
    return header, footer


_SUMMARY = """
SELECT c.engine_id, c.rate_rps, c.replicate, c.status, s.good, s.attainment, s.ttft_misses, s.tpot_misses,
s.goodput_rps, v.* FROM slo_cells(?, ?) AS s JOIN v_cells AS v USING (cell_id) JOIN cells AS c USING (cell_id) WHERE
cell_id = ?
"""
