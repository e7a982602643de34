"""One request as the ledger keeps it: a flat row for sums, and details for the one question why. Pure.

    record = record_of(trace, proven)            # from a trace that has ended
    record.detail                                # JSON: attempts, candidates with their evidence

The phases follow each other and sum up to the duration:

    receive  the client sends its body                 failed   attempts that came to nothing
    gateway  checks, routing, writing the end          prefill  from the attempt that answered to its first token,
    queue    waiting for a turn, or for a model to load             with the time in the engine's own queue
                                                       decode   from the first token to the last
                                                       client   while the client took nothing more

Prompts, answers, headers and keys are not in a trace, so they cannot be here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec
from msgspec import Struct

from gateway.records.trace import CANCELLED, Attempt, Candidate, Trace
from gateway.tenants import cost

PHASES = ("receive", "gateway", "queue", "failed", "prefill", "decode", "client")
MAX_NAME = 256  # of what a client calls a model; no configured name is longer
MAX_REASON = 500
MAX_ATTEMPTS_KEPT = 32  # of a list of prompts; all are in the sums
CLIENT_LEFT = 499

Proven: TypeAlias = Mapping[tuple[str, ...], float]  # by model, engine and replica: what a race has proven, in 1/s


class AttemptRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One try on one replica, in seconds since the request came in: `ok`, `cancelled`, `lost` or the code of its
    failure, and `why` it was made beside the first. Tokens are estimates where an engine has worked and not counted."""

    model: str
    engine: str
    replica: str
    started_s: float
    first_token_s: float | None = None
    ended_s: float
    outcome: str
    reason: str = ""
    why: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class CandidateRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replica that could have served, what was known of it then, and what became of it."""

    model: str
    engine: str
    replica: str
    policy: str
    state: str
    in_flight: int
    waiting: int | None = None
    place: int | None = None
    open_tokens: int = 0
    cached_tokens: int = 0
    trust: float = 1.0
    proven_rps: float | None = None
    doubt: str = ""  # why that is not trusted
    verdict: str


class Detail(Struct, frozen=True, kw_only=True, omit_defaults=True):
    trace_id: str = ""  # of the distributed trace that the request belongs to
    turn_s: float = 0.0  # of the queue phase, the wait for a turn at the model's gate
    attempts: tuple[AttemptRecord, ...] = ()
    candidates: tuple[CandidateRecord, ...] = ()
    not_reached: tuple[str, ...] = ()  # fallback models that nobody had to look at


class Record(Struct, frozen=True, kw_only=True):
    """A row. Its fields are the columns of the table, in this order; times are seconds, `received` since 1970.

    `model` is what the asked name leads to, `served_model` who answered in the end: a fallback, or the same. Tokens are
    the engine's count, or where it gave none (`is_estimated`) what was asked of it and the pieces that it wrote.
    """

    request_id: str
    received: float
    route: str
    status: int
    code: str
    key: str
    tenant: str
    asked_model: str
    model: str
    served_model: str
    engine: str
    replica: str
    is_stream: bool
    num_choices: int
    num_attempts: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    reasoning_tokens: int | None
    is_estimated: bool
    duration_s: float
    ttft_s: float | None
    tpot_s: float | None
    engine_s: float
    receive_s: float
    gateway_s: float
    queue_s: float
    failed_s: float
    prefill_s: float
    decode_s: float
    client_s: float
    detail: str

    @property
    def phases(self) -> dict[str, float]:
        return {phase: getattr(self, f"{phase}_s") for phase in PHASES}

    @property
    def has_left(self) -> bool:
        return self.status == CLIENT_LEFT

    @property
    def has_failed(self) -> bool:
        """An error was told: as the status, or in a stream that had begun."""
        return not self.has_left and (self.status >= 400 or bool(self.code))

    @property
    def num_decoded(self) -> float:
        """Tokens of one choice after its first, which decoding took its time for."""
        return max(self.completion_tokens / self.num_choices - 1, 0)


COLUMNS = Record.__struct_fields__


def record_of(trace: Trace, proven: Proven) -> Record:
    assert trace.ended is not None
    answering = answering_attempt(trace)
    last = answering or trace.last_attempt
    served = last.model if last is not None else trace.model
    phases = phases_of(trace)
    spent = cost.spent(trace)
    num_decoded = spent.completion_tokens / trace.num_choices - 1
    has_decoded = answering is not None and answering.first_token is not None and num_decoded > 0
    return Record(
        request_id=trace.request_id,
        received=trace.received,
        route=trace.route,
        status=trace.status,
        code=trace.code,
        key="" if trace.caller is None else trace.caller.name,
        tenant="" if trace.caller is None else trace.caller.tenant or trace.caller.name,
        asked_model=_cut(trace.asked_model, MAX_NAME),
        model=trace.model,
        served_model=served,
        engine="" if last is None else last.engine,
        replica="" if last is None else last.replica,
        is_stream=trace.is_stream,
        num_choices=trace.num_choices,
        num_attempts=len(trace.attempts),
        prompt_tokens=spent.prompt_tokens,
        completion_tokens=spent.completion_tokens,
        cached_tokens=None if trace.cached_tokens is None else cost.bounded(trace.cached_tokens),
        reasoning_tokens=None if trace.reasoning_tokens is None else cost.bounded(trace.reasoning_tokens),
        is_estimated=spent.is_estimated,
        duration_s=trace.elapsed_s,
        ttft_s=None if answering is None or answering.first_token is None else answering.first_token - trace.started,
        tpot_s=phases["decode"] / num_decoded if has_decoded else None,
        engine_s=cost.engine_s(trace),
        detail=msgspec.json.encode(_detail(trace, proven)).decode(),
        **{f"{phase}_s": duration_s for phase, duration_s in phases.items()},
    )


def detail_of(record: Record) -> Detail:
    return msgspec.json.decode(record.detail, type=Detail)


def answering_attempt(trace: Trace) -> Attempt | None:
    """The attempt whose tokens the client got, or the first of several for a list of prompts. One that failed on the
    way counts only where no other answered."""
    if len(trace.attempts) == 1:  # nearly always
        [only] = trace.attempts
        return only if only.first_token is not None or only.outcome == "ok" else None
    begun = [attempt for attempt in trace.attempts if attempt.first_token is not None]
    good = [attempt for attempt in begun if attempt.outcome in ("ok", CANCELLED)]
    if good:
        return min(good, key=lambda attempt: attempt.first_token or 0.0)
    answered = [attempt for attempt in trace.attempts if attempt.outcome == "ok"]  # in one piece: a question's answer
    return begun[-1] if begun else answered[-1] if answered else None


def phases_of(trace: Trace) -> dict[str, float]:
    """Where the request's time went, in seconds, by phase. They sum up to its duration.

    >>> attempt = Attempt(model="m", engine="e", replica="r", started=2.0, first_token=5.0, ended=9.0, outcome="ok")
    >>> trace = Trace(request_id="x", route="/", started=0.0, body_read=1.0, ended=9.5, attempts=[attempt])
    >>> {phase: duration for phase, duration in phases_of(trace).items() if duration}
    {'receive': 1.0, 'gateway': 1.5, 'prefill': 3.0, 'decode': 4.0}
    """
    total = trace.elapsed_s
    phases = dict.fromkeys(PHASES, 0.0)
    if trace.attempts:
        phases.update(_of_attempts(trace))
    has_read = trace.body_read is not None
    phases["receive"] = trace.body_read - trace.started if trace.body_read is not None else 0.0
    rest = max(total - sum(phases.values()), 0.0)
    if not has_read and not trace.attempts:
        phases["receive"] = rest  # refused before its body was there
    else:
        phases["queue"] = min(trace.waited_s, rest)
        phases["gateway"] = rest - phases["queue"]
    return phases


def _of_attempts(trace: Trace) -> Iterator[tuple[str, float]]:
    """What happened from the first attempt's beginning to the last one's end."""
    begin = min(attempt.started for attempt in trace.attempts)
    end = max(_end(attempt, trace) for attempt in trace.attempts)
    answering = answering_attempt(trace)
    if answering is None:
        last = trace.attempts[-1]
        waited_s = end - last.started if last.outcome == CANCELLED else 0.0
        yield "prefill", waited_s
        yield "failed", end - begin - waited_s
        return
    failed_s = sum(
        _end(attempt, trace) - attempt.started
        for attempt in trace.attempts
        if attempt is not answering and _end(attempt, trace) <= answering.started
    )
    yield "failed", min(failed_s, answering.started - begin)
    if answering.first_token is None:
        yield "prefill", end - answering.started
        return
    yield "prefill", answering.first_token - answering.started
    writing_s = end - answering.first_token
    client_s = min(trace.client_s, writing_s)
    yield "client", client_s
    yield "decode", writing_s - client_s


def _detail(trace: Trace, proven: Proven) -> Detail:
    return Detail(
        trace_id=trace.trace_id,
        turn_s=trace.queued_s,
        attempts=tuple(_attempt(attempt, trace) for attempt in trace.attempts[:MAX_ATTEMPTS_KEPT]),
        candidates=tuple(_candidate(candidate, trace, proven) for candidate in trace.candidates),
        not_reached=tuple(name for name in trace.chain if name not in trace.routed),
    )


def _attempt(attempt: Attempt, trace: Trace) -> AttemptRecord:
    used = cost.of_attempt(attempt)
    return AttemptRecord(
        model=attempt.model,
        engine=attempt.engine,
        replica=attempt.replica,
        started_s=attempt.started - trace.started,
        first_token_s=None if attempt.first_token is None else attempt.first_token - trace.started,
        ended_s=_end(attempt, trace) - trace.started,
        outcome=attempt.outcome,
        reason=_cut(attempt.reason, MAX_REASON),
        why=attempt.why,
        prompt_tokens=used.prompt_tokens,
        completion_tokens=used.completion_tokens,
    )


def _candidate(candidate: Candidate, trace: Trace, proven: Proven) -> CandidateRecord:
    return CandidateRecord(
        model=candidate.model,
        engine=candidate.engine,
        replica=candidate.replica,
        policy=candidate.policy,
        state=candidate.state,
        in_flight=candidate.in_flight,
        waiting=candidate.waiting,
        place=candidate.place,
        open_tokens=candidate.open_tokens,
        cached_tokens=candidate.cached_tokens,
        trust=candidate.trust,
        proven_rps=proven.get((candidate.model, candidate.engine, candidate.replica)),
        doubt=candidate.doubt,
        verdict=_verdict(candidate, trace),
    )


def _verdict(candidate: Candidate, trace: Trace) -> str:
    tries = [
        (number, attempt)
        for number, attempt in enumerate(trace.attempts, start=1)
        if (attempt.model, attempt.replica) == (candidate.model, candidate.replica)
    ]
    if tries:
        number, attempt = tries[-1]
        chosen = f"chosen {_ordinal(number)}" if len(tries) == 1 else f"chosen for {len(tries)} attempts"
        return f"{chosen}: {'answered' if attempt.outcome == 'ok' else attempt.outcome}"
    if (refusal := trace.refusals.get((candidate.model, candidate.replica))) is not None:
        return f"refused: {_cut(refusal, MAX_REASON)}"
    if candidate.place is None:
        what = "left out" if candidate.state == "ready" else "not ready"
        return f"{what}: {_cut(candidate.reason, MAX_REASON)}" if candidate.reason else what
    return "not needed"


def _ordinal(number: int) -> str:
    ending = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _end(attempt: Attempt, trace: Trace) -> float:
    end = trace.ended if attempt.ended is None else attempt.ended
    assert end is not None
    return end


def _cut(text: str, length: int) -> str:
    """At most so many characters, all of which a database takes: half of a surrogate pair is not one."""
    return text[:length] if text.isascii() else text[:length].encode("utf-8", "replace").decode()
