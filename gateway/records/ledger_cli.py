"""`goodgate usage` and `goodgate why`: what the ledger knows, in sums and of one request.

Both only read, so they work beside a running gateway and without one. Results go to stdout, remarks to stderr.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from adapters.config import goodgate_home
from adapters.errors import GoodgateError
from gateway.records.ledger_files import FOLDER
from gateway.records.ledger_reader import GROUPS, SUMS, Latency, LedgerReader, Span, Usage
from gateway.records.record import Record, detail_of
from gateway.records.why import seconds, stamp, story, table, verdict
from gateway.tenants.keys_cli import seconds as duration

MAX_SLOWEST = 1000
NOBODY = "-"  # a caller without a key, a request that reached no model
TITLES = (
    "requests", "failed", "left", "prompt", "cached", "completion", "engine s", "TTFT p50", "p99", "TPOT p50", "p99",
)  # fmt: skip

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Since = Annotated[
    str | None, typer.Option(help="From this day or time (UTC) on, or so long ago: 2026-11-30, 12h.", metavar="TIME")
]


class LedgerError(GoodgateError):
    """The ledger does not have what was asked for. The message says why."""

    code = "ledger_error"


@app.command(epilog="Example: goodgate usage --by tenant,day --since 7d --csv > usage.csv")
def usage(
    by: Annotated[
        str, typer.Option(help=f"What to sum by, with commas between: {', '.join(GROUPS)}.", metavar="NAMES")
    ] = "tenant,model,day",
    since: Since = None,
    until: Annotated[
        str | None, typer.Option(help="Before this day or time (UTC), or up to so long ago.", metavar="TIME")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    model: Annotated[str | None, typer.Option(help="Only what this model answered.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="As CSV, without the total.")] = False,
) -> None:
    """Sum up requests, tokens, engine time and latencies by tenant, model and day."""
    try:
        groups = groups_of(by)
        if as_json and as_csv:
            raise LedgerError("Choose one of --json and --csv.")
        span = span_of(since, until, time.time())
        only = {name: value for name, value in (("tenant", tenant), ("model", model)) if value is not None}
        reader = _reader()
        rows, total = reader.usage(groups, span, only)
    except GoodgateError as error:
        _fail(error)
    _tell_skipped(reader)
    if as_json:
        _echo_json(
            {"by": groups, "rows": [_as_data(row, groups) for row in rows], "total": total and _as_data(total, ())}
        )
    elif as_csv:
        _write_csv([_as_data(row, groups) for row in rows], groups)
    elif total is None:
        typer.echo(f"There are no such requests in {reader.folder}.", err=True)
    else:
        for line in usage_table(groups, rows, total):
            typer.echo(line)


@app.command(epilog="Example: goodgate why req-0f3c    or: goodgate why --last    goodgate why --slowest 5 --since 1h")
def why(
    request_id: Annotated[
        str | None,
        typer.Argument(help="What `x-request-id` of the answer said.", metavar="[REQUEST_ID]", show_default=False),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="The request that came in last.")] = False,
    slowest: Annotated[
        int | None, typer.Option(help="Not one: a list of the slowest.", min=1, max=MAX_SLOWEST, metavar="NUMBER")
    ] = None,
    since: Since = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's requests.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say where a request's time went, which attempts were made, and what could have served it."""
    try:
        if sum((request_id is not None, last, slowest is not None)) != 1:
            raise LedgerError("Name one request by its id, or ask for --last or --slowest NUMBER.")
        if since is not None and slowest is None:
            raise LedgerError("--since goes with --slowest.")
        reader = _reader()
        if slowest is not None:
            records = reader.slowest(slowest, span_of(since or "24h", None, time.time()), tenant)
            _tell_slowest(reader, records, as_json=as_json)
        else:
            _tell_why(reader, _one(reader, request_id, tenant), as_json=as_json)
    except GoodgateError as error:
        _fail(error)
    _tell_skipped(reader)


def groups_of(names: str) -> tuple[str, ...]:
    """
    >>> groups_of("tenant, day")
    ('tenant', 'day')
    """
    groups = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in groups:
        if name not in GROUPS:
            raise LedgerError(f"Nothing can be summed by {name!r}; there is: {', '.join(GROUPS)}.")
    return groups


def span_of(since: str | None, until: str | None, now: float) -> Span:
    """Both ends as days, times, or durations before now."""
    span = Span(0.0 if since is None else moment(since, now), float("inf") if until is None else moment(until, now))
    if span.until <= span.since:
        raise LedgerError("--until must be after --since; it is the first moment that no longer counts.")
    return span


def moment(text: str, now: float) -> float:
    """Seconds since 1970. What names no time zone is in UTC.

    >>> moment("1970-01-02", 0.0), moment("12h", 50_000.0)
    (86400.0, 6800.0)
    """
    if text[-1:] in "smhd" and text[:-1].isdigit():
        return now - duration(text)
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise LedgerError(
            f"{text!r} is no time; write 2026-11-30, 2026-11-30T12:00 or, for so long ago, 12h."
        ) from error


def usage_table(groups: Sequence[str], rows: Sequence[Usage], total: Usage) -> Iterator[str]:
    body = [[*(name or NOBODY for name in row.group), *_cells(row)] for row in rows]
    last = ["total", *[""] * (len(groups) - 1), *_cells(total)]
    lines = [[*groups, *TITLES], *body, last]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        if number == len(lines) - 1:
            yield "─" * (sum(widths) + 2 * (len(widths) - 1))
        names = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)][: len(groups)]
        figures = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)][len(groups) :]
        yield "  ".join([*names, *figures]).rstrip()
    if total.estimated:
        requests = f"{total.estimated:,} request{'s' * (total.estimated > 1)}"
        yield f"Tokens of {requests} are estimated: no engine has counted them."


def _cells(row: Usage) -> Iterator[str]:
    counts = (row.requests, row.failed, row.left, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
    yield from (f"{count:,}" for count in counts)
    yield f"{row.engine_s:,.1f}"
    for latency in (row.ttft_s.p50, row.ttft_s.p99, row.tpot_s.p50, row.tpot_s.p99):
        yield NOBODY if latency is None else seconds(latency)


def _as_data(row: Usage, groups: Sequence[str]) -> dict[str, Any]:
    figures = msgspec.to_builtins(row)
    del figures["group"]
    for name in ("ttft_s", "tpot_s"):
        latency = figures.pop(name)
        figures.update({f"{name.removesuffix('_s')}_{share}_s": value for share, value in latency.items()})
    return {**dict(zip(groups, row.group, strict=True)), **figures}


def _write_csv(rows: Sequence[dict[str, Any]], groups: Sequence[str]) -> None:
    nothing = Usage((), **dict.fromkeys(SUMS, 0), ttft_s=Latency(), tpot_s=Latency())
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*groups, *_as_data(nothing, ())])
    writer.writerows(row.values() for row in rows)


def _one(reader: LedgerReader, request_id: str | None, tenant: str | None) -> Record:
    if request_id is None:
        record = reader.newest(tenant)
        if record is None:
            raise LedgerError(f"There are no{_of(tenant)} requests in {reader.folder}; {_ELSEWHERE}")
        return record
    found = reader.find(request_id, tenant)
    if found is None:
        raise LedgerError(_unknown(reader, request_id, tenant))
    if found.count > 1:
        others = "" if len(found.tenants) == 1 else f", of {len(found.tenants)} tenants; --tenant chooses one"
        typer.echo(f"{found.count:,} requests have this id{others}. This is the newest.", err=True)
    return found.record


_ELSEWHERE = "is GOODGATE_HOME that of the gateway, and does its configuration say `ledger: {keep: file}`?"


def _unknown(reader: LedgerReader, request_id: str, tenant: str | None) -> str:
    there_is_none = f"There is no request {request_id[:128]!r}{_of(tenant)} in {reader.folder}"
    if tenant is None and (alike := reader.ids_like(request_id)):
        return f"{there_is_none}; ids that begin so: {', '.join(alike)}."
    oldest = reader.oldest()
    if oldest is None:
        return f"{there_is_none}, which is empty; {_ELSEWHERE}"
    return (
        f"{there_is_none}, which goes back to {stamp(oldest)}; older ones are gone, those without a valid key were "
        "never kept, and another GOODGATE_HOME has its own."
    )


def _of(tenant: str | None) -> str:
    return "" if tenant is None else f" of tenant {tenant!r}"


def _tell_why(reader: LedgerReader, record: Record, *, as_json: bool) -> None:
    usual = reader.usual(record)
    if as_json:
        fields = {**msgspec.to_builtins(record), "detail": msgspec.to_builtins(detail_of(record))}
        _echo_json({"verdict": verdict(record, usual), "usual": usual, **fields})
        return
    typer.secho(verdict(record, usual), bold=True)
    typer.echo()
    for line in story(record, usual):
        typer.echo(line)


def _tell_slowest(reader: LedgerReader, records: Sequence[Record], *, as_json: bool) -> None:
    verdicts = [verdict(record, reader.usual(record)) for record in records]
    if as_json:
        _echo_json(
            [
                {
                    "request_id": each.request_id,
                    "received": each.received,
                    "duration_s": each.duration_s,
                    "verdict": text,
                }
                for each, text in zip(records, verdicts, strict=True)
            ]
        )
    elif not records:
        typer.echo(f"There are no such requests in {reader.folder}.", err=True)
    else:
        rows = [
            (each.request_id, stamp(each.received), seconds(each.duration_s), text)
            for each, text in zip(records, verdicts, strict=True)
        ]
        for line in table([("request", "received", "took", "why"), *rows]):
            typer.echo(line)


def _tell_skipped(reader: LedgerReader) -> None:
    for name, reason in sorted(reader.skipped.items()):
        typer.echo(f"Left out {name}, which cannot be read: {reason}.", err=True)


def _echo_json(data: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(data)).decode())


def _reader() -> LedgerReader:
    return LedgerReader(goodgate_home() / FOLDER)


def _fail(error: GoodgateError) -> NoReturn:
    typer.echo(error.message, err=True)
    raise typer.Exit(1)
