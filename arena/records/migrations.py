"""How an older store is brought to the next schema version: SQL by the version that it starts from.

Each statement leaves a file that `schema.sql` completes: tables that are new are made there, only what stands in tables
that exist already is added here.
"""

from __future__ import annotations

MIGRATIONS: dict[int, str] = {
    1: """
ALTER TABLE schema_meta ADD COLUMN tool_version VARCHAR;
ALTER TABLE runs ADD COLUMN clock_json VARCHAR;
ALTER TABLE plans ADD COLUMN drawn_json VARCHAR;
ALTER TABLE plan_rows ADD COLUMN prompt_sha256 VARCHAR;
ALTER TABLE plan_rows ADD COLUMN prompt_tokens INTEGER;
ALTER TABLE cells ADD COLUMN phase_order INTEGER;
ALTER TABLE cells ADD COLUMN steady_from_ns BIGINT;
ALTER TABLE cells ADD COLUMN steady_to_ns BIGINT;
ALTER TABLE cells ADD COLUMN workers INTEGER;
ALTER TABLE cells ADD COLUMN clock VARCHAR;
ALTER TABLE cells ADD COLUMN foreign_cpu DOUBLE;
ALTER TABLE requests ADD COLUMN worker INTEGER DEFAULT 0;
ALTER TABLE requests ADD COLUMN text VARCHAR;
ALTER TABLE client_health ADD COLUMN worker INTEGER DEFAULT 0;
ALTER TABLE client_health ADD COLUMN machine_cpu DOUBLE;
UPDATE cells SET steady_from_ns = p.warmup_ns, steady_to_ns = p.horizon_ns
FROM plans AS p WHERE p.plan_sha256 = cells.plan_sha256 AND cells.ingested_utc IS NOT NULL;
UPDATE schema_meta SET version = 2;
""",
}
