"""How a replica's attempts change what routing thinks of it; no sockets, no clock."""

from __future__ import annotations

import pytest

from adapters.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineTimeout,
    GoodgateError,
    InvalidRequest,
    Overloaded,
    StreamInterrupted,
    ToolCallInvalid,
)
from adapters.types import Usage
from gateway.config import BreakerConfig, OutlierConfig
from gateway.records.trace import CANCELLED, Attempt
from gateway.replicas.standing import Peers, Standing

BREAKER = BreakerConfig(failures=5, open_s=30, probe_s=1)
OUTLIERS = OutlierConfig(factor=4, min_ttft_ms=50, min_tpot_ms=10, floor=0.02, probe_s=5, max_ejected=0.5)


def peers(number: int) -> list[Standing]:
    standings = [Standing() for _ in range(number)]
    Peers(BREAKER, OUTLIERS, standings)
    for standing in standings:
        standing.is_down = False
    return standings


def attempt(started: float, outcome: str = "") -> Attempt:
    return Attempt(model="m", engine="e", replica="r", started=started, outcome=outcome)


def serve(standing: Standing, now: float, ttft_s: float, token_s: float = 0.02, prompt_tokens: int = 100) -> None:
    """A whole answer of eleven tokens."""
    one = attempt(now)
    standing.began(one, prompt_tokens)
    one.first_token = now + ttft_s
    standing.answered(one, one.first_token)
    one.ended, one.outcome, one.usage = one.first_token + 10 * token_s, "ok", Usage(prompt_tokens, 11)
    standing.ended(one, None, one.ended)


def fail(standing: Standing, now: float, failure: GoodgateError | None, outcome: str = "failed") -> None:
    one = attempt(now, outcome)
    standing.began(one, 100)
    standing.ended(one, failure, now)


@pytest.mark.replay("G30")
@pytest.mark.parametrize("failure", [InvalidRequest("bad"), ContextLengthExceeded("long"), ToolCallInvalid("odd")])
def test_g30_a_hundred_bad_requests_of_one_tenant_leave_the_breaker_closed(failure: GoodgateError) -> None:
    one, _ = peers(2)
    for now in range(100):
        fail(one, now, failure)
    assert one.may_serve(100)
    assert one.verdict == "good"


def test_clients_that_leave_count_for_nothing_and_set_nothing_back() -> None:
    one, _ = peers(2)
    for now in range(4):
        fail(one, now, EngineFailed("500"))
        fail(one, now, None, CANCELLED)
    assert one.may_serve(4)
    fail(one, 5, StreamInterrupted("broke"))
    assert not one.may_serve(5)


def test_the_last_replica_is_never_ejected() -> None:
    (alone,) = peers(1)
    one, other = peers(2)
    other.is_down = True
    for now in range(50):
        fail(alone, now, EngineFailed("500"))
        fail(one, now, EngineFailed("500"))
    assert alone.may_serve(50)
    assert one.may_serve(50)
    other.is_down = False
    fail(one, 51, EngineFailed("500"))
    assert not one.may_serve(51)  # the other can do without it now


def test_no_more_than_half_of_them_are_ejected() -> None:
    standings = peers(5)
    for now in range(20):
        for each in standings:
            fail(each, now, EngineFailed("500"))
    assert [each.may_serve(20) for each in standings] == [False, False, True, True, True]


def test_a_full_replica_is_set_aside_for_as_long_as_it_said_and_is_not_failing() -> None:
    one, _ = peers(2)
    fail(one, 0, Overloaded("full", retry_after_s=3))
    fail(one, 0.1, Overloaded("full", retry_after_s=1))  # a shorter wish does not make it ready sooner
    assert not one.may_serve(2.9)
    assert "full and said so" in one.why_left_out(2.0)
    assert one.may_serve(3.0)
    for now in range(4, 24):
        fail(one, now, Overloaded("full"))
    assert one.may_serve(24)


def test_a_full_replica_that_takes_a_request_again_is_full_no_more() -> None:
    one, _ = peers(2)
    running = attempt(0)
    one.began(running, 100)
    fail(one, 1, Overloaded("full", retry_after_s=30))
    one.answered(running, 2)  # it had begun before
    assert not one.may_serve(2)
    serve(one, 3, 0.1)
    assert one.may_serve(4)


def test_three_slow_answers_cost_it_its_trust_and_three_fast_ones_give_it_back() -> None:
    slow, fast = peers(2)
    for now in range(10):
        serve(slow, now, 0.1)
        serve(fast, now, 0.1)
    for now in range(10, 15):
        serve(slow, now, 1.0)
        serve(fast, now, 0.1)
    assert slow.verdict == "slow"
    assert slow.trust(16) == pytest.approx(OUTLIERS.floor)
    assert fast.trust(16) == 1
    assert "times as slow" in slow.why_left_out(16)
    assert slow.trust(30) == 1  # its test: a request that shows whether it is fast again
    serve(slow, 30, 1.0)
    assert slow.trust(32) == pytest.approx(OUTLIERS.floor)
    for now in (40, 41, 42):
        assert slow.trust(now) == 1  # after a fast answer the next test follows at once
        serve(slow, now, 0.1)
    assert slow.verdict == "good"


def test_one_odd_answer_costs_nothing() -> None:
    one, other = peers(2)
    for now in range(10):
        serve(one, now, 0.1)
        serve(other, now, 0.1)
    serve(one, 10, 60.0)
    assert one.trust(71) == 1


def test_long_prompts_are_not_slowness() -> None:
    one, other = peers(2)
    for now in range(10):
        serve(one, now, 4.0, prompt_tokens=20_000)
        serve(other, now, 0.1, prompt_tokens=200)
    assert one.trust(20) == 1


def test_slow_tokens_are_slowness_too() -> None:
    one, other = peers(2)
    for now in range(10):
        serve(one, now, 0.1, token_s=0.3)
        serve(other, now, 0.1, token_s=0.03)
    assert one.trust(10) < 0.1


def test_what_is_slow_on_all_is_nobodys_fault() -> None:
    standings = peers(3)
    for now in range(10):
        for each in standings:
            serve(each, now, 0.1)
    for now in range(10, 20):
        for each in standings:
            serve(each, now, 2.0)
    assert [each.trust(20) for each in standings] == [1, 1, 1]


def test_without_peers_it_is_compared_with_its_own_past_and_a_lasting_change_becomes_usual() -> None:
    (one,) = peers(1)
    for now in range(50):
        serve(one, now, 0.1)
    for now in range(50, 56):
        serve(one, now, 1.5)
    assert one.trust(57) < 0.1
    for now in range(60, 300):
        serve(one, now, 1.5)
    assert one.trust(300) == 1


def test_a_frozen_engine_loses_its_trust_while_its_first_victim_still_waits() -> None:
    frozen, other = peers(2)
    for now in range(10):
        serve(frozen, now, 0.1)
        serve(other, now, 0.1)
    victim = attempt(20)
    frozen.began(victim, 100)
    assert frozen.trust(20.3) == 1
    assert frozen.trust(21) == pytest.approx(OUTLIERS.floor)
    victim.outcome = CANCELLED  # its client has given up
    frozen.ended(victim, None, 21)
    assert frozen.trust(21) == 1  # one client that leaves is one odd answer
    for now in range(22, 26):
        victim = attempt(now, CANCELLED)
        frozen.began(victim, 100)
        frozen.ended(victim, None, now + 1)
    assert frozen.trust(26) == pytest.approx(OUTLIERS.floor)


def test_one_request_that_waits_on_a_replica_that_answers_others_is_no_sign() -> None:
    one, other = peers(2)
    serve(one, 0, 0.1)
    serve(other, 0, 0.1)
    odd = attempt(1)
    one.began(odd, 100)
    for now in range(2, 12):
        serve(one, now, 0.1)
        assert one.trust(now + 0.2) == 1


def test_what_seems_dead_is_tried_by_one_request_a_second_and_what_answers_by_all() -> None:
    (one,) = peers(1)
    one.is_down = True
    assert [one.may_try(now) for now in (0, 0.1, 0.5, 0.9, 1.0, 1.1)] == [True, False, False, False, True, False]
    serve(one, 2, 0.1)
    assert all(one.may_try(now) for now in (2.4, 2.5, 2.6))


def test_a_timeout_before_the_first_token_counts_as_the_time_that_it_took() -> None:
    one, other = peers(2)
    for now in range(3):
        serve(one, now, 0.1)
        serve(other, now, 0.1)
    for now in range(10, 50, 10):
        waiting = attempt(now, "engine_timeout")
        one.began(waiting, 100)
        one.ended(waiting, EngineTimeout("silent"), now + 5)
    assert one.trust(48) == pytest.approx(OUTLIERS.floor)
    assert one.may_serve(48)  # four failures
