"""The budget for second tries, in a time of the test's own: engines are not asked more often because they fail."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.attempts.retry_budget import LONGEST_PAUSE_S, WINDOW_S, Recent, RetryBudget, pause_s
from gateway.config import RetriesConfig


def attempts_of(num_requests: int, *, answers_second: bool, max_attempts: int = 3, floor: int = 10) -> int:
    """All first attempts fail at once; then each request tries again as far as the budget lets it."""
    budget = RetryBudget()
    rules = RetriesConfig(floor=floor)
    for _ in range(num_requests):
        budget.opened(0.0)
    num_attempts = num_requests
    for _ in range(num_requests):
        for _ in range(max_attempts - 1):
            if budget.verdict(0.1, rules) != "go":
                break
            budget.lend()
            num_attempts += 1
            budget.repaid()
            if answers_second:
                break
            budget.lost(0.2)
    return num_attempts


@pytest.mark.parametrize("num_requests", [50, 100, 1000])
@pytest.mark.replay("F17")
def test_f17_where_every_engine_fails_they_see_a_fifth_more_attempts_than_requests(num_requests: int) -> None:
    assert attempts_of(num_requests, answers_second=False) == num_requests * 1.2


@pytest.mark.replay("F05")
def test_f05_where_one_of_two_engines_dies_every_request_finds_the_other() -> None:
    assert attempts_of(800, answers_second=True) == 1600


def test_a_lone_request_has_its_tries() -> None:
    assert attempts_of(1, answers_second=False) == 3


def test_retries_under_way_are_waited_for_when_they_hold_every_place() -> None:
    budget = RetryBudget()
    rules = RetriesConfig(floor=1)
    budget.opened(0.0)
    budget.lend()
    assert budget.verdict(0.0, rules) == "wait"
    budget.repaid()
    assert budget.verdict(0.0, rules) == "go"
    budget.lost(0.0)
    assert budget.verdict(0.0, rules) == "spent"
    assert budget.verdict(WINDOW_S - 0.1, rules) == "spent"
    assert budget.verdict(WINDOW_S, rules) == "go"


def test_requests_that_are_open_for_long_count_as_long_as_they_are() -> None:
    budget = RetryBudget()
    rules = RetriesConfig(budget=0.5, floor=0)
    for _ in range(4):
        budget.opened(0.0)
    assert budget.verdict(1000.0, rules) == "go"
    for _ in range(4):
        budget.closed()
    assert budget.verdict(1000.0, rules) == "spent"


@given(st.lists(st.floats(0, 60), max_size=50))
def test_what_is_recent_is_what_happened_in_ten_seconds(times: list[float]) -> None:
    recent = Recent()
    for now in sorted(times):
        recent.add(now)
    told = recent.total(60.0)
    assert sum(now > 51 for now in times) <= told <= sum(now >= 50 for now in times)


@given(st.integers(1, 10), st.booleans(), st.integers())
def test_pauses_grow_are_bounded_and_differ(num_rounds: int, was_full: bool, seed: int) -> None:
    draw = random.Random(seed).random
    pause = pause_s(num_rounds, was_full=was_full, random=draw)
    assert 0.05 <= pause <= LONGEST_PAUSE_S
    assert pause_s(num_rounds, was_full=was_full, random=lambda: 0.0) <= pause
    assert pause <= pause_s(num_rounds + 1, was_full=was_full, random=lambda: 1.0)


@pytest.mark.replay("S02")
def test_s02_at_most_four_tries_in_three_seconds_whatever_is_drawn_where_an_engine_stays_full() -> None:
    for draw in (lambda: 0.0, lambda: 0.5, lambda: 1.0):
        tries = [0.0]
        while len(tries) < 10:
            tries.append(tries[-1] + pause_s(len(tries), was_full=True, random=draw))
        assert sum(at <= 3 for at in tries) <= 4
