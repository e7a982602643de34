"""One request's life: shape -> admit -> route -> attempt -> stream -> record.

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

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from adapters.base import EngineAdapter
from adapters.errors import (
    ContextLengthExceeded,
    EngineProtocolError,
    EngineUnavailable,
    GoodgateError,
    InvalidRequest,
    Overloaded,
    StreamInterrupted,
    UnsupportedOperation,
    UnsupportedParameter,
)
from adapters.tools.strict import StrictTools, held_to_schema, strict_tools
from adapters.types import CacheSalt, Chunk, GenerateRequest, Usage
from adapters.wire import outgoing
from gateway import admission
from gateway.fan_out import fan_out
from gateway.records import logs
from gateway.records.metrics import Metrics
from gateway.records.prefixes import PrefixWatch
from gateway.records.trace import CANCELLED, Attempt, Candidate, Trace, new_request_id
from gateway.records.trace_context import new_span_id
from gateway.replicas.fleet import Fleet, Replica, ServedModel, State
from gateway.replicas.loader import Loader, OnLate
from gateway.replicas.routing import POLICIES, ReplicaView
from gateway.shaping import shaped
from gateway.tenants import cost
from gateway.tenants.accounts import Claim
from gateway.tenants.budgets import Amount, microseconds
from gateway.tenants.cost import Cost, EngineSeconds
from gateway.tenants.quotas import Quotas
from gateway.tenants.salts import Salts

NOT_READY_RETRY_AFTER_S = 2.0

_log = logs.logger("dispatch")

T = TypeVar("T")
Check: TypeAlias = Callable[[EngineAdapter[Any]], None]  # raises what the engine refuses, by name


def _no_tokens(_: object) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Generic[T]):
    """Something an engine answers in one piece."""

    check: Check
    ask: Callable[[EngineAdapter[Any]], Awaitable[T]]
    num_tokens: Callable[[T], int] = _no_tokens  # read by the engine for this answer, where that is accounted for
    expected_tokens: int = 0  # what that number may be, before it is known


class Answer:
    """A generation under way. Iterating gives its chunks; `account` is told the usage when it comes by."""

    def __init__(
        self, model: str, first: Chunk, rest: AsyncGenerator[Chunk, None], account: Callable[[Usage], None]
    ) -> None:
        self.model = model
        self.account = account
        self._first: Chunk | None = first
        self._rest = rest
        self.num_given = 0

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    def __anext__(self) -> Awaitable[Chunk]:
        # Not a coroutine itself: every chunk passes here, and one frame less is a tenth of its cost.
        self.num_given += 1
        if self._first is None:
            return self._rest.__anext__()
        first, self._first = self._first, None
        return _given(first)


async def _given(chunk: Chunk) -> Chunk:
    return chunk


class Dispatcher:
    def __init__(
        self,
        fleet: Fleet,
        loader: Loader,
        metrics: Metrics,
        *,
        max_in_flight: int,
        quotas: Quotas,
        salts: Salts,
        prefixes: PrefixWatch,
        is_verbatim: bool = False,
    ) -> None:
        self._fleet = fleet
        self._loader = loader
        self._prefixes = prefixes
        self._is_verbatim = is_verbatim  # an engine's own words may be recorded, though they may quote a prompt
        self._quotas = quotas
        self._salts = salts
        self._engine_seconds = EngineSeconds()
        self._metrics = metrics
        self._max_in_flight = max_in_flight
        self.in_flight = 0
        self.is_draining = False
        self.is_cut_off = False  # draining took too long, and what is still open is being cancelled
        self._tasks: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()

    @asynccontextmanager
    async def open(
        self, requests: Sequence[GenerateRequest], trace: Trace, on_late: OnLate | None = None
    ) -> AsyncIterator[Answer]:
        """Generate for one prompt or several; several become one answer whose choice index is prompt * n + k."""
        trace.asked_model, trace.is_stream = requests[0].model, requests[0].is_stream
        model = self._fleet.resolve(requests[0].model, trace.caller)
        trace.model = model.name
        requests = [self._prepared(each, model, trace) for each in requests]
        costs = [cost.of_generation(each) for each in requests]
        trace.num_prompts, trace.num_choices = len(requests), len(requests) * requests[0].num_choices
        trace.expected_prompt_tokens = sum(each.prompt_tokens for each in costs)
        with self._admitted(len(requests)):
            async with self._within_limits(trace, costs):
                if len(requests) == 1:
                    async with self._generation(model, trace, on_late, requests[0]) as answer:
                        yield answer
                else:
                    opens = [partial(self._generation, model, trace, on_late, request) for request in requests]
                    async with fan_out(opens, requests[0].num_choices) as chunks:
                        yield Answer(model.name, await anext(chunks), chunks, _counted_already)
        self._prefixes.note(trace, requests[0])

    async def ask(self, question: Question[T], name: str, trace: Trace) -> T:
        """The answer of one of the model's own replicas."""
        trace.asked_model = name
        model = self._fleet.resolve_one(name, trace.caller)
        trace.model = model.name
        costs = [Cost(question.expected_tokens, 0)]
        trace.expected_prompt_tokens = question.expected_tokens
        with self._admitted(1):
            async with self._within_limits(trace, costs), AsyncExitStack() as stack:
                replicas = self._route([model], question.check, trace)
                return await _first_to_answer(stack, replicas, partial(self._ask_one, trace, question))

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is new, let what is open finish, and after the time, or when hurried, cancel what is left."""
        self.is_draining = True
        finished = asyncio.ensure_future(self._all_finished())
        hurried = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({finished, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (finished, hurried):
            waiting.cancel()
        self.is_cut_off = True
        late = set(self._tasks)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=2)

    def hurry(self) -> None:
        """Whoever drains, or will, waits no longer."""
        self._hurry.set()

    async def _all_finished(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    @contextmanager
    def _admitted(self, num_wanted: int) -> Iterator[None]:
        if num_wanted > self._max_in_flight:
            raise InvalidRequest(f"One request may hold at most {self._max_in_flight} prompts.", param="prompt")
        refusal = admission.refusal(
            num_wanted,
            in_flight=self.in_flight,
            max_in_flight=self._max_in_flight,
            is_draining=self.is_draining,
        )
        if refusal is not None:
            raise refusal
        task = asyncio.current_task()
        assert task is not None
        self.in_flight += num_wanted
        self._tasks.add(task)
        try:
            yield
        finally:
            self.in_flight -= num_wanted
            self._tasks.discard(task)

    @asynccontextmanager
    async def _within_limits(self, trace: Trace, costs: Sequence[Cost]) -> AsyncIterator[None]:
        """Holds the caller's share of what his key and tenant may use, and charges what was used in the end. A client
        that leaves pays for what the engine has done for him, as far as that can be told."""
        if trace.caller is None:
            yield
            return
        expected_s = len(costs) * self._engine_seconds.expected(trace.model)
        expected = Amount(sum(each.prompt_tokens + each.completion_tokens for each in costs), microseconds(expected_s))
        claim = Claim(len(costs), expected)
        async with self._quotas.reserved(trace.caller, claim, tell=trace.limits.update) as reservation:
            try:
                yield
            finally:
                engine_s = cost.engine_s(trace)
                reservation.spent = Amount(cost.spent(trace).tokens, microseconds(engine_s))
            self._engine_seconds.learn(trace.model, engine_s / len(costs))

    @asynccontextmanager
    async def _generation(
        self, model: ServedModel, trace: Trace, on_late: OnLate | None, request: GenerateRequest
    ) -> AsyncIterator[Answer]:
        """The answer of the first replica that gives one: of the model's own, or of those of its fallbacks. A prompt
        that is too long for it goes to the models that are there for long ones."""

        def check(adapter: EngineAdapter[Any]) -> None:
            adapter.check_parameters(request)
            if self._salts.is_required:
                adapter.check_salt(request)

        attempt = partial(self._generate_on, trace, request, await strict_tools(request))
        async with AsyncExitStack() as stack:
            chain = [model, *self._models(model.config.fallbacks, trace)]
            try:
                answer = await _first_to_answer(stack, self._route(chain, check, trace, on_late), attempt)
            except ContextLengthExceeded:
                longer = self._models(model.config.context_fallbacks, trace)
                if not longer:
                    raise
                answer = await _first_to_answer(stack, self._route(longer, check, trace, on_late), attempt)
            yield answer

    def _models(self, names: Sequence[str], trace: Trace) -> list[ServedModel]:
        """Those of the models that the caller may use."""
        models = [self._fleet.models[name] for name in names]
        return [model for model in models if model.is_for(trace.caller)]

    def _prepared(self, request: GenerateRequest, model: ServedModel, trace: Trace) -> GenerateRequest:
        """The request as replicas get it. Its `model` is then what a `*` in their own name for it stands for."""
        request = shaped(request, model.shape)
        changes: dict[str, str] = {}
        if (asked := self._fleet.passed_on(request.model)) != request.model:
            changes["model"] = asked
        if (salt := self._salts.of(trace.caller, trace.cache_salt)) is not None:
            changes["cache_salt"] = CacheSalt(salt)
        return msgspec.structs.replace(request, **changes) if changes else request

    async def _route(
        self, chain: Sequence[ServedModel], check: Check, trace: Trace, on_late: OnLate | None = None
    ) -> AsyncGenerator[Replica, None]:
        """Replicas that can do what is asked, best first: those of the first model in the chain, then of the next. A
        model is kept loaded until the next one is wanted, or the route is closed."""
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
                for replica in self._in_order(served, trace):
                    try:
                        check(_adapter(replica))
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
            yield self._last_resort(chain[0])

    def _in_order(self, model: ServedModel, trace: Trace) -> list[Replica]:
        ready = {f"{replica.model}/{replica.name}": replica for replica in model.replicas if replica.is_ready}
        views = [ReplicaView(name, each.in_flight, model.rank(each)) for name, each in ready.items()]
        order = [ready[view.name] for view in POLICIES[model.config.routing](views, self._fleet.next_turn(model))]
        if model.name not in trace.routed:  # prompts of one body see nearly the same
            trace.routed.append(model.name)
            trace.candidates.extend(_candidates(model, order))
        return order

    def _last_resort(self, model: ServedModel) -> Replica:
        """With nothing ready, one try on a replica that was: it may be back before the next probe says so."""
        for replica in model.replicas:
            if replica.state is State.UNHEALTHY and replica.has_started:
                return replica
        states = ", ".join(f"{replica.name} is {replica.state.value}" for replica in model.replicas)
        raise EngineUnavailable(
            f"No replica of model {model.name!r} is ready: {states}; /ready says why.",
            retry_after_s=NOT_READY_RETRY_AFTER_S,
        )

    @asynccontextmanager
    async def _generate_on(
        self, trace: Trace, request: GenerateRequest, strict: StrictTools | None, replica: Replica
    ) -> AsyncIterator[Answer]:
        chunks = _adapter(replica).generate(request, request_id=new_request_id())
        if strict is not None:
            chunks = held_to_schema(chunks, strict)
        async with self._attempt(replica, trace) as attempt, aclosing(chunks):
            first = await self._first_chunk(chunks, replica, trace, attempt)
            rest = chunks if request.is_stream else await _read_whole(first, chunks, request.num_choices, trace)
            attempt.num_choices = request.num_choices
            answer = Answer(replica.model, first, rest, partial(self._account, replica, trace, attempt))
            try:
                yield answer
            finally:
                if request.is_stream:
                    trace.num_pieces += answer.num_given

    @asynccontextmanager
    async def _ask_one(self, trace: Trace, question: Question[T], replica: Replica) -> AsyncIterator[T]:
        async with self._attempt(replica, trace) as attempt:
            answer = await question.ask(_adapter(replica))
            self._account(replica, trace, attempt, Usage(question.num_tokens(answer), 0))
            yield answer

    @asynccontextmanager
    async def _attempt(self, replica: Replica, trace: Trace) -> AsyncIterator[Attempt]:
        """One try on one replica, open for as long as the block. Its outcome is counted once, whatever it is."""
        attempt = Attempt(model=replica.model, engine=replica.engine, replica=replica.name, outcome="ok")
        if trace.span_id:
            attempt.span_id = new_span_id()
        trace.attempts.append(attempt)
        outgoing.HEADERS.set(trace.headers_for(attempt))
        with self._fleet.generation(replica) as share:
            try:
                yield attempt
            except GoodgateError as error:
                attempt.outcome = error.code or error.type
                attempt.reason = error.message if self._is_verbatim else error.for_records
                self._note_failure(replica, trace, error, attempt.reason)
                raise
            except (asyncio.CancelledError, GeneratorExit):
                attempt.outcome = CANCELLED
                raise
            except Exception:
                attempt.outcome = "internal_error"
                raise
            finally:
                attempt.ended = time.perf_counter()
                attempt.engine_s = share(attempt.ended)
                self._metrics.attempted(replica, attempt)

    async def _first_chunk(
        self, chunks: AsyncGenerator[Chunk, None], replica: Replica, trace: Trace, attempt: Attempt
    ) -> Chunk:
        try:
            first = await anext(chunks)
        except StopAsyncIteration:
            raise EngineProtocolError(f"The engine {replica.engine!r} ended without an answer.") from None
        attempt.first_token = time.perf_counter()
        if trace.ttft_s is None:
            trace.ttft_s = attempt.first_token - trace.started
            self._metrics.first_token(replica, trace.ttft_s)
        return first

    def _account(self, replica: Replica, trace: Trace, attempt: Attempt, usage: Usage) -> None:
        attempt.usage = usage
        trace.prompt_tokens += usage.prompt_tokens
        trace.completion_tokens += usage.completion_tokens
        if usage.cached_tokens is not None:
            trace.cached_tokens = (trace.cached_tokens or 0) + usage.cached_tokens
        if usage.reasoning_tokens is not None:
            trace.reasoning_tokens = (trace.reasoning_tokens or 0) + usage.reasoning_tokens
        self._metrics.tokens(replica, usage)

    def _note_failure(self, replica: Replica, trace: Trace, error: GoodgateError, reason: str) -> None:
        if isinstance(error, EngineUnavailable):
            self._fleet.note_unavailable(replica, error.for_records)  # everybody reads it on /ready
        if error.status >= 500:
            logs.warning(
                _log,
                "attempt failed",
                request_id=trace.request_id,
                model=replica.model,
                replica=replica.name,
                code=error.code,
                reason=reason,
            )


async def _first_to_answer(
    stack: AsyncExitStack,
    replicas: AsyncGenerator[Replica, None],
    attempt: Callable[[Replica], AbstractAsyncContextManager[T]],
) -> T:
    """One attempt after the other, until one answers or fails for good. One that answers stays open on the stack, and
    below it the route, which keeps its model loaded."""
    failure: GoodgateError | None = None
    await stack.enter_async_context(aclosing(replicas))
    try:
        async for replica in replicas:
            try:
                return await stack.enter_async_context(attempt(replica))
            except GoodgateError as error:
                if not error.retryable:
                    raise
                failure = error
    except GoodgateError:
        await replicas.aclose()  # the model may have to make room for those that are tried next
        raise
    assert failure is not None  # a route gives at least one replica, or raises
    raise failure


async def _read_whole(
    first: Chunk, rest: AsyncIterator[Chunk], num_choices: int, trace: Trace
) -> AsyncGenerator[Chunk, None]:
    """Everything after the first chunk, already read; `StreamInterrupted` if the answer is not whole."""
    read = []
    async for chunk in rest:
        read.append(chunk)
        trace.num_pieces += 1
    num_finished = sum(chunk.finish_reason is not None for chunk in (first, *read))
    if num_finished < num_choices:
        raise StreamInterrupted("The engine's stream ended before the answer was whole.")
    return _replay(read)


async def _replay(chunks: Sequence[Chunk]) -> AsyncGenerator[Chunk, None]:
    for chunk in chunks:
        yield chunk


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


def _adapter(replica: Replica) -> EngineAdapter[Any]:
    assert replica.adapter is not None  # routing offers only replicas that have started
    return replica.adapter


def _counted_already(_: Usage) -> None:
    """The parts of a fanned-out answer have told their own usage; their sum must not count again."""
