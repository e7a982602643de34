"""Who is let in, who waits and who is sent away, in virtual time; and what is learnt on the way."""

from __future__ import annotations

import contextlib
import random

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from multidict import CIMultiDict

from adapters.errors import InvalidRequest
from gateway.admission.forecast import FirstToken, Pace
from gateway.admission.limit import SHARE_OF_TPOT, AdaptiveLimit, LimitRules
from gateway.admission.priority import PRIORITY_HEADER, TTFT_HEADER, Priority, PriorityNotAllowed, wish_of
from gateway.admission.queue import Entry
from gateway.admission.turnstile import MAX_RETRY_AFTER_S, Rules, Turnstile


def entry(turnstile: Turnstile, now: float, priority: Priority = Priority.DEFAULT, tenant: str = "t") -> Entry:
    return Entry(priority, tenant, 100, 200, now, turnstile.deadline(now, None))


def busy(rules: Rules, *, held_s: float = 1.0) -> tuple[Turnstile, float]:
    """A turnstile whose places are all taken, each for `held_s`, as it knows."""
    turnstile, now = Turnstile(rules), 0.0
    while turnstile.has_room():
        turnstile.enter(Priority.DEFAULT, now)
    for _ in range(4 * rules.highest):
        now += held_s / rules.highest
        turnstile.release(now)
        turnstile.enter(Priority.DEFAULT, now)
    return turnstile, now


def test_what_would_come_too_late_is_sent_away_at_once_and_told_when_to_come() -> None:
    turnstile, now = busy(Rules(highest=10, ttft_s=0.5))  # ten turns a second
    sheds = [arrival.shed for _ in range(30) if (arrival := turnstile.arrive(entry(turnstile, now), now))]
    refused = [shed for shed in sheds if shed is not None]
    assert 1 <= len(turnstile.queue) <= 5  # what half a second has turns for
    assert {shed.reason for shed in refused} == {"late"}
    waits = [shed.retry_after_s for shed in refused]
    assert waits == sorted(waits)
    assert waits[-1] - waits[0] == pytest.approx((len(waits) - 1) / 10, rel=0.3)  # a turn later each
    assert all(0 < wait <= MAX_RETRY_AFTER_S for wait in waits)


def test_without_a_target_nobody_is_too_late_before_his_wait_is_over() -> None:
    turnstile, now = busy(Rules(highest=1, max_waiting=5))
    arrivals = [turnstile.arrive(entry(turnstile, now), now) for _ in range(6)]
    assert [None if each.shed is None else each.shed.reason for each in arrivals] == [None] * 5 + ["full"]


def test_a_queue_of_none_refuses_at_once() -> None:
    turnstile, now = busy(Rules(highest=2, max_waiting=0))
    shed = turnstile.arrive(entry(turnstile, now, Priority.HIGH), now).shed
    assert shed is not None
    assert shed.reason == "full"


def test_a_tenant_with_little_waiting_takes_the_place_of_one_that_floods() -> None:
    turnstile, now = busy(Rules(highest=1, max_waiting=4))
    for _ in range(4):
        turnstile.arrive(entry(turnstile, now, tenant="flood"), now)
    arrival = turnstile.arrive(entry(turnstile, now, tenant="few"), now)
    assert arrival.shed is None
    assert arrival.displaced is not None
    assert arrival.displaced.entry.tenant == "flood"


def test_a_stall_makes_the_forecast_longer_by_itself() -> None:
    turnstile, now = busy(Rules(highest=10, ttft_s=2.0))
    assert turnstile.arrive(entry(turnstile, now), now).shed is None
    later = now + 30  # nothing has ended since
    assert turnstile.arrive(entry(turnstile, later), later).shed is not None


def test_a_forecast_that_kept_everybody_away_is_found_wrong() -> None:
    turnstile, now = busy(Rules(highest=4, ttft_s=0.5), held_s=20.0)
    assert turnstile.arrive(entry(turnstile, now), now).shed is not None
    for _ in range(400):  # answers are short again, and somebody else always comes first
        now += 0.05
        turnstile.release(now)
        turnstile.enter(Priority.DEFAULT, now)
    assert turnstile.arrive(entry(turnstile, now), now).shed is None


def test_a_wish_can_only_be_tighter_than_the_target() -> None:
    turnstile = Turnstile(Rules(ttft_s=0.5))
    assert turnstile.deadline(10.0, 0.2) == 10.2
    assert turnstile.deadline(10.0, 60.0) == 10.5
    assert Turnstile(Rules(max_wait_s=5)).deadline(10.0, None) == 15.0


def test_high_takes_places_in_turn_and_lower_ones_count_on_it() -> None:
    pace = Pace()
    for number in range(200):
        pace.entered(Priority.HIGH if number % 2 else Priority.LOW, number * 0.1)
        pace.left(number * 0.1 + 0.1)
    high = pace.wait_s(0, Priority.HIGH, 1, 20.0)
    assert high == pytest.approx(0.1, rel=0.2)
    assert pace.wait_s(0, Priority.LOW, 1, 20.0) == pytest.approx(2 * high, rel=0.2)


@given(st.floats(0.001, 1), st.floats(0, 0.001), st.integers(1, 10))
def test_the_first_token_is_a_line_over_the_prompts_length(base_s: float, per_token_s: float, seed: int) -> None:
    draw, line = random.Random(seed), FirstToken()
    for _ in range(100):
        tokens = draw.randint(1, 4000)
        line.learn(tokens, base_s + per_token_s * tokens)
    assert line.expected_s(2000) == pytest.approx(base_s + per_token_s * 2000, rel=0.01)
    assert line.likely_s(10) >= line.expected_s(10) >= 0


def test_prompts_of_one_length_make_no_line_but_a_mean() -> None:
    line = FirstToken()
    for ttft_s in (0.1, 0.2) * 50:
        line.learn(100, ttft_s)
    assert line.expected_s(8000) == pytest.approx(0.15, rel=0.1)


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 100), st.floats(0, 100)), max_size=300),
    st.integers(1, 20),
    st.integers(0, 100),
)
def test_the_limit_stays_in_its_bounds_whatever_is_measured(
    measured: list[tuple[bool, float, float]], lowest: int, more: int
) -> None:
    limit = AdaptiveLimit(LimitRules(ttft_s=0.5, tpot_s=0.05, lowest=lowest, highest=lowest + more))
    for number, (is_met, ttft_s, tpot_s) in enumerate(measured):
        if is_met:
            limit.met()
        limit.learn(number, number + 0.5, 5, ttft_s=ttft_s, tpot_s=tpot_s)
        assert lowest <= limit.value <= lowest + more


def test_the_limit_does_not_grow_while_nobody_waits() -> None:
    limit = AdaptiveLimit(LimitRules(tpot_s=0.05))
    before = limit.value
    for number in range(500):
        limit.learn(number, number, 3, tpot_s=0.001)
    assert limit.value == before


def test_the_limit_settles_where_the_slow_end_meets_the_target() -> None:
    """Each sequence costs a millisecond a token: the target of 50 ms, less its margin, is met by 42."""
    draw, limit, now = random.Random(3), AdaptiveLimit(LimitRules(tpot_s=0.05)), 0.0
    seen = []
    for number in range(4000):
        now += 0.1
        limit.met()
        limit.learn(now, now, limit.value, tpot_s=0.001 * limit.value * draw.uniform(0.95, 1.0))
        if number > 2000:
            seen.append(limit.value)
    assert 0.05 * SHARE_OF_TPOT * 1000 - 6 <= min(seen) <= max(seen) <= 46


def test_the_limit_leaves_what_it_cannot_judge() -> None:
    limit = AdaptiveLimit(LimitRules(tpot_s=0.05))
    for _ in range(100):
        limit.met()
        limit.learn(1.0, 2.0, limit.value, tpot_s=0.01)
    grown = limit.value
    assert grown > 8
    for _ in range(100):  # they began before the limit was what it is
        limit.learn(1.0, 3.0, limit.value, tpot_s=10.0)
    assert limit.value == grown


@given(st.one_of(st.text(max_size=8), st.floats().map(str)))
@example("1e-321")  # more than 0, and no second of it is left
def test_a_wish_is_a_number_of_milliseconds_or_refused(text: str) -> None:
    ttft_s = None
    with contextlib.suppress(InvalidRequest):
        ttft_s = wish_of(CIMultiDict({TTFT_HEADER: text}), None).ttft_s
    assert ttft_s is None or 0 < ttft_s <= 3600


@pytest.mark.parametrize("ceiling", Priority)
@pytest.mark.parametrize("asked", Priority)
def test_no_header_lifts_a_request_above_its_key(asked: Priority, ceiling: Priority) -> None:
    headers = CIMultiDict({PRIORITY_HEADER: asked.label})
    if asked < ceiling:
        with pytest.raises(PriorityNotAllowed):
            wish_of(headers, ceiling)
    else:
        assert wish_of(headers, ceiling).priority is asked
    assert wish_of(CIMultiDict(), ceiling).priority is ceiling
    assert wish_of(headers, None).priority is asked


class AnyTurnstile(RuleBasedStateMachine):
    """Whatever happens in whatever order: nobody is lost, no place is, and nobody waits beside a free one."""

    def __init__(self) -> None:
        super().__init__()
        self.turnstile = Turnstile(Rules(highest=3, max_waiting=4, ttft_s=5.0))
        self.now = 0.0
        self.num_open = 0
        self.waiting: set[Entry] = set()

    @rule(priority=st.sampled_from(Priority), tenant=st.sampled_from("ab"))
    def arrive(self, priority: Priority, tenant: str) -> None:
        if self.turnstile.has_room():
            self.turnstile.enter(priority, self.now)
            self.num_open += 1
            return
        new = entry(self.turnstile, self.now, priority, tenant)
        arrival = self.turnstile.arrive(new, self.now)
        for shed in (arrival.shed, arrival.displaced):
            assert shed is None or 0 < shed.retry_after_s <= MAX_RETRY_AFTER_S
        if arrival.displaced is not None:
            self.waiting.remove(arrival.displaced.entry)
            assert arrival.displaced.entry.priority >= priority
        if arrival.shed is None:
            self.waiting.add(new)
        elif arrival.shed.reason == "full":
            assert all(each.priority <= priority for each in self.waiting)

    @precondition(lambda self: self.num_open)
    @rule()
    def release(self) -> None:
        self.turnstile.release(self.now)
        self.num_open -= 1
        self._turn()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.waiting, key=lambda each: each.number)))
        assert self.turnstile.leave(gone)
        assert not self.turnstile.leave(gone)
        self.waiting.remove(gone)

    @rule(elapsed_s=st.floats(0, 2))
    def pass_time(self, elapsed_s: float) -> None:
        self.now += elapsed_s
        for each in [each for each in self.waiting if each.deadline <= self.now]:
            assert self.turnstile.expire(each, self.now) is not None
            self.waiting.remove(each)

    def _turn(self) -> None:
        turns = self.turnstile.turns(self.now)
        self.num_open += len(turns.entries)
        self.waiting -= {*turns.entries, *(shed.entry for shed in turns.sheds)}

    @invariant()
    def all_are_accounted_for(self) -> None:
        assert set(self.turnstile.queue) == self.waiting
        assert self.turnstile.num_open == self.num_open <= 3
        assert not self.waiting or self.num_open == 3
        assert len(self.waiting) <= 4


AnyTurnstile.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAnyTurnstile = AnyTurnstile.TestCase
