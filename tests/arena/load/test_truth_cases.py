"""What load generators get wrong, as `goodgate arena truth` puts it: the truths, and that ours comes out right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from arena.judging.load_truth import Court, judge_answers, judge_failures
from arena.load import scripted_engine as scripted
from arena.load import truth_cases as cases
from arena.load.arrivals import poisson, seed_sequence
from arena.load.loadgen import Limits
from arena.load.scripted_engine import RunningEngine, Script, Step
from arena.records.store import Store
from tests.arena.cells import MS, fire, plan_of

SERVICE_MS = 60.0
ONE = Script(steps=[Step(SERVICE_MS, scripted.text_event("a") + scripted.finish_event() + scripted.DONE)])


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with scripted.running() as running:
        yield running


def test_without_a_freeze_everybody_sees_the_engines_own_ttft() -> None:
    calm = [100.0 * index for index in range(cases.FREEZE_AT)] + [1e9]
    assert cases.true_ttft_ms(calm)[: cases.FREEZE_AT] == [cases.CAP_TTFT_MS] * cases.FREEZE_AT


def test_whoever_comes_during_a_freeze_waits_for_its_end_and_behind_the_limit_for_a_place() -> None:
    """One every 100 ms. Before the limit: the rest of the freeze. Behind it: until the first of those ahead is done."""
    times = [100.0 * index for index in range(100)]
    frozen_ms, thaw_ms = times[cases.FREEZE_AT], times[cases.FREEZE_AT] + cases.FREEZE_MS
    free = cases.true_ttft_ms(times, cap=1000)
    assert free[cases.FREEZE_AT] == cases.FREEZE_MS + cases.CAP_TTFT_MS
    assert free[cases.FREEZE_AT + 10] == thaw_ms + cases.CAP_TTFT_MS - (frozen_ms + 1000)
    assert free[99] == cases.CAP_TTFT_MS
    capped = cases.true_ttft_ms(times)
    life_ms = cases.CAP_TTFT_MS + cases.CAP_ITL_MS * (cases.CAP_TOKENS - 1)
    behind = cases.FREEZE_AT + cases.CAP
    assert capped[cases.FREEZE_AT + 10] == free[cases.FREEZE_AT + 10]
    assert capped[behind] == pytest.approx(thaw_ms + life_ms + cases.CAP_TTFT_MS - times[behind])
    assert sum(capped) > sum(free)


def test_dispersion_tells_poisson_from_lock_step_and_from_constant() -> None:
    honest = poisson(rate_rps=50, horizon_ns=60 * 10**9, seed=seed_sequence(run=1, cell=0, replicate=0))
    dispersion, lag_one = cases.dispersion_and_lag_one(honest.tolist())
    assert 0.6 < dispersion < 1.5
    assert lag_one is not None
    assert abs(lag_one) < 0.1
    one = poisson(rate_rps=12.5, horizon_ns=60 * 10**9, seed=seed_sequence(run=1, cell=0, replicate=0))
    forked = sorted(time for time in one.tolist() for _ in range(4))  # four processes with one seed
    assert cases.dispersion_and_lag_one(forked)[0] > 2.5
    assert cases.dispersion_and_lag_one(list(range(0, 60 * 10**9, 20_000_000)))[1] is None


@pytest.mark.replay("R01", "R18", "R21", "R22", "R45")
async def test_answers_that_are_easily_misread_and_all_failures_come_out_right(
    engine: RunningEngine, tmp_path: Path
) -> None:
    """By the views that judge engines. Four rows of the table of measured tools, of which none has all right."""
    with Store(tmp_path / "truth.duckdb") as store:
        court = Court(engine, store, tmp_path)
        await court.run(cases.answers_plan())
        role_ms = cases.true_role_ttft_ms(engine.take_log())
        await court.run(cases.failures_plan(), Limits(request_timeout_s=1.5))
        rows = {row.case: row for row in [*judge_answers(store, role_ms), judge_failures(store)]}
    engine.take_log()
    assert rows["failures found, of five kinds"].claimed == "54"
    assert rows["failures found, of five kinds"].is_right
    assert rows["one-token answers with a TPOT"].claimed == "0"
    assert float(rows["4 tokens a chunk: TPOT, ms"].claimed) == pytest.approx(10, rel=0.2)
    assert float(rows["4 tokens a chunk: gap a token, ms"].claimed) == pytest.approx(10, rel=0.2)
    assert float(rows["role chunk first: TTFT, ms"].claimed) == pytest.approx(role_ms, rel=0.1)
    assert role_ms > 199


@pytest.mark.replay("R05", "R06")
async def test_a_queue_in_the_client_shows_in_the_ttft_and_does_not_burst(
    engine: RunningEngine, tmp_path: Path
) -> None:
    """One in flight, 60 ms of service, one every 30 ms: each waits 30 ms longer than the one before it."""
    plan = plan_of([(30.0 * index, ONE) for index in range(16)], cell_id="queue")
    fired = await fire(engine, plan, tmp_path, limits=Limits(max_in_flight=1, beyond="wait", warm_connections=1))
    assert [fired.rows[i].status for i in range(16)] == ["ok"] * 16
    assert [fired.rows[i].scheduled_ns for i in range(16)] == [request.scheduled_ns for request in plan.requests]
    assert fired.log.max_in_flight == 1
    ttft_ms = [((fired.rows[i].first_gen_ns or 0) - fired.rows[i].scheduled_ns) / MS for i in range(16)]
    growth = (ttft_ms[-1] - ttft_ms[0]) / 15
    assert growth >= (SERVICE_MS - 30) * 0.99
    lags_ms = [((fired.rows[i].sent_ns or 0) - fired.rows[i].scheduled_ns) / MS for i in range(16)]
    assert all(late > early for early, late in itertools.pairwise(lags_ms))
    sends = [fired.rows[i].sent_ns or 0 for i in range(16)]
    assert all((after - before) / MS >= SERVICE_MS * 0.99 for before, after in itertools.pairwise(sends))
    assert fired.run.lag_p99_ms is not None
    assert fired.run.lag_p99_ms > 300


async def test_a_request_that_waits_in_the_client_when_the_cell_ends_is_no_row_that_was_sent(
    engine: RunningEngine, tmp_path: Path
) -> None:
    plan = plan_of([(0, ONE), *((5.0, ONE) for _ in range(5))], cell_id="left")
    measured = plan.requests[:1]
    plan = type(plan)("left", "constant", 1.0, 0, 1, plan.requests)
    assert plan.measured == measured
    fired = await fire(engine, plan, tmp_path, limits=Limits(max_in_flight=1, beyond="wait", warm_connections=1))
    assert fired.run.ok == 1
    assert all(row.sent_ns is not None for row in fired.rows.values())
