"""What a load master and its workers say to each other, over locust's own messages. Pure data.

    worker                         master
    hello(token, host, pid)   ->
                              <-   assignment(job, worker, plan)      when all have come
    ready                     ->
                              <-   start(epoch)                       when all are ready; then locust starts its users
    progress, measured_done   ->
                              <-   finish                             when all measured requests have ended
    finished(size)            ->
                              <-   fetch(offset) ... chunk(data)      where the worker's spool is on another host
                              <-   quit (locust's own)

Whatever else comes, or what does not come in time, ends the cell: as aborted, never as a smaller one.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from arena.load.loadgen import Job
from arena.load.plan import CellPlan

T = TypeVar("T")

HELLO, READY, PROGRESS, MEASURED_DONE, FINISHED, CHUNK = (
    "arena_hello", "arena_ready", "arena_progress", "arena_measured_done", "arena_finished", "arena_chunk",
)  # fmt: skip
ASSIGNMENT, START, FINISH, FETCH = "arena_assignment", "arena_start", "arena_finish", "arena_fetch"
FROM_WORKERS = (HELLO, READY, PROGRESS, MEASURED_DONE, FINISHED, CHUNK)
FROM_MASTER = (ASSIGNMENT, START, FINISH, FETCH)
NO_MASTER, MASTER_IS_GONE = 4, 5  # exit statuses of a worker
CONTENT = "content"
CHUNK_BYTES = 1 << 20


class Enlistment(msgspec.Struct):
    """What a worker is told, on its stdin."""

    host: str
    port: int
    token: str = ""  # proves to the master that it is one of those it started


class Hello(msgspec.Struct):
    token: str
    host: str
    pid: int


class Assignment(msgspec.Struct):
    """`job.spool` is empty where the worker has to write its spool on its own host."""

    worker: int
    job: Job
    plan: CellPlan


class Epoch(msgspec.Struct):
    """The start of the cell: on the clock that all processes of one boot share, and on the wall for other hosts."""

    boot_id: str | None
    monotonic_ns: int
    unix_ns: int


def content(data: Any, kind: type[T]) -> T:
    """What a message carries; ValidationError where it is something else."""
    return msgspec.msgpack.decode(data[CONTENT], type=kind)


def boot_id() -> str | None:
    """Names this boot of this host; processes that agree on it share CLOCK_MONOTONIC. None where it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def local_epoch_ns(
    epoch: Epoch, *, boot: str | None, monotonic_ns: int, unix_ns: int
) -> tuple[int, Literal["monotonic", "wall"]]:
    """The start on this process's CLOCK_MONOTONIC, and which clock that rests on. Wall time is mapped once, here."""
    if boot is not None and boot == epoch.boot_id:
        return epoch.monotonic_ns, "monotonic"
    return monotonic_ns + epoch.unix_ns - unix_ns, "wall"


def host_name() -> str:
    return socket.gethostname()
