"""The order of those who wait: classes with a floor, tenants by their share, deadlines; whatever comes and goes."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.admission.priority import Priority
from gateway.admission.queue import Entry, FairQueue


def entry(priority: Priority = Priority.DEFAULT, tenant: str = "t", deadline: float = 1.0, tokens: int = 100) -> Entry:
    return Entry(priority, tenant, prompt_tokens=tokens, tokens=tokens, arrived=0.0, deadline=deadline)


def put(queue: FairQueue, *entries: Entry) -> FairQueue:
    for each in entries:
        queue.put(each)
    return queue


def take(queue: FairQueue) -> Entry:
    taken = queue.take(lambda _: False).entry
    assert taken is not None
    return taken


def test_a_higher_class_is_first_and_within_it_the_earliest_deadline() -> None:
    queue = put(
        FairQueue(),
        entry(Priority.LOW, deadline=1),
        entry(Priority.DEFAULT, deadline=3),
        entry(Priority.DEFAULT, deadline=2),
        entry(Priority.HIGH, deadline=9),
    )
    order = [take(queue) for _ in range(4)]
    assert [(each.priority, each.deadline) for each in order] == [
        (Priority.HIGH, 9),
        (Priority.DEFAULT, 2),
        (Priority.DEFAULT, 3),
        (Priority.LOW, 1),
    ]


def test_a_low_class_that_waits_behind_a_flood_has_its_floor_of_the_turns() -> None:
    queue = FairQueue(floor_share=0.1)
    turns = Counter[Priority]()
    for _ in range(20):
        put(queue, entry(Priority.LOW), entry(Priority.DEFAULT))
    for _ in range(200):
        put(queue, entry(Priority.HIGH))
        turns[take(queue).priority] += 1
    assert 17 <= turns[Priority.LOW] <= 19  # a tenth of those that went to its betters
    assert 15 <= turns[Priority.DEFAULT] <= 18


def test_a_class_that_was_sent_away_is_owed_its_floor_too() -> None:
    queue = FairQueue(floor_share=0.1)
    for _ in range(10):
        assert not queue.is_owed_a_turn(Priority.LOW)
        put(queue, entry(Priority.HIGH))
        take(queue)
    assert queue.is_owed_a_turn(Priority.LOW)
    put(queue, entry(Priority.HIGH), entry(Priority.LOW))
    assert take(queue).priority is Priority.LOW


def test_a_tenant_that_floods_delays_only_itself() -> None:
    queue = put(FairQueue(), *(entry(tenant="flood", deadline=0.1) for _ in range(100)))
    put(queue, *(entry(tenant="few", deadline=9) for _ in range(3)))
    order = [take(queue).tenant for _ in range(7)]
    assert order.count("few") == 3


def test_tenants_share_tokens_and_not_requests_by_their_weights() -> None:
    queue = FairQueue({"heavy": 3})
    tokens = Counter[str]()
    for _ in range(400):
        put(queue, entry(tenant="heavy", tokens=300), entry(tenant="light", tokens=50))
    while sum(tokens.values()) < 40_000:
        taken = take(queue)
        tokens[taken.tenant] += taken.tokens
    assert 2.8 < tokens["heavy"] / tokens["light"] < 3.2


def test_who_comes_back_has_neither_credit_nor_forgotten_debt() -> None:
    queue = put(FairQueue(), *(entry(tenant="always") for _ in range(50)))
    for _ in range(20):
        take(queue)
    put(queue, *(entry(tenant="late") for _ in range(10)))
    order = [take(queue).tenant for _ in range(8)]
    assert order.count("late") == 4  # no twenty turns in a row for its absence

    queue = put(FairQueue(), entry(tenant="big", tokens=1000), *(entry(tenant="small", tokens=10) for _ in range(90)))
    while take(queue).tenant != "big":
        pass
    put(queue, entry(tenant="big", tokens=1000))
    assert [take(queue).tenant for _ in range(50)].count("big") == 0


def test_what_is_hopeless_costs_nobody_a_turn() -> None:
    queue = put(FairQueue(), *(entry(tenant="late", deadline=1) for _ in range(5)), entry(tenant="other", deadline=9))
    turn = queue.take(lambda each: each.deadline < 5)
    assert (turn.entry is not None and turn.entry.tenant, len(turn.hopeless), len(queue)) == ("other", 5, 0)


def test_the_last_of_the_lowest_class_makes_room() -> None:
    low = [entry(Priority.LOW, tenant=name, deadline=deadline) for name, deadline in (("a", 1), ("a", 2), ("b", 3))]
    queue = put(FairQueue(), *low, entry(Priority.DEFAULT))
    assert queue.last_below(entry(Priority.HIGH)) is low[1]  # of the tenant with the most
    assert queue.last_below(entry(Priority.LOW, tenant="c")) is low[1]
    assert queue.last_below(entry(Priority.LOW, tenant="b")) is None  # it would have as many as `a` has
    assert queue.last_below(entry(Priority.LOW, tenant="a")) is None


class AnyQueue(RuleBasedStateMachine):
    """Whatever comes, leaves and is taken, everyone is in exactly one place, and the order holds."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue({"a": 2}, floor_share=0.25)
        self.waiting: list[Entry] = []
        self.passed_over = Counter[Priority]()

    @rule(
        priority=st.sampled_from(Priority),
        tenant=st.sampled_from("abc"),
        deadline=st.integers(0, 5),
        tokens=st.integers(0, 500),
    )
    def put(self, priority: Priority, tenant: str, deadline: int, tokens: int) -> None:
        new = entry(priority, tenant, deadline, tokens)
        self.queue.put(new)
        self.waiting.append(new)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(gone)
        assert not self.queue.remove(gone)
        self.waiting.remove(gone)

    @rule()
    def take(self) -> None:
        taken = self.queue.take(lambda _: False).entry
        assert (taken is None) == (not self.waiting)
        if taken is None:
            return
        own = [each for each in self.waiting if (each.priority, each.tenant) == (taken.priority, taken.tenant)]
        assert taken is min(own, key=lambda each: (each.deadline, each.number))
        self.waiting.remove(taken)
        for priority in Priority:
            is_waiting = any(each.priority is priority for each in self.waiting)
            if taken.priority is priority or not is_waiting:
                self.passed_over[priority] = 0
            else:
                self.passed_over[priority] += 1

    @rule(priority=st.sampled_from(Priority), tenant=st.sampled_from("abcd"))
    def look(self, priority: Priority, tenant: str) -> None:
        ahead = self.queue.num_ahead(priority, tenant)
        assert 0 <= ahead <= len(self.waiting)
        last = self.queue.last_below(entry(priority, tenant))
        assert last is None or (last in self.waiting and last.priority >= priority)

    @invariant()
    def nobody_is_lost(self) -> None:
        assert set(self.queue) == set(self.waiting)
        assert len(self.queue) == len(self.waiting)

    @invariant()
    def nobody_starves(self) -> None:
        assert max(self.passed_over.values(), default=0) <= 12


AnyQueue.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAnyQueue = AnyQueue.TestCase
