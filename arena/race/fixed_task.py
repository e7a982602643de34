"""A task that takes the same time on the same machine: its time before each cell shows whether the machine has moved.

    fixed_task_ms()      # 2.31

SHA-256 over 2 MiB, on one core: no engine, no network, no memory to speak of. The best of a few tries, since a busy
neighbour can only ever add to it; what is left is the speed of the processor, and a neighbour that never pauses.
"""

from __future__ import annotations

import hashlib
import time

BLOCK = bytes(1 << 21)
TRIES = 9


def fixed_task_ms(tries: int = TRIES) -> float:
    """Milliseconds of wall-clock time; takes about `tries` times as long."""
    return min(_once_ms() for _ in range(tries))


def _once_ms() -> float:
    started = time.perf_counter_ns()
    hashlib.sha256(BLOCK).digest()
    return (time.perf_counter_ns() - started) / 1e6
