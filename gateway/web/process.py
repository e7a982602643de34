"""What the system says of this process: its memory, its file descriptors, and the limits of both.

    resident_bytes(), memory_limit()       # None where the system does not tell
    open_files(), files_limit()
    raise_files_limit()                    # to what an unprivileged process may have; says how many that is
    files_wanted(512)                      # by a gateway of so many open generations

Asking costs some microseconds, but counting open files costs one for every dozen of them.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # the first version of cgroups writes a number near 2**63 for none


def resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except OSError:
        return None


def open_files() -> int | None:
    try:
        return len(os.listdir("/dev/fd")) - 1  # the folder itself was open while it was read
    except OSError:
        return None


def files_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_files_limit() -> int | None:
    """The soft limit becomes the hard one, which is what it is there for: the soft one protects users of select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS calls the hard limit infinite and takes less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return files_limit()


def files_wanted(max_in_flight: int) -> int:
    """So many should be allowed: for each open generation a client's connection and an engine's, half as many
    connections that just rest, and what the process itself has open."""
    return 3 * max_in_flight + 128


def memory_limit() -> int | None:
    """That of the container or service that this process runs in: the least on the way from its cgroup to the root."""
    limits = []
    for folder, name in _cgroups():
        while folder != _CGROUP.parent:
            with suppress(OSError, ValueError):  # not every level has the file, and "max" is no number
                limits.append(int((folder / name).read_text()))
            folder = folder.parent
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _cgroups() -> list[tuple[Path, str]]:
    """Where this process's memory is limited, by the second version of cgroups and by the first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append((_CGROUP / path.lstrip("/"), "memory.max"))
        elif "memory" in controllers.split(","):
            found.append((_CGROUP / "memory" / path.lstrip("/"), "memory.limit_in_bytes"))
    return found
