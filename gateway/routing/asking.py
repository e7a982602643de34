"""What routing may know of a request, worked out as far as the policies on its way read it.

asks = Asks(fleet, index)
ask = asks.of([model, *fallbacks], request, cost, trace)
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from adapters.types import GenerateRequest
from gateway.records.prefixes import head_of
from gateway.records.trace import Trace
from gateway.replicas.directory import Directory
from gateway.replicas.replica import ServedModel
from gateway.routing.ask import Ask, session_of
from gateway.routing.policies import READS_PREFIX, READS_SESSION
from gateway.routing.prefix_index import PrefixIndex
from gateway.tenants.cost import Cost


class Asks:
    def __init__(self, fleet: Directory, index: PrefixIndex) -> None:
        self._fleet = fleet
        self._index = index
        self._lots = Random()  # of its own in each process, so that they do not draw alike

    def of(self, chain: Sequence[ServedModel], request: GenerateRequest | None, cost: Cost, trace: Trace) -> Ask:
        """Of a generation by one of these models or groups; of a question where there is no request."""
        routings = {part.config.routing for named in chain for part in self._fleet.parts(named)}
        prefix: tuple[int, ...] = ()
        if request is not None and not READS_PREFIX.isdisjoint(routings):
            prefix = self._index.blocks(head_of(request)[0], (request.salt, trace.model))
        session = None
        if not READS_SESSION.isdisjoint(routings):
            session = session_of(trace.session, request, "" if trace.caller is None else trace.caller.tenant)
        return Ask(
            prompt_tokens=cost.prompt_tokens,
            completion_tokens=cost.completion_tokens,
            session=session,
            prefix=prefix,
            lot=self._lots.getrandbits(32),
        )
