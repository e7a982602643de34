-- What the raw rows mean. The definitions of docs and reports are exactly these; a better one re-scores old runs.
--
-- Percentiles are order statistics (quantile_disc): values that occurred. A plain percentile is over ok requests that have
-- the value, and is always shown with that count; an `_inf` one is over every measured request, with failures infinitely late.

CREATE OR REPLACE VIEW v_tokens_at_first AS
-- Tokens that had arrived by the first stamp: its event, and any others that came in the same read.
SELECT cell_id, seq, list_sum(list_filter(list_zip(t_ns, n_tok), lambda pair: pair[1] = t_ns[1]).list_transform(lambda pair: pair[2]))::BIGINT AS n_first
FROM token_events
WHERE len(t_ns) > 0;

CREATE OR REPLACE VIEW v_requests AS
-- ttft_sched: from the moment the request was due, whatever kept it. ttft_send: from the real send, a diagnostic.
-- tpot: over the tokens after the first chunk; NULL where there are none. e2e ends at the last generated event: usage and
-- [DONE] do not extend it. ttfo: first text that is not reasoning.
SELECT
    r.*,
    status = 'ok' AS ok,
    coalesce(out_tok_usage, out_tok_counted) AS n_out,
    (sent_ns - scheduled_ns) / 1e6 AS lag_ms,
    (connected_ns - sent_ns) / 1e6 AS connect_ms,
    (first_byte_ns - wrote_ns) / 1e6 AS first_byte_wait_ms,
    (first_gen_ns - scheduled_ns) / 1e6 AS ttft_sched_ms,
    (first_gen_ns - sent_ns) / 1e6 AS ttft_send_ms,
    (first_text_ns - scheduled_ns) / 1e6 AS ttfo_ms,
    CASE
        WHEN coalesce(out_tok_usage, out_tok_counted) - n_first >= 1
        THEN (last_gen_ns - first_gen_ns) / 1e6 / (coalesce(out_tok_usage, out_tok_counted) - n_first)
    END AS tpot_ms,
    (last_gen_ns - scheduled_ns) / 1e6 AS e2e_ms
FROM requests AS r
LEFT JOIN v_tokens_at_first USING (cell_id, seq);

CREATE OR REPLACE VIEW v_arrival_shape AS
-- How the events of an answer came. n_reads: moments at which some came; those of one read came together. gap_cv: standard
-- deviation of the gaps between these moments over their mean; NULL for fewer than two gaps.
WITH moments AS (
    SELECT cell_id, seq, list_sort(list_distinct(t_ns)) AS moment FROM token_events
),
gaps AS (
    SELECT cell_id, seq, len(moment) AS n_reads, list_transform(range(2, len(moment) + 1), lambda i: moment[i] - moment[i - 1]) AS gap
    FROM moments
)
SELECT
    cell_id, seq, n_reads,
    CASE WHEN len(gap) >= 2 THEN list_aggregate(gap, 'stddev_pop') / nullif(list_aggregate(gap, 'avg'), 0) END AS gap_cv
FROM gaps;

CREATE OR REPLACE VIEW v_repeated AS
-- Measured requests whose prompt the same engine had been sent before: to warm it up, in an earlier cell, in the warm-up of
-- this one, or earlier in its window. Prompts shorter than a block of a prefix cache are let be: of one word each there are
-- not enough to go round, and nothing of them can be reused.
WITH sent AS (
    SELECT c.engine_id, c.slot, c.plan_sha256, r.cell_id, r.seq, r.measured, r.prompt_id
    FROM requests AS r JOIN cells AS c USING (cell_id)
),
first_sent AS (
    SELECT engine_id, prompt_id, min(row(slot, seq)) AS first FROM sent GROUP BY ALL
)
SELECT s.cell_id, s.seq, s.prompt_id
FROM sent AS s
JOIN first_sent AS f USING (engine_id, prompt_id)
LEFT JOIN plan_rows AS p ON p.plan_sha256 = s.plan_sha256 AND p.seq = s.seq
WHERE s.measured AND coalesce(p.prompt_tokens, 16) >= 16 AND (
    row(s.slot, s.seq) > f.first
    OR EXISTS (SELECT 1 FROM warmup_prompts AS w WHERE w.engine_id = s.engine_id AND w.prompt_id = s.prompt_id)
);

CREATE OR REPLACE VIEW v_measured AS
SELECT * FROM v_requests WHERE measured;

CREATE OR REPLACE VIEW v_itl AS
-- One row a gap between arrivals. Events of one read arrived together and are one chunk.
-- chunk_gap_ms: the stall a user sees. per_token_ms: the gap spread over the tokens it brought, to be counted n_tok times;
-- NULL where an engine sends several tokens an event and does not say how many (its events do not add up to its usage).
WITH events AS (
    SELECT cell_id, seq, unnest(t_ns) AS t_ns, unnest(n_tok) AS n_tok FROM token_events
),
chunks AS (
    SELECT cell_id, seq, t_ns, sum(n_tok)::BIGINT AS n_tok FROM events GROUP BY ALL
),
gaps AS (
    SELECT
        cell_id, seq, t_ns, n_tok,
        (t_ns - lag(t_ns) OVER (PARTITION BY cell_id, seq ORDER BY t_ns)) / 1e6 AS chunk_gap_ms
    FROM chunks
)
SELECT
    g.cell_id, g.seq, r.measured, r.status = 'ok' AS ok, g.t_ns, g.n_tok, g.chunk_gap_ms,
    CASE
        WHEN r.tokens_known OR r.out_tok_usage = r.out_tok_counted
        THEN g.chunk_gap_ms / nullif(g.n_tok, 0)
    END AS per_token_ms
FROM gaps AS g
JOIN requests AS r USING (cell_id, seq)
WHERE g.chunk_gap_ms IS NOT NULL;

CREATE OR REPLACE VIEW v_cells AS
-- What needs no SLO. Every measured request is in `requests`; failures are all that are not ok.
SELECT
    cell_id,
    count(*) AS requests,
    count(*) FILTER (WHERE ok) AS ok,
    count(*) FILTER (WHERE NOT ok) AS failures,
    count(*) FILTER (WHERE status = 'unsent') AS unsent,
    count(*) FILTER (WHERE NOT ok) / count(*) AS error_rate,
    count(ttft_sched_ms) FILTER (WHERE ok) AS ttft_n,
    quantile_disc(ttft_sched_ms, 0.5) FILTER (WHERE ok) AS ttft_p50_ms,
    quantile_disc(ttft_sched_ms, 0.99) FILTER (WHERE ok) AS ttft_p99_ms,
    quantile_disc(CASE WHEN ok THEN coalesce(ttft_sched_ms, 'inf') ELSE 'inf' END, 0.99) AS ttft_p99_inf_ms,
    quantile_disc(ttft_send_ms, 0.99) FILTER (WHERE ok) AS ttft_send_p99_ms,
    quantile_disc(ttfo_ms, 0.99) FILTER (WHERE ok) AS ttfo_p99_ms,
    count(tpot_ms) FILTER (WHERE ok) AS tpot_n,
    quantile_disc(tpot_ms, 0.5) FILTER (WHERE ok) AS tpot_p50_ms,
    quantile_disc(tpot_ms, 0.99) FILTER (WHERE ok) AS tpot_p99_ms,
    -- An ok answer without a TPOT has no say here; a failure is infinitely slow.
    quantile_disc(CASE WHEN ok THEN tpot_ms ELSE 'inf' END, 0.99) AS tpot_p99_inf_ms,
    quantile_disc(e2e_ms, 0.5) FILTER (WHERE ok) AS e2e_p50_ms,
    quantile_disc(e2e_ms, 0.99) FILTER (WHERE ok) AS e2e_p99_ms,
    quantile_disc(lag_ms, 0.99) AS lag_p99_ms,
    count(*) FILTER (WHERE reused) / nullif(count(reused), 0) AS reuse_ratio,
    sum(n_out) FILTER (WHERE ok) AS out_tokens
FROM v_measured
GROUP BY cell_id;

CREATE OR REPLACE VIEW v_cell_itl AS
-- Both published series, each with its count; per-token values weigh as many as the tokens they stand for.
SELECT
    cell_id,
    count(*) AS chunk_gaps,
    quantile_disc(chunk_gap_ms, 0.5) AS chunk_gap_p50_ms,
    quantile_disc(chunk_gap_ms, 0.99) AS chunk_gap_p99_ms,
    (SELECT count(*) FROM v_itl AS i, range(i.n_tok) WHERE i.cell_id = c.cell_id AND i.measured AND i.ok AND per_token_ms IS NOT NULL)
        AS per_token_n,
    (SELECT quantile_disc(per_token_ms, 0.5) FROM v_itl AS i, range(i.n_tok) WHERE i.cell_id = c.cell_id AND i.measured AND i.ok)
        AS per_token_p50_ms,
    (SELECT quantile_disc(per_token_ms, 0.99) FROM v_itl AS i, range(i.n_tok) WHERE i.cell_id = c.cell_id AND i.measured AND i.ok)
        AS per_token_p99_ms
FROM v_itl AS c
WHERE measured AND ok
GROUP BY cell_id;

CREATE OR REPLACE MACRO slo_requests(slo_ttft_ms, slo_tpot_ms) AS TABLE
-- Did each measured request meet both limits? A failure misses both. An answer that generated nothing misses its TTFT. An
-- answer with too few tokens for a TPOT is judged by its TTFT alone.
SELECT
    cell_id, seq, scheduled_ns, prompt_id, status, ttft_sched_ms, tpot_ms, e2e_ms,
    ok AND coalesce(ttft_sched_ms <= slo_ttft_ms, false) AS meets_ttft,
    ok AND coalesce(tpot_ms <= slo_tpot_ms, true) AS meets_tpot,
    ok AND coalesce(ttft_sched_ms <= slo_ttft_ms, false) AND coalesce(tpot_ms <= slo_tpot_ms, true) AS good
FROM v_measured;

CREATE OR REPLACE MACRO slo_cells(slo_ttft_ms, slo_tpot_ms) AS TABLE
-- Joint attainment, over every measured request; goodput in good requests per second of the measured window.
SELECT
    s.cell_id,
    count(*) AS requests,
    count(*) FILTER (WHERE good) AS good,
    count(*) FILTER (WHERE good) / count(*) AS attainment,
    count(*) FILTER (WHERE NOT meets_ttft) AS ttft_misses,
    count(*) FILTER (WHERE NOT meets_tpot) AS tpot_misses,
    count(*) FILTER (WHERE good) / (any_value(p.horizon_ns - p.warmup_ns) / 1e9) AS goodput_rps
FROM slo_requests(slo_ttft_ms, slo_tpot_ms) AS s
JOIN cells USING (cell_id)
JOIN plans AS p USING (plan_sha256)
GROUP BY s.cell_id;

CREATE OR REPLACE VIEW v_order AS
-- phase_order: which engine met a plan first, second, ... What comes later may find a warmer, or a more tired, machine.
SELECT
    run_id, cell_id, engine_id, plan_sha256, slot,
    row_number() OVER (PARTITION BY run_id, plan_sha256 ORDER BY slot) AS phase_order
FROM cells;

CREATE OR REPLACE VIEW v_runs AS
-- plans_sha256: races with the same one fired the same plans, whatever their engines.
SELECT
    r.*,
    (SELECT sha256(string_agg(DISTINCT c.plan_sha256, ' ' ORDER BY c.plan_sha256)) FROM cells AS c WHERE c.run_id = r.run_id)
        AS plans_sha256
FROM runs AS r;

CREATE OR REPLACE VIEW v_engines AS
-- settings_sha256: everything that makes it another engine, but where it ran. NULL weights or version count as such.
SELECT
    e.*,
    sha256(concat_ws(chr(10), name, coalesce(version, '?'), model, coalesce(weights_sha, '?'), flags_json)) AS settings_sha256
FROM engines AS e;
