"""Reads the ledger: sums over all files, one request, and what is usual for its replica. Nothing here writes.

    reader = LedgerReader(home / FOLDER)
    rows, total = reader.usage(("tenant", "model"), Span(since, until))
    found = reader.find("req-1")                       # its newest record, and who else used that id
    usual = reader.usual(found.record)                 # medians of the day before it

Each file is asked by itself and its answers are added up here, so memory does not grow with the number of records.
Percentiles come from latencies rounded to three digits and counted. A file that cannot be read is left out, and named
in `skipped`.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from gateway.records import ledger_files
from gateway.records.ledger_files import NotALedger, NotBegun
from gateway.records.record import CLIENT_LEFT, COLUMNS, Record

T = TypeVar("T")
Group: TypeAlias = tuple[str, ...]
_Rows: TypeAlias = list[tuple[Any, ...]]

DAY_S = 86_400.0
# What records can be summed by, and how each is read off a row.
GROUPS: Mapping[str, str] = {
    "tenant": "tenant",
    "key": "key",
    "model": "served_model",
    "engine": "engine",
    "replica": "replica",
    "route": "route",
    "day": "strftime('%Y-%m-%d', received, 'unixepoch')",
}
SUMS: Mapping[str, str] = {
    "requests": "COUNT(*)",
    "failed": f"SUM(status != {CLIENT_LEFT} AND (status >= 400 OR code != ''))",
    "left": f"SUM(status = {CLIENT_LEFT})",
    "prompt_tokens": "SUM(prompt_tokens)",
    "cached_tokens": "SUM(COALESCE(cached_tokens, 0))",
    "completion_tokens": "SUM(completion_tokens)",
    "reasoning_tokens": "SUM(COALESCE(reasoning_tokens, 0))",
    "estimated": "SUM(is_estimated)",
    "engine_s": "SUM(engine_s)",
}
_ROUNDED = "printf('%.2e', {})"  # to three digits, so that what is counted has few values
_NUM_USUAL = 5  # records that make something usual


class Span(Struct, frozen=True):
    """A half-open time, in seconds since 1970."""

    since: float = 0.0
    until: float = float("inf")


class Latency(Struct, frozen=True):
    """Seconds; None where nothing was measured."""

    p50: float | None = None
    p99: float | None = None


class Usage(Struct, frozen=True):
    """One line of sums. `left`: the client did not wait for the end. `engine_s`: engines' time, failed attempts too.
    `estimated`: requests whose tokens no engine has counted."""

    group: Group
    requests: int
    failed: int
    left: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    estimated: int
    engine_s: float
    ttft_s: Latency
    tpot_s: Latency


class Found(Struct, frozen=True):
    """The newest record of an id, how many there are, and whose they are."""

    record: Record
    count: int
    tenants: tuple[str, ...]


class Usual(Struct, frozen=True):
    """Medians of the same model's requests on the same replica, in the day before; None where they were too few."""

    count: int = 0
    prefill_s: float | None = None
    tpot_s: float | None = None


class LedgerReader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.skipped: dict[str, str] = {}  # names of files that could not be read, and why

    def usage(
        self, by: Sequence[str], span: Span, only: Mapping[str, str] | None = None
    ) -> tuple[list[Usage], Usage | None]:
        """The sums of each group, in the groups' order, and of all together. `only` maps some of GROUPS to a value."""
        where, values = _where(span, only or {})
        groups = ", ".join(GROUPS[name] for name in by) or "''"
        sums_query = f"SELECT {groups}, {', '.join(SUMS.values())} FROM requests WHERE {where} GROUP BY {groups}"
        latency_queries = [
            f"SELECT {groups}, {_ROUNDED.format(column)}, COUNT(*) FROM requests "
            f"WHERE {where} AND {column} IS NOT NULL GROUP BY {groups}, {_ROUNDED.format(column)}"
            for column in ("ttft_s", "tpot_s")
        ]

        def ask(db: sqlite3.Connection) -> tuple[_Rows, list[_Rows]]:
            return db.execute(sums_query, values).fetchall(), [
                db.execute(query, values).fetchall() for query in latency_queries
            ]

        sums: dict[Group, list[float]] = {}
        latencies: tuple[dict[Group, Counter[str]], ...] = ({}, {})  # by group, how often each latency was seen
        for summed, counted in self._each(ask, since=span.since):
            for group, row in _grouped(summed, len(by)):
                before = sums.setdefault(group, [0] * len(SUMS))
                before[:] = [a + b for a, b in zip(before, row, strict=True)]
            for counters, rows in zip(latencies, counted, strict=True):
                for group, (value, count) in _grouped(rows, len(by)):
                    counters.setdefault(group, Counter())[value] += count
        if not sums:
            return [], None
        none: Counter[str] = Counter()
        lines = [
            _usage(group, row, *(counters.get(group, none) for counters in latencies))
            for group, row in sorted(sums.items())
        ]
        total = [sum(column) for column in zip(*sums.values(), strict=True)]
        return lines, _usage((), total, *(sum(counters.values(), none) for counters in latencies))

    def find(self, request_id: str, tenant: str | None = None) -> Found | None:
        """The newest record with this id. Ids are the clients' choice, so there may be several."""
        mine = "" if tenant is None else "AND tenant = ?"
        values = (request_id,) if tenant is None else (request_id, tenant)
        newest_query = f"SELECT * FROM requests WHERE request_id = ? {mine} ORDER BY received DESC LIMIT 1"
        whose_query = f"SELECT tenant, COUNT(*) FROM requests WHERE request_id = ? {mine} GROUP BY tenant"

        def ask(db: sqlite3.Connection) -> tuple[list[Record], dict[str, int]]:
            newest = [_record(row) for row in db.execute(newest_query, values)]
            return newest, dict(db.execute(whose_query, values).fetchall())

        records: list[Record] = []
        whose: Counter[str] = Counter()
        for newest, counts in self._each(ask):
            records += newest
            whose.update(counts)
        if not records:
            return None
        return Found(max(records, key=lambda record: record.received), whose.total(), tuple(sorted(whose)))

    def newest(self, tenant: str | None = None) -> Record | None:
        """The last request that came in, whoever or only this tenant sent it."""
        found = self._top("received", 1, Span(), tenant)
        return found[0] if found else None

    def slowest(self, number: int, span: Span, tenant: str | None = None) -> list[Record]:
        return self._top("duration_s", number, span, tenant)

    def usual(self, record: Record) -> Usual:
        """What the requests before this one took, where it was answered."""
        where = "served_model = ? AND replica = ? AND received >= ? AND received < ? AND code = '' AND ttft_s > 0"
        values = (record.served_model, record.replica, record.received - DAY_S, record.received)
        queries = [
            f"SELECT {_ROUNDED.format(column)}, COUNT(*) FROM requests "
            f"WHERE {where} AND {column} IS NOT NULL GROUP BY {_ROUNDED.format(column)}"
            for column in ("prefill_s", "tpot_s")
        ]

        def ask(db: sqlite3.Connection) -> list[dict[str, int]]:
            return [dict(db.execute(query, values).fetchall()) for query in queries]

        prefill: Counter[str] = Counter()
        tpot: Counter[str] = Counter()
        for prefill_counts, tpot_counts in self._each(ask, since=record.received - DAY_S):
            prefill.update(prefill_counts)
            tpot.update(tpot_counts)
        medians = (percentile(counts, 0.5) if counts.total() >= _NUM_USUAL else None for counts in (prefill, tpot))
        return Usual(prefill.total(), *medians)

    def ids_like(self, beginning: str, limit: int = 5) -> list[str]:
        """Ids that begin so: what was copied may have been cut."""
        query = "SELECT DISTINCT request_id FROM requests WHERE request_id >= ? AND request_id < ? LIMIT ?"
        bounds = (beginning, beginning + chr(0x10FFFF), limit)
        found = [
            name for names in self._each(lambda db: [row[0] for row in db.execute(query, bounds)]) for name in names
        ]
        return sorted(set(found))[:limit]

    def oldest(self) -> float | None:
        """When the oldest request that is still kept came in."""
        for times in self._each(lambda db: db.execute("SELECT MIN(received) FROM requests").fetchone()):
            if times[0] is not None:
                return float(times[0])
        return None

    def _top(self, column: str, number: int, span: Span, tenant: str | None) -> list[Record]:
        where, values = _where(span, {} if tenant is None else {"tenant": tenant})
        query = f"SELECT * FROM requests WHERE {where} ORDER BY {column} DESC LIMIT ?"
        rows = self._each(lambda db: [_record(row) for row in db.execute(query, (*values, number))], since=span.since)
        records = [record for found in rows for record in found]
        return sorted(records, key=lambda record: -float(getattr(record, column)))[:number]

    def _each(self, ask: Callable[[sqlite3.Connection], T], *, since: float = 0.0) -> Iterator[T]:
        """What each file answers, oldest first; those from before a time are left out. A request is in the file of the
        day on which it ended, so never in one before it came in."""
        first = ledger_files.day_of(since)
        for segment in ledger_files.segments(self.folder):
            if segment.day < first:
                continue
            try:
                with closing(ledger_files.connect_to_read(self.folder / segment.name)) as db:
                    answer = ask(db)
            except NotBegun:
                continue
            except (sqlite3.DatabaseError, NotALedger) as error:
                if (self.folder / segment.name).exists():  # otherwise it was let go while we came to it
                    self.skipped[segment.name] = str(error)
                continue
            yield answer


def percentile(counts: Mapping[str, int], share: float) -> float | None:
    """The smallest value that so many of all do not exceed; None of nothing.

    >>> percentile({"1.00e+00": 98, "2.00e+00": 1, "3.00e+00": 1}, 0.99)
    2.0
    """
    wanted, seen = share * sum(counts.values()), 0
    for value, count in sorted((float(text), count) for text, count in counts.items()):
        seen += count
        if seen >= wanted:
            return value
    return None


def _usage(group: Group, sums: Sequence[float], ttft: Counter[str], tpot: Counter[str]) -> Usage:
    values: dict[str, Any] = {
        name: value if name == "engine_s" else int(value) for name, value in zip(SUMS, sums, strict=True)
    }
    ttft_s, tpot_s = (Latency(percentile(counts, 0.5), percentile(counts, 0.99)) for counts in (ttft, tpot))
    return Usage(group=group, ttft_s=ttft_s, tpot_s=tpot_s, **values)


def _where(span: Span, only: Mapping[str, str]) -> tuple[str, tuple[Any, ...]]:
    conditions = ["received >= ?", "received < ?", *(f"{GROUPS[name]} = ?" for name in only)]
    return " AND ".join(conditions), (span.since, span.until, *only.values())


def _grouped(rows: Iterable[tuple[Any, ...]], num_groups: int) -> Iterator[tuple[Group, tuple[Any, ...]]]:
    """Each row as its group and what was asked of it. Without groups the query has an empty one."""
    width = max(num_groups, 1)
    for row in rows:
        yield row[:num_groups], row[width:]


def _record(row: Sequence[Any]) -> Record:
    return msgspec.convert(dict(zip(COLUMNS, row, strict=True)), Record, strict=False)
