"""The log of a launched engine: a fresh file for each start, a few older ones beside it, and its telling lines.

    path, file = open_log(home / "logs" / "vllm.log")      # the one before is now vllm.log.1
    telling_lines(read_tail(path))                         # what to quote when the engine has ended

What bounds the disk: KEPT logs of earlier starts, and launching/supervise.py cuts the one that is being written.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
from pathlib import Path
from typing import IO

KEPT = 5  # as many as quick crashes in a row are the last, so that the first of them can still be read
_TAIL_BYTES = 64 << 10
_ROOM_BYTES = 64 << 10
_LINES_SHOWN = 8
_LINE_WIDTH = 300


def open_log(path: Path) -> tuple[Path, IO[bytes]]:
    """Open a fresh log. The logs of earlier starts are `*.log.1`, the latest, to `*.log.5`.

    The lock lives in the open file that the engine inherits, so it lasts exactly as long as the engine. A log that a
    running engine writes is left alone, and the next free name is used: vllm.log, vllm-2.log, ...
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        candidate = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        if not _is_in_use(candidate):
            break
    for age in range(KEPT, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            _aged(candidate, age - 1).replace(_aged(candidate, age))
    log = candidate.open("ab+", buffering=0)  # for appending, so that it can be cut while the engine writes
    with contextlib.suppress(BlockingIOError):  # lost a race for the same name: the two then share the file
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return candidate, log


def _aged(log: Path, age: int) -> Path:
    return log.with_name(f"{log.name}.{age}") if age else log


def _is_in_use(log: Path) -> bool:
    try:
        with log.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:  # an error about an engine must not fail over its log
        return ""


def is_full(path: Path) -> bool:
    """Has the disk of this file no room left? An engine that cannot write then ends without a word."""
    try:
        return shutil.disk_usage(path.parent).free < _ROOM_BYTES
    except OSError:
        return False


_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)")
_COMPLAINT = re.compile(
    r"error|exception|fail|fatal|cannot|can't|unable|not found|no such|invalid|out of memory", re.IGNORECASE
)


def telling_lines(log: str) -> list[str]:
    """The few last lines that say what went wrong; just the last lines where none complains."""
    lines = [clean for line in re.split(r"[\r\n]+", _ESCAPES.sub("", log)) if (clean := _printable(line))]
    return ([line for line in lines if _COMPLAINT.search(line)] or lines)[-_LINES_SHOWN:]


def _printable(line: str) -> str:
    """A line that may go to a terminal, whatever the engine wrote."""
    short = line.strip()[:_LINE_WIDTH]
    return "".join(char if char.isprintable() else " " for char in short).strip()
