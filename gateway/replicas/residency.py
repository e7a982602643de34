"""Which models are loaded, when not all of them fit. Pure: states and a time go in, a decision comes out.

    rules = Rules(max_loaded=1)
    decision = decide(residents, rules, now)
    decision.load                              # start these now
    decision.evict                             # these have to make room, and nobody uses them
    decision.closing                           # loaded, but who comes now waits: another model is next

Who waits is served in the order of arrival. The model whose first request has waited longest is planned first: it
names the models that have to go, idle ones before busy ones and then those that were asked longest ago, and no more of
them than necessary. A busy one is closed: what is open in it goes on to its end, and what is new waits its turn. So
nothing that runs is cut off, and nothing that waits waits for ever, however busy the others are. A model that fits
beside everything that is planned before it need not wait for that.

Whoever asks for a model before it is loaded is let in when it is, all at once; so each load serves somebody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from enum import Enum

from msgspec import Struct


class Phase(Enum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"  # it still holds its memory


class Rules(Struct, frozen=True, kw_only=True):
    """Which models may be loaded together. Whatever may, may also with one of them less."""

    max_loaded: int | None = None
    groups: tuple[frozenset[str], ...] = ()  # where there are any, several models have to share one
    memory_gib: float | None = None
    sizes_gib: Mapping[str, float] = {}

    def allow(self, models: Set[str]) -> bool:
        return self._has_places(models) and self._share_a_group(models) and self._has_memory(models)

    def _has_places(self, models: Set[str]) -> bool:
        return self.max_loaded is None or len(models) <= self.max_loaded

    def _share_a_group(self, models: Set[str]) -> bool:
        return not self.groups or len(models) <= 1 or any(models <= group for group in self.groups)

    def _has_memory(self, models: Set[str]) -> bool:
        return self.memory_gib is None or sum(self.sizes_gib[model] for model in models) <= self.memory_gib


class Resident(Struct, frozen=True, kw_only=True):
    """What is known of one model. `num_open` counts those that were let in and have not left."""

    name: str
    phase: Phase = Phase.UNLOADED
    num_open: int = 0
    waiting_since: float | None = None  # when the first of those that wait came
    last_let_in: float = 0.0
    idle_since: float = 0.0
    unload_after_s: float | None = None

    @property
    def is_present(self) -> bool:
        return self.phase is not Phase.UNLOADED

    @property
    def is_wanted(self) -> bool:
        return self.num_open > 0 or self.waiting_since is not None

    @property
    def can_go_now(self) -> bool:
        """Nothing would be cut off: it is idle, or is being loaded for nobody."""
        if self.phase is Phase.LOADING:
            return not self.is_wanted
        return self.phase is Phase.LOADED and self.num_open == 0

    @property
    def expires_at(self) -> float | None:
        """When it has been idle for too long, if nobody comes."""
        if self.unload_after_s is None or self.phase is not Phase.LOADED or self.is_wanted:
            return None
        return self.idle_since + self.unload_after_s


class Decision(Struct, frozen=True, kw_only=True):
    """Names of models, each in the order in which it was decided. `look_again_at`: the next change by time alone."""

    let_in: tuple[str, ...] = ()  # all who wait for these
    load: tuple[str, ...] = ()
    evict: tuple[str, ...] = ()
    expire: tuple[str, ...] = ()
    closing: frozenset[str] = frozenset()
    look_again_at: float | None = None


def decide(residents: Sequence[Resident], rules: Rules, now: float) -> Decision:
    """What to do now. What it says about a model is to be done before it is asked again."""
    known = {each.name: each for each in residents}
    present = {each.name for each in residents if each.is_present}  # what holds memory
    planned = {each.name for each in residents if each.phase in (Phase.LOADING, Phase.LOADED)}  # what is to hold it
    promised: set[str] = set()  # planned for someone who waits, so not for a later one to take
    closing: set[str] = set()
    let_in: list[str] = []
    load: list[str] = []
    for waited_for in _in_order_of_arrival(residents):
        name = waited_for.name
        if name in planned:
            if waited_for.phase is Phase.LOADED:
                let_in.append(name)
            continue
        if name in closing:
            continue  # its turn comes when it has made room
        victims = _victims(waited_for, [known[each] for each in planned - promised], planned, rules)
        if victims is None:
            continue
        planned = planned - victims | {name}
        promised.add(name)
        closing |= victims
        if waited_for.phase is Phase.UNLOADED and rules.allow(present | {name}):
            load.append(name)
            present.add(name)
    evict = tuple(each for each in sorted(closing) if known[each].can_go_now and each not in let_in)
    expiries = [(at, each.name) for each in residents if each.name not in evict and (at := each.expires_at) is not None]
    return Decision(
        let_in=tuple(let_in),
        load=tuple(load),
        evict=evict,
        expire=tuple(name for at, name in expiries if at <= now),
        closing=frozenset(closing),
        look_again_at=min((at for at, _ in expiries if at > now), default=None),
    )


def _in_order_of_arrival(residents: Iterable[Resident]) -> list[Resident]:
    waiting = [(each.waiting_since, each.name, each) for each in residents if each.waiting_since is not None]
    return [each for _, _, each in sorted(waiting, key=lambda item: item[:2])]


def _victims(wanted: Resident, candidates: Iterable[Resident], planned: Set[str], rules: Rules) -> set[str] | None:
    """The fewest that have to go so that the wanted one may be there; None where even all of them are not enough."""
    going: list[str] = []
    staying = planned | {wanted.name}
    for candidate in sorted(candidates, key=_how_soon_to_go):
        if rules.allow(staying):
            break
        going.append(candidate.name)
        staying = staying - {candidate.name}
    if not rules.allow(staying):
        return None
    for name in reversed(going):  # one that was in nobody's way stays
        if rules.allow(staying | {name}):
            going.remove(name)
            staying = staying | {name}
    return set(going)


def _how_soon_to_go(resident: Resident) -> tuple[bool, bool, float, str]:
    """The time of the last that was let in, not of the last that left: a closed model's place in this order must not
    change while it empties, or another would be closed in its stead, and the wait begin anew."""
    is_loading = resident.phase is Phase.LOADING
    return not resident.can_go_now, is_loading, resident.last_let_in, resident.name
