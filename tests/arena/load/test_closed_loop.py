"""A closed loop is another kind of load: so many in flight, each due when the answer before it has been read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from arena.load import scripted_engine as scripted
from arena.load import spool
from arena.load.loadgen import ClosedLoop, run_cell
from arena.load.plan import CellPlan, Target
from arena.load.scripted_engine import RunningEngine, Script, Step
from arena.load.spool import RequestRow
from tests.arena.cells import MS, Fired, plan_of

ENDING = scripted.finish_event() + scripted.DONE


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with scripted.running() as running:
        yield running


def closed_plan(cell_id: str, script: Script, prompts: int, *, warmup_ms: float, horizon_ms: float) -> CellPlan:
    """Its requests have no times of their own, so they are planned for the end of the window."""
    horizon_ns = round(horizon_ms * MS)
    requests = tuple(
        replace(request, scheduled_ns=horizon_ns)
        for request in plan_of([(0, script)] * prompts, cell_id=cell_id).requests
    )
    return CellPlan(cell_id, "closed", 0.0, round(warmup_ms * MS), horizon_ns, requests)


async def run_closed(engine: RunningEngine, plan: CellPlan, folder: Path, loop: ClosedLoop) -> Fired:
    path = folder / f"{plan.cell_id}.jsonl"
    run = await run_cell(plan, Target(engine.url, "scripted", "scripted"), path, closed=loop)
    everything = list(spool.read_rows(path))
    return Fired(
        run, {row.seq: row for row in everything if isinstance(row, RequestRow)}, engine.take_log(), everything
    )


async def test_each_user_waits_for_its_answer_and_thinks_before_it_asks_again(
    engine: RunningEngine, tmp_path: Path
) -> None:
    script = Script(steps=[Step(50, scripted.text_event("a") + ENDING)])
    plan = closed_plan("closed", script, 200, warmup_ms=200, horizon_ms=1200)
    fired = await run_closed(engine, plan, tmp_path, ClosedLoop(concurrency=3, think_s=0.05))
    assert fired.run.aborted is None
    assert fired.run.max_in_flight == fired.log.max_in_flight == 3
    measured = [row for row in fired.rows.values() if row.measured]
    assert all(200 * MS <= row.scheduled_ns < 1200 * MS for row in measured)
    assert 3 * 3 < len(measured) <= 3 * 1000 / 100 + 3  # a round takes 100 ms at least
    assert all(row.status == "ok" for row in measured)
    ends = sorted(row.done_ns for row in fired.rows.values() if row.done_ns is not None)
    dues = sorted(row.scheduled_ns for row in fired.rows.values())[3:]
    assert all(due - 50 * MS in ends for due in dues), "due is the end of an answer plus the time to think"


async def test_prompts_that_run_out_abort_the_cell_instead_of_being_sent_twice(
    engine: RunningEngine, tmp_path: Path
) -> None:
    script = Script(steps=[Step(0, scripted.text_event("a") + ENDING)])
    plan = closed_plan("dry", script, 5, warmup_ms=0, horizon_ms=60_000)
    fired = await run_closed(engine, plan, tmp_path, ClosedLoop(concurrency=2))
    assert fired.run.aborted == "The 5 prompts of the cell ran out before its window ended."
    assert (sorted(fired.rows), fired.run.ok) == ([0, 1, 2, 3, 4], 5)


async def test_a_frozen_engine_is_met_by_few_requests_so_the_loop_has_no_goodput(
    engine: RunningEngine, tmp_path: Path
) -> None:
    """Coordinated omission, as it is: 2 users see a freeze of 0.6 s as 2 slow answers, where 60 were due open loop."""
    plan = closed_plan(
        "omission", Script(steps=[Step(10, scripted.text_event("a") + ENDING)]), 400, warmup_ms=0, horizon_ms=1500
    )
    frozen = plan_of([(0, Script(steps=[Step(10, scripted.text_event("a") + ENDING)], freeze_ms=600))]).requests[0]
    requests = [*plan.requests]
    requests[20] = replace(requests[20], body=frozen.body)
    plan = replace(plan, requests=tuple(requests))
    fired = await run_closed(engine, plan, tmp_path, ClosedLoop(concurrency=2))
    slow = [row for row in fired.rows.values() if row.first_gen_ns and row.first_gen_ns - row.scheduled_ns > 300 * MS]
    assert len(slow) == 2
