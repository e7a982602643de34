"""The breaker under any order of failures, answers and times, against what it promises."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.config import BreakerConfig
from gateway.replicas.breaker import Breaker, FailureShare, Position

RULES = BreakerConfig(failures=3, open_s=10, max_open_s=40, probe_s=1, min_requests=10, window_s=20)


def opened(rules: BreakerConfig = RULES, now: float = 0.0) -> Breaker:
    breaker = Breaker(rules)
    for _ in range(rules.failures):
        breaker.failed(now, now, "it failed")
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(RULES)
    for now in range(20):
        breaker.failed(now, now, "x")
        breaker.failed(now, now, "x")
        breaker.completed(now, now)
        assert breaker.position(now) is Position.CLOSED or now > 2  # the share of failures opens it later
    assert opened().position(0.0) is Position.OPEN


def test_a_share_of_failures_opens_it_though_none_came_in_a_row() -> None:
    breaker = Breaker(RULES)
    for now in range(4):
        breaker.completed(now, now)
        breaker.failed(now, now, "x")
    assert breaker.position(4) is Position.CLOSED  # eight attempts are too few to tell
    breaker.completed(4, 4)
    breaker.failed(4, 4, "x")
    assert breaker.position(4) is Position.OPEN
    assert "50% of 10 attempts failed" in breaker.reason


@pytest.mark.replay("G28")
def test_g28_twenty_five_failures_at_once_open_it_once_and_its_end_only_moves_away() -> None:
    breaker = opened()
    for number in range(22):
        before = breaker.opens_for_s(0.0)
        breaker.failed(0.0, number / 10, "500")  # they had begun before it opened
        assert breaker.opens_for_s(0.0) >= before
    assert breaker.num_openings == 1
    assert breaker.opens_for_s(2.1) == pytest.approx(10)
    assert not breaker.admits(12.0)


@pytest.mark.replay("G28")
def test_g28_each_opening_lasts_longer_than_the_one_before_up_to_a_limit() -> None:
    breaker, now, lengths = opened(), 0.0, []
    for _ in range(6):
        lengths.append(breaker.opens_for_s(now))
        now += lengths[-1]
        assert breaker.admits(now)
        breaker.began(now)
        breaker.failed(now, now, "500")
    assert lengths == [10, 20, 30, 40, 40, 40]


@pytest.mark.replay("G31")
def test_g31_half_open_it_closes_with_the_first_answer_though_trials_before_were_never_heard_of_again() -> None:
    breaker = opened()
    for second in range(10, 15):
        assert breaker.admits(second)
        breaker.began(second)  # its client has left, or it was refused: neither answer nor failure
        assert not breaker.admits(second + 0.5)
    breaker.began(15)
    breaker.answered(15)
    assert breaker.position(15) is Position.CLOSED


def test_closed_by_a_trial_one_failure_opens_it_again_until_an_answer_was_whole() -> None:
    breaker = opened()
    breaker.began(10)
    breaker.answered(10)
    breaker.failed(10, 11, "the stream broke")
    assert breaker.position(11) is Position.OPEN
    breaker.answered(31)
    breaker.completed(31, 32)
    breaker.failed(32, 33, "x")
    assert breaker.position(33) is Position.CLOSED


def test_what_began_before_it_opened_neither_closes_nor_prolongs_the_half_open() -> None:
    breaker = opened(now=5)
    breaker.answered(4)
    breaker.completed(4, 16)
    assert breaker.position(16) is Position.HALF_OPEN
    breaker.failed(4, 17, "x")
    assert breaker.position(17) is Position.HALF_OPEN


def test_a_health_probe_that_finds_it_well_after_it_was_down_lets_a_trial_in_at_once() -> None:
    breaker = opened()
    breaker.recovered(2)
    assert breaker.position(2) is Position.HALF_OPEN
    breaker.began(2)
    breaker.failed(2, 2, "still loading")
    assert breaker.opens_for_s(2) == 20


def test_what_failed_long_ago_does_not_make_the_next_opening_longer() -> None:
    breaker = opened()
    breaker.answered(10)
    breaker.completed(10, 10)
    for _ in range(3):
        breaker.failed(100, 100, "x")
    assert breaker.opens_for_s(100) == 10


def test_a_replica_that_cannot_be_spared_stays_closed_and_opens_when_it_can() -> None:
    breaker = Breaker(RULES)
    for _ in range(10):
        breaker.failed(0, 0, "x", may_open=False)
    assert breaker.position(0) is Position.CLOSED
    breaker.failed(0, 0, "x")
    assert breaker.position(0) is Position.OPEN


def test_the_share_of_failures_forgets_what_is_older_than_its_window() -> None:
    share = FailureShare()
    for _ in range(10):
        share.note(0, 20, is_failure=True)
    assert share.at(19, 20) == (10, 1)
    assert share.at(30, 20) == (5, 1)
    assert share.at(70, 20) == (0, 0)


class AnyOrder(RuleBasedStateMachine):
    """Attempts that begin, answer, fail, break and vanish in any order, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = Breaker(RULES)
        self.attempts: list[float] = []

    @rule(passed_s=st.floats(0.01, 30))
    def time_passes(self, passed_s: float) -> None:
        self.now += passed_s

    @precondition(lambda self: self.breaker.admits(self.now))
    @rule()
    def an_attempt_begins(self) -> None:
        is_trial = self.breaker.is_open
        self.breaker.began(self.now)
        self.attempts.append(self.now)
        if is_trial:
            assert not self.breaker.admits(self.now + RULES.probe_s / 2)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), how=st.sampled_from(["answered", "whole", "failed", "vanished", "not spared"]))
    def an_attempt_ends(self, data: st.DataObject, how: str) -> None:
        started = self.attempts.pop(data.draw(st.integers(0, len(self.attempts) - 1)))
        was, length_s = self.breaker.position(self.now), self.breaker.opens_for_s(self.now)
        if how == "answered":
            self.breaker.answered(started)
        elif how == "whole":
            self.breaker.completed(started, self.now)
        elif how != "vanished":
            self.breaker.failed(started, self.now, "x", may_open=how == "failed")
        is_ = self.breaker.position(self.now)
        if was is Position.OPEN:
            assert is_ is Position.OPEN  # only time, or a health probe, ends it
            assert self.breaker.opens_for_s(self.now) >= length_s
        if how == "vanished":
            assert is_ is was

    @rule()
    def a_health_probe_finds_it_well_again(self) -> None:
        self.breaker.recovered(self.now)
        assert self.breaker.position(self.now) is not Position.OPEN

    @invariant()
    def it_is_never_shut_for_longer_than_the_limit(self) -> None:
        assert 0 <= self.breaker.opens_for_s(self.now) <= RULES.max_open_s

    @invariant()
    def a_good_replica_is_closed_within_its_time_and_a_trial(self) -> None:
        assert self.breaker.admits(self.now + self.breaker.opens_for_s(self.now))


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
