-- Raw facts of one arena run. Times are BIGINT nanoseconds from the start of the cell, NULL where the thing never happened.
-- Metrics are views (views.sql). What judging said at the time (`search_steps`, `verdicts`) is kept beside the rows it was
-- computed from, so that `goodgate arena check` can compute it again and compare.

CREATE TABLE IF NOT EXISTS schema_meta (
    version INTEGER NOT NULL,
    tool_version VARCHAR,
    duckdb_version VARCHAR NOT NULL
);

CREATE TABLE IF NOT EXISTS runs (
    run_id VARCHAR PRIMARY KEY,
    started_utc VARCHAR NOT NULL,
    scenario VARCHAR NOT NULL,
    seed BIGINT NOT NULL,
    git_sha VARCHAR,
    host_json VARCHAR NOT NULL,
    clock_json VARCHAR,
    notes VARCHAR
);

CREATE TABLE IF NOT EXISTS engines (
    engine_id VARCHAR PRIMARY KEY,
    run_id VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    version VARCHAR,
    endpoint VARCHAR NOT NULL,
    model VARCHAR NOT NULL,
    weights_sha VARCHAR,
    flags_json VARCHAR NOT NULL,
    capability_json VARCHAR NOT NULL
);

-- One plan serves every engine; it is stored once, under the digest of its content. `drawn_json` says how its arrivals came
-- about, NULL where somebody wrote them down.
CREATE TABLE IF NOT EXISTS plans (
    plan_sha256 VARCHAR PRIMARY KEY,
    kind VARCHAR NOT NULL,
    rate_rps DOUBLE NOT NULL,
    warmup_ns BIGINT NOT NULL,
    horizon_ns BIGINT NOT NULL,
    n INTEGER NOT NULL,
    drawn_json VARCHAR
);

CREATE TABLE IF NOT EXISTS plan_rows (
    plan_sha256 VARCHAR NOT NULL,
    seq INTEGER NOT NULL,
    scheduled_ns BIGINT NOT NULL,
    prompt_id VARCHAR NOT NULL,
    prompt_sha256 VARCHAR,
    max_tokens INTEGER NOT NULL,
    prompt_tokens INTEGER -- as asked; NULL where the workload does not say
);

-- `status` is the audit's word on the cell, `unjudged` from ingestion until it has spoken; `ingested_utc` says that the spool
-- is in. They are different facts. `slot` is the cell's place in the run. [steady_from_ns, steady_to_ns) is the window of scheduled times that is measured.
CREATE TABLE IF NOT EXISTS cells (
    cell_id VARCHAR PRIMARY KEY,
    run_id VARCHAR NOT NULL,
    engine_id VARCHAR NOT NULL,
    plan_sha256 VARCHAR NOT NULL,
    replicate INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    rate_rps DOUBLE NOT NULL,
    status VARCHAR NOT NULL,
    reason VARCHAR,
    steady_from_ns BIGINT,
    steady_to_ns BIGINT,
    epoch_unix_ns BIGINT,
    max_in_flight INTEGER,
    connections_opened INTEGER,
    cooldown_exhausted BOOLEAN,
    gc_frozen BOOLEAN,
    timer VARCHAR,
    cpu_slice_ns BIGINT,
    workers INTEGER,
    clock VARCHAR,
    foreign_cpu DOUBLE,
    ingested_utc TIMESTAMP
);

CREATE TABLE IF NOT EXISTS requests (
    cell_id VARCHAR NOT NULL,
    seq INTEGER NOT NULL,
    measured BOOLEAN NOT NULL,
    prompt_id VARCHAR NOT NULL,
    max_tokens INTEGER NOT NULL,
    scheduled_ns BIGINT NOT NULL,
    sent_ns BIGINT,
    connected_ns BIGINT,
    wrote_ns BIGINT,
    first_byte_ns BIGINT,
    role_ns BIGINT,
    first_reason_ns BIGINT,
    first_text_ns BIGINT,
    first_gen_ns BIGINT,
    last_gen_ns BIGINT,
    usage_ns BIGINT,
    done_ns BIGINT,
    status VARCHAR NOT NULL,
    http INTEGER,
    err_class VARCHAR,
    err_message VARCHAR,
    finish_reason VARCHAR,
    in_tok_usage INTEGER,
    out_tok_usage INTEGER,
    reason_tok_usage INTEGER,
    cached_tok INTEGER,
    out_tok_counted INTEGER NOT NULL,
    tokens_known BOOLEAN NOT NULL,
    n_chunks INTEGER NOT NULL,
    n_recvs INTEGER NOT NULL,
    reused BOOLEAN,
    worker INTEGER,
    text VARCHAR,
    PRIMARY KEY (cell_id, seq)
);

-- One row a request: the events that generated something, in order. kind: 0 text, 1 reasoning, 2 tool-call arguments.
CREATE TABLE IF NOT EXISTS token_events (
    cell_id VARCHAR NOT NULL,
    seq INTEGER NOT NULL,
    t_ns BIGINT[] NOT NULL,
    n_tok INTEGER[] NOT NULL,
    kind UTINYINT[] NOT NULL
);

CREATE TABLE IF NOT EXISTS client_health (
    cell_id VARCHAR NOT NULL,
    t_ns BIGINT NOT NULL,
    cpu DOUBLE NOT NULL,
    loop_lag_ns BIGINT NOT NULL,
    in_flight INTEGER NOT NULL,
    sockets INTEGER NOT NULL,
    worker INTEGER,
    machine_cpu DOUBLE
);

-- What this machine's energy counters showed while a cell ran: joules since the race began, by source (rapl:package-0,
-- nvml:0). On the wall's clock, as `cells.epoch_unix_ns` is.
CREATE TABLE IF NOT EXISTS energy (
    cell_id VARCHAR NOT NULL,
    source VARCHAR NOT NULL,
    t_unix_ns BIGINT NOT NULL,
    joules DOUBLE NOT NULL
);

-- The engine's own metrics while the cell ran. A series has a row when its value is other than a second before.
CREATE TABLE IF NOT EXISTS engine_health (
    cell_id VARCHAR NOT NULL,
    t_ns BIGINT NOT NULL,
    metric VARCHAR NOT NULL,
    value DOUBLE NOT NULL
);

CREATE TABLE IF NOT EXISTS search_steps (
    engine_id VARCHAR NOT NULL,
    step INTEGER NOT NULL,
    cell_id VARCHAR NOT NULL,
    rate_rps DOUBLE NOT NULL,
    n INTEGER NOT NULL,
    misses INTEGER NOT NULL,
    design_effect DOUBLE NOT NULL,
    n_eff DOUBLE NOT NULL,
    verdict VARCHAR NOT NULL,
    ci_lo DOUBLE,
    ci_hi DOUBLE,
    PRIMARY KEY (engine_id, step)
);

-- rate_pass: the highest rate that held, proven or not; rate_fail: the lowest above it that did not.
CREATE TABLE IF NOT EXISTS verdicts (
    run_id VARCHAR NOT NULL,
    engine_id VARCHAR NOT NULL,
    slo_id VARCHAR NOT NULL,
    rate_pass DOUBLE,
    pass_proven BOOLEAN,
    rate_fail DOUBLE,
    fail_proven BOOLEAN,
    est DOUBLE,
    lo DOUBLE,
    hi DOUBLE,
    rank_lo INTEGER,
    rank_hi INTEGER,
    evidence_sha VARCHAR,
    PRIMARY KEY (run_id, engine_id, slo_id)
);

-- Prompts that warmed an engine up before its cells. None of them may be measured.
CREATE TABLE IF NOT EXISTS warmup_prompts (
    engine_id VARCHAR NOT NULL,
    prompt_id VARCHAR NOT NULL
);

CREATE TABLE IF NOT EXISTS audits (
    cell_id VARCHAR NOT NULL,
    check_name VARCHAR NOT NULL,
    value DOUBLE,
    threshold DOUBLE,
    ok BOOLEAN NOT NULL,
    PRIMARY KEY (cell_id, check_name)
);
