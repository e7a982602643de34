"""What is slow only because the load paused: it is offered, kept, and never measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from arena.load import scripted_engine as scripted
from arena.load.scripted_engine import DONE, Script, Step, finish_event, text_event
from arena.race.config import load_scenario, scenario_names
from arena.records.rows import CellRecord, EngineRecord, RunRecord
from arena.records.store import Store
from tests.arena.cells import fire, plan_of

SLOW_MS, QUICK_MS = 300, 20


def answer_after(ms: float) -> Script:
    return Script(steps=[Step(ms, text_event("a") + finish_event() + DONE)])


@pytest.mark.replay("R49")
async def test_a_slow_first_second_after_a_pause_is_warm_up_and_in_no_figure(tmp_path: Path) -> None:
    """The device has clocked down: whoever comes in the first 400 ms waits long."""
    warmup_ms = 400.0
    due = [(20.0 * index, answer_after(SLOW_MS if 20.0 * index < warmup_ms else QUICK_MS)) for index in range(60)]
    plan = plan_of(due, warmup_ms=warmup_ms)
    with scripted.running() as engine:
        fired = await fire(engine, plan, tmp_path)
    with Store(tmp_path / "arena.duckdb") as store:
        run = RunRecord(run_id="run", started_utc="2026-01-01T00:00:00Z", scenario="chat", seed=1, host={})
        store.record_run(run)
        store.record_engine(
            EngineRecord(engine_id="e", run_id="run", name="e", endpoint="", model="m", flags={}, capability={})
        )
        cell = CellRecord(cell_id="cell", run_id="run", engine_id="e", replicate=0, slot=0, rate_rps=50)
        store.record_cell(cell, plan)
        store.ingest("cell", fired.run.spool)
        (figures,) = store.query("SELECT * FROM v_cells")
        (kept,) = store.query("SELECT count(*) AS n FROM requests WHERE NOT measured AND status = 'ok'")
    assert (kept["n"], figures["requests"]) == (20, 40)
    assert figures["ttft_p50_ms"] < SLOW_MS / 2
    lives_ms = [(row.first_gen_ns - row.scheduled_ns) / 1e6 for row in fired.rows.values() if row.first_gen_ns]
    assert sum(life_ms >= SLOW_MS for life_ms in lives_ms) >= 20


@pytest.mark.replay("R49")
@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("name", scenario_names())
def test_every_shipped_scenario_loads_an_engine_before_it_measures(name: str, quick: bool) -> None:
    """Between cells an engine rests while the last one is judged, so each begins with load of its own rate."""
    scenario = load_scenario(name, quick=quick).scenario
    assert scenario.cell.warmup_s >= 1
    assert scenario.search.burst >= 4, "an engine that batches has to have batched before it is measured"
