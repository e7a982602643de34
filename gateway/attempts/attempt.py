"""One try on one replica (retries.py makes another on the next one).

    async with attempts.generate(trace, request, None, ask, replica, Try()) as answer: ...

An attempt is open for as long as its answer is. Its outcome, its tokens and its share of the engine's time are noted
once, whatever becomes of it; what the replica's failure says of the replica goes to the fleet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TypeVar

from adapters.errors import EngineProtocolError, GoodgateError
from adapters.tools.strict import StrictTools, held_to_schema
from adapters.types import Chunk, GenerateRequest, Usage
from adapters.wire import outgoing
from gateway.admission.gate import Gates
from gateway.attempts.answer import Answer, Question, read_rest
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
        self.fleet = fleet
        self.gates = gates
        self.metrics = metrics
        self.is_verbatim = is_verbatim  # an engine's own words may be recorded, though they may quote a prompt

    def generate(
        self, trace: Trace, request: GenerateRequest, strict: StrictTools | None, ask: Ask, replica: Replica, how: Try
    ) -> AbstractAsyncContextManager[Answer]:
        """The replica's answer, once its first chunk is in hand: all of it where the client does not stream. Leaving
        the block stops the engine's work."""
        return _Generation(_UnderWay(self, replica, trace, ask, how), request, strict)

    @asynccontextmanager
    async def ask(self, trace: Trace, question: Question[T], ask: Ask, replica: Replica, how: Try) -> AsyncIterator[T]:
        """The replica's answer in one piece."""
        attempt = _UnderWay(self, replica, trace, ask, how)
        attempt.begin()
        try:
            answer = await question.ask(replica.started_adapter)
            attempt.account(Usage(question.num_tokens(answer), 0))
            yield answer
        except BaseException as error:
            attempt.end(error)
            raise
        attempt.end(None)


class _UnderWay:
    """What is noted of one attempt while it is under way. Each request passes here and through `_Generation`: classes
    cost a third of what generators would."""

    __slots__ = ("_attempts", "_mark", "ask", "how", "noted", "replica", "trace")

    def __init__(self, attempts: Attempts, replica: Replica, trace: Trace, ask: Ask, how: Try) -> None:
        self._attempts = attempts
        self.replica = replica
        self.trace = trace
        self.ask = ask
        self.how = how

    def begin(self) -> None:
        replica, trace = self.replica, self.trace
        self.noted = attempt = Attempt(
            model=replica.model,
            engine=replica.engine,
            replica=replica.name,
            why=self.how.why,
            outcome="ok",
            expected_prompt_tokens=self.ask.prompt_tokens,
        )
        if trace.span_id:
            attempt.span_id = new_span_id()
        trace.attempts.append(attempt)
        outgoing.HEADERS.set(trace.headers_for(attempt))
        self._mark = self._attempts.fleet.opened(replica, self.ask.tokens, attempt.started)

    def note_start(self) -> None:
        self._attempts.fleet.note_start(self.replica, self.noted, self.ask.prompt_tokens)

    def note_first_token(self) -> None:
        attempt, trace = self.noted, self.trace
        attempt.first_token = now = time.perf_counter()
        self._attempts.fleet.note_first_token(self.replica, attempt, now)
        self._attempts.gates.note_first_token(attempt)
        if trace.ttft_s is None:
            trace.ttft_s = now - trace.started
            self._attempts.metrics.first_token(self.replica, trace.ttft_s)

    def account(self, usage: Usage) -> None:
        trace = self.trace
        self.noted.usage = usage
        trace.prompt_tokens += usage.prompt_tokens
        trace.completion_tokens += usage.completion_tokens
        if usage.cached_tokens is not None:
            trace.cached_tokens = (trace.cached_tokens or 0) + usage.cached_tokens
        if usage.reasoning_tokens is not None:
            trace.reasoning_tokens = (trace.reasoning_tokens or 0) + usage.reasoning_tokens
        self._attempts.metrics.tokens(self.replica, usage)

    def end(self, error: BaseException | None) -> None:
        attempt = self.noted
        failure = error if isinstance(error, GoodgateError) else None
        if failure is not None:
            attempt.outcome = failure.code or failure.type
            attempt.reason = failure.message if self._attempts.is_verbatim else failure.for_records
            _log_failure(self.replica, self.trace, failure, attempt.reason)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            attempt.outcome = LOST if self.how.is_lost else CANCELLED
        elif error is not None:
            attempt.outcome = "internal_error"
        attempt.ended = now = time.perf_counter()
        attempt.engine_s = self._attempts.fleet.closed(self.replica, self.ask.tokens, self._mark, now)
        self._attempts.metrics.attempted(self.replica, attempt)
        self._attempts.fleet.note_attempt(self.replica, attempt, failure)
        self._attempts.gates.note_end(attempt)


class _Generation(AbstractAsyncContextManager[Answer]):
    """One attempt and the engine's chunks, for as long as the block lasts."""

    __slots__ = ("_answer", "_attempt", "_chunks", "_request")

    def __init__(self, attempt: _UnderWay, request: GenerateRequest, strict: StrictTools | None) -> None:
        chunks = attempt.replica.started_adapter.generate(request, request_id=new_request_id())
        self._chunks = chunks if strict is None else held_to_schema(chunks, strict)
        self._attempt = attempt
        self._request = request
        self._answer: Answer | None = None

    async def __aenter__(self) -> Answer:
        self._attempt.begin()
        try:
            self._answer = await self._begun()
        except BaseException as error:
            await self._end(error)
            raise
        return self._answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._answer is not None and self._request.is_stream:
            self._attempt.trace.num_pieces += self._answer.num_given
        await self._end(error)

    async def _begun(self) -> Answer:
        attempt, request = self._attempt, self._request
        attempt.note_start()
        chunks = [await self._first_chunk()]
        attempt.note_first_token()
        attempt.how.on_first_token()
        if not request.is_stream:
            await read_rest(chunks, self._chunks, request.num_choices, attempt.trace)
        attempt.noted.num_choices = request.num_choices
        attempt.noted.is_stream = request.is_stream
        return Answer(attempt.replica.model, chunks, self._chunks, attempt.account, by=attempt.replica)

    async def _first_chunk(self) -> Chunk:
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            engine = self._attempt.replica.engine
            raise EngineProtocolError(f"The engine {engine!r} ended without an answer.") from None

    async def _end(self, error: BaseException | None) -> None:
        try:
            await self._chunks.aclose()
        except BaseException as later:
            self._attempt.end(later)
            raise
        self._attempt.end(error)


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
