"""Answers whose every event is known: from the record of the scripted engine, or from the rows of our own cell.

truth = from_log(engine.take_log(), script, last=100)        # whatever load generator it was that asked
seen = from_spool(path)                                      # what ours has stamped of an engine that tells nothing
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from adapters.wire.sse import EventSplitter
from arena.load import spool
from arena.load.scripted_engine import Log, Record, Script
from arena.load.spool import RequestRow
from arena.outside.definitions import Answer, Event, Kind


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Payload(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


def from_log(log: Log, script: Script, *, last: int) -> list[Answer]:
    """The truth of the requests that came last; those before them were a tool's own trials."""
    recent = sorted(log.requests.values(), key=lambda record: record.received_ns)[-last:]
    told = list(_told(script))
    return [_true(record, told) for record in recent]


def _told(script: Script) -> Iterator[tuple[int, Kind, int, int | None]]:
    """Of each event with choices: its step, what it is, how many tokens it brings, and the count so far, if told."""
    for index, step in enumerate(script.steps):
        for event in EventSplitter().feed(step.data.encode("latin-1")):
            if event.data == b"[DONE]":
                continue
            payload = msgspec.json.decode(event.data, type=_Payload)
            total = payload.usage.completion_tokens if payload.usage is not None else None
            for choice in payload.choices:
                kind: Kind = "finish" if choice.finish_reason else "text" if choice.delta.content else "role"
                yield index, kind, 0 if kind != "text" else 1, total


def _true(record: Record, told: list[tuple[int, Kind, int, int | None]]) -> Answer:
    """Times are those at which the engine handed each event to the kernel, after it had the whole request."""
    events, so_far = [], 0
    for index, kind, tokens, total in told:
        brought = total - so_far if kind == "text" and total is not None else tokens
        so_far += brought
        events.append(Event((record.left_ns[index] - record.received_ns) / 1e6, kind, brought))
    return Answer(record.received_ns / 1e6, tuple(events), so_far)


def from_spool(path: Path) -> list[Answer]:
    """The measured ok rows of a cell. A finish reason is stamped with the usage, which engines send right behind it."""
    rows = [row for row in spool.read_rows(path) if isinstance(row, RequestRow)]
    return [_seen(row) for row in rows if row.measured and row.status == "ok" and row.token_ns]


def _seen(row: RequestRow) -> Answer:
    sent_ns = row.sent_ns or 0

    def event(stamp_ns: int, kind: Kind, tokens: int = 0) -> Event:
        return Event((stamp_ns - sent_ns) / 1e6, kind, tokens)

    events = [event(stamp_ns, "text", tokens) for stamp_ns, tokens in zip(row.token_ns, row.token_n, strict=True)]
    if row.role_ns is not None and row.role_ns < row.token_ns[0]:
        events.insert(0, event(row.role_ns, "role"))
    if row.usage_ns is not None and row.usage_ns >= row.token_ns[-1] and row.finish_reason is not None:
        events.append(event(row.usage_ns, "finish"))
    return Answer(sent_ns / 1e6, tuple(events), row.out_tok_usage or row.out_tok_counted)
