"""Which replica serves a request. Pure: the fleet's state goes in, an order of preference comes out.

>>> ask = Ask(prompt_tokens=100)
>>> views = [ReplicaView("a", open_tokens=900), ReplicaView("b", open_tokens=50), ReplicaView("c", open_tokens=50)]
>>> [view.name for view in least_load(views, ask, turn=0)]
['b', 'c', 'a']
>>> [view.name for view in round_robin(views, ask, turn=1)]
['b', 'c', 'a']

The whole order is returned, not one pick, so that a second attempt goes to the next best replica. `turn` counts the
model's requests; it moves on the ties, so that equal replicas share the load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from gateway.routing.ask import Ask


class ReplicaView(Struct, frozen=True):
    """What routing may know of a replica: its name, and what this gateway has open on it."""

    name: str
    in_flight: int = 0
    open_tokens: int = 0
    rank: int = 0  # the place of its model in a group
    trust: float = 1.0  # 0..1: how well it fares (gateway/replicas/standing.py)
    offered_rps: float = 0.0  # requests that this gateway gives it, lately
    proven_rps: float = 0.0  # those that it is trusted to carry, for `goodput`; 0 where nothing is known


Policy = Callable[[Sequence[ReplicaView], Ask, int], list[ReplicaView]]


def round_robin(views: Sequence[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    """Each replica in its turn."""
    if not views:
        return []
    first = turn % len(views)
    return [*views[first:], *views[:first]]


def least_load(views: Sequence[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    """The least work first, in tokens and not in requests; equals in turn (the sort is stable)."""
    return sorted(round_robin(views, ask, turn), key=lambda view: view.open_tokens)


def in_order(views: Sequence[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    """A group's first model before its second, and so on; of one model the replica with the least to do."""
    return sorted(least_load(views, ask, turn), key=lambda view: view.rank)


POLICIES: Mapping[str, Policy] = {"round_robin": round_robin, "least_load": least_load, "order": in_order}
