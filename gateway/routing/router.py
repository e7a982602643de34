"""A request's way over the fleet: the replicas that can do what is asked, one after the other, best first.

    route = router.route([model, *fallbacks], check, trace, ask)
    async for replica in route:                    # an attempt; the next replica is asked for if that fails
        ...
    route.close()

Which order is best says policies.py, which is pure; here are the models in their turn, those that have to be loaded
first, and what is noted for whoever asks later why a replica was chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from gateway.routing.policies import POLICIES, READS_PREFIX, room_first
from gateway.routing.prefix_index import TOKENS_A_BLOCK, PrefixIndex
from gateway.routing.proofs import Proofs
from gateway.routing.views import LEAST_TRUST, ReplicaView

NOT_READY_RETRY_AFTER_S = 2.0
NOBODY: Mapping[str, int] = {}

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

    def route(
        self, chain: Sequence[ServedModel], check: Check, trace: Trace, ask: Ask, on_late: OnLate | None = None
    ) -> Route:
        """Replicas that can do what is asked, best first: those of the first model in the chain, then of the next. A
        model is kept loaded until the next one is wanted, or the route is closed. Gives at least one, or raises."""
        parts = [part for named in chain for part in self._fleet.parts(named)]
        trace.chain = (*trace.chain, *[served.name for served in parts if served.name not in trace.chain])
        return Route(self, chain[0], parts, check, trace, ask, on_late)

    def lets_in_at_once(self, served: ServedModel, ask: Ask) -> bool:
        """There is nothing to wait for: the model is always there, and has no gate or is asked a question in one piece,
        which writes nothing and needs no turn."""
        return not self._loader.has_to_hold(served) and not (ask.completion_tokens and self._gates.guards(served))

    async def let_in(
        self, served: ServedModel, trace: Trace, ask: Ask, on_late: OnLate | None
    ) -> AbstractContextManager[object]:
        """Waits until the model is loaded, and then for a turn: what has to be loaded has no queue to be late in."""
        loaded = await self._loader.hold(served, trace, on_late)
        if not ask.completion_tokens or not self._gates.guards(served):
            return loaded
        with ExitStack() as stack:
            stack.enter_context(loaded)
            stack.enter_context(await self._gates.let_in(served, trace, ask, on_late))
            return stack.pop_all()

    def in_order(self, served: ServedModel, trace: Trace, ask: Ask) -> list[Replica]:
        """Those of the model as it is loaded that may serve."""
        model = self._loader.as_loaded(served)
        now = time.perf_counter()
        able = [each for each in model.replicas if each.state is State.READY and each.standing.may_serve(now)]
        known = self._index.known(ask.prefix) if model.config.routing in READS_PREFIX else NOBODY
        order = self._ordered(model, able, ask, now, known)
        if model.name not in trace.routed:  # prompts of one body see nearly the same
            trace.routed.append(model.name)
            proofs = self._proofs if model.config.routing == "goodput" else None
            trace.candidates += _candidates(model, order, now, proofs, known)
        return order

    def note_prefix(self, served: ServedModel, replica: Replica, ask: Ask) -> None:
        """The replica is about to read this prompt."""
        if served.config.routing in READS_PREFIX:
            self._index.note(ask.prefix, _owner(replica))

    def _ordered(
        self, model: ServedModel, replicas: Sequence[Replica], ask: Ask, now: float, known: Mapping[str, int] = NOBODY
    ) -> list[Replica]:
        if len(replicas) <= 1:
            return [*replicas]
        by_name = {f"{replica.model}/{replica.name}": replica for replica in replicas}
        proofs = self._proofs if model.config.routing == "goodput" else None
        views = [_view(name, each, model, now, known, proofs) for name, each in by_name.items()]
        policy = POLICIES[model.config.routing]
        order = room_first(policy(views, ask, self._fleet.next_turn(model)))
        return [by_name[view.name] for view in order]

    def last_resort(self, model: ServedModel, ask: Ask) -> Replica:
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


class Route:
    """One request's replicas, one after the other. Each request passes here: a class costs a third of what an
    asynchronous generator would."""

    def __init__(
        self,
        router: Router,
        first: ServedModel,
        parts: Sequence[ServedModel],
        check: Check,
        trace: Trace,
        ask: Ask,
        on_late: OnLate | None,
    ) -> None:
        self._router = router
        self._first = first
        self._parts = parts
        self._left = iter(parts)
        self._check = check
        self._trace = trace
        self._ask = ask
        self._on_late = on_late
        self._refusal: GoodgateError | None = None
        self._num_given = 0
        self._served = first  # whose replicas are given now
        self._order: Iterator[Replica] = iter(())
        self._held: AbstractContextManager[object] | None = None

    def __aiter__(self) -> Route:
        return self

    async def __anext__(self) -> Replica:
        while self._num_given < self._first.config.max_attempts:
            for replica in self._order:
                if self._can(replica):
                    self._router.note_prefix(self._served, replica, self._ask)
                    self._num_given += 1
                    return replica
            self.close()
            if (served := next(self._left, None)) is None:
                return await self._last_resort()
            await self._turn_to(served)
        raise StopAsyncIteration

    def close(self) -> None:
        """The model that was held may go."""
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)

    async def _turn_to(self, served: ServedModel) -> None:
        try:
            await self._let_in(served)
        except (EngineUnavailable, Overloaded) as error:
            self._refusal = self._refusal or error
        else:
            self._served = served
            self._order = iter(self._router.in_order(served, self._trace, self._ask))

    async def _let_in(self, served: ServedModel) -> None:
        if not self._router.lets_in_at_once(served, self._ask):
            self._held = await self._router.let_in(served, self._trace, self._ask, self._on_late)
            self._held.__enter__()

    def _can(self, replica: Replica) -> bool:
        if not replica.has_started:
            return False  # it has left, or ended, since the order was made
        try:
            self._check(replica.started_adapter)
        except (UnsupportedParameter, UnsupportedOperation) as error:
            self._refusal = self._refusal or error
            self._trace.refusals[replica.model, replica.name] = error.message
            return False
        return True

    async def _last_resort(self) -> Replica:
        if self._num_given:
            raise StopAsyncIteration
        if self._refusal is not None:
            raise self._refusal
        self._num_given = self._first.config.max_attempts
        await self._let_in(self._parts[0])
        return self._router.last_resort(self._first, self._ask)


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
        trust = replica.standing.trust(now)
        yield Candidate(
            model=replica.model,
            engine=replica.engine,
            replica=replica.name,
            policy=model.config.routing,
            state=replica.state._value_,  # `value` is a descriptor in Python, and each request passes here
            reason=replica.reason or ("" if trust == 1 and replica in order else replica.standing.why_left_out(now)),
            in_flight=replica.in_flight,
            waiting=replica.load.waiting,
            place=order.index(replica) if replica in order else None,
            open_tokens=replica.open_tokens,
            cached_tokens=_cached_tokens(replica, known),
            trust=trust,
            doubt="" if proofs is None else proofs.of(replica, now).doubt,
        )
