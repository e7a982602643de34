"""Who waits, and whose turn is next: by class, then by tenant, then by deadline. Pure.

    queue = FairQueue(weights={"acme": 3}, floor_share=0.05)
    queue.put(entry)                               # an Entry
    queue.take(is_hopeless)                        # Turn(entry, hopeless): the next one, and those that it passed over
    queue.last_below(entry)                        # who would have to make room for it

Classes are strict, but for a floor: a class that waits behind others has at least `floor_share` of the turns, so none
starves. Within a class tenants share by the tokens that they were let in with, in proportion to their weights
(start-time fair queueing): each has a virtual clock, the tenant whose clock is behind is next, and whoever comes back
after a pause starts with the others, neither with credit nor without the debt he left. Within a tenant the earliest
deadline is next.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gateway.admission.priority import Priority

MAX_CREDIT = 2.0  # turns that the floor may owe a class: it is a share, and no store for later
MAX_DEBTS = 1000  # tenants whose virtual clocks are remembered though they have nothing waiting


@dataclass(slots=True, eq=False)
class Entry:
    """One generation that waits. Times are seconds on one clock; `tokens` is all that it may come to."""

    priority: Priority
    tenant: str
    prompt_tokens: int
    tokens: int
    arrived: float
    deadline: float  # for its first token
    number: int = 0  # of its arrival; the queue gives it


class Turn(NamedTuple):
    entry: Entry | None
    hopeless: Sequence[Entry]


IsHopeless: TypeAlias = Callable[[Entry], bool]


@dataclass(slots=True, eq=False)
class _Flow:
    """What one tenant has waiting in one class, earliest deadline first."""

    clock: float
    entries: list[Entry] = field(default_factory=list)


class _Lane:
    """One class: its tenants' flows and their virtual clocks."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.flows: dict[str, _Flow] = {}
        self.num_waiting = 0
        self.credit = 0.0  # turns that the floor owes it
        self.is_wanted = False  # somebody came for it since its last turn, and be it that he was sent away
        self.weights = weights
        self._debts: dict[str, float] = {}  # clocks of tenants that have nothing waiting now
        self._now = 0.0  # the virtual time: the clock of whoever was served last

    def put(self, entry: Entry) -> None:
        flow = self.flows.get(entry.tenant)
        if flow is None:
            flow = self.flows[entry.tenant] = _Flow(max(self._now, self._debts.pop(entry.tenant, 0.0)))
        insort(flow.entries, entry, key=_urgency)
        self.num_waiting += 1

    def take(self, is_hopeless: IsHopeless, hopeless: list[Entry]) -> Entry | None:
        while self.flows:
            flow = min(self.flows.values(), key=_clock)
            entry = flow.entries[0]
            if is_hopeless(entry):
                self.remove(entry)
                hopeless.append(entry)
                continue
            self._now = flow.clock
            flow.clock += max(entry.tokens, 1) / self._weight(entry.tenant)
            self.remove(entry)
            return entry
        return None

    def remove(self, entry: Entry) -> bool:
        flow = self.flows.get(entry.tenant)
        if flow is None:
            return False
        place = bisect_left(flow.entries, _urgency(entry), key=_urgency)
        if place == len(flow.entries) or flow.entries[place] is not entry:
            return False
        del flow.entries[place]
        self.num_waiting -= 1
        if not flow.entries:
            del self.flows[entry.tenant]
            self._remember(entry.tenant, flow.clock)
        return True

    def num_ahead(self, tenant: str) -> float:
        """How many others go before one more of the tenant, if all that wait are alike."""
        own = self.flows.get(tenant)
        turns = 1 if own is None else len(own.entries) + 1
        per_weight = turns / self._weight(tenant)
        others = sum(
            min(len(flow.entries), per_weight * self._weight(name))
            for name, flow in self.flows.items()
            if flow is not own
        )
        return turns - 1 + others

    def longest(self) -> tuple[str, _Flow]:
        """The tenant with the most waiting, for its weight."""
        return max(self.flows.items(), key=lambda each: len(each[1].entries) / self._weight(each[0]))

    def share_of(self, tenant: str, more: int = 0) -> float:
        flow = self.flows.get(tenant)
        return ((0 if flow is None else len(flow.entries)) + more) / self._weight(tenant)

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def _remember(self, tenant: str, clock: float) -> None:
        if clock <= self._now:
            return
        if len(self._debts) >= MAX_DEBTS:
            self._debts = {name: debt for name, debt in self._debts.items() if debt > self._now}
        if len(self._debts) < MAX_DEBTS:
            self._debts[tenant] = clock


class FairQueue:
    def __init__(self, weights: Mapping[str, float] | None = None, floor_share: float = 0.05) -> None:
        self._lanes = {priority: _Lane(weights or {}) for priority in Priority}
        self._floor_share = floor_share
        self._num_put = 0

    def adopt(self, weights: Mapping[str, float], floor_share: float) -> None:
        """Other shares from now on, for those who wait already too."""
        self._floor_share = floor_share
        for lane in self._lanes.values():
            lane.weights = weights

    def __len__(self) -> int:
        return sum(lane.num_waiting for lane in self._lanes.values())

    def __iter__(self) -> Iterator[Entry]:
        for lane in self._lanes.values():
            for flow in lane.flows.values():
                yield from flow.entries

    def num_waiting(self, priority: Priority) -> int:
        return self._lanes[priority].num_waiting

    def put(self, entry: Entry) -> None:
        self._num_put += 1
        entry.number = self._num_put
        self._lanes[entry.priority].put(entry)

    def remove(self, entry: Entry) -> bool:
        """Forget one that waits no longer. False if it was not here."""
        return self._lanes[entry.priority].remove(entry)

    def take(self, is_hopeless: IsHopeless) -> Turn:
        """The next one to be served. Those for which it is too late are taken out on the way; they cost no turn."""
        hopeless: list[Entry] = []
        while (lane := self._next_lane()) is not None:
            entry = lane.take(is_hopeless, hopeless)
            if entry is not None:
                self._settle_turn(lane)
                return Turn(entry, hopeless)
        return Turn(None, hopeless)

    def is_owed_a_turn(self, priority: Priority) -> bool:
        """The floor has the next turn for one of the class who comes now."""
        lane = self._lanes[priority]
        lane.is_wanted = True
        return lane.credit >= lane.num_waiting + 1 - 1e-9  # of twenty twentieths

    def num_ahead(self, priority: Priority, tenant: str) -> float:
        """How many would be served before one that comes now, but for the floor."""
        before = sum(lane.num_waiting for each, lane in self._lanes.items() if each < priority)
        return before + self._lanes[priority].num_ahead(tenant)

    def last_below(self, entry: Entry) -> Entry | None:
        """Who makes room for `entry`: of the lowest class below its own, or else of a tenant of its own class that has
        more waiting than `entry`'s would have, the one that would be served last. None if nobody has to."""
        for priority in reversed(Priority):
            lane = self._lanes[priority]
            if not lane.num_waiting or priority < entry.priority:
                continue
            _, flow = lane.longest()
            last = flow.entries[-1]
            if priority > entry.priority or lane.share_of(last.tenant) > lane.share_of(entry.tenant, more=1):
                return last
        return None

    def _next_lane(self) -> _Lane | None:
        waiting = [lane for lane in self._lanes.values() if lane.num_waiting]
        if not waiting:
            return None
        owed = max(waiting[1:], key=_credit, default=None)
        return owed if owed is not None and owed.credit >= 1 - 1e-9 else waiting[0]

    def _settle_turn(self, served: _Lane) -> None:
        """A turn was given: the floor owes a share of it to each lower class that wants one."""
        is_lower = False
        for lane in self._lanes.values():
            if lane is served:
                is_lower = True
                lane.is_wanted = False
                lane.credit = max(lane.credit - 1, 0.0)
            elif is_lower and (lane.num_waiting or lane.is_wanted):
                lane.credit = min(lane.credit + self._floor_share, MAX_CREDIT)


def _urgency(entry: Entry) -> tuple[float, int]:
    return entry.deadline, entry.number


def _clock(flow: _Flow) -> float:
    return flow.clock


def _credit(lane: _Lane) -> float:
    return lane.credit
