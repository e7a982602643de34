"""One try on one replica, and another on the next while the failures are such that it may do better.

    answer = await first_to_answer(stack, router.route(...), partial(attempts.generate, trace, request, None))

An attempt is open for as long as its answer is. Its outcome, its tokens and its share of the engine's time are noted
once, whatever becomes of it; what the replica's failure says of the replica goes to the fleet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import TypeVar

from adapters.errors import EngineProtocolError, EngineUnavailable, GoodgateError
from adapters.tools.strict import StrictTools, held_to_schema
from adapters.types import Chunk, GenerateRequest, Usage
from adapters.wire import outgoing
from gateway.answer import Answer, Question, read_whole
from gateway.records import logs
from gateway.records.metrics import Metrics
from gateway.records.trace import CANCELLED, Attempt, Trace, new_request_id
from gateway.records.trace_context import new_span_id
from gateway.replicas.fleet import Fleet, Replica

_log = logs.logger("dispatch")

T = TypeVar("T")


class Attempts:
    def __init__(self, fleet: Fleet, metrics: Metrics, *, is_verbatim: bool) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._is_verbatim = is_verbatim  # an engine's own words may be recorded, though they may quote a prompt

    @asynccontextmanager
    async def generate(
        self, trace: Trace, request: GenerateRequest, strict: StrictTools | None, replica: Replica
    ) -> AsyncIterator[Answer]:
        """The replica's answer, once its first chunk is in hand: all of it where the client does not stream. Leaving
        the block stops the engine's work."""
        chunks = replica.started_adapter.generate(request, request_id=new_request_id())
        if strict is not None:
            chunks = held_to_schema(chunks, strict)
        async with self._attempt(replica, trace) as attempt, aclosing(chunks):
            first = await self._first_chunk(chunks, replica, trace, attempt)
            rest = chunks if request.is_stream else await read_whole(first, chunks, request.num_choices, trace)
            attempt.num_choices = request.num_choices
            answer = Answer(replica.model, first, rest, partial(self._account, replica, trace, attempt))
            try:
                yield answer
            finally:
                if request.is_stream:
                    trace.num_pieces += answer.num_given

    @asynccontextmanager
    async def ask(self, trace: Trace, question: Question[T], replica: Replica) -> AsyncIterator[T]:
        """The replica's answer in one piece."""
        async with self._attempt(replica, trace) as attempt:
            answer = await question.ask(replica.started_adapter)
            self._account(replica, trace, attempt, Usage(question.num_tokens(answer), 0))
            yield answer

    @asynccontextmanager
    async def _attempt(self, replica: Replica, trace: Trace) -> AsyncIterator[Attempt]:
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


async def first_to_answer(
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
