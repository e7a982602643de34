"""Joules that this machine's own counters have seen: RAPL for processors, NVML for NVIDIA's graphics cards.

    counters, missing = readable_counters()     # `missing` says of each kind that cannot be read, why
    async with sampled(counters) as samples:
        ...                                     # a cell runs; once a second every counter is noted
    samples[0]                                  # Sample(t_unix_ns=..., source="rapl:package-0", joules=...)

They count what the whole package or card takes, idle share and neighbours included, and never what one process takes.
RAPL: https://docs.kernel.org/power/powercap/powercap.html (`energy_uj` wraps at `max_energy_range_uj`). NVML:
`nvmlDeviceGetTotalEnergyConsumption`, millijoules since the driver was loaded, from Volta on.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

POWERCAP = Path("/sys/class/powercap")
NVML_LIBRARY = "libnvidia-ml.so.1"
EVERY_S = 1.0


class Counter(Protocol):
    """Joules since it was made, never falling. `joules` raises OSError once it can be read no more."""

    @property
    def name(self) -> str: ...
    def joules(self) -> float: ...


class Sample(NamedTuple):
    t_unix_ns: int
    source: str
    joules: float


def readable_counters(powercap: Path = POWERCAP, nvml: str = NVML_LIBRARY) -> tuple[list[Counter], list[str]]:
    """Every counter that can be read here, and a sentence for each kind of which there is none."""
    zones, no_zones = rapl_zones(powercap)
    cards, no_cards = nvml_cards(nvml)
    return [*zones, *cards], [reason for reason in (no_zones, no_cards) if reason]


@asynccontextmanager
async def sampled(counters: Sequence[Counter], *, every_s: float = EVERY_S) -> AsyncIterator[list[Sample]]:
    """The list fills while the block runs; it has a first sample before the block and a last one after it."""
    samples: list[Sample] = []
    task = asyncio.create_task(_sample(counters, samples, every_s)) if counters else None
    try:
        _read(counters, samples)
        yield samples
    finally:
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        _read(counters, samples)


async def _sample(counters: Sequence[Counter], samples: list[Sample], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        _read(counters, samples)


def _read(counters: Sequence[Counter], samples: list[Sample]) -> None:
    """A counter that fails leaves a gap, and a window with a gap at its edge has no figure."""
    for counter in counters:
        with suppress(OSError):
            samples.append(Sample(time.time_ns(), counter.name, counter.joules()))


# ---------------------------------------------------------------------------------------------------------------- RAPL


class RaplZone:
    """A package, or the memory beside it. Wraps of the counter are added up, so read it more often than it wraps."""

    def __init__(self, folder: Path) -> None:
        self.name = f"rapl:{(folder / 'name').read_text().strip()}"
        self._file = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self._last_uj = int(self._file.read_text())
        self._total_uj = 0

    def joules(self) -> float:
        now_uj = int(self._file.read_text())
        self._total_uj += (now_uj - self._last_uj) % (self._range_uj + 1)
        self._last_uj = now_uj
        return self._total_uj / 1e6


def rapl_zones(powercap: Path) -> tuple[list[Counter], str]:
    """Packages, and their `dram` where they have one. `core` and `uncore` are parts of a package, `psys` holds it."""
    folders = [*sorted(powercap.glob("*-rapl:[0-9]")), *sorted(powercap.glob("*-rapl:[0-9][0-9]"))]
    folders += sorted(powercap.glob("*-rapl:*:*"))
    zones: list[Counter] = []
    denied = False
    for folder in folders:
        try:
            kind = (folder / "name").read_text().strip()
            is_part = folder.name.count(":") > 1
            if (kind == "dram") if is_part else kind.startswith("package"):
                zones.append(RaplZone(folder))
        except PermissionError:
            denied = True
        except (OSError, ValueError):
            continue  # a zone that is switched off answers with an error
    if zones:
        return zones, ""
    if denied:
        return [], "RAPL: the kernel lets only root read the counters."
    return [], f"RAPL: there are no counters below {powercap}."


# ---------------------------------------------------------------------------------------------------------------- NVML


class NvmlCard:
    def __init__(self, library: Any, number: int) -> None:
        self.name = f"nvml:{number}"
        self._library = library
        self._handle = ctypes.c_void_p()
        _check(library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(self._handle)))
        self._first_mj = self._read_mj()

    def joules(self) -> float:
        return (self._read_mj() - self._first_mj) / 1e3

    def _read_mj(self) -> int:
        millijoules = ctypes.c_ulonglong()
        _check(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules)))
        return millijoules.value


def nvml_cards(name: str) -> tuple[list[Counter], str]:
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return [], "NVML: there is no NVIDIA driver."
    try:
        _check(library.nvmlInit_v2())
        count = ctypes.c_uint()
        _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        return [NvmlCard(library, number) for number in range(count.value)], "" if count.value else "NVML: no card."
    except (OSError, AttributeError) as error:  # an old driver lacks a function
        return [], f"NVML: the energy cannot be read ({error})."


def _check(status: int) -> None:
    if status:
        raise OSError(f"NVML status {status}")
