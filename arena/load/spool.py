"""The spool: one JSONL file per cell, written while it runs, and the truth until the store has ingested it.

A file is a `SpoolHeader`, then `RequestRow`s in the order they ended and `HealthRow`s between them, then a
`SpoolFooter`. Where several load processes share a cell, each writes a spool of its own, and `arena.load.distributed`
merges them into the cell's.

A spool is complete when `<name>.done` stands beside it: that marker is renamed into place after the file was synced to
disk, and holds its digest. A spool without marker belongs to a load process that died; `account_for_missing` closes it,
so that no planned request ever vanishes.

All times are nanoseconds from the cell's start (`SpoolHeader.epoch_monotonic_ns`), NULL where the thing never happened.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import msgspec

from arena.load.plan import CellPlan

Status: TypeAlias = Literal["ok", "error", "timeout", "truncated", "unsent", "cancelled"]
"""ok: a complete answer. error: refused, broken or ended in an error event. timeout: the client's limit passed.
truncated: the stream ended without saying so. unsent: never left (cap reached, or the load process died).
cancelled: a warm-up or cool-down request still in flight when the cell ended; never a measured one."""

TEXT, REASONING, TOOL_CALL = 0, 1, 2
"""Values of `RequestRow.token_kind`."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding JSON or msgpack may raise that somebody else has written, or that was damaged."""


class SpoolHeader(msgspec.Struct, tag_field="row", tag="header", kw_only=True):
    cell_id: str
    plan_sha256: str
    target: str
    url: str
    model: str
    epoch_monotonic_ns: int | None = None  # this and the rest are NULL where the process died before its clock started
    epoch_unix_ns: int | None = None
    gc_frozen: bool | None = None
    timer: str | None = None  # what paced the sends: "timerfd" or "poll"
    cpu_slice_ns: int | None = None  # the turns the kernel granted this process; NULL also where it cannot say
    workers: int = 1  # load processes that shared the cell
    clock: Literal["monotonic", "wall"] = "monotonic"  # how the start was agreed on: one host's clock, or wall time
    locust_version: str | None = None


class RequestRow(msgspec.Struct, tag_field="row", tag="request", kw_only=True):
    seq: int
    measured: bool
    worker: int = 0  # which load process sent it
    prompt_id: str
    max_tokens: int
    scheduled_ns: int
    sent_ns: int | None = None  # just before the first write (or connect, where no warm connection was left)
    connected_ns: int | None = None  # only where the request had to open its connection
    wrote_ns: int | None = None  # the last byte of the request was handed to the kernel
    first_byte_ns: int | None = None
    role_ns: int | None = None
    first_reason_ns: int | None = None
    first_text_ns: int | None = None
    first_gen_ns: int | None = None  # first text, reasoning or tool-call argument: the end of TTFT
    last_gen_ns: int | None = None
    usage_ns: int | None = None
    done_ns: int | None = None
    status: Status
    http: int | None = None
    err_class: str | None = None
    err_message: str | None = None
    finish_reason: str | None = None
    in_tok_usage: int | None = None
    out_tok_usage: int | None = None
    reason_tok_usage: int | None = None
    cached_tok: int | None = None
    out_tok_counted: int = 0  # tokens seen in events: from usage per chunk where offered, else one an event
    tokens_known: bool = False  # whether the counts below came from the engine's usage per chunk
    n_chunks: int = 0
    n_recvs: int = 0
    reused: bool | None = None  # NULL when nothing was sent
    text: str | None = None  # what was generated, of some answers of each cell: for a tokenizer to count
    token_ns: list[int] = []
    token_n: list[int] = []
    token_kind: list[int] = []


class HealthRow(msgspec.Struct, tag_field="row", tag="health", kw_only=True):
    """The load process watching itself, several times a second."""

    t_ns: int
    worker: int = 0
    cpu: float  # share of one core since the last sample
    machine_cpu: float | None = None  # busy share of all cores since the last sample, whoever kept them busy
    loop_lag_ns: int  # worst delay of a timer in the event loop since the last sample
    in_flight: int
    sockets: int


class MetricRow(msgspec.Struct, tag_field="row", tag="metric", kw_only=True):
    """One sample of the engine's own metrics, in a file beside the spool: `metric` is the series with its labels."""

    t_ns: int
    metric: str
    value: float


class SpoolFooter(msgspec.Struct, tag_field="row", tag="footer", kw_only=True):
    """`requests` counts the request rows before it. `cooldown_exhausted`: load ceased before the last measured
    answer."""

    requests: int
    max_in_flight: int
    connections_opened: int
    cooldown_exhausted: bool
    foreign_cpu: float | None = None  # share of all cores that processes took which are none of the race's
    aborted: str | None = None  # why the cell is incomplete, or NULL


SpoolRow: TypeAlias = SpoolHeader | RequestRow | HealthRow | SpoolFooter

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(SpoolRow).decode
_decode_metric = msgspec.json.Decoder(MetricRow).decode


class SpoolError(Exception):
    """A spool that cannot be believed: no done marker, other bytes than the marker vouches for, or another plan's."""


class SpoolWriter:
    """Rows go to the kernel one by one, so that a killed process loses only what had not ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        self.num_requests = 0

    def write(self, row: SpoolRow) -> None:
        """OSError where the disk takes no more; the file may then end in a part of the row, which readers pass over."""
        left = memoryview(_encode(row) + b"\n")
        while left:  # a disk that is nearly full takes a part, and tells it by the count alone
            left = left[self._file.write(left) :]
        self.num_requests += isinstance(row, RequestRow)

    def finish(self, footer: SpoolFooter) -> None:
        """Footer, disk, marker: in that order."""
        self.write(footer)
        os.fsync(self._file.fileno())
        self.close()
        mark_done(self._path)

    def close(self) -> None:
        """Stop writing. Without `finish`, the spool stays incomplete."""
        self._file.close()


def done_marker(path: Path) -> Path:
    return path.with_name(path.name + ".done")


def plan_file(path: Path) -> Path:
    """Where the plan of a spool lies beside it."""
    return path.with_name(path.name + ".plan")


def worker_file(path: Path, worker: int) -> Path:
    """The spool of one of several load processes, until it is merged into the cell's."""
    return path.with_name(f"{path.name}.w{worker}")


def worker_files(path: Path) -> list[Path]:
    """All that belongs to workers' spools of a cell."""
    return sorted(each for each in path.parent.glob(f"{glob.escape(path.name)}.w[0-9]*"))


def metrics_file(path: Path) -> Path:
    """Where the engine's own metrics during the cell lie beside its spool, when the engine has any."""
    return path.with_name(path.name + ".metrics")


def is_complete(path: Path) -> bool:
    return done_marker(path).exists()


def remove(path: Path) -> None:
    """Take an older spool of this name away, its marker first."""
    for part in (done_marker(path), path, plan_file(path), metrics_file(path), *worker_files(path)):
        part.unlink(missing_ok=True)


def read_rows(path: Path) -> Iterator[SpoolRow]:
    """Every whole row. A last line that was cut by a crash is passed over; a damaged one in the middle is an error."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield _decode(line)


def write_metrics(path: Path, rows: Sequence[MetricRow]) -> None:
    """The engine's metrics beside a spool, whole or not at all. No rows, no file."""
    if not rows:
        return
    target = metrics_file(path)
    draft = target.with_name(target.name + ".tmp")
    draft.write_bytes(b"".join(_encode(row) + b"\n" for row in rows))
    draft.replace(target)


def read_metrics(path: Path) -> list[MetricRow]:
    """The engine's metrics beside a spool; none where the engine tells nothing."""
    if not metrics_file(path).exists():
        return []
    return [_decode_metric(line) for line in metrics_file(path).read_bytes().splitlines()]


def verify(path: Path) -> None:
    """Raise `SpoolError` unless the done marker vouches for exactly these bytes."""
    marker = done_marker(path)
    if not marker.exists():
        raise SpoolError(f"{path} has no done marker: its cell is still running, or its load process died.")
    if marker.read_bytes().strip() != _digest(path).encode():
        raise SpoolError(f"{path} has changed since its cell ended: its digest is not the one in {marker.name}.")


def account_for_missing(path: Path, plan: CellPlan, header: SpoolHeader, reason: str) -> None:
    """Close the spool of a load process that died: one `unsent` row for each warm-up or measured request without a
    row."""
    path.touch()
    _cut_torn_line(path)
    rows = list(read_rows(path))
    seen = {row.seq for row in rows if isinstance(row, RequestRow)}
    writer = SpoolWriter(path)
    writer.num_requests = len(seen)
    if not rows:
        writer.write(header)
    for request in plan.requests:
        if request.seq not in seen and request.scheduled_ns < plan.horizon_ns:
            writer.write(unsent_row(plan, request.seq, "client_died", reason))
    health = [row for row in rows if isinstance(row, HealthRow)]
    writer.finish(
        SpoolFooter(
            requests=writer.num_requests,
            max_in_flight=max((row.in_flight for row in health), default=0),
            connections_opened=max((row.sockets for row in health), default=0),
            cooldown_exhausted=False,
            aborted=reason,
        )
    )


def unsent_row(plan: CellPlan, seq: int, err_class: str, message: str | None = None) -> RequestRow:
    request = plan.requests[seq]
    return RequestRow(
        seq=seq,
        measured=plan.is_measured(request),
        prompt_id=request.prompt_id,
        max_tokens=request.max_tokens,
        scheduled_ns=request.scheduled_ns,
        status="unsent",
        err_class=err_class,
        err_message=message,
    )


def _cut_torn_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def mark_done(path: Path) -> None:
    """Vouch for the bytes of a whole spool that lies on disk."""
    marker = done_marker(path)
    draft = marker.with_name(marker.name + ".tmp")
    with draft.open("w") as file:
        file.write(_digest(path) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.rename(marker)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
