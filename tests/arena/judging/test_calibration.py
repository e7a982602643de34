"""The statistics keep their promises on engines whose goodput is known: a small form of `goodgate arena calibrate`."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from arena.commands import calibrate as command
from arena.commands.cli import app
from arena.judging import calibration
from arena.judging.calibration import CHAT, LONG, QUICK, calibrate, judged, naive_bisection, search, table
from arena.judging.queues import MM1, Batching, Engine, HeavyTailed, Scaled, served


def test_the_queue_of_known_capacity_has_the_tail_that_its_formula_says() -> None:
    engine = MM1(service_rps=23.0)
    cell = engine.cell(engine.goodput(99), 40_000.0, np.random.default_rng(1))
    assert (cell.severity[cell.scheduled_s > 100] > 1).mean() == pytest.approx(0.01, abs=0.0015)


def test_customers_are_served_one_after_the_other() -> None:
    cell = served(np.array([0.0, 1.0, 5.0]), np.array([2.0, 2.0, 1.0]), limit_s=1.0)
    assert cell.ended_s.tolist() == [2.0, 4.0, 6.0]


def test_an_idle_engine_that_batches_answers_in_the_time_of_its_steps() -> None:
    engine = Batching()
    cell = engine.cell(0.01, 2000.0, np.random.default_rng(2))
    prefill_s = 0.004 + 131 * 0.0006
    assert float(np.median(cell.severity)) == pytest.approx(prefill_s, abs=0.015)
    assert float(np.median(cell.ended_s - cell.scheduled_s)) == pytest.approx(prefill_s + 63 * 0.0047, rel=0.1)


@pytest.mark.parametrize("engine", [MM1(service_rps=23.0), MM1(service_rps=10.0)])
def test_intervals_cover_and_proofs_are_true_on_a_queue(engine: MM1) -> None:
    """60 searches: 0.90 of them is 54, and 51 are three standard errors below 0.95."""
    row = calibrate(engine, CHAT, searches=60, seed=11)
    assert row.covered >= 51 / 60
    assert row.false_pass <= 0.05
    assert row.apart <= 0.1
    assert row.estimate is not None
    assert row.estimate < 1.12
    assert row.naive > 1.1  # what everybody writes first
    assert row.naive_above > 0.6  # of 60, where 200 gave 74 to 94 %


def test_a_race_on_common_arrivals_meets_the_same_plan_at_the_same_rung() -> None:
    """What is the engine's own differs, and a scaled engine is the same one in a faster time."""
    engine = MM1(service_rps=23.0)
    own = [np.random.default_rng(seed) for seed in (1, 2, 3)]
    plans = [np.random.default_rng(9) for _ in own]
    mine, twin = (engine.cell(10.0, 30.0, rng, plan) for rng, plan in zip(own[:2], plans[:2], strict=True))
    fast = Scaled(engine, 2.0).cell(10.0, 30.0, own[2], plans[2])
    assert mine.scheduled_s.tolist() == twin.scheduled_s.tolist()
    assert mine.severity.tolist() != twin.severity.tolist()
    assert fast.scheduled_s.tolist() == pytest.approx(mine.scheduled_s.tolist())
    assert Scaled(engine, 2.0).goodput(99) == 2 * engine.goodput(99)


def test_engines_that_batch_and_own_nothing_but_the_plan_come_to_the_same() -> None:
    found = [search(Batching(), QUICK, np.random.default_rng(seed), first_rps=5.0, plan_seed=(4, 0)) for seed in (1, 2)]
    assert found[0] == found[1]


def test_a_race_tells_four_times_the_goodput_apart_and_equals_hardly_ever() -> None:
    """In 40 quick races, of which four times the goodput was told in half to four fifths, engine by engine."""
    row = calibrate(MM1(service_rps=23.0), QUICK, searches=80, seed=13, unlike=MM1(service_rps=10.0))
    power = {part.factor: part for part in row.power}
    assert power[4.0].told >= 0.4
    assert all(part.wrong <= 0.05 for part in row.power)
    assert row.apart <= 0.1
    assert row.apart_unlike <= 0.1


@pytest.mark.parametrize("engine", [MM1(10.0), MM1(23.0), Batching()])
def test_short_cells_of_a_steady_queue_that_misses_nothing_are_not_called_unstable(engine: Engine) -> None:
    """They were, in 2 to 6 % of cells of 4 s, and counted as if all their requests had missed."""
    rate = 0.85 * engine.goodput(99)
    cells = (engine.cell(rate, 11.5, np.random.default_rng([5, number])) for number in range(100))
    outcomes = [judged(cell, 0, rate, QUICK) for cell in cells]
    assert sum(not outcome.stable and not outcome.misses for outcome in outcomes) <= 1


def test_long_cells_prove_a_pass_and_hardly_ever_falsely() -> None:
    row = calibrate(MM1(service_rps=23.0), LONG, searches=30, seed=12)
    assert row.proven > 0.3  # or else "never falsely" would say nothing
    assert row.false_pass <= 0.1
    assert row.estimate is not None
    assert 0.9 < row.estimate < 1.05


def test_bisection_on_short_looks_at_an_idle_engine_errs_upward() -> None:
    engine = MM1(service_rps=100.0)
    rates = [
        naive_bisection(engine, np.random.default_rng([3, number]), (20.0, 200.0)) / engine.goodput(99)
        for number in range(30)
    ]
    assert np.median(rates) > 1.03


def test_the_goodput_of_an_engine_without_a_formula_is_found_by_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HeavyTailed(service_rps=20.0, variation=1e-6)  # all but M/D/1
    waits = engine.cell(engine.goodput(99), 20_000.0, np.random.default_rng(4)).severity
    assert (waits > 1).mean() == pytest.approx(0.01, abs=0.004)
    assert engine.goodput(99) < 20.0


def test_a_table_says_what_missed_its_target() -> None:
    row = calibrate(MM1(service_rps=10.0), CHAT, searches=2, seed=1)
    assert table([row]).count("\n") == 2
    assert row.missed == [] or all("%" in words for words in row.missed)


def test_the_command_writes_its_table_between_the_marks_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "ENGINES", (MM1(service_rps=23.0),))
    monkeypatch.setattr(calibration, "BUDGETS", (CHAT,))
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n<!-- {command.MARK}: begin -->\n<!-- {command.MARK}: end -->\ntail\n")
    result = CliRunner().invoke(app, ["calibrate", "--searches", "4", "--page", str(page), "--json"])
    assert result.exit_code == 0, result.output
    assert page.read_text().startswith("# Page\n")
    assert "M/M/1, goodput at 80% of its capacity" in page.read_text()
    assert page.read_text().endswith("tail\n")
    rows = json.loads(result.stdout)
    assert math.isfinite(rows[0]["covered"])


def test_a_page_that_is_not_there_is_told_before_the_searches_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "--page", str(tmp_path / "none.md")])
    assert result.exit_code == 2
    assert "There is no page" in result.output
