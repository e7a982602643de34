"""How busy the machine was, and how much of that was none of ours.

Linux counts processor time for the whole machine in /proc/stat and for each process in /proc/PID/stat (proc(5)), both
in ticks of 1/100 s. What the machine spent beyond a process and all its descendants was spent by others: on a machine
that measures, that is noise. Elsewhere than on Linux nothing is known, and the answers are None.

    audit = CpuAudit(os.getpid())
    ...                       # a cell
    audit.foreign_share()     # 0.12: others took 12 % of all cores
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_IDLE = (3, 4)  # fields of the "cpu" line: idle and iowait
_GUEST = 8  # guest time from here on is in user time already


@dataclass(frozen=True, slots=True)
class Ticks:
    """Since boot, over all cores."""

    busy: int  # stolen time included: it was somebody else's
    total: int


@dataclass(frozen=True, slots=True)
class ProcessTicks:
    pid: int
    parent: int
    own: int
    of_ended_children: int


def parse_machine(stat: str) -> Ticks:
    """From the text of /proc/stat."""
    fields = [int(word) for word in stat.split("\n", 1)[0].split()[1:]][:_GUEST]
    return Ticks(sum(fields) - sum(fields[place] for place in _IDLE), sum(fields))


def parse_process(stat: str) -> ProcessTicks:
    """From the text of /proc/PID/stat. The name, in brackets, may hold anything."""
    pid, _, rest = stat.partition(" (")
    fields = rest.rpartition(") ")[2].split()
    user, system, ended_user, ended_system = (int(word) for word in fields[11:15])
    return ProcessTicks(int(pid), int(fields[1]), user + system, ended_user + ended_system)


def family_ticks(processes: Iterable[ProcessTicks], root: int) -> int:
    """Time of a process and its living descendants, and of the dead that any of them has waited for."""
    known = {each.pid: each for each in processes}
    children: dict[int, list[int]] = {}
    for each in known.values():
        children.setdefault(each.parent, []).append(each.pid)
    total, waiting = 0, [root] if root in known else []
    while waiting:
        each = known[waiting.pop()]
        total += each.own + each.of_ended_children
        waiting += children.get(each.pid, [])
    return total


class MachineMeter:
    """The busy share of all cores since the last question."""

    def __init__(self) -> None:
        self._last = _machine()

    def busy_share(self) -> float | None:
        now, before = _machine(), self._last
        self._last = now
        if now is None or before is None or now.total <= before.total:
            return None
        return (now.busy - before.busy) / (now.total - before.total)


class CpuAudit:
    """Counts from its creation on. `root` is the process whose whole family is ours."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._machine = _machine()
        self._family = _family(root)

    def foreign_share(self) -> float | None:
        """Share of all cores that others took, 0 to 1; None where the system does not tell."""
        machine, family = _machine(), _family(self._root)
        if machine is None or self._machine is None or machine.total <= self._machine.total:
            return None
        busy = machine.busy - self._machine.busy
        foreign = busy - (family - self._family)
        return min(1.0, max(0.0, foreign / (machine.total - self._machine.total)))


def _machine() -> Ticks | None:
    try:
        return parse_machine((PROC / "stat").read_text())
    except OSError:
        return None


def _family(root: int) -> int:
    return family_ticks(_processes(), root)


def _processes() -> Iterable[ProcessTicks]:
    try:
        pids = [name for name in os.listdir(PROC) if name.isdigit()]
    except OSError:
        return
    for pid in pids:
        try:
            yield parse_process((PROC / pid / "stat").read_text("utf-8", "replace"))  # a name may be no text
        except OSError:  # it has ended meanwhile
            continue
