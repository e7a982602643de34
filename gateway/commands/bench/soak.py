"""The gateway under load for long, while everything around it fails in turn: does it keep its word, and stay as it is?

    report = asyncio.run(soak(minutes=30, rate=50, folder=Path(...)))
    report.claims, report.outcomes, report.slopes

The gateway is a process with keys, limits, metrics, ledger and log, before two scripted engines in processes of their
own. Clients come open loop (`clients.py`), faults in turn (`faults.py`); what the gateway holds is read off the system
and its own `/metrics` every few seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct

from gateway.commands.bench.clients import ROUTE, Clients
from gateway.commands.bench.faults import Fault, cycling
from gateway.commands.bench.processes import (
    Engine,
    Gateway,
    config_text,
    cpu_s,
    gateway,
    machine,
    make_key,
    num_files,
    rss_mb,
)
from gateway.commands.bench.verdict import Claim, Sample, Slope, claims, slopes

WARM_UP_S = 3.0  # of load before the gateway is seen idle for the first time
QUIET_S = 5.0  # longer than a connection without use is kept, to clients or to engines
SETTLE_S = 30.0  # and nothing that ends by itself takes longer than this
SECTIONS: dict[str, Any] = {
    "server": {"port": 0, "header_timeout_s": 5, "body_timeout_s": 3, "write_timeout_s": 3},
    "health": {"interval_s": 1, "timeout_s": 1, "recheck_s": 0.5},
    "breaker": {"open_s": 2, "max_open_s": 5},  # so that each fault is met, and not only the first
    "reload": {"watch": False},
    "model": {"total_timeout_s": 15},
    "options": {"connect_timeout_s": 1, "first_token_timeout_s": 2, "token_timeout_s": 2},
}


class Report(Struct, frozen=True):
    """What was seen. `outcomes` is by kind of client; `refusals` by status and code."""

    date: str
    machine: str
    minutes: float
    rate: float
    outcomes: Mapping[str, Mapping[str, int]]
    refusals: Mapping[str, int]
    not_sent: int
    faults: Sequence[Fault]
    samples: Sequence[Sample]
    slopes: Mapping[str, Slope]
    claims: Sequence[Claim]

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)


async def soak(*, minutes: float, rate: float, folder: Path, say: Callable[[str], None] = print) -> Report:
    seconds = minutes * 60
    with Engine.started() as first, Engine.started() as second:
        engines = [first, second]
        config = folder / "gateway.yaml"

        def text(number: int) -> str:
            return config_text([engine.port for engine in engines], weight=2 + number % 2, **SECTIONS)

        config.write_text(text(1))
        key = make_key(folder, role="admin")
        with gateway(config, folder) as served:
            async with Watch(served, key) as watch:
                async with Clients(served.port, key) as warming:
                    await warming.offer(rate, WARM_UP_S)
                before = await watch.settled()
                faults: list[Fault] = []
                async with Clients(served.port, key) as clients:
                    sampling = asyncio.create_task(watch.keep_sampling(every_s=min(5.0, seconds / 20)))
                    offering = asyncio.create_task(clients.offer(rate, seconds))
                    async for fault in cycling(engines, served, config, seconds, text):
                        faults.append(fault)
                        say(f"{fault.ended_s:6.0f} s  {fault.name:10}  {watch.samples[-1].rss_mb:.1f} MB  {clients}")
                    await offering
                    sampling.cancel()
                after = await watch.settled(before)
                return Report(
                    date=datetime.now(UTC).date().isoformat(),
                    machine=machine(),
                    minutes=minutes,
                    rate=rate,
                    outcomes=clients.by_kind_and_outcome(),
                    refusals=clients.refusals,
                    not_sent=clients.not_sent,
                    faults=faults,
                    samples=watch.samples,
                    slopes=slopes(watch.samples),
                    claims=claims(
                        clients.outcomes,
                        watch.samples,
                        before,
                        after,
                        left_open=sum(engine.num_open() for engine in engines),
                        lost_records=watch.lost_records(),
                        reloads=watch.reloads(sum(not fault.where for fault in faults)),
                    ),
                )


class Watch:
    """What the gateway holds, by the system's word and its own."""

    def __init__(self, served: Gateway, key: str) -> None:
        self.samples: list[Sample] = []
        self._served = served
        self._headers = {"Authorization": f"Bearer {key}"}
        self._text = ""
        self._began = time.monotonic()
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Watch:
        # A connection for each reading: a kept one would be a file and a task of the gateway's.
        connector = aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def keep_sampling(self, every_s: float) -> None:
        self._began = time.monotonic()
        while True:
            self.samples.append(await self.sample())
            await asyncio.sleep(every_s)

    async def sample(self) -> Sample:
        async with self._session.get(f"{self._served.url}/metrics") as response:
            self._text = await response.text()
        pid = self._served.pid
        return Sample(
            at_s=time.monotonic() - self._began,
            rss_mb=rss_mb(pid),
            files=num_files(pid),
            tasks=int(self.total("goodgate_tasks")),
            in_flight=int(self.total("goodgate_in_flight")),
            cpu_s=cpu_s(pid),
        )

    async def settled(self, wanted: Sample | None = None) -> Sample:
        """An idle gateway: as soon as it holds no more than is wanted, or once it has let go of nothing for a while.
        Probes come and go, so the least counts."""
        deadline = time.monotonic() + SETTLE_S
        since, least = time.monotonic(), await self.sample()
        while (now := time.monotonic()) < deadline:
            sample = await self.sample()
            if wanted is not None and all(a <= b for a, b in zip(_held(sample), _held(wanted), strict=True)):
                return sample
            if sum(_held(sample)) < sum(_held(least)):
                since, least = now, sample
            if wanted is None and now - since > QUIET_S:
                break
            await asyncio.sleep(0.5)
        return least

    def total(self, name: str, *labels: str) -> float:
        """The sum of a metric's series in the last reading, or of those with these labels' values."""
        lines = (line for line in self._text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(f'"{label}"' in line for label in labels))

    def lost_records(self) -> int:
        """Of the requests that were let in, those that the ledger has not."""
        asked = self.total("goodgate_requests_total", ROUTE) - self.total("goodgate_requests_total", ROUTE, "401")
        return int(asked - self.total("goodgate_ledger_records_total"))

    def reloads(self, num_asked: int) -> tuple[int, int, int]:
        applied, refused = (self.total("goodgate_config_reloads_total", verdict) for verdict in ("applied", "refused"))
        return num_asked, int(applied), int(refused)


def _held(sample: Sample) -> tuple[int, int, int]:
    return sample.tasks, sample.files, sample.in_flight
