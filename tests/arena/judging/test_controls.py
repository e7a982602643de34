"""Controls of a race: what cannot differ may not differ, and where it does the race proves nothing."""

import numpy as np
import pytest

from arena.judging.controls import Reading, aa_control, drift_control


def readings(factors: list[float], *, seed: int = 1, engines: str = "ab") -> list[Reading]:
    noise = np.random.default_rng(seed).normal(0, 0.004, len(factors))
    return [
        Reading(slot, engines[slot % len(engines)], 2.0 * factor * (1 + float(wobble)))
        for slot, (factor, wobble) in enumerate(zip(factors, noise, strict=True))
    ]


def test_a_machine_that_stays_as_it_is_passes() -> None:
    assert drift_control(readings([1.0] * 16)).ok is True


def test_a_machine_that_grows_slower_over_the_race_leaves_it_unproven() -> None:
    control = drift_control(readings([1 + 0.01 * slot for slot in range(16)]))
    assert control.ok is False
    assert "at the end of the race" in control.words


def test_a_machine_that_is_slower_in_one_engines_slots_leaves_the_race_unproven() -> None:
    control = drift_control(readings([1.0, 1.2] * 8))
    assert control.ok is False
    assert "some engines' slots" in control.words


def test_a_drift_too_small_to_make_engines_differ_is_no_matter() -> None:
    assert drift_control(readings([1 + 0.001 * slot for slot in range(16)])).ok is True


def test_few_readings_tell_nothing() -> None:
    assert drift_control(readings([1.0, 3.0] * 3)).ok is None


def test_a_still_machine_is_hardly_ever_called_moving() -> None:
    noisy = [np.random.default_rng([9, race]).lognormal(0, 0.1, 12).tolist() for race in range(300)]
    assert sum(drift_control(readings(factors, engines="abc")).ok is False for factors in noisy) <= 9


@pytest.mark.parametrize(("better", "ok"), [(0.5, True), (0.95, True), (0.999, False), (0.001, False), (None, None)])
def test_one_engine_under_two_names_may_not_be_told_apart(better: float | None, ok: bool | None) -> None:
    assert aa_control("vllm", "vllm-again", better).ok is ok
