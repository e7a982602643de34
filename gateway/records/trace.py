"""What is noted about one request on its way, for its headers, its log line, its metrics and the ledger. Never holds
the prompt."""

from __future__ import annotations

import time
from collections.abc import Mapping

from aiohttp import web
from msgspec import Struct, field

from adapters.types import Usage
from gateway.admission.priority import Priority
from gateway.records.random_ids import random_hex
from gateway.records.trace_context import TraceContext, new_span_id
from gateway.tenants.keys import Key

CANCELLED = "cancelled"
LOST = "lost"  # another attempt at the same time was faster


class Attempt(Struct, kw_only=True):
    """One try on one replica. `outcome` is "ok", "cancelled", "lost" or the code of what failed. `why` is empty for the
    first try; later ones have the code of the failure before them, "hedge" or "continuation"."""

    model: str
    engine: str
    replica: str
    why: str = ""
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    ended: float | None = None
    outcome: str = ""
    reason: str = ""  # the failure in words
    engine_s: float = 0.0  # its share of the engine's time, once it has ended (see gateway/replicas/engine_time.py)
    num_choices: int = 1
    is_stream: bool = False  # a slow client may then have made the engine wait
    expected_prompt_tokens: int = 0
    usage: Usage | None = None  # as the engine told it
    span_id: str = ""  # where the request's spans are recorded

    @property
    def token_time_s(self) -> float | None:
        """Seconds for each output token after the first of each choice. None without a whole answer that has such
        tokens; what a slow client made the engine wait is in it."""
        num_more = 0 if self.usage is None else self.usage.completion_tokens - self.num_choices
        if self.outcome != "ok" or self.ended is None or self.first_token is None or num_more <= 0:
            return None
        return (self.ended - self.first_token) * self.num_choices / num_more


class Candidate(Struct, frozen=True):
    """A replica as routing saw it when it chose. `place` counts from 0, the best; None where it could not be chosen."""

    model: str
    engine: str
    replica: str
    policy: str
    state: str
    reason: str  # why it was not ready
    in_flight: int  # this gateway's open generations on it
    waiting: int | None  # in the engine's own queue, as of the last probe
    place: int | None
    open_tokens: int = 0  # the most that the open generations may come to
    cached_tokens: int = 0  # of the prompt, that it was thought to have read before
    trust: float = 1.0  # below 1 for one that has fared worse than the others
    doubt: str = ""  # why routing does not trust what a race has proven of it, where it asks


class Trace(Struct, kw_only=True):
    """`caller` is None where no key is asked for. `model` stays empty until the name is known to be a configured one;
    `asked_model` is the client's own word, whatever it is. Times are seconds on the monotonic clock; `received` alone
    is the wall's. Once it has `ended` it changes no more."""

    request_id: str
    route: str
    method: str = ""
    received: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    status: int = 0
    code: str = ""
    context: TraceContext | None = None  # its place in a distributed trace, where it has one
    span_id: str = ""  # its own span, where spans are recorded
    is_let_in: bool = False  # to a route for callers, and with a valid key where one is asked for
    caller: Key | None = None
    cache_salt: str = ""  # of a tenant of the gateway in front of this one, if that has told it
    session: str = ""  # that the caller says the request belongs to
    body_read: float | None = None
    asked_model: str = ""
    model: str = ""
    is_stream: bool = False
    num_prompts: int = 1
    num_choices: int = 1  # of all prompts together
    chain: tuple[str, ...] = ()  # the model or group and its fallbacks, as far as the caller may use them
    routed: list[str] = field(default_factory=list)  # those of them whose replicas were looked at: the candidates
    candidates: list[Candidate] = field(default_factory=list)
    refusals: dict[tuple[str, str], str] = field(default_factory=dict)  # by model and replica: what it cannot honour
    priority: Priority = Priority.DEFAULT
    ttft_wish_s: float | None = None  # the caller's own, where it is tighter than the model's
    waited_s: float = 0.0  # for its turn, and for a model that had to be loaded
    queued_s: float = 0.0  # of that, for its turn
    attempts: list[Attempt] = field(default_factory=list)
    ttft_s: float | None = None
    client_s: float = 0.0  # for a client that took nothing more
    expected_prompt_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    num_pieces: int = 0  # of text that engines have given, for answers that end without a count of tokens
    limits: dict[str, str] = field(default_factory=dict)  # headers that tell the caller what is left to him
    _waited_until: float = 0.0

    @property
    def elapsed_s(self) -> float:
        return (time.perf_counter() if self.ended is None else self.ended) - self.started

    def note_wait(self, began: float, ended: float) -> None:
        """One wait for a model. Those of a request's several prompts pass at the same time and count once."""
        self.waited_s += max(0.0, ended - max(began, self._waited_until))
        self._waited_until = max(ended, self._waited_until)

    def note_queued(self, began: float, ended: float) -> None:
        """One wait for a turn."""
        before_s = self.waited_s
        self.note_wait(began, ended)
        self.queued_s += self.waited_s - before_s

    @property
    def trace_id(self) -> str:
        """The distributed trace that it belongs to; empty where there is none."""
        return "" if self.context is None else self.context.trace_id

    def headers_for(self, attempt: Attempt) -> Mapping[str, str]:
        """What tells the engine of the trace. The parent of its spans is the attempt if that becomes a span itself;
        otherwise the caller's span, so that nothing is missing between the two."""
        context = self.context
        if context is None:
            return {}
        parent_id = attempt.span_id or context.parent_id or new_span_id()
        state = {"tracestate": context.state} if context.state else {}
        return {"traceparent": context.traceparent(parent_id), **state}

    @property
    def last_attempt(self) -> Attempt | None:
        """The latest that was not made in vain beside a faster one."""
        for attempt in reversed(self.attempts):
            if attempt.outcome != LOST:
                return attempt
        return None


TRACE = web.RequestKey("trace", Trace)


def new_request_id() -> str:
    """Six bytes of the time and six at random: ids of one time lie together, so the ledger's index grows at its end and
    not all over."""
    return f"req-{int(time.time() * 1000):012x}{random_hex(6)}"
