"""Request by request, out of a real store: nothing is counted twice, and what failed is not left out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from arena.judging.cells import CellResult
from arena.judging.traces import MOMENTS, QUANTILES, read_course, read_traces
from arena.load.scripted_engine import Script
from arena.records.store import Store
from tests.arena.cells import MS, plan_of
from tests.arena.records.test_store import answer, failure, prepare, record, spooled
from tests.arena.reports.synthetic import synthetic_race

ROWS = [
    answer(0, ttft_ms=100, gaps_ms=(50, 50)),  # in the system from 0 to 200 ms
    answer(1, ttft_ms=30, gaps_ms=(10,)),  # from 1 to 41 ms
    failure(2, done_ns=140 * MS),
    failure(3, status="unsent", sent_ns=None),
    msgspec.structs.replace(
        failure(4, measured=False, status="cancelled"), scheduled_ns=450 * MS, done_ns=470 * MS
    ),  # in cool-down
]
DUE_MS = (0, 1, 2, 3, 450)
PLAN = replace(plan_of([(at_ms, Script(steps=[])) for at_ms in DUE_MS]), horizon_ns=400 * MS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "arena.duckdb") as opened:
        prepare(opened)
        opened.record_cell(record("cell"), PLAN)
        opened.ingest("cell", spooled(tmp_path / "cell.jsonl", PLAN, ROWS))
        yield opened


def cell() -> CellResult:
    return replace(synthetic_race().engines[0].cells[0], cell_id="cell", plan_sha256=PLAN.sha256)


def test_a_course_has_everyone_who_was_due_and_failures_as_endless(store: Store) -> None:
    course = read_course(store, cell())
    assert course.requests[0] == (0.0, 100.0)
    assert course.requests[1] == (0.001, 30.0)
    assert [ttft for _, ttft in course.requests[2:]] == [math.inf, math.inf]  # what cool-down cut off is no failure
    assert (course.warmup_s, course.horizon_s, course.end_s) == (0, 0.4, 0.47)


def test_requests_in_flight_are_those_that_came_and_have_not_gone(store: Store) -> None:
    course = read_course(store, cell())
    assert len(course.in_flight) == MOMENTS + 1
    at = dict(course.in_flight)

    def level(second: float) -> int:
        return at[min(at, key=lambda moment: abs(moment - second))]

    assert level(0.02) == 3  # the one that was never sent is not in the system
    assert level(0.1) == 2
    assert level(0.17) == 1
    assert level(0.3) == 0
    assert level(0.46) == 1  # the load is kept up until the cell is over


def test_flow_and_pauses_are_those_of_the_measured_window(store: Store) -> None:
    engine = synthetic_race().engines[0]
    known = replace(cell(), rate_rps=4.0)
    engine = replace(engine, cells=(known,), headline_rps=4.0)
    traces = read_traces(store, [engine], ttft_ms=50, tpot_ms=60)
    window_s = 0.4
    flow = traces.flows["cell"]
    assert flow.offered_rps == pytest.approx(4 / window_s)
    assert flow.completed_rps == pytest.approx(2 / window_s)
    assert flow.good_rps == pytest.approx(1 / window_s)  # the other's first word came late
    gaps = traces.gaps_ms[engine.engine_id]
    assert len(gaps) == QUANTILES + 1
    assert set(gaps) == {10.0, 50.0}
    assert set(traces.courses) == {engine.engine_id}
