"""The routing policies and admission are pure: state in, decision out."""

from __future__ import annotations

import doctest
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import capacity
from gateway.replicas import names
from gateway.routing import policies
from gateway.routing import views as views_module
from gateway.routing.ask import Ask, session_key
from gateway.routing.policies import (
    MIN_TRUST,
    POLICIES,
    hot,
    in_order,
    power_of_two,
    prefix_affinity,
    room_first,
    round_robin,
    session_affinity,
    weighted,
)
from gateway.routing.views import LEAST_TRUST, ReplicaView, least_load
from gateway.web import body

ASK = Ask(prompt_tokens=100, completion_tokens=100)

facts = st.fixed_dictionaries(
    {
        "in_flight": st.integers(0, 9),
        "open_tokens": st.integers(0, 5_000),
        "rank": st.integers(0, 3),
        "weight": st.floats(0.1, 100),
        "cost": st.floats(0, 10),
        "max_in_flight": st.none() | st.integers(1, 9),
        "waiting": st.integers(0, 3),
        "trust": st.floats(LEAST_TRUST, 1),
        "latency_s": st.floats(0, 60),
        "cached_tokens": st.integers(0, 200),
        "offered_rps": st.floats(0, 100),
        "proven_rps": st.floats(0, 100),
    }
)
views = st.lists(facts, max_size=8).map(lambda all_facts: [view(f"r{n}", **each) for n, each in enumerate(all_facts)])
plain_views = st.lists(st.integers(0, 50), max_size=8).map(
    lambda loads: [ReplicaView(f"r{n}", open_tokens=load) for n, load in enumerate(loads)]
)
turns = st.integers(0, 10_000)
sessions = st.integers(0, 2**64 - 1)
asks = st.builds(
    Ask,
    prompt_tokens=st.integers(0, 5_000),
    completion_tokens=st.integers(0, 5_000),
    session=st.none() | sessions,
    lot=st.integers(0, 2**32 - 1),
)


def view(name: str, **fields: Any) -> ReplicaView:
    return ReplicaView(name, **fields)


def ordered(name: str, given_views: list[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    """As the router has it."""
    return room_first(POLICIES[name](given_views, ask, turn))


def firsts(policy: Callable[..., list[ReplicaView]], given_views: list[ReplicaView], num_turns: int) -> Counter[str]:
    return Counter(policy(given_views, ASK, turn)[0].name for turn in range(num_turns))


@given(views, asks, turns, st.sampled_from(sorted(POLICIES)))
def test_every_policy_orders_all_replicas_and_changes_nothing(
    given_views: list[ReplicaView], ask: Ask, turn: int, name: str
) -> None:
    before = list(given_views)
    order = ordered(name, given_views, ask, turn)
    assert given_views == before
    assert sorted(order, key=lambda view: view.name) == before
    assert ordered(name, given_views, ask, turn) == order


@given(views, asks, turns, st.sampled_from(sorted(POLICIES)))
def test_no_policy_prefers_a_full_replica_to_one_with_room(
    given_views: list[ReplicaView], ask: Ask, turn: int, name: str
) -> None:
    full = [each.is_full for each in ordered(name, given_views, ask, turn)]
    assert full == sorted(full)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_a_replica_that_is_hardly_trusted_gets_hardly_anything(name: str, num_replicas: int) -> None:
    replicas = [view(f"r{n}", cost=n) for n in range(1, num_replicas)]
    given_views = [view("bad", trust=0.02, cached_tokens=100, rank=0), *replicas]
    chosen = [
        ordered(name, given_views, Ask(prompt_tokens=100, session=turn * 7919, lot=turn * 104729), turn)[0].name
        for turn in range(1000)
    ]
    assert chosen.count("bad") <= 20


@given(plain_views, turns)
def test_least_load_never_prefers_a_busier_replica(given_views: list[ReplicaView], turn: int) -> None:
    loads = [view.open_tokens for view in least_load(given_views, ASK, turn)]
    assert loads == sorted(loads)


@given(views, asks, turns)
def test_least_load_sees_what_a_replica_can_carry(given_views: list[ReplicaView], ask: Ask, turn: int) -> None:
    works = [view.work(ask) for view in least_load(given_views, ask, turn)]
    assert works == sorted(works)


@given(st.integers(1, 8), turns)
def test_round_robin_gives_each_replica_one_turn_in_a_round(num_replicas: int, turn: int) -> None:
    replicas = [ReplicaView(f"r{n}") for n in range(num_replicas)]
    in_turn = [round_robin(replicas, ASK, turn + step)[0].name for step in range(num_replicas)]
    assert sorted(in_turn) == [view.name for view in replicas]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.integers(1, 600))
def test_weights_are_shares_at_any_moment(weights: list[float], num_turns: int) -> None:
    replicas = [ReplicaView(f"r{n}", weight=weight) for n, weight in enumerate(weights)]
    counts = firsts(weighted, replicas, num_turns)
    for replica in replicas:
        assert abs(counts[replica.name] - num_turns * replica.weight / sum(weights)) < 5


def test_a_heavy_replica_does_not_get_its_share_in_one_go() -> None:
    replicas = [ReplicaView("big", weight=3), ReplicaView("small")]
    order = "".join(weighted(replicas, ASK, turn)[0].name[0] for turn in range(200))
    assert "bbbbbb" not in order
    assert "ss" not in order


@given(st.integers(2, 8), turns)
def test_equally_loaded_replicas_share_the_load(num_replicas: int, turn: int) -> None:
    replicas = [ReplicaView(f"r{n}", open_tokens=3) for n in range(num_replicas)]
    assert len({least_load(replicas, ASK, turn + step)[0].name for step in range(num_replicas)}) == num_replicas


@given(views.filter(lambda given_views: len(given_views) > 1), asks)
def test_power_of_two_takes_the_better_of_two_by_work_and_latency(given_views: list[ReplicaView], ask: Ask) -> None:
    one, other = power_of_two(given_views, ask, 0)[:2]
    by = 1.0 if one.latency_s == 0 or other.latency_s == 0 else one.latency_s
    against = 1.0 if one.latency_s == 0 or other.latency_s == 0 else other.latency_s
    assert one.work(ask) * by <= other.work(ask) * against


def test_power_of_two_draws_every_pair() -> None:
    replicas = [ReplicaView(f"r{n}") for n in range(5)]
    drawn = Counter(
        frozenset(view.name for view in power_of_two(replicas, Ask(prompt_tokens=1, lot=lot), 0)[:2])
        for lot in range(1000)
    )
    assert len(drawn) == 10
    assert min(drawn.values()) == max(drawn.values())


def test_a_prompt_goes_where_most_of_it_was_read() -> None:
    given_views = [view("cold"), view("warm", open_tokens=400, cached_tokens=60), view("warmer", cached_tokens=80)]
    assert [each.name for each in prefix_affinity(given_views, ASK, 0)] == ["warmer", "cold", "warm"]


def test_a_little_of_a_prompt_is_not_worth_a_busier_replica() -> None:
    given_views = [view("cold"), view("warm", open_tokens=400, cached_tokens=20)]
    assert prefix_affinity(given_views, ASK, 0)[0].name == "cold"


@given(views, asks, turns)
def test_affinity_never_chooses_a_hot_replica(given_views: list[ReplicaView], ask: Ask, turn: int) -> None:
    is_hot = hot(given_views, ask)
    for policy in (prefix_affinity, session_affinity):
        order = policy(given_views, ask, turn)
        assert not order or not is_hot(order[0]) or all(is_hot(each) or each.trust < MIN_TRUST for each in order)


@pytest.mark.replay("G31")
def test_g31_a_slow_replica_with_a_hot_prefix_loses_its_share() -> None:
    """Three of four replicas end a request in a tick, the slow one in ten; each asks for the same hot prefix."""
    open_tokens = dict.fromkeys("abcd", 0)
    ends: list[tuple[int, str]] = []
    served: Counter[str] = Counter()
    for tick in range(600):
        for end in [each for each in ends if each[0] <= tick]:
            ends.remove(end)
            open_tokens[end[1]] -= ASK.tokens
        for turn in (2 * tick, 2 * tick + 1):
            given_views = [
                view(name, open_tokens=tokens, cached_tokens=100 * (name == "a"))
                for name, tokens in open_tokens.items()
            ]
            name = prefix_affinity(given_views, ASK, turn)[0].name
            open_tokens[name] += ASK.tokens
            ends.append((tick + (10 if name == "a" else 1), name))
            served[name] += 1
    assert served["a"] / served.total() < 0.5
    assert open_tokens["a"] <= 6 * ASK.tokens


@given(st.integers(2, 9), st.lists(sessions, min_size=1, max_size=50), st.data())
def test_only_the_sessions_of_a_replica_that_went_move(num_replicas: int, keys: list[int], data: st.DataObject) -> None:
    replicas = [ReplicaView(f"r{n}", weight=1 + n % 2) for n in range(num_replicas)]
    gone = data.draw(st.sampled_from(replicas))
    for key in keys:
        ask = Ask(prompt_tokens=1, session=key)
        before = session_affinity(replicas, ask, 0)
        after = session_affinity([each for each in replicas if each is not gone], ask, 1)
        assert after == [each for each in before if each is not gone]


def test_sessions_are_spread_by_weight() -> None:
    replicas = [ReplicaView("big", weight=3), ReplicaView("small")]
    asks = [Ask(prompt_tokens=1, session=session_key("acme", f"chat-{n}")) for n in range(2000)]
    share = sum(session_affinity(replicas, ask, 0)[0].name == "big" for ask in asks) / len(asks)
    assert 0.72 < share < 0.78


def test_a_session_of_one_tenant_is_not_anothers() -> None:
    assert session_key("a", "bc") == session_key("a", "bc")
    assert len({session_key("a", "bc"), session_key("ab", "c"), session_key("", "abc")}) == 3


def test_the_cheapest_serves_until_it_is_full_or_lets_requests_wait() -> None:
    cheap = {"cost": 1, "max_in_flight": 2}
    dear = view("dear", cost=9)
    assert ordered("cost", [dear, view("cheap", in_flight=1, **cheap)], ASK, 0)[0].name == "cheap"
    assert ordered("cost", [dear, view("cheap", in_flight=2, **cheap)], ASK, 0)[0].name == "dear"
    assert ordered("cost", [dear, view("cheap", waiting=1, **cheap)], ASK, 0)[0].name == "dear"
    assert ordered("cost", [dear, view("cheap", trust=0.1, **cheap)], ASK, 0)[0].name == "dear"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=8), turns)
def test_a_groups_models_keep_their_order_whatever_their_load(loads: list[tuple[int, int]], turn: int) -> None:
    given_views = [ReplicaView(f"r{n}", open_tokens=load, rank=rank) for n, (rank, load) in enumerate(loads)]
    order = [(view.rank, view.open_tokens) for view in in_order(given_views, ASK, turn)]
    assert order == sorted(order)


@given(st.integers(1, 300), st.integers(0, 600), st.integers(1, 600))
def test_admission_never_lets_the_gateway_be_overfilled(wanted: int, in_flight: int, limit: int) -> None:
    refusal = capacity.refusal(wanted, in_flight=in_flight, max_in_flight=limit, is_draining=False)
    assert (refusal is None) == (in_flight + wanted <= limit)
    assert refusal is None or (refusal.status, refusal.retry_after_s) == (503, capacity.FULL_RETRY_AFTER_S)


def test_a_draining_gateway_admits_nothing() -> None:
    assert capacity.refusal(1, in_flight=0, max_in_flight=9, is_draining=True) is not None


def test_the_examples_in_the_pure_modules_are_true() -> None:
    for module in (policies, views_module, body, names):
        assert doctest.testmod(module).failed == 0
