"""A request's way over the fleet: the replicas that can do what is asked, one after the other, best first.

    async for replica in router.route([model, *fallbacks], check, trace):
        ...                                        # an attempt; the next replica is asked for if that fails

Which order is best says policies.py, which is pure; here are the models in their turn, those that have to be loaded
first, and what is noted for whoever asks later why a replica was chosen.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, TypeAlias

from adapters.base import EngineAdapter
from adapters.errors import EngineUnavailable, GoodgateError, Overloaded, UnsupportedOperation, UnsupportedParameter
from gateway.records.trace import Candidate, Trace
from gateway.replicas.fleet import Fleet
from gateway.replicas.loader import Loader, OnLate
from gateway.replicas.replica import Replica, ServedModel, State
from gateway.routing.ask import Ask
from gateway.routing.policies import POLICIES, ReplicaView

NOT_READY_RETRY_AFTER_S = 2.0

Check: TypeAlias = Callable[[EngineAdapter[Any]], None]  # raises what the engine refuses, by name


class Router:
    def __init__(self, fleet: Fleet, loader: Loader) -> None:
        self._fleet = fleet
        self._loader = loader

    async def route(
        self, chain: Sequence[ServedModel], check: Check, trace: Trace, ask: Ask, on_late: OnLate | None = None
    ) -> AsyncGenerator[Replica, None]:
        """Replicas that can do what is asked, best first: those of the first model in the chain, then of the next. A
        model is kept loaded until the next one is wanted, or the route is closed. Gives at least one, or raises."""
        refusal: GoodgateError | None = None
        num_given = 0
        parts = [part for named in chain for part in self._fleet.parts(named)]
        trace.chain = (*trace.chain, *(served.name for served in parts if served.name not in trace.chain))
        for served in parts:
            try:
                held = await self._loader.hold(served, trace, on_late)
            except (EngineUnavailable, Overloaded) as error:
                refusal = refusal or error
                continue
            with held:
                for replica in self._in_order(served, trace, ask):
                    try:
                        check(replica.started_adapter)
                    except (UnsupportedParameter, UnsupportedOperation) as error:
                        refusal = refusal or error
                        trace.refusals[replica.model, replica.name] = error.message
                        continue
                    yield replica
                    num_given += 1
                    if num_given == chain[0].config.max_attempts:
                        return
        if num_given == 0:
            if refusal is not None:
                raise refusal
            yield _last_resort(chain[0])

    def _in_order(self, model: ServedModel, trace: Trace, ask: Ask) -> list[Replica]:
        ready = {f"{replica.model}/{replica.name}": replica for replica in model.replicas if replica.is_ready}
        views = [_view(name, each, model) for name, each in ready.items()]
        policy = POLICIES[model.config.routing]
        order = [ready[view.name] for view in policy(views, ask, self._fleet.next_turn(model))]
        if model.name not in trace.routed:  # prompts of one body see nearly the same
            trace.routed.append(model.name)
            trace.candidates.extend(_candidates(model, order))
        return order


def _view(name: str, replica: Replica, model: ServedModel) -> ReplicaView:
    return ReplicaView(name, in_flight=replica.in_flight, open_tokens=replica.open_tokens, rank=model.rank(replica))


def _last_resort(model: ServedModel) -> Replica:
    """With nothing ready, one try on a replica that was: it may be back before the next probe says so."""
    for replica in model.replicas:
        if replica.state is State.UNHEALTHY and replica.has_started:
            return replica
    states = ", ".join(f"{replica.name} is {replica.state.value}" for replica in model.replicas)
    raise EngineUnavailable(
        f"No replica of model {model.name!r} is ready: {states}; /ready says why.",
        retry_after_s=NOT_READY_RETRY_AFTER_S,
    )


def _candidates(model: ServedModel, order: Sequence[Replica]) -> Iterator[Candidate]:
    """What is known of each replica of the model or group while one of them is chosen."""
    for replica in model.replicas:
        yield Candidate(
            model=replica.model,
            engine=replica.engine,
            replica=replica.name,
            policy=model.config.routing,
            state=replica.state.value,
            reason=replica.reason,
            in_flight=replica.in_flight,
            waiting=replica.load.waiting,
            place=order.index(replica) if replica in order else None,
        )
