"""One try on one replica (retries.py makes another on the next one).

    async with attempts.generate(trace, request, None, ask, replica, Try()) as answer: ...

An attempt is open for as long as its answer is. Its outcome, its tokens and its share of the engine's time are noted
once, whatever becomes of it; what the replica's failure says of the replica goes to the fleet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TypeVar

from adapters.errors import EngineProtocolError, GoodgateError
from adapters.tools.strict import StrictTools, held_to_schema
from adapters.types import Chunk, GenerateRequest, Usage
from adapters.wire import outgoing
from gateway.admission.gate import Gates
from gateway.attempts.answer import Answer, Question, read_whole
from gateway.attempts.tries import Try
from gateway.records import logs
from gateway.records.metrics import Metrics
from gateway.records.trace import CANCELLED, LOST, Attempt, Trace, new_request_id
from gateway.records.trace_context import new_span_id
from gateway.replicas.fleet import Fleet
from gateway.replicas.replica import Replica
from gateway.routing.ask import Ask

_log = logs.logger("dispatch")

T = TypeVar("T")


class Attempts:
    def __init__(self, fleet: Fleet, gates: Gates, metrics: Metrics, *, is_verbatim: bool) -> None:
        self._fleet = fleet
        self._gates = gates
        self._metrics = metrics
        self._is_verbatim = is_verbatim  # an engine's own words may be recorded, though they may quote a prompt

    @asynccontextmanager
    async def generate(
        self, trace: Trace, request: GenerateRequest, strict: StrictTools | None, ask: Ask, replica: Replica, how: Try
    ) -> AsyncIterator[Answer]:
        """The replica's answer, once its first chunk is in hand: all of it where the client does not stream. Leaving
        the block stops the engine's work."""
        chunks = replica.started_adapter.generate(request, request_id=new_request_id())
        if strict is not None:
            chunks = held_to_schema(chunks, strict)
        async with self._attempt(replica, trace, ask, how) as attempt, aclosing(chunks):
            self._fleet.note_start(replica, attempt, ask.prompt_tokens)
            first = await self._first_chunk(chunks, replica, trace, attempt)
            how.on_first_token()
            rest = chunks if request.is_stream else await read_whole(first, chunks, request.num_choices, trace)
            attempt.num_choices = request.num_choices
            attempt.is_stream = request.is_stream
            answer = Answer(replica.model, first, rest, partial(self._account, replica, trace, attempt), by=replica)
            try:
                yield answer
            finally:
                if request.is_stream:
                    trace.num_pieces += answer.num_given

    @asynccontextmanager
    async def ask(self, trace: Trace, question: Question[T], ask: Ask, replica: Replica, how: Try) -> AsyncIterator[T]:
        """The replica's answer in one piece."""
        async with self._attempt(replica, trace, ask, how) as attempt:
            answer = await question.ask(replica.started_adapter)
            self._account(replica, trace, attempt, Usage(question.num_tokens(answer), 0))
            yield answer

    @asynccontextmanager
    async def _attempt(self, replica: Replica, trace: Trace, ask: Ask, how: Try) -> AsyncIterator[Attempt]:
        attempt = Attempt(model=replica.model, engine=replica.engine, replica=replica.name, why=how.why, outcome="ok")
        attempt.expected_prompt_tokens = ask.prompt_tokens
        if trace.span_id:
            attempt.span_id = new_span_id()
        trace.attempts.append(attempt)
        outgoing.HEADERS.set(trace.headers_for(attempt))
        failure: GoodgateError | None = None
        with self._fleet.generation(replica, ask.tokens) as share:
            try:
                yield attempt
            except GoodgateError as error:
                attempt.outcome = error.code or error.type
                attempt.reason = error.message if self._is_verbatim else error.for_records
                failure = error
                _log_failure(replica, trace, error, attempt.reason)
                raise
            except (asyncio.CancelledError, GeneratorExit):
                attempt.outcome = LOST if how.is_lost else CANCELLED
                raise
            except Exception:
                attempt.outcome = "internal_error"
                raise
            finally:
                attempt.ended = time.perf_counter()
                attempt.engine_s = share(attempt.ended)
                self._metrics.attempted(replica, attempt)
                self._fleet.note_attempt(replica, attempt, failure)
                self._gates.note_end(attempt)

    async def _first_chunk(
        self, chunks: AsyncGenerator[Chunk, None], replica: Replica, trace: Trace, attempt: Attempt
    ) -> Chunk:
        try:
            first = await anext(chunks)
        except StopAsyncIteration:
            raise EngineProtocolError(f"The engine {replica.engine!r} ended without an answer.") from None
        attempt.first_token = time.perf_counter()
        self._fleet.note_first_token(replica, attempt, attempt.first_token)
        self._gates.note_first_token(attempt)
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


def _log_failure(replica: Replica, trace: Trace, error: GoodgateError, reason: str) -> None:
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
