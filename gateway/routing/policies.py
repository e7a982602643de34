"""Which replica serves a request. Pure: the fleet's state goes in, an order of preference comes out.

>>> ask = Ask(prompt_tokens=100)
>>> views = [ReplicaView("a", open_tokens=900), ReplicaView("b", open_tokens=50), ReplicaView("c", open_tokens=50)]
>>> [view.name for view in least_load(views, ask, turn=0)]
['b', 'c', 'a']
>>> [view.name for view in round_robin(views, ask, turn=1)]
['b', 'c', 'a']

The whole order is returned, not one pick, so that a second attempt goes to the next best replica. `turn` counts the
model's requests; it moves on the ties, so that equal replicas share the load. docs/routing.md says which policy is for
what; a new one is a function and its line in `POLICIES`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate

from gateway.routing.ask import Ask
from gateway.routing.goodput import goodput
from gateway.routing.views import Policy, ReplicaView, from_turn, least_load

HOT = 1.5  # times the mean work of the other replicas, and
HOT_REQUESTS = 4  # so many requests like this one beyond that: more waits longer than a cache or a session saves
MIN_TRUST = 0.5  # below it a replica comes last where trust cannot be weighed
MIN_CACHED_SHARE = 0.25  # of a prompt: less to read is not worth leaving the least loaded replica for
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 by the golden ratio
MASK = (1 << 64) - 1


def round_robin(views: Sequence[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    """Each replica in its turn; one that is trusted less misses some of its turns."""
    return _in_shares(views, [view.trust for view in views], turn)


def weighted(views: Sequence[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    """Each replica as often as its weight says, spread evenly."""
    return _in_shares(views, [view.speed for view in views], turn)


def power_of_two(views: Sequence[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    """Of two that are drawn by lot, the one that should answer first; so gateways that see only their own work do not
    all run to the same replica."""
    rest = least_load(views, ask, turn)
    num = len(views)
    if num < 2:
        return rest
    first = ask.lot % num
    one, other = views[first], views[(first + 1 + ask.lot // num % (num - 1)) % num]
    knows_latency = one.latency_s > 0 and other.latency_s > 0
    waits = [view.work(ask) * (view.latency_s if knows_latency else 1.0) for view in (one, other)]
    drawn = [one, other] if waits[0] <= waits[1] else [other, one]
    return [*drawn, *(view for view in rest if view is not one and view is not other)]


def prefix_affinity(views: Sequence[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    """The replica that has read the most of this prompt before, as long as it is not hot; otherwise the least load."""
    order = least_load(views, ask, turn)
    enough = max(MIN_CACHED_SHARE * ask.prompt_tokens, 1)
    knowing = [view for view in order if view.cached_tokens >= enough]
    if not knowing:
        return order
    is_hot = hot(views, ask)
    best = max((view for view in knowing if not is_hot(view)), key=lambda view: view.cached_tokens, default=order[0])
    return [best, *(view for view in order if view is not best)]


def session_affinity(views: Sequence[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    """A session's replica by rendezvous: when replicas come and go, only the sessions of those that went move, and a
    new one takes its share of each. Hot and untrusted ones come last. Without a session, the least load."""
    if (session := ask.session) is None:
        return least_load(views, ask, turn)
    is_hot = hot(views, ask)
    order = sorted(views, key=lambda view: _distance(session, view))
    return sorted(order, key=lambda view: view.trust < MIN_TRUST or is_hot(view))


def cost(views: Sequence[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    """The cheapest first, but those whose engine lets requests wait after those that do not."""
    return sorted(least_load(views, ask, turn), key=lambda view: (view.trust < MIN_TRUST, view.waiting > 0, view.cost))


def in_order(views: Sequence[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    """A group's first model before its second, and so on; of one model the replica with the least to do."""
    return sorted(least_load(views, ask, turn), key=lambda view: (view.trust < MIN_TRUST, view.rank))


POLICIES: Mapping[str, Policy] = {
    "round_robin": round_robin,
    "weighted": weighted,
    "least_load": least_load,
    "power_of_two": power_of_two,
    "prefix_affinity": prefix_affinity,
    "session_affinity": session_affinity,
    "cost": cost,
    "goodput": goodput,
    "order": in_order,
}
READS_PREFIX = frozenset({"prefix_affinity"})  # what others do not read is not worked out for them
READS_SESSION = frozenset({"session_affinity"})


def room_first(order: list[ReplicaView]) -> list[ReplicaView]:
    """Any policy's order, but those that are full (`max_in_flight`) after all that have room."""
    return sorted(order, key=lambda view: view.is_full) if any(view.is_full for view in order) else order


def hot(views: Sequence[ReplicaView], ask: Ask) -> Callable[[ReplicaView], bool]:
    """Tells which replicas have so much more to do than the others that affinity to them does not pay."""
    total = sum([view.work(ask) for view in views])
    times_others = HOT / max(len(views) - 1, 1)
    spare = HOT_REQUESTS * ask.tokens

    def is_hot(view: ReplicaView) -> bool:
        work = view.work(ask)
        return work > times_others * (total - work) + spare and len(views) > 1

    return is_hot


def _in_shares(views: Sequence[ReplicaView], shares: Sequence[float], turn: int) -> list[ReplicaView]:
    """Each replica first as often as its share says. Turns go round the circle of all shares in steps of the golden
    ratio, which visits each arc at the most even intervals; arcs of one size are simply visited in turn."""
    if not shares or min(shares) == max(shares):
        return from_turn(views, turn)
    ends = list(accumulate(shares))
    return from_turn(views, min(bisect_right(ends, (turn * GOLDEN & MASK) / 2**64 * ends[-1]), len(views) - 1))


def _distance(session: int, view: ReplicaView) -> float:
    """By weighted rendezvous hashing: an exponential variate of the replica's weight, always the same one."""
    return -math.log((_mixed(session ^ _place(view.name)) + 1) / 2**64) / view.weight


@lru_cache(maxsize=4096)
def _place(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())


def _mixed(number: int) -> int:
    """The finalizer of SplitMix64: each bit of the number changes half of the bits."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & MASK
    return number ^ (number >> 31)
