"""This machine as a device to plan for: its memory, and how fast it reads it."""

from __future__ import annotations

import os
import time

import torch

from native_engine.capacity import Device

READ_BYTES = 2**29  # far more than caches hold
READS = 5


def this_machine() -> Device:
    """Takes half a second."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(name="here", memory_bytes=memory_bytes, bytes_per_s=read_bandwidth())


def read_bandwidth() -> float:
    """Bytes a second, with all cores: the best of a few sums over a large tensor, for it is a ceiling that is asked
    for."""
    numbers = torch.ones(READ_BYTES // 4)
    numbers.sum()
    seconds = []
    for _ in range(READS):
        started = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - started)
    return READ_BYTES / min(seconds)
