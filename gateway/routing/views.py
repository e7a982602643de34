"""What policies read of a replica, and the order that most of them fall back to. Pure.

>>> view = ReplicaView("a", open_tokens=900, weight=2)
>>> view.work(Ask(prompt_tokens=100))
500.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from gateway.routing.ask import Ask

LEAST_TRUST = 1e-3  # so that one that nobody trusts still has a speed


class ReplicaView(Struct, frozen=True):
    """What routing may know of a replica: what its operator has said of it, what this gateway has open on it, and how
    it fares. `trust` is 1 where it does as well as the others, and `LEAST_TRUST` where it should get nothing."""

    name: str
    in_flight: int = 0
    open_tokens: int = 0
    rank: int = 0  # the place of its model in a group
    weight: float = 1.0  # how much it carries, against the others
    cost: float = 0.0
    max_in_flight: int | None = None
    waiting: int = 0  # in the engine's own queue, as of the last probe
    trust: float = 1.0  # how well it fares (gateway/replicas/standing.py)
    latency_s: float = 0.0  # to the first token for each token of work, lately; 0 where nothing is known
    offered_rps: float = 0.0  # requests that this gateway gives it, lately
    proven_rps: float = 0.0  # those that it is trusted to carry, for `goodput`; 0 where nothing is known
    cached_tokens: int = 0  # of this prompt, that it has probably read before

    @property
    def speed(self) -> float:
        return self.weight * self.trust

    @property
    def is_full(self) -> bool:
        return self.max_in_flight is not None and self.in_flight >= self.max_in_flight

    def work(self, ask: Ask) -> float:
        """What it would have to do with this request, in tokens of a replica of weight 1."""
        return (self.open_tokens + ask.tokens) / (self.weight * self.trust)


Policy = Callable[[Sequence[ReplicaView], Ask, int], list[ReplicaView]]


def least_load(views: Sequence[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    """The least work first, in tokens and not in requests, by what each can carry; equals in turn (the sort is
    stable)."""
    tokens = ask.tokens
    return sorted(from_turn(views, turn), key=lambda view: (view.open_tokens + tokens) / (view.weight * view.trust))


def from_turn(views: Sequence[ReplicaView], turn: int) -> list[ReplicaView]:
    """All of them, beginning with another one at each turn."""
    if not views:
        return []
    first = turn % len(views)
    return [*views[first:], *views[:first]]
