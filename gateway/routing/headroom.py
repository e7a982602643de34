"""How much more a model can carry, and how many replicas it wants: a signal for autoscalers. Pure.

>>> a, b = Carrier("a", proven_rps=10.0, is_ready=True), Carrier("b", proven_rps=10.0, is_ready=False)
>>> found = headroom([a, b], offered_rps=14.0, target=0.7)
>>> found.capacity_rps, found.headroom_rps, found.utilisation, found.replicas_needed
(10.0, -4.0, 1.4, 2.0)

Offered is what the model's replicas are given and what was turned away for lack of them: requests that nobody served
are demand too. Capacity is what its ready replicas are trusted to carry, one instance each. What is needed is told for
instances like the average of those that are trusted, ready or not, so a model with none up can say how many it wants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil

from msgspec import Struct

IDLE_RPS = 0.001  # less than this is nothing: a fading count never reaches zero
SLACK = 1.1  # fewer are enough only if they would be with a tenth more demand
NOTHING_PROVEN = "Nothing is trusted of any of its replicas: {doubt}"


class Carrier(Struct, frozen=True):
    """A replica: what it is trusted to carry, 0 where that is nothing, for the reason in `doubt`."""

    name: str
    proven_rps: float
    is_ready: bool
    doubt: str = ""


class Headroom(Struct, frozen=True):
    """`headroom_rps` is negative where more is offered than can be carried. None is what nobody can tell."""

    offered_rps: float
    capacity_rps: float | None  # None where something is ready, but nothing is trusted of it
    headroom_rps: float | None
    utilisation: float | None
    proven_per_replica_rps: float | None
    replicas_needed: float | None  # at the target, not rounded, so that several gateways' can be added up
    reason: str = ""  # why they are None


def headroom(replicas: Sequence[Carrier], *, offered_rps: float, target: float) -> Headroom:
    offered_rps = offered_rps if offered_rps >= IDLE_RPS else 0.0
    trusted = [each for each in replicas if each.proven_rps]
    if not trusted:
        doubt = next((each.doubt for each in replicas), "")
        return Headroom(offered_rps, None, None, None, None, None, NOTHING_PROVEN.format(doubt=doubt))
    per_replica = sum(each.proven_rps for each in trusted) / len(trusted)
    needed = offered_rps / (per_replica * target)
    ready = [each for each in replicas if each.is_ready]
    capacity = sum(each.proven_rps for each in ready)
    if ready and not capacity:
        reason = NOTHING_PROVEN.format(doubt=ready[0].doubt)
        return Headroom(offered_rps, None, None, None, per_replica, needed, reason)
    utilisation = offered_rps / capacity if capacity else None
    return Headroom(offered_rps, capacity, capacity - offered_rps, utilisation, per_replica, needed)


def shares(replicas: Sequence[Carrier], turned_away_rps: float) -> list[float]:
    """What of the demand that nobody served each replica would have had, by what they are trusted to carry."""
    total = sum(each.proven_rps for each in replicas)
    return [turned_away_rps * each.proven_rps / total if total else 0.0 for each in replicas]


class Wanted:
    """Whole replicas out of those that are needed: more at once, fewer only when fewer would have been enough for
    `hold_s`, with a tenth to spare. So neither chance nor the echo of a burst makes the number go up and down.

    >>> wanted = Wanted()
    >>> seen = ((0.0, 1.9), (1.0, 2.1), (30.0, 1.9), (61.5, 1.9), (122.0, 1.0))
    >>> [wanted.at(now, needed, hold_s=60) for now, needed in seen]
    [2, 3, 3, 3, 2]
    """

    __slots__ = ("_enough", "_wanted")

    def __init__(self) -> None:
        self._wanted = 0
        self._enough: deque[tuple[float, int]] = (
            deque()
        )  # when, and how many; fewer and fewer, so the first is the most

    def at(self, now: float, needed: float, *, hold_s: float) -> int:
        enough = ceil(needed * SLACK)
        while self._enough and self._enough[-1][1] <= enough:
            self._enough.pop()
        self._enough.append((now, enough))
        while self._enough[0][0] < now - hold_s:
            self._enough.popleft()
        self._wanted = max(ceil(needed), min(self._wanted, self._enough[0][1]))
        return self._wanted
