"""What is told of a cell while it runs is what its rows are judged by when it is over."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from arena.judging.so_far import SoFar, Tally, tpot_of, ttft_of
from arena.load import scripted_engine as scripted
from arena.load import spool as spools
from arena.load.loadgen import Progress, run_cell
from arena.load.plan import Target
from arena.load.spool import RequestRow
from arena.load.spool_follower import Follower
from arena.race.scenario import SLO
from arena.records.store import Store
from tests.arena.cells import plan_of
from tests.arena.records.test_store import answer, failure, load, prepare

LIMITS = SLO(ttft_ms=150, tpot_ms=30)
TOGETHER = {"token_ns": [100, 100, 400], "token_n": [2, 1, 4], "first_gen_ns": 100, "last_gen_ns": 400}
ROWS = [
    answer(0),
    answer(1, ttft_ms=200),  # late
    answer(2, gaps_ms=(40, 40)),  # slow
    answer(3, gaps_ms=()),  # one token: judged by its TTFT alone
    answer(4, **TOGETHER, scheduled_ns=0, token_kind=[0, 0, 0], out_tok_usage=None, out_tok_counted=7),
    answer(5, out_tok_usage=1),  # more events than tokens claimed
    answer(6, measured=False, ttft_ms=9000),
    answer(7, first_gen_ns=None, last_gen_ns=None, token_ns=[], token_n=[], token_kind=[], out_tok_usage=0),
    failure(8),
    failure(9, status="truncated", first_gen_ns=10_000_000, last_gen_ns=10_000_000),
]


def tallied(rows: list[RequestRow]) -> SoFar:
    tally = Tally(LIMITS)
    for row in rows:
        tally.add(row)
    return tally.so_far()


def test_each_row_is_in_time_so_far_if_the_views_say_that_it_was(tmp_path: Path) -> None:
    with Store(tmp_path / "arena.duckdb") as store:
        prepare(store)
        load(store, tmp_path, ROWS)
        judged = store.query(f"SELECT * FROM slo_requests({LIMITS.ttft_ms}, {LIMITS.tpot_ms}) ORDER BY seq")
        cell = store.query("SELECT * FROM v_cells")[0]
    rows = {row.seq: row for row in ROWS}
    for verdict in judged:
        row = rows[verdict["seq"]]
        assert tallied([row]) == SoFar(1, int(verdict["good"]), ttft_of(row), ttft_of(row))
        assert tpot_of(row) == pytest.approx(verdict["tpot_ms"])
    so_far = tallied(ROWS)
    assert (so_far.ended, so_far.in_time) == (len(judged), sum(verdict["good"] for verdict in judged))
    assert so_far.ttft_p99_ms == cell["ttft_p99_inf_ms"] == math.inf


def test_nothing_is_said_before_the_first_measured_answer() -> None:
    assert tallied([ROWS[6]]) == SoFar()


def test_a_cell_that_runs_tells_how_many_were_in_time_and_its_end_agrees_with_its_rows(tmp_path: Path) -> None:
    """Every third answer of a scripted engine is late, over two seconds."""
    late = scripted.stream_script(ttft_ms=300, itl_ms=5, tokens=3)
    quick = scripted.stream_script(ttft_ms=20, itl_ms=5, tokens=3)
    plan = plan_of([(50 * index, late if index % 3 == 0 else quick) for index in range(40)])
    spool = tmp_path / "spool" / "cell.jsonl"
    follower, tally = Follower(spool.parent, cell="cell"), Tally(LIMITS)
    told: list[tuple[Progress, SoFar]] = []

    def watch(progress: Progress) -> None:
        for _, row in follower.rows():
            tally.add(row)
        told.append((progress, tally.so_far()))

    with scripted.running() as engine:
        asyncio.run(run_cell(plan, Target(engine.url, "m", "scripted"), spool, on_progress=watch))
    watch(told[-1][0])
    rows: list[Any] = [row for row in spools.read_rows(spool) if isinstance(row, RequestRow)]
    assert told[-1][1] == tallied(rows)
    assert told[-1][1].ended == len(plan.measured) == 40
    assert told[-1][1].in_time <= 26
    under_way = [so_far for _, so_far in told if 0 < so_far.ended < 40]
    assert any(so_far.in_time < so_far.ended for so_far in under_way)
