"""Whose processor time it was: out of the kernel's own counters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from arena.load.cpu_audit import CpuAudit, MachineMeter, ProcessTicks, family_ticks, parse_machine, parse_process

SPIN = "import time\nend = time.monotonic() + 0.6\nwhile time.monotonic() < end: pass"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def test_a_machine_is_busy_in_all_but_idle_and_iowait_and_guests_are_not_counted_twice() -> None:
    ticks = parse_machine("cpu  100 1 20 500 30 2 3 4 50 0\ncpu0 1 2 3\n")
    assert (ticks.busy, ticks.total) == (130, 660)


def test_a_process_may_be_called_anything() -> None:
    stat = "42 (a) b (c) S 7 42 42 0 -1 4194304 1 2 3 4 100 20 3 4 20 0 1 0 500 0 0"
    assert parse_process(stat) == ProcessTicks(42, 7, 120, 7)


def test_a_family_is_all_that_descend_and_nobody_else() -> None:
    known = [
        ProcessTicks(1, 0, 1000, 0), ProcessTicks(10, 1, 5, 3), ProcessTicks(11, 10, 7, 0), ProcessTicks(12, 11, 2, 1),
        ProcessTicks(20, 1, 400, 0),
    ]  # fmt: skip
    assert family_ticks(known, 10) == 5 + 3 + 7 + 2 + 1
    assert family_ticks(known, 99) == 0


@on_linux
def test_a_child_that_spins_is_ours_and_the_same_seen_from_a_sibling_is_foreign() -> None:
    """Both in one run, so that what else runs on the machine is in both."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as sibling:
        ours, theirs = CpuAudit(os.getpid()), CpuAudit(sibling.pid)
        subprocess.run([sys.executable, "-c", SPIN], check=True)
        own_share, foreign_share = ours.foreign_share(), theirs.foreign_share()
        sibling.kill()
    assert own_share is not None
    assert foreign_share is not None
    assert foreign_share > own_share + 0.05


@on_linux
def test_a_neighbour_whose_name_is_no_text_does_not_end_the_race() -> None:
    name = "ctypes.CDLL(None).prctl(15, b'\\xff\\xfe', 0, 0, 0)"
    named = f"import ctypes, sys; {name}; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", named], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as neighbour:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        audit = CpuAudit(os.getpid())  # it looks at every process that there is
        subprocess.run([sys.executable, "-c", SPIN], check=True)
        assert audit.foreign_share() is not None
        neighbour.kill()


@on_linux
def test_the_machine_meter_is_a_share_and_starts_anew_with_each_question() -> None:
    meter = MachineMeter()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    share = meter.busy_share()
    assert share is not None
    assert 0.1 < share <= 1
