"""One request's life: shape -> admit -> hold limits -> route -> attempt -> stream -> record.

    async with dispatcher.open([request], trace) as answer:      # the first chunk is in hand
        async for chunk in answer:
            ...
    embeddings = await dispatcher.ask(Question(...), "model", trace)       # what is answered in one piece

Opening may try several replicas, then those of the fallback models, as long as the failures are retryable; once `open`
has answered there is no second attempt, because the client may have seen a part of the first. A client that does not
stream sees nothing before the end, so there the whole answer is in hand before `open` answers. A model that is loaded
on demand is waited for when it is its turn to be tried; `on_late` is called if that takes longer than a heartbeat, so
that a stream can show its client that it is alive. Leaving the block, for whatever reason, closes the adapter's
generator, and that stops the engine's work.

A question takes the same way, but always to one model, a group's first, and never to a fallback: the vectors and token
ids of another would mean something else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from functools import partial
from typing import Any, TypeAlias, TypeVar

from adapters.base import EngineAdapter
from adapters.errors import ContextLengthExceeded, EngineUnavailable, InvalidRequest
from adapters.tools.strict import strict_tools
from adapters.types import CacheSalt, Continuation, GenerateRequest, Usage, changed
from gateway.admission.gate import Gates
from gateway.admission.open_requests import OpenRequests
from gateway.attempts.answer import Answer, Question
from gateway.attempts.attempt import Attempts
from gateway.attempts.continuation import can_continue, continued, with_progress
from gateway.attempts.deadline import within
from gateway.attempts.hedging import Hedges
from gateway.attempts.retries import Retries
from gateway.attempts.tries import CONTINUATION, Try
from gateway.config import Live
from gateway.fan_out import fan_out
from gateway.records.metrics import Metrics
from gateway.records.prefixes import PrefixWatch
from gateway.records.trace import Trace
from gateway.replicas.fleet import Fleet
from gateway.replicas.loader import Loader, OnLate
from gateway.replicas.replica import Replica, ServedModel
from gateway.routing.ask import Ask
from gateway.routing.asking import Asks
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.proofs import Proofs
from gateway.routing.router import Router
from gateway.shaping import shaped
from gateway.tenants import cost
from gateway.tenants.charges import Charges
from gateway.tenants.cost import Cost
from gateway.tenants.quotas import Quotas
from gateway.tenants.salts import Salts

T = TypeVar("T")
Answering: TypeAlias = AbstractAsyncContextManager[Answer]
OpenAnswer: TypeAlias = Callable[[], Answering]
Begin: TypeAlias = Callable[[GenerateRequest, Ask, AsyncExitStack], Awaitable[Answer]]


class Dispatcher:
    def __init__(
        self,
        fleet: Fleet,
        loader: Loader,
        gates: Gates,
        metrics: Metrics,
        *,
        max_in_flight: int,
        quotas: Quotas,
        salts: Salts,
        prefixes: PrefixWatch,
        proofs: Proofs,
        live: Live,
        index: PrefixIndex,
        is_verbatim: bool = False,
    ) -> None:
        self.open_requests = OpenRequests(max_in_flight, gates.num_waiting)
        self._fleet = fleet
        self._salts = salts
        self._charges = Charges(quotas)
        self._asks = Asks(fleet, index)
        self._router = Router(fleet, loader, gates, proofs, index)
        self._attempts = Attempts(fleet, gates, metrics, is_verbatim=is_verbatim)
        self._retries = Retries(live, metrics)
        self._hedges = Hedges(gates, metrics)
        self._metrics = metrics
        self._prefixes = prefixes

    @asynccontextmanager
    async def open(
        self, requests: Sequence[GenerateRequest], trace: Trace, on_late: OnLate | None = None
    ) -> AsyncIterator[Answer]:
        """Generate for one prompt or several; several become one answer whose choice index is prompt * n + k."""
        trace.asked_model, trace.is_stream = requests[0].model, requests[0].is_stream
        model = self._fleet.resolve(requests[0].model, trace.caller)
        requests = [self._prepared(each, model, trace) for each in requests]
        costs = [cost.of_generation(each) for each in requests]
        _note(trace, model, requests, costs)
        chain = [model, *self._models((*model.config.fallbacks, *model.config.context_fallbacks), trace)]
        asks = [self._asks.of(chain, request, each, trace) for request, each in zip(requests, costs, strict=True)]
        begin = partial(self._begun, model, trace, on_late)
        with self.open_requests.admitted(len(requests)):
            async with self._charges.held(trace, costs), AsyncExitStack() as stack:
                if len(requests) == 1:
                    yield await begin(requests[0], asks[0], stack)
                else:
                    opens = [partial(_apart, begin, *each) for each in zip(requests, asks, strict=True)]
                    yield await _joined(opens, model, requests[0].num_choices, stack)
        self._prefixes.note(trace, requests[0])

    async def ask(self, question: Question[T], name: str, trace: Trace) -> T:
        """The answer of one of the model's own replicas."""
        trace.asked_model = name
        model = self._fleet.resolve_one(name, trace.caller)
        trace.model = model.name
        trace.expected_prompt_tokens = question.expected_tokens
        with self.open_requests.admitted(1):
            expected = Cost(question.expected_tokens, 0)
            async with self._charges.held(trace, [expected]), AsyncExitStack() as stack:
                ask = self._asks.of([model], None, expected, trace)
                stack.enter_context(self._retries.request())
                route = partial(self._router.route, [model], question.check, trace, ask)
                attempt = partial(self._attempts.ask, trace, question, ask)
                return await self._retries.first_answer(stack, route, attempt, model.config.max_attempts)

    def _prepared(self, request: GenerateRequest, model: ServedModel, trace: Trace) -> GenerateRequest:
        """The request as replicas get it. Its `model` is then what a `*` in their own name for it stands for."""
        request = shaped(request, model.shape)
        if isinstance(request.continuation, Continuation) and trace.caller is not None and not trace.caller.is_admin:
            raise InvalidRequest("'continuation' is for gateways; leave it out.", param="continuation")
        changes: dict[str, str] = {}
        if (asked := self._fleet.passed_on(request.model)) != request.model:
            changes["model"] = asked
        if (salt := self._salts.of(trace.caller, trace.cache_salt)) is not None:
            changes["cache_salt"] = CacheSalt(salt)
        return changed(request, **changes) if changes else request

    async def _begun(
        self,
        model: ServedModel,
        trace: Trace,
        on_late: OnLate | None,
        request: GenerateRequest,
        ask: Ask,
        stack: AsyncExitStack,
    ) -> Answer:
        """The answer of the first replica that gives one: of the model's own, or of those of its fallbacks. A prompt
        that is too long for it goes to the models that are there for long ones. It is open as long as the stack."""

        check = partial(self._check, request)
        strict = await strict_tools(request)
        telling = with_progress(model.config, request, strict)

        def generate(replica: Replica, how: Try) -> Answering:
            asked = request if telling is None or not can_continue(replica) else telling
            return self._attempts.generate(trace, asked, strict, ask, replica, how)

        attempt = self._hedges.hedged(model, check, generate)

        async def first_answer(chain: Sequence[ServedModel]) -> Answer:
            route = partial(self._router.route, chain, check, trace, ask, on_late)
            return await self._retries.first_answer(held, route, attempt, model.config.max_attempts)

        if (timeout_s := model.config.total_timeout_s) is not None:
            await stack.enter_async_context(within(timeout_s))
        stack.enter_context(self._retries.request())
        held = stack if telling is None else await stack.enter_async_context(AsyncExitStack())
        try:
            answer = await first_answer([model, *self._models(model.config.fallbacks, trace)])
        except ContextLengthExceeded:
            longer = self._models(model.config.context_fallbacks, trace)
            if not longer:
                raise
            answer = await first_answer(longer)
        if telling is None:
            return answer
        resume = partial(self._resumed, model, trace, ask)
        note = partial(self._metrics.add, "goodgate_continuations", model.name)
        return await continued(stack, held.pop_all(), answer, telling, resume, note)

    @asynccontextmanager
    async def _resumed(
        self, model: ServedModel, trace: Trace, ask: Ask, broken: Answer, rest: GenerateRequest
    ) -> AsyncIterator[Answer]:
        """The rest of an answer, by another replica than the one that broke off."""
        with closing(self._router.route([model], partial(self._check, rest), trace, ask)) as route:
            async for replica in route:
                if replica is not broken.by:
                    how = Try(why=CONTINUATION)
                    async with self._attempts.generate(trace, rest, None, ask, replica, how) as answer:
                        yield answer
                        return
        raise EngineUnavailable("No other replica could go on with the answer.")

    def _check(self, request: GenerateRequest, adapter: EngineAdapter[Any]) -> None:
        adapter.check_parameters(request)
        if self._salts.is_required:
            adapter.check_salt(request)

    def _models(self, names: Sequence[str], trace: Trace) -> list[ServedModel]:
        """Those of the models that the caller may use."""
        if not names:
            return []
        models = [self._fleet.models[name] for name in names if name in self._fleet.models]  # not taken out meanwhile
        return [model for model in models if model.is_for(trace.caller)]


def _note(trace: Trace, model: ServedModel, requests: Sequence[GenerateRequest], costs: Sequence[Cost]) -> None:
    trace.model = model.name
    trace.num_prompts, trace.num_choices = len(requests), len(requests) * requests[0].num_choices
    trace.expected_prompt_tokens = sum(each.prompt_tokens for each in costs)


@asynccontextmanager
async def _apart(begin: Begin, request: GenerateRequest, ask: Ask) -> AsyncIterator[Answer]:
    """One of several prompts, each of which may end for itself."""
    async with AsyncExitStack() as stack:
        yield await begin(request, ask, stack)


async def _joined(opens: Sequence[OpenAnswer], model: ServedModel, num_choices: int, stack: AsyncExitStack) -> Answer:
    """Of several prompts a client gets all their answers in one."""
    chunks = await stack.enter_async_context(fan_out(opens, num_choices))
    return Answer(model.name, [await anext(chunks)], chunks, _counted_already)


def _counted_already(_: Usage) -> None:
    """The parts of a fanned-out answer have told their own usage; their sum must not count again."""
