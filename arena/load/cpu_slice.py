"""Ask the kernel to run this process soon after it wakes, at the price of short turns.

A load process sleeps nearly always, but beside an engine that keeps every core busy it waits for a turn when an event
comes, and that wait would be measured as the engine's. Linux from 6.12 on lets any process name the length of its
turns; a short one means an early deadline after each wake. No privilege is needed, and the share of the processor stays
fair.

Measured with two busy loops on two cores, 1000 chunks/s: p99 of the TTFT error 1.13 ms without, 0.10 ms with turns of
0.1 ms.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

SHORT_SLICE_NS = 100_000  # the shortest that the kernel grants
_SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_ATTRIBUTES = "=IIQiIQQQII"  # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, clamps
_SIZE = struct.calcsize(_ATTRIBUTES)
_RUNTIME = 5


def ask_for_short_slices(slice_ns: int = SHORT_SLICE_NS) -> int | None:
    """The length of turns that the kernel now grants to the calling thread, or None where it does not say."""
    calls = _SYSCALLS.get(platform.machine()) if sys.platform == "linux" else None
    if calls is None:
        return None
    set_attributes, get_attributes = calls
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(_SIZE)
    if libc.syscall(get_attributes, 0, attributes, _SIZE, 0) != 0:
        return None
    wanted = list(struct.unpack(_ATTRIBUTES, attributes.raw[:_SIZE]))
    wanted[_RUNTIME] = slice_ns
    libc.syscall(set_attributes, 0, ctypes.create_string_buffer(struct.pack(_ATTRIBUTES, *wanted)), 0)
    if libc.syscall(get_attributes, 0, attributes, _SIZE, 0) != 0:
        return None
    granted: int = struct.unpack(_ATTRIBUTES, attributes.raw[:_SIZE])[_RUNTIME]
    return granted or None
