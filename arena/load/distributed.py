"""Several load processes, one cell: who sends what, and one spool out of theirs.

The plan is one global schedule. Worker k of n sends every n-th request of it, from the k-th on, at its planned time,
so what the target sees is the plan, whatever n is: nothing is drawn in a worker. `max_in_flight` is shared out too, and
what was really in flight at once is counted again over all rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from arena.load import spool as spools
from arena.load.plan import CellPlan
from arena.load.spool import HealthRow, RequestRow, SpoolFooter, SpoolHeader, SpoolWriter

if TYPE_CHECKING:
    from arena.load.loadgen import Limits


def share_of(plan: CellPlan, worker: int, workers: int) -> CellPlan:
    """What one of `workers` processes sends. Requests keep their number and their time."""
    return replace(plan, requests=plan.requests[worker::workers])


def limits_of(limits: Limits, worker: int, workers: int) -> Limits:
    """A worker's part of the limits that hold for the whole cell; the parts add up to them."""
    return replace(
        limits,
        max_in_flight=_part(limits.max_in_flight, worker, workers),
        warm_connections=_part(limits.warm_connections, worker, workers),
    )


def _part(whole: int, worker: int, workers: int) -> int:
    return whole // workers + (worker < whole % workers)


def merge(
    path: Path, workers: int, header: SpoolHeader, *, foreign_cpu: float | None = None, aborted: str | None = None
) -> None:
    """Write the cell's spool out of its workers' and take those away.

    It is closed only if every worker has closed its own and the load ended well (`aborted` is None). Otherwise it stays
    open, with all rows that there are, for `spool.account_for_missing`.
    """
    parts = [spools.worker_file(path, worker) for worker in range(workers)]
    present = [part for part in parts if part.exists()]
    is_whole = aborted is None and all(spools.is_complete(part) for part in parts)
    if is_whole:
        for part in parts:
            spools.verify(part)
    writer = SpoolWriter(path)
    writer.write(_merged_header(header, [next(spools.read_rows(part), header) for part in present], workers))
    footers: list[SpoolFooter] = []
    lives: list[tuple[int, int]] = []
    for row in heapq.merge(*(_rows(part, footers) for part in present), key=_when_ns):
        writer.write(row)
        if isinstance(row, RequestRow) and row.sent_ns is not None and row.done_ns is not None:
            lives.append((row.sent_ns, row.done_ns))
    if is_whole:
        writer.finish(_merged_footer(writer.num_requests, footers, most_at_once(lives), foreign_cpu))
    else:
        writer.close()
    for each in spools.worker_files(path):
        each.unlink()


def most_at_once(lives: Sequence[tuple[int, int]]) -> int:
    """The largest number of (from, to) that overlap; one that ends when another begins is not counted with it."""
    changes = sorted(change for start, end in lives for change in ((start, 1), (max(end, start + 1), -1)))
    most = level = 0
    for _, change in changes:
        level += change
        most = max(most, level)
    return most


def _rows(part: Path, footers: list[SpoolFooter]) -> Iterator[RequestRow | HealthRow]:
    for row in spools.read_rows(part):
        if isinstance(row, SpoolFooter):
            footers.append(row)
        elif not isinstance(row, SpoolHeader):
            yield row


def _when_ns(row: RequestRow | HealthRow) -> int:
    if isinstance(row, HealthRow):
        return row.t_ns
    return row.done_ns if row.done_ns is not None else row.scheduled_ns


def _merged_header(header: SpoolHeader, of_parts: Sequence[spools.SpoolRow], workers: int) -> SpoolHeader:
    """What the parts agree on, and where they differ, the worst."""
    known = [each for each in of_parts if isinstance(each, SpoolHeader) and each.epoch_monotonic_ns is not None]
    if not known:
        return msgspec.structs.replace(header, workers=workers)
    slices = [each.cpu_slice_ns for each in known]
    return msgspec.structs.replace(
        known[0],
        plan_sha256=header.plan_sha256,  # theirs is of their shares
        workers=workers,
        gc_frozen=all(each.gc_frozen for each in known),
        timer="poll" if any(each.timer == "poll" for each in known) else known[0].timer,
        cpu_slice_ns=None if None in slices else max(each for each in slices if each is not None),
        clock="wall" if any(each.clock == "wall" for each in known) else "monotonic",
    )


def _merged_footer(
    requests: int, footers: Sequence[SpoolFooter], max_in_flight: int, foreign_cpu: float | None
) -> SpoolFooter:
    return SpoolFooter(
        requests=requests,
        max_in_flight=max_in_flight,
        connections_opened=sum(footer.connections_opened for footer in footers),
        cooldown_exhausted=any(footer.cooldown_exhausted for footer in footers),
        foreign_cpu=foreign_cpu,
        aborted=next((footer.aborted for footer in footers if footer.aborted), None),
    )
