"""Run one cell: a plan against a target, in a load process of its own, or in several that share it.

    run_cell(plan, target, spool) -> the plan, written -> `python -m arena.load.loadgen_process` -> spool + CellRun
    run_cell(..., crew=Crew(workers=4)) -> `python -m arena.load.load_master` -> four workers' spools -> one spool

This is the driver's side and imports neither locust nor gevent. A load process that crashes or overstays is an aborted
cell, not an exception: its spool is closed with a row for every measured request, `unsent` where none was written, so
that the store shows what happened. No process survives `run_cell`, not even when it is cancelled.

>>> run = await run_cell(plan, Target("http://127.0.0.1:8080", "smollm2", "native"), Path("spool/cell-1.jsonl"))
>>> run.aborted, run.lag_p99_ms
(None, 0.21)
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from arena.load import spool as spools
from arena.load.answer_reader import shown
from arena.load.cpu_audit import CpuAudit
from arena.load.distributed import merge
from arena.load.plan import CellPlan, Target
from arena.load.spool import RequestRow, SpoolFooter, SpoolHeader

STDERR_BYTES = 8 << 10  # that are kept, from the end
TIME_LIMIT_MARGIN_S = 15.0  # for importing locust, parsing the last answers and syncing the spool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the client itself allows, all its processes together. Every limit that is reached shows in the rows."""

    request_timeout_s: float = 120.0  # from the send to the last byte; then the row is `timeout`, with what it had got
    connect_timeout_s: float = 5.0
    max_in_flight: int = 1024
    # unsent: a request beyond the limit never leaves; it is a miss, and the cell is invalid. wait: it leaves when there
    # is room, still counted from the moment it was due, so that a queue in the client shows in its TTFT.
    beyond: Literal["unsent", "wait"] = "unsent"
    warm_connections: int = 16  # idle connections held ready above the need
    time_limit_s: float | None = None  # of the whole cell; None: the plan's end plus `request_timeout_s` plus a margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Several load processes that share a cell, as locust's workers, with a master between them and the driver.

    By default the workers are started here. With `starts_workers=False` they come from other hosts, where
    `goodgate arena worker --master HOST:PORT` runs; whoever reaches that port is trusted with plans and targets.
    """

    workers: int
    host: str = "127.0.0.1"  # where the master listens
    port: int = 0  # 0: any free one
    starts_workers: bool = True
    joining_s: float = 60.0  # how long the master waits for all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """`concurrency` requests in flight, each followed `think_s` after its answer by the next."""

    concurrency: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Told about twice a second while a cell runs."""

    pid: int  # of the load process, or of the master
    elapsed_s: float
    sent: int
    done: int
    failed: int
    in_flight: int
    workers: tuple[int, ...] = ()  # pids of the workers that were started here


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """What the client can say of itself and of the count of rows; what the target did is in the spool."""

    cell_id: str
    spool: Path
    aborted: str | None  # why the cell is incomplete, or None
    requests: int  # rows in the spool
    measured: int  # planned requests in the steady window; each has a row
    ok: int  # of the measured
    unsent: int  # of the measured
    lag_p99_ms: float | None  # send behind schedule, measured requests; None when none was sent
    max_in_flight: int
    wall_s: float
    foreign_cpu: float | None = None  # share of all cores that others took
    epoch_unix_ns: int | None = None  # the cell's time zero; None: its clock never started


async def run_cell(
    plan: CellPlan,
    target: Target,
    spool: Path,
    *,
    limits: Limits = Limits(),
    crew: Crew | None = None,
    closed: ClosedLoop | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> CellRun:
    """Fire the plan at the target and leave a complete spool. An older spool of that name is replaced.

    `closed` makes it a closed loop: the plan's prompts in their order, but each when the loop allows; its schedule is
    not looked at. A closed loop runs in one process.
    """
    if crew and closed:
        raise ValueError("A closed loop runs in one load process; take its workers away.")
    started = time.monotonic()
    spool.parent.mkdir(parents=True, exist_ok=True)
    spools.remove(spool)
    await asyncio.to_thread(plan.write, spools.plan_file(spool))
    audit = CpuAudit(os.getpid())
    aborted = await _run_process(
        Job(target, limits, str(spool), crew, closed), _time_limit_s(plan, limits, crew), on_progress
    )
    if crew:
        await asyncio.to_thread(
            merge, spool, crew.workers, spool_header(target, plan), foreign_cpu=audit.foreign_share(), aborted=aborted
        )
    if not spools.is_complete(spool):
        reason = aborted or "The load process ended without closing its spool."
        await asyncio.to_thread(spools.account_for_missing, spool, plan, spool_header(target, plan), reason)
    return await asyncio.to_thread(_summary, plan, spool, time.monotonic() - started)


class Job(msgspec.Struct):
    """What the load process is told, on its stdin: headers may hold a key, so it goes neither to argv nor to a file."""

    target: Target
    limits: Limits
    spool: str
    crew: Crew | None = None
    closed: ClosedLoop | None = None


def spool_header(target: Target, plan: CellPlan) -> SpoolHeader:
    """The header of a cell that has not started its clock."""
    return SpoolHeader(
        cell_id=plan.cell_id,
        plan_sha256=plan.sha256,
        target=target.name,
        url=target.url,
        model=target.model,
    )


def _time_limit_s(plan: CellPlan, limits: Limits, crew: Crew | None) -> float:
    if limits.time_limit_s is not None:
        return limits.time_limit_s
    gathering_s = crew.joining_s + TIME_LIMIT_MARGIN_S if crew else 0.0
    own_s = limits.request_timeout_s + limits.connect_timeout_s + TIME_LIMIT_MARGIN_S
    return plan.horizon_ns / 1e9 + own_s + gathering_s


async def _run_process(job: Job, time_limit_s: float, on_progress: Callable[[Progress], None] | None) -> str | None:
    """Run the load process to its end. None, or why it did not end well."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "arena.load.load_master" if job.crew else "arena.load.loadgen_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    listening = asyncio.create_task(_end_of(process.stderr))
    try:
        async with asyncio.timeout(time_limit_s):
            process.stdin.write(
                msgspec.json.encode(job) + b"\n"
            )  # stays open: its end tells the process that we are gone
            async for line in process.stdout:
                if on_progress is not None:
                    on_progress(msgspec.json.decode(line, type=Progress))
            code = await process.wait()
    except TimeoutError:
        return f"The cell overstayed its time limit of {time_limit_s:g} s."
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
        await process.wait()
        said = await listening
    return None if code == 0 else _crash_report(code, said)


async def _end_of(stderr: asyncio.StreamReader) -> str:
    """What was said last; a line may be of any length."""
    end = b""
    while data := await stderr.read(STDERR_BYTES):
        end = (end + data)[-STDERR_BYTES:]
    return end.decode("utf-8", "replace")


def _crash_report(code: int, said: str) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    last = shown(next((line for line in reversed(said.splitlines()) if line.strip()), ""))
    return f"The load process {how}" + (f": {last}" if last else ".")


def _summary(plan: CellPlan, spool: Path, wall_s: float) -> CellRun:
    rows = list(spools.read_rows(spool))
    header, footer = rows[0], rows[-1]
    assert isinstance(header, SpoolHeader)
    assert isinstance(footer, SpoolFooter)
    measured = [row for row in rows if isinstance(row, RequestRow) and row.measured]
    return CellRun(
        cell_id=plan.cell_id,
        spool=spool,
        aborted=footer.aborted,
        requests=footer.requests,
        measured=len(measured),
        ok=sum(row.status == "ok" for row in measured),
        unsent=sum(row.status == "unsent" for row in measured),
        lag_p99_ms=_p99([(row.sent_ns - row.scheduled_ns) / 1e6 for row in measured if row.sent_ns is not None]),
        max_in_flight=footer.max_in_flight,
        wall_s=wall_s,
        foreign_cpu=footer.foreign_cpu,
        epoch_unix_ns=header.epoch_unix_ns,
    )


def _p99(values: list[float]) -> float | None:
    """An order statistic: a value that occurred."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else None
