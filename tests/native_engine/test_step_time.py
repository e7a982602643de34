"""The model of a step's time, on steps whose true cost is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from native_engine.step_time import StepTimeModel, StepWork, chunk_work


def true_seconds(work: StepWork, *, speed: float = 1.0) -> float:
    """A CPU's: linears in tiles of 8 rows, twice as costly beyond 64."""
    tiles = -(-work.rows // 8)
    linears = 0.0012 * tiles + 0.0012 * max(0, tiles - 8)
    return (0.002 + linears + 4e-7 * work.context + 2e-4 * work.sampled) / speed


def some_step(rng: np.random.Generator) -> StepWork:
    work = StepWork(0, 0, 0)
    for _ in range(rng.integers(1, 33)):
        work += chunk_work(int(rng.integers(20, 800)), 1, sampled=1)
    if rng.random() < 0.4:
        work += chunk_work(int(rng.integers(0, 500)), int(rng.integers(16, 224)), sampled=int(rng.random() < 0.5))
    return work


def trained(steps: int = 600, *, speed: float = 1.0, noise: float = 0.05, seed: int = 1) -> StepTimeModel:
    model, rng = StepTimeModel(), np.random.default_rng(seed)
    for _ in range(steps):
        work = some_step(rng)
        model.observe(work, true_seconds(work, speed=speed) * rng.lognormal(0, noise))
    return model


def relative_errors(model: StepTimeModel, *, speed: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(99)
    steps = [some_step(rng) for _ in range(300)]
    return np.array([model.predict(work) / true_seconds(work, speed=speed) - 1 for work in steps])


def test_a_chunk_attends_to_all_that_lies_before_each_of_its_rows() -> None:
    assert chunk_work(10, 3, sampled=1) == StepWork(rows=3, context=11 + 12 + 13, sampled=1)
    assert chunk_work(0, 4, sampled=0) + chunk_work(7, 1, sampled=1) == StepWork(5, 1 + 2 + 3 + 4 + 8, 1)


def test_steps_that_were_never_seen_are_predicted_within_a_tenth_at_the_median() -> None:
    errors = np.abs(relative_errors(trained()))
    assert np.median(errors) < 0.10
    assert np.percentile(errors, 95) < 0.30


def test_a_machine_that_becomes_half_as_fast_is_learnt_anew() -> None:
    model, rng = trained(), np.random.default_rng(5)
    for _ in range(1500):
        work = some_step(rng)
        model.observe(work, true_seconds(work, speed=0.5))
    assert np.median(np.abs(relative_errors(model, speed=0.5))) < 0.12


def test_more_work_never_takes_less_time_within_an_octave() -> None:
    model = trained()
    times = [model.predict(StepWork(rows, 5000, 8)) for rows in range(128, 256)]
    assert times == sorted(times)


def test_only_decodes_of_one_kind_were_seen_and_a_prompt_still_gets_a_sane_time() -> None:
    """Least squares over one point on a line knows no slope; it must not say that a prompt costs nothing, or less."""
    model = StepTimeModel()
    for _ in range(200):
        model.observe(StepWork(8, 4000, 8), 0.010)
    assert model.predict(StepWork(8, 4000, 8)) == pytest.approx(0.010, rel=0.05)
    assert 0.010 <= model.predict(StepWork(200, 20000, 8)) < 10


def test_one_stalled_step_does_not_spoil_what_is_known() -> None:
    model = trained()
    work = StepWork(16, 5000, 16)
    before = model.predict(work)
    model.observe(work, 3.0)
    assert model.predict(work) < 1.3 * before


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        StepTimeModel().observe(StepWork(1, 1, 1), seconds)


def test_errors_are_told_once_there_is_something_to_tell() -> None:
    assert StepTimeModel().error(99) == 0.0
    assert 0.02 < trained(noise=0.05).error(99) < 0.6
