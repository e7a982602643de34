"""The routing policies and admission are pure: state in, decision out."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import capacity
from gateway.replicas import names
from gateway.routing import policies
from gateway.routing.ask import Ask
from gateway.routing.policies import POLICIES, ReplicaView, in_order, least_load, round_robin
from gateway.web import body

ASK = Ask(prompt_tokens=100, completion_tokens=100)

views = st.lists(st.integers(0, 50), max_size=8).map(
    lambda loads: [ReplicaView(f"r{n}", open_tokens=load) for n, load in enumerate(loads)]
)
turns = st.integers(0, 10_000)


@given(views, turns, st.sampled_from(sorted(POLICIES)))
def test_every_policy_orders_all_replicas_and_changes_nothing(
    given_views: list[ReplicaView], turn: int, name: str
) -> None:
    before = list(given_views)
    order = POLICIES[name](given_views, ASK, turn)
    assert given_views == before
    assert sorted(order, key=lambda view: view.name) == before
    assert POLICIES[name](given_views, ASK, turn) == order


@given(views, turns)
def test_least_load_never_prefers_a_busier_replica(given_views: list[ReplicaView], turn: int) -> None:
    loads = [view.open_tokens for view in least_load(given_views, ASK, turn)]
    assert loads == sorted(loads)


@given(st.integers(1, 8), turns)
def test_round_robin_gives_each_replica_one_turn_in_a_round(num_replicas: int, turn: int) -> None:
    replicas = [ReplicaView(f"r{n}") for n in range(num_replicas)]
    firsts = [round_robin(replicas, ASK, turn + step)[0].name for step in range(num_replicas)]
    assert sorted(firsts) == [view.name for view in replicas]


@given(st.integers(2, 8), turns)
def test_equally_loaded_replicas_share_the_load(num_replicas: int, turn: int) -> None:
    replicas = [ReplicaView(f"r{n}", open_tokens=3) for n in range(num_replicas)]
    firsts = {least_load(replicas, ASK, turn + step)[0].name for step in range(num_replicas)}
    assert len(firsts) == num_replicas


@given(st.integers(1, 300), st.integers(0, 600), st.integers(1, 600))
def test_admission_never_lets_the_gateway_be_overfilled(wanted: int, in_flight: int, limit: int) -> None:
    refusal = capacity.refusal(wanted, in_flight=in_flight, max_in_flight=limit, is_draining=False)
    assert (refusal is None) == (in_flight + wanted <= limit)
    assert refusal is None or (refusal.status, refusal.retry_after_s) == (503, capacity.FULL_RETRY_AFTER_S)


def test_a_draining_gateway_admits_nothing() -> None:
    assert capacity.refusal(1, in_flight=0, max_in_flight=9, is_draining=True) is not None


def test_the_examples_in_the_pure_modules_are_true() -> None:
    for module in (policies, body, names):
        assert doctest.testmod(module).failed == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=8), turns)
def test_a_groups_models_keep_their_order_whatever_their_load(loads: list[tuple[int, int]], turn: int) -> None:
    given_views = [ReplicaView(f"r{n}", open_tokens=load, rank=rank) for n, (rank, load) in enumerate(loads)]
    order = [(view.rank, view.open_tokens) for view in in_order(given_views, ASK, turn)]
    assert order == sorted(order)
