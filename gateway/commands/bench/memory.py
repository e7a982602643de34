"""What the gateway holds after many requests, and how soon it answers after its start.

memory(requests=100_000, folder=...)    start(rounds=5, folder=...)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import uvloop
from msgspec import Struct

from gateway.commands.bench.lean import ask_repeatedly
from gateway.commands.bench.processes import Engine, config_text, cpu_s, gateway, machine, make_key, num_files, rss_mb
from gateway.commands.bench.verdict import Claim, Slope, slope

CONNECTIONS = 16
STEPS = 20
WARM_UP_SHARE = 0.2


class Memory(Struct, frozen=True):
    date: str
    machine: str
    requests: int
    before_mb: float
    after_mb: float
    per_request: Slope  # bytes, after the warm-up
    files_before: int
    files_after: int


class Start(Struct, frozen=True):
    date: str
    machine: str
    seconds: float
    cpu_s: float
    has_torch: bool


def memory(*, requests: int, folder: Path, say: Callable[[str], None] = print) -> Memory:
    key = make_key(folder)
    config = folder / "gateway.yaml"
    with Engine.started(ttft_ms=0, itl_ms=0) as engine:
        config.write_text(config_text([engine.port]))
        with gateway(config, folder) as served:
            _ask(served.port, key, 100)
            before, files = rss_mb(served.pid), num_files(served.pid)
            points = [(0.0, before)]
            for step in range(STEPS):
                _ask(served.port, key, requests // STEPS)
                points.append((requests / STEPS * (step + 1), rss_mb(served.pid)))
                say(f"{points[-1][0]:.0f} requests: {points[-1][1]:.1f} MB")
            late = [(at, mb * (1 << 20)) for at, mb in points if at >= requests * WARM_UP_SHARE]
            return Memory(
                date=datetime.now(UTC).date().isoformat(),
                machine=machine(),
                requests=requests,
                before_mb=before,
                after_mb=points[-1][1],
                per_request=slope(late, per=1),
                files_before=files,
                files_after=num_files(served.pid),
            )


def _ask(port: int, key: str, requests: int) -> None:
    uvloop.run(ask_repeatedly(port, key, connections=CONNECTIONS, requests=requests))


def start(*, rounds: int, folder: Path) -> Start:
    """From the command to the first chat that is answered."""
    took: list[float] = []
    cpu: list[float] = []
    has_torch = False
    key = make_key(folder)
    config = folder / "gateway.yaml"
    with Engine.started(ttft_ms=0, itl_ms=0) as engine:
        config.write_text(config_text([engine.port]))
        for _ in range(rounds):
            began = time.perf_counter()
            with gateway(config, folder) as served:
                _ask(served.port, key, 1)
                took.append(time.perf_counter() - began)
                cpu.append(cpu_s(served.pid))
                has_torch |= "torch" in Path(f"/proc/{served.pid}/maps").read_text()
    return Start(
        datetime.now(UTC).date().isoformat(), machine(), statistics.median(took), statistics.median(cpu), has_torch
    )


def claims_of_memory(found: Memory) -> list[Claim]:
    return [
        Claim("less than 200 MB", f"{found.after_mb:.0f} MB", found.after_mb < 200),
        Claim("flat: a byte for each request at most", f"{found.per_request} bytes", found.per_request.is_flat(1)),
    ]


def claims_of_start(found: Start) -> list[Claim]:
    return [
        Claim("the first answer within a second", f"{found.seconds:.2f} s", found.seconds < 1),
        Claim("without torch", "torch is loaded" if found.has_torch else "torch is not loaded", not found.has_torch),
    ]
