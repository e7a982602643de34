"""Why a request took as long as it did, in words: a verdict of one sentence, and the story behind it. Pure.

    verdict(record, usual)           # "Slow to its first token (TTFT): 4.1 s of 4.9 s were prefill on vllm-a, ..."
    story(record, usual)             # lines: who, what, a timeline, the attempts, the candidates

What is slow is what took longer than is usual for that model on that replica. Where nothing is known to be usual, the
phase that took the most is named, and called no more than that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from gateway.records.ledger_reader import Usual
from gateway.records.record import CandidateRecord, Detail, Record, detail_of

BAR_WIDTH = 40
NOTICEABLE_S = 0.05  # less than this nobody waits for
NOTICEABLE_SHARE = 0.2  # of the request's time, or of what is usual
POLICIES = {
    "round_robin": "each in its turn",
    "weighted": "each as often as its weight says",
    "least_load": "the fewest open tokens for its weight first",
    "power_of_two": "of two drawn by lot, the one with less to do and a faster first token",
    "prefix_affinity": "the one that has read most of the prompt before, unless it is hot; else the least load",
    "session_affinity": "the session's own, unless it is hot; without a session the least load",
    "cost": "the cheapest that has room",
    "goodput": "what is proven of each is filled up first; without proof, the least work",
    "order": "a group's first model before its second, of one model the fewest open tokens first",
}
_IN_PHASE = {
    "receive": "the client took to send its body",
    "gateway": "the gateway itself took",
    "failed": "went into attempts that failed",
}


def verdict(record: Record, usual: Usual) -> str:
    """The one sentence to read first."""
    if record.has_left:
        return f"The client left after {seconds(record.duration_s)}, {_when_left(record)}."
    if record.has_failed:
        return _failure(record)
    if usual.prefill_s is None and usual.tpot_s is None:
        return f"{_largest(record)} There is nothing to compare it with yet."
    excess = excess_s(record, usual)
    phase = max(excess, key=lambda each: excess[each])
    if excess[phase] < max(NOTICEABLE_S, NOTICEABLE_SHARE * (record.duration_s - excess[phase])):
        return _as_usual(record)
    return _slow(record, usual, phase)


def excess_s(record: Record, usual: Usual) -> dict[str, float]:
    """By phase, what it took beyond the usual. Of a phase that is usually next to nothing, that is all of it."""
    excess = dict(record.phases)
    excess["prefill"] = record.prefill_s - usual.prefill_s if usual.prefill_s is not None else 0.0
    per_token_s = 0.0 if record.tpot_s is None or usual.tpot_s is None else record.tpot_s - usual.tpot_s
    excess["decode"] = per_token_s * record.num_decoded
    return excess


def story(record: Record, usual: Usual) -> Iterator[str]:
    detail = detail_of(record)
    yield from _head(record)
    yield ""
    yield from timeline(record, usual)
    if detail.attempts:
        yield from ("", "attempts")
        yield from (f"  {line}" for line in _attempts(detail, record))
    if detail.candidates or detail.not_reached:
        yield from ("", f"candidates{_policy(detail.candidates)}")
        yield from (f"  {line}" for line in _candidates(detail))


def timeline(record: Record, usual: Usual) -> Iterator[str]:
    """A bar for each phase, one after the other."""
    width = max(len(_took(duration_s)) for duration_s in record.phases.values())
    begin_s = 0.0
    for phase, duration_s in record.phases.items():
        left, length = _bar(begin_s, duration_s, record.duration_s)
        begin_s += duration_s
        bar = (" " * left + "█" * length).ljust(BAR_WIDTH)
        yield f"  {phase:8} {_took(duration_s):>{width}}  {bar}  {_beside(phase, record, usual)}".rstrip()


def seconds(duration_s: float) -> str:
    """
    >>> seconds(0.0123), seconds(4.1), seconds(75.0)
    ('12.3 ms', '4.10 s', '75.0 s')
    """
    if duration_s < 1:
        return f"{duration_s * 1e3:.3g} ms" if duration_s >= 0.001 else f"{duration_s * 1e3:.2f} ms"
    return f"{duration_s:.0f} s" if duration_s >= 100 else f"{duration_s:#.3g} s"


def printable(text: str) -> str:
    """Text from outside, without what could move a terminal's cursor or colour it."""
    return (
        text
        if text.isprintable()
        else "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    )


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they need."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _slow(record: Record, usual: Usual, phase: str) -> str:
    took = seconds(record.phases[phase])
    where = printable(record.replica)
    if phase == "client":
        return f"Slow because of its client, which took nothing for {took} of {seconds(record.duration_s)}."
    if phase == "decode":
        assert record.tpot_s is not None
        assert usual.tpot_s is not None  # or nothing would be known to be in excess
        usually = f"{seconds(usual.tpot_s)} is usual"
        return f"Slow by decode (TPOT): {seconds(record.tpot_s)} a token on {where}, where {usually}."
    if phase == "prefill":
        assert usual.prefill_s is not None
        cause = f"were prefill on {where}{_behind(record)}, where {seconds(usual.prefill_s)} is usual"
    else:
        cause = _cause(phase, record)
    until_first = seconds(record.duration_s if record.ttft_s is None else record.ttft_s)
    return f"Slow to its first token (TTFT): {took} of {until_first} {cause}."


def _behind(record: Record) -> str:
    """How busy the replica was when it was chosen: prefill has the time in the engine's own queue in it."""
    for candidate in detail_of(record).candidates:
        if (candidate.model, candidate.replica) == (record.served_model, record.replica) and candidate.in_flight:
            return f", behind {candidate.in_flight:,} open generation{'s' * (candidate.in_flight > 1)}"
    return ""


def _as_usual(record: Record) -> str:
    if record.tpot_s is not None and record.decode_s > record.duration_s / 2:
        return (
            f"Not slow but long: {record.completion_tokens:,} tokens at {seconds(record.tpot_s)} each, "
            f"as usual on {printable(record.replica)}."
        )
    return f"Not slow: {seconds(record.duration_s)}, as usual on {printable(record.replica)}."


def _largest(record: Record) -> str:
    phase = max(record.phases, key=lambda each: record.phases[each])
    what = f"{seconds(record.phases[phase])} of {seconds(record.duration_s)}"
    if phase == "decode" and record.tpot_s is not None:
        return f"Most of it was decode (TPOT): {what}, {seconds(record.tpot_s)} a token."
    if phase == "prefill":
        return f"Most of it was prefill (TTFT) on {printable(record.replica)}: {what}."
    if phase == "client":
        return f"Most of it was spent on a client that took nothing: {what}."
    return f"Most of it, {what}, {_cause(phase, record)}."


def _cause(phase: str, record: Record) -> str:
    if phase != "queue":
        return _IN_PHASE[phase]
    is_for_turn = detail_of(record).turn_s > record.queue_s / 2
    return "it waited for its turn at the model's gate" if is_for_turn else "it waited for a model to be loaded"


def _failure(record: Record) -> str:
    how = f"with status {record.status}" if record.status >= 400 else "in the middle of its stream"
    times = {0: "before any attempt", 1: "after one attempt"}.get(
        record.num_attempts, f"after {record.num_attempts} attempts"
    )
    return f"Failed {how} (`{printable(record.code)}`), {times} and {seconds(record.duration_s)}."


def _when_left(record: Record) -> str:
    if record.ttft_s is not None:
        return f"when it had about {record.completion_tokens:,} tokens"
    if record.num_attempts == 0:
        return "before any engine was asked"
    return f"while {printable(record.replica)} had not given a first token yet"


def _head(record: Record) -> Iterator[str]:
    kind = "streamed" if record.is_stream else "whole"
    yield f"{record.request_id}  POST {record.route}  {record.status} {printable(record.code)}".rstrip() + f"  {kind}"
    whose = f"tenant {record.tenant}, key {record.key}" if record.key else "no key"
    yield f"{stamp(record.received)}  {whose}"
    if trace_id := detail_of(record).trace_id:
        yield f"trace {trace_id}"
    if record.asked_model:
        yield f"asked for {printable(record.asked_model)!r}{_led_to(record)}"
    about = "about " if record.is_estimated else ""
    cached = "" if record.cached_tokens is None else f" ({record.cached_tokens:,} from the engine's cache)"
    written = f"{about}{record.completion_tokens:,} completion tokens"
    yield f"{about}{record.prompt_tokens:,} prompt tokens{cached}, {written}"
    ttft = "" if record.ttft_s is None else f", TTFT {seconds(record.ttft_s)}"
    tpot = "" if record.tpot_s is None else f", TPOT {seconds(record.tpot_s)}"
    yield f"{seconds(record.duration_s)} in all{ttft}{tpot}"


def _led_to(record: Record) -> str:
    leads = "" if record.model in ("", record.asked_model) else f", which is {record.model!r}"
    if not record.replica:
        return leads
    verb = "went last to" if record.has_failed else "answered by"
    fallback = "" if record.served_model == record.model else f" of the fallback {record.served_model!r}"
    return f"{leads}, {verb} {record.replica}{fallback} ({record.engine})"


def _took(duration_s: float) -> str:
    return seconds(duration_s) if duration_s else "-"


def _beside(phase: str, record: Record, usual: Usual) -> str:
    if phase == "prefill" and usual.prefill_s is not None and record.prefill_s:
        return f"usual: {seconds(usual.prefill_s)} (median of {usual.count:,} in the day before)"
    if phase == "decode" and record.tpot_s is not None:
        compared = "" if usual.tpot_s is None else f", usual: {seconds(usual.tpot_s)}"
        return f"{seconds(record.tpot_s)} a token{compared}"
    if phase == "queue" and (turn_s := detail_of(record).turn_s):
        return f"{seconds(turn_s)} of it for a turn at the model's gate"
    return ""


def _bar(begin_s: float, duration_s: float, total_s: float) -> tuple[int, int]:
    """Where a phase's bar begins, and how long it is. One that took any noticeable time is seen."""
    scale = BAR_WIDTH / total_s if total_s > 0 else 0.0
    left, end = round(begin_s * scale), round((begin_s + duration_s) * scale)
    is_seen = duration_s * scale >= 0.05
    left = min(left, BAR_WIDTH - is_seen)
    return left, max(end - left, int(is_seen))


def _attempts(detail: Detail, record: Record) -> Iterator[str]:
    for attempt in detail.attempts:
        place = attempt.replica if attempt.model == record.model else f"{attempt.replica} of {attempt.model}"
        first = ""
        if attempt.first_token_s is not None:
            first = f", first token after {seconds(attempt.first_token_s - attempt.started_s)}"
        reason = f": {printable(attempt.reason)}" if attempt.reason else ""
        took = seconds(attempt.ended_s - attempt.started_s)
        yield f"+{attempt.started_s:.3f} s  {place}  {attempt.outcome}{first}, ended after {took}{reason}"
    if (more := record.num_attempts - len(detail.attempts)) > 0:
        yield f"and {more:,} more"


def _policy(candidates: Sequence[CandidateRecord]) -> str:
    names = dict.fromkeys(candidate.policy for candidate in candidates)
    return "".join(f" ({name}: {POLICIES.get(name, 'as configured')})" for name in names)


def _candidates(detail: Detail) -> Iterator[str]:
    if detail.candidates:
        facts = ("open", "tokens", "known", "trust", "queued there", "proven")
        titles = ("model", "replica", "engine", "state", "place", *facts, "verdict")
        yield from table([titles, *(_row(candidate) for candidate in detail.candidates)])
    for candidate in detail.candidates:
        if candidate.doubt:
            yield f"{candidate.replica}: its proven goodput is not trusted: {printable(candidate.doubt)}"
    for name in detail.not_reached:
        yield f"{name}: fallback, not reached"


def _row(candidate: CandidateRecord) -> tuple[str, ...]:
    return (
        candidate.model,
        candidate.replica,
        candidate.engine,
        candidate.state,
        "-" if candidate.place is None else str(candidate.place + 1),
        str(candidate.in_flight),
        f"{candidate.open_tokens:,}",
        f"{candidate.cached_tokens:,}" if candidate.cached_tokens else "-",
        f"{candidate.trust:.2f}",
        "-" if candidate.waiting is None else str(candidate.waiting),
        "-" if candidate.proven_rps is None else f"{candidate.proven_rps:g}/s",
        printable(candidate.verdict),
    )


def stamp(at: float) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03}Z"
