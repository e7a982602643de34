"""Local TCP ports: a free one, and who listens on one.

    port = free_port()
    held_by_others(port, ours={pid, ...})      # the process that answers there and is not ours, or ""

Who listens is read from /proc (Linux). Where it cannot be read, nobody is accused.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

HOST = "127.0.0.1"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN = "0A"  # the state's number in these tables
# Addresses that take connections to HOST, as /proc/net/tcp and tcp6 write them (in the order of a little-endian host).
_REACHES_HOST = {"0100007F", "00000000", "0" * 32, "0000000000000000FFFF00000100007F"}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def held_by_others(port: int, ours: Iterable[int]) -> str:
    """Names the process that listens on the port, if it is known to be none of ours; else empty."""
    sockets = _listening_sockets(port)
    for pid in ours:
        held = _sockets_of(pid)
        if held is None:
            return ""  # one of ours that we may not look into
        sockets -= held
    return _name_of_holder(sockets) if sockets else ""


def who_listens(port: int) -> str:
    """`python3 (pid 4711)`, or empty where it is not known."""
    sockets = _listening_sockets(port)
    return _name_of_holder(sockets) if sockets else ""


def _listening_sockets(port: int) -> set[str]:
    """The inodes of the sockets that take connections to HOST on the port."""
    found = set()
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table) as file:
            next(file, None)  # the heading
            for fields in map(str.split, file):
                address, _, number = fields[1].partition(":")
                if fields[3] == _LISTEN and int(number, 16) == port and address in _REACHES_HOST:
                    found.add(fields[9])
    return found


def _sockets_of(pid: int) -> set[str] | None:
    """The inodes of a process's sockets; None where we may not look. A process that has ended holds none."""
    held = set()
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    held.add(target[len("socket:[") : -1])
    except PermissionError:
        return None
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return held


def _name_of_holder(sockets: set[str]) -> str:
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        if sockets & (_sockets_of(pid) or set()):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace")  # which may be no text
                return f"{name.strip()} (pid {pid})"
    return "a process of another user"
