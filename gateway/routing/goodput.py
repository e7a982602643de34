"""The policy `goodput`: a replica gets what it is proven to carry, and no more while another has room. Pure.

>>> ask = Ask(prompt_tokens=100)
>>> views = [
...     ReplicaView("small", proven_rps=4.0, offered_rps=3.0),
...     ReplicaView("large", proven_rps=16.0, offered_rps=8.0),
...     ReplicaView("unknown"),
... ]
>>> [view.name for view in goodput(views, ask, turn=0)]
['large', 'small', 'unknown']

Three classes of replicas, each before the next:

    room       less is asked of it than is proven and trusted: the cheapest first, and of those that cost the same the
               emptiest, so that they fill alike
    unknown    nothing is trusted of it: it takes what the others have no room for, as much as the least of them may
    full       everything else in proportion to what is proven, so that all fare alike badly

A replica that fares badly (`trust` below 1) carries so much less. Where nothing at all is proven it is
`least_load`. Rates are those of this gateway; `proven_rps` has the margin off.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.routing.ask import Ask
from gateway.routing.views import ReplicaView, least_load

_ROOM, _UNKNOWN, _FULL = range(3)
_LEAST_RPS = 1e-9  # a proof of less, or of hardly any trust, must not become a division by zero


def goodput(views: Sequence[ReplicaView], ask: Ask, turn: int) -> list[ReplicaView]:
    order = least_load(views, ask, turn)
    proven = [view.proven_rps for view in views if view.proven_rps]
    if not proven:
        return order
    least_rps = min(proven)

    def place(view: ReplicaView) -> tuple[int, float, float]:
        used = view.offered_rps / max((view.proven_rps or least_rps) * view.trust, _LEAST_RPS)
        if used >= 1:
            return _FULL, 0.0, used
        return (_ROOM if view.proven_rps else _UNKNOWN), view.cost, used

    return sorted(order, key=place)
