"""The load process: `python -m arena.load.loadgen_process`, started by `arena.load.loadgen`, never by hand.

It, its parts (`paced_cell`, `pacers`, `sleeper`, `locust_shell`) and the processes of distributed load (`load_master`,
`load_worker`) are the only modules that import locust and gevent, because importing locust patches the whole process.
Locust is the shell: one user hosts the pacer, and each ended request goes to its request event, so that its statistics
and listeners work. What decides the measurement is ours: the schedule, the sockets and their stamps, the rows.

Input: one JSON line on stdin (`Job`); an end of file there means that the driver is gone, and ends the process. Output:
the spool, and progress as JSON lines on stdout.
"""

from __future__ import annotations

import locust  # isort: skip  (patches the standard library: before everything else)
import os
import sys
import time
from pathlib import Path

import gevent
import msgspec
from locust.env import Environment

from arena.load import spool
from arena.load.cpu_audit import CpuAudit
from arena.load.loadgen import Job, Progress
from arena.load.locust_shell import PacedUser, become_a_load_process, end_with_parent
from arena.load.paced_cell import Cell
from arena.load.plan import CellPlan

START_IN_NS = 50_000_000


def run(job: Job) -> None:
    """One cell from its first connection to its done marker."""
    become_a_load_process()
    plan = CellPlan.read(spool.plan_file(Path(job.spool)))
    environment = Environment(user_classes=[PacedUser], catch_exceptions=False)
    cell = Cell(job, plan, environment, tell=tell)
    PacedUser.pace = cell.pace
    cell.prepare()
    audit = CpuAudit(os.getppid())
    cell.start(time.monotonic_ns() + START_IN_NS)
    background = [gevent.spawn(cell.record), gevent.spawn(cell.watch), gevent.spawn(end_with_parent)]
    runner = environment.create_local_runner()
    runner.start(user_count=1, spawn_rate=1)
    (cell.measured_done if plan.measured or job.closed else cell.plan_done).wait()
    foreign_cpu = audit.foreign_share()
    runner.quit()
    gevent.killall(background)
    cell.finish(foreign_cpu=foreign_cpu)


def tell(progress: Progress) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(progress) + b"\n")


if __name__ == "__main__":
    assert locust  # imported for what its import does
    run(msgspec.json.decode(sys.stdin.buffer.readline(), type=Job))
