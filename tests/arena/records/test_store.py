"""Rows in, metrics out: each test is a way in which another tool's figures went wrong."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest

from arena.load import spool
from arena.load.loadgen import spool_header
from arena.load.plan import CellPlan, Target
from arena.load.scripted_engine import Script
from arena.load.spool import HealthRow, RequestRow, SpoolError, SpoolFooter, SpoolWriter
from arena.records.rows import CellRecord, CellSummary, EngineRecord, RunRecord
from arena.records.schema import StoreError
from arena.records.store import Store
from tests.arena.cells import MS, plan_of

TARGET = Target("http://127.0.0.1:1", "m", "engine")


def answer(seq: int, *, ttft_ms: float = 100, gaps_ms: Sequence[float] = (20, 20), **changes: Any) -> RequestRow:
    """An ok row of a request that was due at `seq` milliseconds and left at once."""
    due = seq * MS
    stamps = [due + round(ttft_ms * MS)]
    for gap in gaps_ms:
        stamps.append(stamps[-1] + round(gap * MS))
    row = RequestRow(
        seq=seq,
        measured=True,
        prompt_id=f"prompt-{seq}",
        max_tokens=8,
        scheduled_ns=due,
        sent_ns=due,
        wrote_ns=due,
        first_byte_ns=stamps[0],
        first_gen_ns=stamps[0],
        first_text_ns=stamps[0],
        last_gen_ns=stamps[-1],
        done_ns=stamps[-1],
        status="ok",
        http=200,
        out_tok_usage=len(stamps),
        out_tok_counted=len(stamps),
        n_chunks=len(stamps),
        n_recvs=len(stamps),
        reused=True,
        token_ns=stamps,
        token_n=[1] * len(stamps),
        token_kind=[0] * len(stamps),
    )
    return msgspec.structs.replace(row, **changes)


def failure(seq: int, **changes: Any) -> RequestRow:
    return RequestRow(
        seq=seq,
        prompt_id=f"prompt-{seq}",
        max_tokens=8,
        scheduled_ns=seq * MS,
        **{"measured": True, "sent_ns": seq * MS, "status": "error", "http": 500, "err_class": "http_500", **changes},
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "arena.duckdb") as opened:
        prepare(opened)
        yield opened


def prepare(store: Store) -> None:
    store.record_run(RunRecord(run_id="run", started_utc="2026-01-01T00:00:00Z", scenario="chat", seed=1, host={}))
    store.record_engine(
        EngineRecord(
            engine_id="e1", run_id="run", name="native", endpoint="http://x", model="m", flags={}, capability={}
        )
    )


def plan_for(rows: Sequence[RequestRow], cell_id: str = "cell") -> CellPlan:
    return plan_of([(index, Script(steps=[])) for index in range(max(row.seq for row in rows) + 1)], cell_id=cell_id)


def spooled(path: Path, plan: CellPlan, rows: Sequence[RequestRow], *, promised: int | None = None) -> Path:
    writer = SpoolWriter(path)
    header = spool_header(TARGET, plan)
    header.epoch_unix_ns = 1
    writer.write(header)
    for row in rows:
        writer.write(row)
    writer.write(HealthRow(t_ns=5, cpu=0.5, loop_lag_ns=7, in_flight=3, sockets=4))
    requests = writer.num_requests if promised is None else promised
    writer.finish(SpoolFooter(requests=requests, max_in_flight=3, connections_opened=4, cooldown_exhausted=False))
    return path


def load(store: Store, folder: Path, rows: Sequence[RequestRow], cell_id: str = "cell") -> None:
    plan = plan_for(rows, cell_id)
    store.record_cell(record(cell_id), plan)
    store.ingest(cell_id, spooled(folder / f"{cell_id}.jsonl", plan, rows))


def record(cell_id: str) -> CellRecord:
    return CellRecord(cell_id=cell_id, run_id="run", engine_id="e1", replicate=0, slot=0, rate_rps=10)


def summary(store: Store, *, ttft_ms: float = 1000, tpot_ms: float = 100, cell_id: str = "cell") -> CellSummary:
    return store.cell_summary(cell_id, slo_ttft_ms=ttft_ms, slo_tpot_ms=tpot_ms)


def only(rows: list[dict[str, Any]]) -> dict[str, Any]:
    assert len(rows) == 1
    return rows[0]


@pytest.mark.replay("R06", "R07")
def test_the_clock_starts_when_a_request_was_due_not_when_it_left(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0, ttft_ms=500, sent_ns=400 * MS)])
    row = only(store.query("SELECT * FROM v_requests"))
    assert (row["ttft_sched_ms"], row["ttft_send_ms"], row["lag_ms"]) == (500, 100, 400)
    assert summary(store).ttft_p99_ms == 500


def test_tpot_leaves_the_ttft_and_the_first_chunk_out(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0, ttft_ms=200, gaps_ms=[20] * 9)])
    assert summary(store).tpot_p50_ms == pytest.approx(20)


@pytest.mark.replay("R18", "R45")
def test_several_tokens_a_chunk_do_not_inflate_the_speed_of_one(store: Store, tmp_path: Path) -> None:
    """Four tokens each 40 ms: the stall is 40 ms, a token takes 10. Dividing by n - 1 would say 9."""
    counts = {"token_n": [4] * 5, "out_tok_usage": 20, "out_tok_counted": 20, "tokens_known": True}
    load(store, tmp_path, [answer(0, gaps_ms=[40] * 4, **counts)])
    itl = only(store.query("SELECT * FROM v_cell_itl"))
    assert (itl["chunk_gaps"], itl["chunk_gap_p50_ms"], itl["chunk_gap_p99_ms"]) == (4, 40, 40)
    assert (itl["per_token_n"], itl["per_token_p50_ms"], itl["per_token_p99_ms"]) == (16, 10, 10)
    assert summary(store).tpot_p50_ms == pytest.approx(10)


@pytest.mark.replay("R18")
def test_per_token_gaps_are_not_invented_where_the_engine_hides_its_counts(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0, gaps_ms=[40] * 4, out_tok_usage=20)])
    itl = only(store.query("SELECT * FROM v_cell_itl"))
    assert (itl["chunk_gap_p50_ms"], itl["per_token_n"], itl["per_token_p50_ms"]) == (40, 0, None)


def test_events_of_one_read_are_one_chunk(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0, gaps_ms=[0, 30, 0])])
    itl = only(store.query("SELECT * FROM v_cell_itl"))
    assert (itl["chunk_gaps"], itl["chunk_gap_p50_ms"], itl["per_token_n"], itl["per_token_p50_ms"]) == (1, 30, 2, 15)
    assert summary(store).tpot_p50_ms == pytest.approx(15)


@pytest.mark.replay("R03")
def test_the_ttft_is_no_gap(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0, ttft_ms=900, gaps_ms=[20, 20])])
    assert [row["chunk_gap_ms"] for row in store.query("SELECT chunk_gap_ms FROM v_itl")] == [20, 20]


@pytest.mark.replay("R21", "R45")
def test_an_answer_of_one_token_has_a_ttft_and_no_tpot(store: Store, tmp_path: Path) -> None:
    """A TPOT of 0 would always be good. It is judged by its TTFT alone."""
    load(store, tmp_path, [answer(0, ttft_ms=100, gaps_ms=[]), answer(1, ttft_ms=300, gaps_ms=[])])
    found = summary(store, ttft_ms=200, tpot_ms=1)
    assert (found.tpot_n, found.tpot_p50_ms, found.tpot_p99_inf_ms) == (0, None, None)
    assert (found.ttft_n, found.ttft_p99_ms) == (2, 300)
    assert (found.good, found.ttft_misses, found.tpot_misses) == (1, 1, 0)


def test_an_answer_that_generated_nothing_misses_its_ttft(store: Store, tmp_path: Path) -> None:
    nothing = {"first_gen_ns": None, "last_gen_ns": None, "first_text_ns": None, "out_tok_usage": 0}
    empty = answer(0, **nothing, out_tok_counted=0, token_ns=[], token_n=[], token_kind=[])
    load(store, tmp_path, [empty, answer(1)])
    found = summary(store)
    assert (found.ok, found.ttft_n, found.good, found.ttft_misses) == (2, 1, 1, 1)
    assert found.ttft_p99_inf_ms == math.inf


@pytest.mark.replay("R20")
def test_missing_values_are_left_out_of_percentiles_and_counted(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0, ttft_ms=100), *(failure(seq) for seq in range(1, 10))])
    found = summary(store)
    assert (found.requests, found.ttft_n, found.ttft_p50_ms, found.tpot_n) == (10, 1, 100, 1)


@pytest.mark.replay("R22")
def test_failures_stay_in_the_denominator_and_are_infinitely_late(store: Store, tmp_path: Path) -> None:
    rows = [failure(seq) if seq % 5 == 0 else answer(seq) for seq in range(50)]
    load(store, tmp_path, rows)
    found = summary(store)
    assert (found.requests, found.failures, found.good, found.attainment) == (50, 10, 40, 0.8)
    assert (found.ttft_p99_ms, found.ttft_p99_inf_ms, found.tpot_p99_inf_ms) == (100, math.inf, math.inf)


@pytest.mark.replay("R40")
def test_half_the_answers_failing_is_an_error_rate_of_a_half(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [failure(0), answer(1), failure(2), answer(3)])
    assert only(store.query("SELECT error_rate FROM v_cells"))["error_rate"] == 0.5


@pytest.mark.replay("R23")
def test_an_answer_that_failed_after_its_first_token_is_in_no_percentile(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0, ttft_ms=5, status="error", err_class="error_event"), answer(1, ttft_ms=100)])
    found = summary(store)
    assert (found.ttft_n, found.ttft_p50_ms, found.good) == (1, 100, 1)
    assert only(store.query("SELECT * FROM v_cell_itl"))["chunk_gaps"] == 2


@pytest.mark.replay("R22", "R50")
def test_unsent_and_timed_out_requests_are_misses(store: Store, tmp_path: Path) -> None:
    unsent = failure(1, status="unsent", sent_ns=None, http=None, err_class="max_in_flight")
    load(store, tmp_path, [answer(0), unsent, answer(2, status="timeout")])
    found = summary(store)
    assert (found.requests, found.unsent, found.failures, found.good) == (3, 1, 2, 1)
    assert found.reuse_ratio == 1


@pytest.mark.replay("R27")
def test_a_late_usage_event_does_not_lengthen_the_answer(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0, ttft_ms=100, gaps_ms=[20], usage_ns=500 * MS, done_ns=900 * MS)])
    assert summary(store).e2e_p50_ms == 120


def test_disjoint_misses_add_up(store: Store, tmp_path: Path) -> None:
    """Each limit holds for 9 of 10, both together only for 8."""
    slow_start, slow_tokens = answer(0, ttft_ms=999), answer(1, gaps_ms=[90, 90])
    load(store, tmp_path, [slow_start, slow_tokens, *(answer(seq) for seq in range(2, 10))])
    found = summary(store, ttft_ms=200, tpot_ms=50)
    assert (found.ttft_misses, found.tpot_misses, found.good, found.attainment) == (1, 1, 8, 0.8)


def test_warm_up_and_cool_down_are_stored_and_not_measured(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0, ttft_ms=9000, measured=False), answer(1), failure(2, measured=False)])
    found = summary(store)
    assert (found.requests, found.failures, found.ttft_p99_ms) == (1, 0, 100)
    assert only(store.query("SELECT count(*) AS n FROM requests"))["n"] == 3


def test_goodput_is_good_requests_per_second_of_the_measured_window(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(seq) for seq in range(11)])
    assert summary(store).goodput_rps == pytest.approx(11 / 0.010, rel=0.001)


def test_ingesting_twice_changes_nothing(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0), failure(1)])
    before = summary(store), store.query("SELECT * FROM token_events"), store.query("SELECT * FROM client_health")
    store.judge_cell("cell", "invalid_client", "lag")
    store.ingest("cell", tmp_path / "cell.jsonl")
    after = summary(store), store.query("SELECT * FROM token_events"), store.query("SELECT * FROM client_health")
    assert after[1:] == before[1:]
    assert only(store.query("SELECT status, reason FROM cells")) == {"status": "invalid_client", "reason": "lag"}
    assert after[0] == type(before[0])(**{**asdict(before[0]), "status": "invalid_client"})


def asdict(found: CellSummary) -> dict[str, Any]:
    return {name: getattr(found, name) for name in CellSummary.__dataclass_fields__}


def test_a_spool_that_promises_more_than_it_holds_leaves_the_store_as_it_was(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0)])
    other = spooled(tmp_path / "short.jsonl", plan_for([answer(0)]), [answer(0, ttft_ms=1)], promised=2)
    with pytest.raises(SpoolError, match="promises 2 requests and holds 1"):
        store.ingest("cell", other)
    assert summary(store).ttft_p50_ms == 100


def test_a_foreign_or_unfinished_spool_is_refused(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0)])
    foreign = spooled(tmp_path / "foreign.jsonl", plan_for([answer(3)]), [answer(0)])
    with pytest.raises(SpoolError, match="belongs to cell"):
        store.ingest("cell", foreign)
    spool.done_marker(foreign).unlink()
    with pytest.raises(SpoolError, match="no done marker"):
        store.ingest("cell", foreign)
    with pytest.raises(SpoolError, match="never recorded"):
        store.ingest("nobody", tmp_path / "cell.jsonl")


def test_a_cell_that_never_ran_is_planned_and_an_aborted_one_says_why(store: Store, tmp_path: Path) -> None:
    plan = plan_for([answer(1)])
    store.record_cell(record("cell"), plan)
    assert only(store.query("SELECT status, ingested_utc FROM cells")) == {"status": "planned", "ingested_utc": None}
    spool.account_for_missing(tmp_path / "s", plan, spool_header(TARGET, plan), "killed")
    store.ingest("cell", tmp_path / "s")
    assert only(store.query("SELECT status, reason FROM cells")) == {"status": "aborted", "reason": "killed"}
    assert summary(store).unsent == 2


def test_one_plan_is_stored_once_for_all_engines(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0), answer(1)], "a")
    load(store, tmp_path, [answer(0), answer(1)], "b")
    assert only(store.query("SELECT n FROM plans"))["n"] == 2
    assert only(store.query("SELECT count(*) AS n FROM plan_rows"))["n"] == 2
    assert {row["cell_id"] for row in store.query("SELECT cell_id FROM v_cells")} == {"a", "b"}


def test_the_store_reads_back_after_closing(store: Store, tmp_path: Path) -> None:
    load(store, tmp_path, [answer(0)])
    store.record_audit("cell", "lag", 0.2, 1.0, True)
    store.close()
    with Store(tmp_path / "arena.duckdb", read_only=True) as reader:
        assert summary(reader).ttft_p50_ms == 100
        assert only(reader.query("SELECT ok FROM audits"))["ok"] is True


def test_a_store_of_another_version_is_refused_with_its_version(store: Store, tmp_path: Path) -> None:
    store.close()
    with duckdb.connect(str(tmp_path / "arena.duckdb")) as connection:
        connection.execute("UPDATE schema_meta SET version = 99")
    for read_only in (True, False):
        with pytest.raises(StoreError, match="schema version 99"):
            Store(tmp_path / "arena.duckdb", read_only=read_only)


def test_an_unknown_cell_is_an_error_and_not_an_empty_summary(store: Store) -> None:
    with pytest.raises(KeyError, match="nobody"):
        summary(store, cell_id="nobody")


KILLED_INGESTER = """
import sys, time
from pathlib import Path
from arena.records.store import Store
store = Store(Path(sys.argv[1]))
def stop_before_the_mark(*arguments):
    print("loaded", flush=True)
    time.sleep(60)
store._mark_ingested = stop_before_the_mark
store.ingest("cell", Path(sys.argv[2]))
"""


def test_an_ingester_killed_in_mid_cell_leaves_nothing_half_loaded(tmp_path: Path) -> None:
    rows = [answer(seq) for seq in range(100)]
    path = tmp_path / "arena.duckdb"
    with Store(path) as store:
        prepare(store)
        plan = plan_for(rows)
        store.record_cell(record("cell"), plan)
        spooled(tmp_path / "cell.jsonl", plan, rows)
    argv = [sys.executable, "-c", KILLED_INGESTER, str(path), str(tmp_path / "cell.jsonl")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loaded\n"
        os.kill(process.pid, signal.SIGKILL)
    with Store(path) as store:
        assert only(store.query("SELECT count(*) AS n FROM requests"))["n"] == 0
        assert only(store.query("SELECT status FROM cells"))["status"] == "planned"
        store.ingest("cell", tmp_path / "cell.jsonl")
        assert summary(store).requests == 100


def test_a_cell_of_ten_thousand_requests_goes_in_within_seconds(store: Store, tmp_path: Path) -> None:
    rows = [answer(seq, gaps_ms=[20] * 31) for seq in range(10_000)]
    started = time.perf_counter()
    load(store, tmp_path, rows)
    assert summary(store).requests == 10_000
    assert time.perf_counter() - started < 10


def test_a_store_opened_for_reading_is_scored_by_the_current_views(tmp_path: Path) -> None:
    """`arena report` may not write into the store; a view that an older program left there must not decide."""
    path = tmp_path / "arena.duckdb"
    with Store(path) as store:
        prepare(store)
        load(store, tmp_path, [answer(0, ttft_ms=100), answer(1, ttft_ms=300)])
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE OR REPLACE VIEW v_requests AS SELECT *, 1.0 AS ttft_sched_ms FROM requests")
        connection.execute("CREATE OR REPLACE VIEW v_measured AS SELECT *, 1.0 AS tpot_ms FROM v_requests")
    with Store(path, read_only=True) as store:
        assert [row["ttft_sched_ms"] for row in store.query("SELECT * FROM v_measured ORDER BY seq")] == [100, 300]
        assert summary(store).ttft_p99_ms == 300


def test_a_measured_request_that_has_no_row_is_not_lost_in_silence(store: Store, tmp_path: Path) -> None:
    """It would leave the denominator, and the cell would look better for it."""
    plan = plan_of([(0, Script(steps=[])), (1, Script(steps=[]))])
    store.record_cell(record("cell"), plan)
    with pytest.raises(SpoolError, match="no row for 1 of the measured requests"):
        store.ingest("cell", spooled(tmp_path / "cell.jsonl", plan, [answer(0)]))
    assert store.query("SELECT count(*) AS n FROM requests")[0]["n"] == 0


def test_the_order_in_which_engines_met_a_plan_is_told_by_their_places(store: Store) -> None:
    plan = plan_for([answer(0)])
    for slot, name in enumerate(["a", "b", "b2", "a2"], 1):
        store.record_engine(
            EngineRecord(engine_id=name[0], run_id="run", name=name[0], endpoint="", model="m", flags={}, capability={})
        )
        its_plan = plan if len(name) == 1 else plan_for([answer(1)])
        cell = CellRecord(cell_id=name, run_id="run", engine_id=name[0], replicate=0, slot=slot, rate_rps=10)
        store.record_cell(cell, its_plan)
    rows = store.query("SELECT cell_id, phase_order FROM v_order ORDER BY slot")
    assert [(row["cell_id"], row["phase_order"]) for row in rows] == [("a", 1), ("b", 2), ("b2", 1), ("a2", 2)]


def test_races_with_equal_plans_and_engines_with_equal_settings_are_told_by_their_digests(tmp_path: Path) -> None:
    digests = []
    for name, rows, flags in (("1", [answer(0)], {"a": 1}), ("2", [answer(0)], {"a": 2}), ("3", [answer(1)], {"a": 1})):
        with Store(tmp_path / f"{name}.duckdb") as opened:
            prepare(opened)
            opened.record_engine(
                EngineRecord(
                    engine_id="e1", run_id="run", name="native", endpoint=name, model="m", flags=flags, capability={}
                )
            )
            opened.record_cell(record("cell"), plan_for(rows))
            run, engine = only(opened.query("SELECT * FROM v_runs")), only(opened.query("SELECT * FROM v_engines"))
            digests.append((run["plans_sha256"], engine["settings_sha256"]))
    (plans, settings), (same_plans, other_settings), (other_plans, same_settings) = digests
    assert plans == same_plans != other_plans
    assert settings == same_settings != other_settings
