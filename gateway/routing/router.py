"""A request's way over the fleet: the replicas that can do what is asked, one after the other, best first.

    async for replica in router.route([model, *fallbacks], check, trace):
        ...                                        # an attempt; the next replica is asked for if that fails

Which order is best says policies.py, which is pure; here are the models in their turn, those that have to be loaded
first, and what is noted for whoever asks later why a replica was chosen.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

from adapters.base import EngineAdapter
from adapters.errors import EngineUnavailable, GoodgateError, Overloaded, UnsupportedOperation, UnsupportedParameter
from gateway.admission.gate import Gates
from gateway.records.trace import Candidate, Trace
from gateway.replicas.fleet import Fleet
from gateway.replicas.loader import Loader, OnLate
from gateway.replicas.replica import Replica, ServedModel, State
from gateway.routing.ask import Ask
from gateway.routing.goodput import goodput
from gateway.routing.policies import LEAST_TRUST, POLICIES, READS_PREFIX, Policy, ReplicaView, room_first
from gateway.routing.prefix_index import TOKENS_A_BLOCK, PrefixIndex
from gateway.routing.proofs import Proofs

NOT_READY_RETRY_AFTER_S = 2.0
NOBODY: Mapping[str, int] = {}
ALL_POLICIES: Mapping[str, Policy] = {**POLICIES, "goodput": goodput}

Check: TypeAlias = Callable[[EngineAdapter[Any]], None]  # raises what the engine refuses, by name


class Resting(Overloaded):
    """Every replica that could be asked is full and has told when to come back, and that is not yet."""

    def __init__(self, model: str, rest_s: float) -> None:
        self.rest_s = rest_s
        super().__init__(f"Every replica of model {model!r} is full; ask again later.", retry_after_s=rest_s)


class Router:
    def __init__(self, fleet: Fleet, loader: Loader, gates: Gates, proofs: Proofs, index: PrefixIndex) -> None:
        self._fleet = fleet
        self._loader = loader
        self._gates = gates
        self._proofs = proofs
        self._index = index

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
                held = await self._let_in(served, trace, ask, on_late)
            except (EngineUnavailable, Overloaded) as error:
                refusal = refusal or error
                continue
            with held:
                for replica in self._in_order(self._loader.as_loaded(served), trace, ask):
                    if not replica.has_started:
                        continue  # it has left, or ended, since the order was made
                    try:
                        check(replica.started_adapter)
                    except (UnsupportedParameter, UnsupportedOperation) as error:
                        refusal = refusal or error
                        trace.refusals[replica.model, replica.name] = error.message
                        continue
                    if served.config.routing in READS_PREFIX:
                        self._index.note(ask.prefix, _owner(replica))
                    yield replica
                    num_given += 1
                    if num_given == chain[0].config.max_attempts:
                        return
        if num_given == 0:
            if refusal is not None:
                raise refusal
            with await self._let_in(parts[0], trace, ask, on_late):
                yield self._last_resort(chain[0], ask)

    async def _let_in(
        self, served: ServedModel, trace: Trace, ask: Ask, on_late: OnLate | None
    ) -> AbstractContextManager[object]:
        """Waits until the model is loaded, and then for a turn: what has to be loaded has no queue to be late in. A
        question in one piece (it writes nothing) needs no turn."""
        loaded = await self._loader.hold(served, trace, on_late)
        if not ask.completion_tokens or not self._gates.guards(served):
            return loaded
        with ExitStack() as stack:
            stack.enter_context(loaded)
            stack.enter_context(await self._gates.let_in(served, trace, ask, on_late))
            return stack.pop_all()

    def _in_order(self, model: ServedModel, trace: Trace, ask: Ask) -> list[Replica]:
        now = time.perf_counter()
        able = [each for each in model.replicas if each.is_ready and each.standing.may_serve(now)]
        known = self._index.known(ask.prefix) if model.config.routing in READS_PREFIX else {}
        order = self._ordered(model, able, ask, now, known)
        if model.name not in trace.routed:  # prompts of one body see nearly the same
            trace.routed.append(model.name)
            proofs = self._proofs if model.config.routing == "goodput" else None
            trace.candidates.extend(_candidates(model, order, now, proofs, known))
        return order

    def _ordered(
        self, model: ServedModel, replicas: Sequence[Replica], ask: Ask, now: float, known: Mapping[str, int] = NOBODY
    ) -> list[Replica]:
        by_name = {f"{replica.model}/{replica.name}": replica for replica in replicas}
        proofs = self._proofs if model.config.routing == "goodput" else None
        views = [_view(name, each, model, now, known, proofs) for name, each in by_name.items()]
        policy = ALL_POLICIES[model.config.routing]
        order = room_first(policy(views, ask, self._fleet.next_turn(model)))
        return [by_name[view.name] for view in order]

    def _last_resort(self, model: ServedModel, ask: Ask) -> Replica:
        """With nothing that may serve, one try on what might: the best of those that failures have ejected, or one that
        was well and may be again before the next probe says so. Such a one most likely will not answer, so few requests
        try it and the others do not wait for them. One that is full is left alone for as long as it has asked for.
        """
        now = time.perf_counter()
        ready = [replica for replica in model.replicas if replica.is_ready]
        ejected = [replica for replica in ready if not replica.standing.is_aside(now)]
        if ejected:
            return self._ordered(model, ejected, ask, now)[0]
        if ready:
            raise Resting(model.name, min(replica.standing.left_out_for_s(now) for replica in ready))
        for replica in model.replicas:
            if _was_well(replica) and replica.standing.may_try(now):
                return replica
        if not self._fleet.knows(model):
            raise EngineUnavailable(f"Model {model.name!r} is not configured any more; /v1/models lists what is.")
        states = ", ".join(f"{replica.name} is {replica.state.value}" for replica in model.replicas)
        raise EngineUnavailable(
            f"No replica of model {model.name!r} is ready: {states}; /ready says why.",
            retry_after_s=NOT_READY_RETRY_AFTER_S,
        )


def _was_well(replica: Replica) -> bool:
    return replica.state is State.UNHEALTHY and replica.has_started


def _view(
    name: str, replica: Replica, model: ServedModel, now: float, known: Mapping[str, int], proofs: Proofs | None
) -> ReplicaView:
    config = replica.config
    return ReplicaView(
        name,
        in_flight=replica.in_flight,
        open_tokens=replica.open_tokens,
        rank=model.rank(replica),
        weight=config.weight,
        cost=config.cost or 0.0,
        max_in_flight=config.max_in_flight,
        waiting=replica.load.waiting or 0,
        trust=max(replica.standing.trust(now), LEAST_TRUST),
        latency_s=replica.standing.to_first.seconds,
        cached_tokens=_cached_tokens(replica, known),
        offered_rps=0.0 if proofs is None else replica.offered.at(now),
        proven_rps=0.0 if proofs is None else proofs.share_rps(replica, now),
    )


def _cached_tokens(replica: Replica, known: Mapping[str, int]) -> int:
    return known.get(_owner(replica), 0) * TOKENS_A_BLOCK if known else 0


def _owner(replica: Replica) -> str:
    """Whose prefix cache it is: that of an engine which was started again is empty."""
    return f"{replica.model}/{replica.name}#{replica.num_restarts}"


def _candidates(
    model: ServedModel, order: Sequence[Replica], now: float, proofs: Proofs | None, known: Mapping[str, int]
) -> Iterator[Candidate]:
    """What is known of each replica of the model or group while one of them is chosen."""
    for replica in model.replicas:
        yield Candidate(
            model=replica.model,
            engine=replica.engine,
            replica=replica.name,
            policy=model.config.routing,
            state=replica.state.value,
            reason=replica.reason or replica.standing.why_left_out(now),
            in_flight=replica.in_flight,
            waiting=replica.load.waiting,
            place=order.index(replica) if replica in order else None,
            open_tokens=replica.open_tokens,
            cached_tokens=_cached_tokens(replica, known),
            trust=replica.standing.trust(now),
            doubt="" if proofs is None else proofs.of(replica, now).doubt,
        )
