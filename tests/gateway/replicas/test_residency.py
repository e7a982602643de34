"""What is loaded and what makes room, as a pure decision: the rules hold at every moment and everybody has his turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.replicas.residency import Decision, Phase, Resident, Rules, decide

NAMES = "abcde"


def loaded(name: str, *, last_let_in: float = 0.0, num_open: int = 0, **known: float) -> Resident:
    return Resident(name=name, phase=Phase.LOADED, last_let_in=last_let_in, num_open=num_open, **known)


def waiting(name: str, since: float = 1.0) -> Resident:
    return Resident(name=name, waiting_since=since)


ONE = Rules(max_loaded=1)
TWO = Rules(max_loaded=2)


def test_what_is_waited_for_is_loaded_where_there_is_room() -> None:
    assert decide([waiting("a"), loaded("b")], TWO, now=5) == Decision(load=("a",))


def test_without_rules_everything_may_be_loaded() -> None:
    assert decide([waiting("a"), waiting("b", 2), loaded("c")], Rules(), now=5).load == ("a", "b")


def test_an_idle_model_makes_room_and_the_next_is_loaded_when_it_has() -> None:
    decision = decide([waiting("a"), loaded("b")], ONE, now=5)
    assert (decision.load, decision.evict) == ((), ("b",))
    assert decide([waiting("a"), Resident(name="b", phase=Phase.UNLOADING)], ONE, now=5) == Decision()
    assert decide([waiting("a"), Resident(name="b")], ONE, now=5).load == ("a",)


def test_a_busy_model_is_closed_and_not_evicted() -> None:
    decision = decide([waiting("a"), loaded("b", num_open=1)], ONE, now=5)
    assert (decision.load, decision.evict, decision.closing) == ((), (), {"b"})


def test_an_idle_model_goes_before_a_busy_one_though_it_was_asked_later() -> None:
    models = [waiting("a"), loaded("b", last_let_in=1, num_open=1), loaded("c", last_let_in=2)]
    assert decide(models, TWO, now=5).evict == ("c",)


def test_of_idle_models_the_one_asked_longest_ago_goes() -> None:
    models = [waiting("a"), loaded("b", last_let_in=3), loaded("c", last_let_in=2)]
    assert decide(models, TWO, now=5).evict == ("c",)


def test_a_model_in_nobodys_way_stays() -> None:
    rules = Rules(memory_gib=10, sizes_gib={"a": 6, "b": 1, "c": 5})
    models = [waiting("a"), loaded("b", last_let_in=1), loaded("c", last_let_in=2)]
    assert decide(models, rules, now=5).evict == ("c",)


def test_models_of_different_groups_are_not_loaded_together() -> None:
    rules = Rules(groups=(frozenset("ab"), frozenset("bc")))
    decision = decide([waiting("c"), loaded("a"), loaded("b")], rules, now=5)
    assert decision.evict == ("a",)
    assert decide([waiting("d"), loaded("a"), loaded("b")], rules, now=5).evict == ("a", "b"), "d is in no group"


def test_who_came_first_is_planned_first() -> None:
    models = [waiting("a", since=2), waiting("b", since=1), loaded("c")]
    decision = decide(models, ONE, now=5)
    assert (decision.load, decision.evict) == ((), ("c",))
    assert decide([*models[:2], Resident(name="c")], ONE, now=5).load == ("b",)


def test_a_model_that_fits_beside_what_is_planned_need_not_wait_for_it() -> None:
    rules = Rules(memory_gib=10, sizes_gib={"big": 8, "small": 2, "busy": 7})
    models = [waiting("big", since=1), waiting("small", since=2), loaded("busy", num_open=1)]
    assert decide(models, rules, now=5).load == ("small",)


def test_a_model_that_would_delay_an_earlier_one_waits() -> None:
    rules = Rules(memory_gib=10, sizes_gib={"big": 9, "small": 2, "busy": 7})
    models = [waiting("big", since=1), waiting("small", since=2), loaded("busy", num_open=1)]
    assert decide(models, rules, now=5).load == ()


def test_who_waits_for_a_closed_model_is_let_in_when_nobody_is_before_him_any_more() -> None:
    closed = loaded("b", num_open=1, waiting_since=2)
    assert decide([waiting("a", since=1), closed], ONE, now=5).let_in == ()
    assert decide([Resident(name="a"), closed], ONE, now=5).let_in == ("b",)
    assert decide([waiting("a", since=3), closed], ONE, now=5) == Decision(let_in=("b",), closing=frozenset("b"))


def test_a_load_that_nobody_waits_for_goes_on_until_its_place_is_wanted() -> None:
    abandoned = Resident(name="b", phase=Phase.LOADING)
    assert decide([Resident(name="a"), abandoned], ONE, now=5) == Decision()
    assert decide([waiting("a"), abandoned], ONE, now=5).evict == ("b",)


def test_a_load_that_somebody_waits_for_is_not_given_up() -> None:
    assert decide([waiting("a"), Resident(name="b", phase=Phase.LOADING, waiting_since=2)], ONE, now=5).evict == ()


@pytest.mark.parametrize(("now", "expire", "again"), [(9, (), 10.0), (10, ("a",), None)])
def test_an_idle_model_is_unloaded_when_its_time_is_up(now: float, expire: tuple[str, ...], again: float) -> None:
    idle = loaded("a", idle_since=5, unload_after_s=5)
    decision = decide([idle, loaded("b")], Rules(), now)
    assert (decision.expire, decision.look_again_at) == (expire, again)


def test_a_busy_model_is_not_idle() -> None:
    assert decide([loaded("a", num_open=1, idle_since=0, unload_after_s=5)], Rules(), now=99) == Decision()


@dataclass
class Model:
    phase: Phase = Phase.UNLOADED
    open: int = 0
    waiting: list[float] = field(default_factory=list)
    last_let_in: float = 0
    idle_since: float = 0
    is_closing: bool = False
    num_served: int = 0


class World:
    """The loader without sockets and clocks: it does what is decided and lets anything happen in between."""

    def __init__(self, rules: Rules, unload_after_s: float | None) -> None:
        self.rules = rules
        self.unload_after_s = unload_after_s
        self.now = 1.0
        self.models = {name: Model() for name in NAMES}

    def ask(self, name: str) -> None:
        model = self.models[name]
        if model.phase is Phase.LOADED and not model.is_closing:
            self.let_in(model)
        else:
            model.waiting.append(self.now)

    def give_up(self, name: str) -> None:
        if self.models[name].waiting:
            self.models[name].waiting.pop(0)

    def leave(self, name: str) -> None:
        model = self.models[name]
        if model.open:
            model.open -= 1
            model.idle_since = self.now

    def proceed(self, name: str) -> None:
        """A load or an unload comes to its end."""
        model = self.models[name]
        if model.phase is Phase.LOADING:
            model.phase, model.idle_since, model.last_let_in = Phase.LOADED, self.now, self.now
            for _ in model.waiting:
                self.let_in(model)
            model.waiting.clear()
        elif model.phase is Phase.UNLOADING:
            model.phase = Phase.UNLOADED

    def fail(self, name: str) -> None:
        model = self.models[name]
        if model.phase is Phase.LOADING:
            model.phase = Phase.UNLOADING
            model.waiting.clear()

    def let_in(self, model: Model) -> None:
        model.open += 1
        model.last_let_in = self.now
        model.num_served += 1

    def act(self) -> None:
        decision = decide([self.view(name, model) for name, model in self.models.items()], self.rules, self.now)
        for name, model in self.models.items():
            model.is_closing = name in decision.closing
        for name in decision.let_in:
            for _ in self.models[name].waiting:
                self.let_in(self.models[name])
            self.models[name].waiting.clear()
        for name in decision.load:
            assert self.models[name].phase is Phase.UNLOADED
            assert self.models[name].waiting, "loaded for nobody"
            self.models[name].phase = Phase.LOADING
        for name in (*decision.evict, *decision.expire):
            model = self.models[name]
            assert model.phase in (Phase.LOADED, Phase.LOADING)
            assert not model.open, "cut off"
            assert model.phase is Phase.LOADED or not model.waiting, "given up though somebody waits"
            model.phase = Phase.UNLOADING
        present = {name for name, model in self.models.items() if model.phase is not Phase.UNLOADED}
        assert self.rules.allow(present), f"{present} are loaded together"

    def view(self, name: str, model: Model) -> Resident:
        return Resident(
            name=name,
            phase=model.phase,
            num_open=model.open,
            waiting_since=min(model.waiting, default=None),
            last_let_in=model.last_let_in,
            idle_since=model.idle_since,
            unload_after_s=self.unload_after_s,
        )

    @property
    def num_waiting(self) -> int:
        return sum(len(model.waiting) for model in self.models.values())


@st.composite
def any_rules(draw: st.DrawFn) -> Rules:
    """Rules under which each model can be loaded alone."""
    groups = draw(st.lists(st.frozensets(st.sampled_from(NAMES), min_size=1), max_size=3))
    budget = draw(st.none() | st.integers(4, 10))
    sizes = draw(st.lists(st.integers(1, 4), min_size=len(NAMES), max_size=len(NAMES)))
    return Rules(
        max_loaded=draw(st.none() | st.integers(1, 4)),
        groups=tuple(groups),
        memory_gib=budget,
        sizes_gib=dict(zip(NAMES, sizes, strict=True)),
    )


EVENTS: tuple[Callable[[World, str], None], ...] = (
    World.ask, World.ask, World.give_up, World.leave, World.leave, World.proceed, World.proceed, World.fail,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(any_rules(), st.none() | st.just(3.0), st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(NAMES))))
def test_whatever_happens_the_rules_hold_and_in_the_end_nobody_waits(
    rules: Rules, unload_after_s: float | None, events: list[tuple[Callable[[World, str], None], str]]
) -> None:
    world = World(rules, unload_after_s)
    for event, name in events:
        event(world, name)
        world.now += 1
        world.act()
    for _ in range(200):
        if not world.num_waiting:
            return
        for name in NAMES:  # everything that has begun comes to its end
            world.proceed(name)
            world.act()
            while world.models[name].open:
                world.leave(name)
                world.act()
            world.now += 1
    pytest.fail(f"{world.num_waiting} still wait")


@settings(max_examples=100, deadline=None)
@given(any_rules(), st.sampled_from(NAMES), st.randoms(use_true_random=False))
def test_one_that_waits_has_its_turn_however_busy_the_others_are(
    rules: Rules, patient: str, chance: random.Random
) -> None:
    """All others are asked for all the time, and each always has somebody in it where it can."""
    world = World(rules, None)
    others = [name for name in NAMES if name != patient]
    for _ in range(5):
        storm(world, others, chance)
    world.ask(patient)
    for _ in range(50):
        storm(world, others, chance)
        world.proceed(patient)
        world.act()
        if world.models[patient].num_served:
            return
    pytest.fail(f"{patient!r} was never let in")


def storm(world: World, names: list[str], chance: random.Random) -> None:
    for name in chance.sample(names, len(names)):
        world.ask(name)
        world.act()
        world.proceed(name)
        world.act()
        while world.models[name].open > (0 if world.models[name].is_closing else 1):  # it is never idle of itself
            world.leave(name)
        world.now += 1
        world.act()
