"""How a spool goes into the store: DuckDB reads the JSON lines itself, and the columns are those of the row types.

Values only, no connection: `arena.records.store` runs these statements, `arena.records.check` compares by the same
columns.
"""

from __future__ import annotations

from collections.abc import Mapping

REQUEST_COLUMNS = {
    "seq": "INTEGER", "measured": "BOOLEAN", "prompt_id": "VARCHAR", "max_tokens": "INTEGER", "scheduled_ns": "BIGINT",
    "sent_ns": "BIGINT", "connected_ns": "BIGINT", "wrote_ns": "BIGINT", "first_byte_ns": "BIGINT", "role_ns": "BIGINT",
    "first_reason_ns": "BIGINT", "first_text_ns": "BIGINT", "first_gen_ns": "BIGINT", "last_gen_ns": "BIGINT",
    "usage_ns": "BIGINT", "done_ns": "BIGINT", "status": "VARCHAR", "http": "INTEGER", "err_class": "VARCHAR",
    "err_message": "VARCHAR", "finish_reason": "VARCHAR", "in_tok_usage": "INTEGER", "out_tok_usage": "INTEGER",
    "reason_tok_usage": "INTEGER", "cached_tok": "INTEGER", "out_tok_counted": "INTEGER", "tokens_known": "BOOLEAN",
    "n_chunks": "INTEGER", "n_recvs": "INTEGER", "reused": "BOOLEAN", "worker": "INTEGER", "text": "VARCHAR",
}  # fmt: skip
HEALTH_COLUMNS = {
    "t_ns": "BIGINT", "cpu": "DOUBLE", "loop_lag_ns": "BIGINT", "in_flight": "INTEGER", "sockets": "INTEGER",
    "worker": "INTEGER", "machine_cpu": "DOUBLE",
}  # fmt: skip
METRIC_COLUMNS = {"t_ns": "BIGINT", "metric": "VARCHAR", "value": "DOUBLE"}
_EVENT_COLUMNS = {"seq": "INTEGER", "token_ns": "BIGINT[]", "token_n": "INTEGER[]", "token_kind": "UTINYINT[]"}


def _load(table: str, kind: str, columns: Mapping[str, str], where: str = "true") -> str:
    types = ", ".join(f"'{name}': '{type_}'" for name, type_ in {"row": "VARCHAR", **columns}.items())
    return (
        f"INSERT INTO {table} (cell_id, {', '.join(_stored(name) for name in columns)}) "
        f"SELECT $cell_id, {', '.join(columns)} "
        f"FROM read_json($spool, format = 'newline_delimited', columns = {{{types}}}) "
        f"WHERE \"row\" = '{kind}' AND {where}"
    )


def _stored(name: str) -> str:
    return {"token_ns": "t_ns", "token_n": "n_tok", "token_kind": "kind"}.get(name, name)


# Each takes $cell_id and $spool.
LOAD_SPOOL = (
    _load("requests", "request", REQUEST_COLUMNS),
    _load("token_events", "request", _EVENT_COLUMNS, where="len(token_ns) > 0"),
    _load("client_health", "health", HEALTH_COLUMNS),
)
LOAD_METRICS = _load("engine_health", "metric", METRIC_COLUMNS)

# Measured requests of a cell's plan that have no row.
MISSING = """
SELECT count(*) AS n FROM cells JOIN plans AS p USING (plan_sha256) JOIN plan_rows AS r USING (plan_sha256)
WHERE cell_id = ? AND r.scheduled_ns >= p.warmup_ns AND r.scheduled_ns < p.horizon_ns
AND NOT EXISTS (SELECT 1 FROM requests AS q WHERE q.cell_id = cells.cell_id AND q.seq = r.seq)
"""

# A cell that the audit has judged keeps that judgement.
MARK_INGESTED = """
UPDATE cells SET ingested_utc = now()::TIMESTAMP, epoch_unix_ns = $epoch_unix_ns, gc_frozen = $gc_frozen,
timer = $timer, cpu_slice_ns = $cpu_slice_ns, workers = $workers, clock = $clock, foreign_cpu = $foreign_cpu,
steady_from_ns = (SELECT warmup_ns FROM plans AS p WHERE p.plan_sha256 = cells.plan_sha256),
steady_to_ns = (SELECT horizon_ns FROM plans AS p WHERE p.plan_sha256 = cells.plan_sha256),
max_in_flight = $max_in_flight, connections_opened = $connections_opened, cooldown_exhausted = $cooldown_exhausted,
reason = CASE WHEN status = 'planned' THEN $reason ELSE reason END,
status = CASE WHEN status = 'planned' THEN $status ELSE status END WHERE cell_id = $cell_id
"""
