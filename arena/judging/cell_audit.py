"""The audits of one cell, fed from its rows. `arena.judging.audit.verdict` makes its status of what they find."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from arena.judging import audit, steady
from arena.judging.arrival_audit import arrivals_drawn, asked_prompts
from arena.judging.cells import read_plan, read_window
from arena.judging.client_audit import Counted, client_findings
from arena.judging.findings import SECOND_NS, Finding, Row
from arena.judging.notes import RunNotes
from arena.load.arrivals import Drawn
from arena.race.scenario import Scenario
from arena.records.store import Store


def audit_rows(store: Store, cell_id: str) -> list[Row]:
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
    return [Row(**row) for row in rows]


def audit_cell(store: Store, cell_id: str, scenario: Scenario) -> list[Finding]:
    """Run the cell's audits from its rows; the caller decides whether to record them."""
    plan = read_plan(store, cell_id)
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
        lag_budget_ms=scenario.slo.lag_budget_ms,
        warm_cache=scenario.cache == "warm",
        exact_output=scenario.exact_output,
        repeated=store.query("SELECT count(*) AS n FROM v_repeated WHERE cell_id = ?", [cell_id])[0]["n"],
    )
    if drawn is not None:
        findings += arrivals_drawn(drawn, schedule_ns)
    findings.append(asked_prompts(rows, {row["seq"]: row["prompt_tokens"] for row in planned}))
    findings += _client_findings(store, cell_id, scenario)
    return findings + _stationarity(rows, read_window(store, cell_id), plan["warmup_ns"] / SECOND_NS)


def _client_findings(store: Store, cell_id: str, scenario: Scenario) -> list[Finding]:
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
        lag_budget_ms=scenario.slo.lag_budget_ms,
        tokens_per_s=cell["rate_rps"] * scenario.longest_output,
        calibration=notes.calibration if notes else None,
    )


def _stationarity(rows: Sequence[Row], window: steady.Window, warmup_s: float) -> list[Finding]:
    known = sorted((row for row in rows if row.status != "unsent"), key=lambda row: (row.scheduled_ns, row.seq))

    def seconds(ns: int | None) -> float:
        return math.inf if ns is None else ns / SECOND_NS

    return steady.findings(
        [row.scheduled_ns / SECOND_NS for row in known],
        [seconds(row.last_gen_ns if row.status == "ok" and row.last_gen_ns else row.done_ns) for row in known],
        [
            (row.first_gen_ns - row.scheduled_ns) / 1e6 if row.status == "ok" and row.first_gen_ns else math.inf
            for row in known
        ],
        window,
        warmup_s,
    )
