"""The order of slots: whatever drifts over a race, or favours whoever comes first, costs everybody the same."""

from collections import Counter

import pytest

from arena.race.fixed_task import fixed_task_ms
from arena.race.order import in_round, twin_name

NAMES = ["a", "b", "c", "d"]


def test_two_engines_run_in_the_order_abba() -> None:
    assert [*in_round(["a", "b"], 1), *in_round(["a", "b"], 2)] == ["a", "b", "b", "a"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_over_a_whole_square_each_engine_has_each_place_equally_often(count: int) -> None:
    names = NAMES[:count]
    places = Counter((name, place) for n in range(1, 2 * count + 1) for place, name in enumerate(in_round(names, n)))
    assert set(places.values()) == {2}


@pytest.mark.parametrize("first", [1, 3, 5])
def test_a_drift_at_a_constant_pace_cancels_in_every_two_rounds(first: int) -> None:
    slots = [*in_round(NAMES, first), *in_round(NAMES, first + 1)]
    assert {sum(slot for slot, name in enumerate(slots) if name == each) for each in NAMES} == {7}


def test_the_second_entry_of_an_engine_has_a_name_of_its_own() -> None:
    assert twin_name("vllm", ["vllm", "vllm-again"]) == "vllm-again-again"


def test_the_fixed_task_takes_time_and_is_the_best_of_its_tries() -> None:
    assert 0 < fixed_task_ms(tries=20) <= min(fixed_task_ms(tries=1) for _ in range(3)) * 2
