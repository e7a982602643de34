"""More requests than a model can carry, over real sockets: what is served in time, who, and how soon others know.

    python -m tests.overload [--seconds 8] [--times 1,2,5,10]

A gateway and a fake engine run in processes of their own. The engine takes four requests at a time, 400 ms each; what
is beyond that waits inside it. Arrivals are Poisson, so that a slow answer slows nothing that comes after it. 30 % of
the capacity are asked for in the high class; the rest is two thirds default and one third low. In time means: the first
token within the target, counted from when the request was due. The first seconds of each load are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from msgspec import Struct

from gateway.admission.priority import PRIORITY_HEADER, Priority
from tests.gateway.rig import free_port

TTFT_MS, PLACES, FIRST_MS, EACH_MS, TOKENS = 1000, 4, 40, 10, 37
CAPACITY_RPS = PLACES / (FIRST_MS + EACH_MS * (TOKENS - 1)) * 1e3
SHARE_HIGH = 0.3  # of the capacity, however much is asked for in all
SETTLE_S = 3.0
ENGINE = {"ttft_ms": FIRST_MS, "itl_ms": EACH_MS, "tokens": TOKENS, "max_concurrent": PLACES}
BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Tell me of the river."}]}


class Seen(Struct, frozen=True):
    """One request as its client saw it. `took_s`: to its first token, or to its refusal."""

    priority: Priority
    status: int
    took_s: float
    retry_after_s: float

    @property
    def is_in_time(self) -> bool:
        return self.status == 200 and self.took_s * 1e3 <= TTFT_MS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--times", type=lambda text: [float(each) for each in text.split(",")], default=[1, 2, 5, 10])
    arguments = parser.parse_args()
    for has_gate in (True, False):
        print(f"\n{'with' if has_gate else 'without'} `slo: {{ttft_ms: {TTFT_MS}}}`")
        print("| load | in time, req/s | high in time | refused | refusals p99 | Retry-After | late |")
        print("|---|---|---|---|---|---|---|")
        with gateway(has_gate) as url:
            for times in arguments.times:
                seen = asyncio.run(offer(url, times, arguments.seconds, seed=1))
                print(f"| {times:g}x | {row(seen, arguments.seconds)} |")


def row(seen: list[Seen], seconds: float) -> str:
    high = [each for each in seen if each.priority is Priority.HIGH]
    refused = [each for each in seen if each.status == 503]
    waits = sorted(each.retry_after_s for each in refused) or [0.0]
    served = [each for each in seen if each.status == 200]
    return " | ".join(
        [
            f"{sum(each.is_in_time for each in seen) / seconds:.1f}",
            f"{100 * sum(each.is_in_time for each in high) / max(len(high), 1):.1f} %",
            f"{100 * len(refused) / len(seen):.0f} %",
            f"{1e3 * percentile([each.took_s for each in refused], 0.99):.0f} ms",
            f"{waits[0]:.0f} to {waits[-1]:.0f} s",
            f"{sum(not each.is_in_time for each in served)} of {len(served)}",
        ]
    )


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else math.nan


async def offer(url: str, times: float, seconds: float, seed: int) -> list[Seen]:
    """Poisson arrivals of each class; what became of each one after the first seconds."""
    rest = CAPACITY_RPS * max(times - SHARE_HIGH, 0)
    rates = {Priority.HIGH: CAPACITY_RPS * SHARE_HIGH, Priority.DEFAULT: rest * 2 / 3, Priority.LOW: rest / 3}
    draw = random.Random(seed)
    due: list[tuple[float, Priority]] = []
    for priority, rate in rates.items():
        at = draw.expovariate(rate)
        while at < SETTLE_S + seconds:
            due.append((at, priority))
            at += draw.expovariate(rate)
    began = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        tasks = []
        for at, priority in sorted(due):
            await asyncio.sleep(max(began + at - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(ask(client, url, priority, began + at)))
        seen = await asyncio.gather(*tasks)
    return [each for each, (at, _) in zip(seen, sorted(due), strict=True) if at >= SETTLE_S]


async def ask(client: aiohttp.ClientSession, url: str, priority: Priority, due: float) -> Seen:
    async with client.post(
        f"{url}/v1/chat/completions", json=BODY, headers={PRIORITY_HEADER: priority.label}
    ) as response:
        if response.status == 200:
            await response.content.readline()
        took_s = time.perf_counter() - due
        await response.read()
        return Seen(priority, response.status, took_s, float(response.headers.get("Retry-After", 0)))


@contextmanager
def gateway(has_gate: bool) -> Iterator[str]:
    """A gateway of its own process, ready to serve."""
    slo = {"slo": {"ttft_ms": TTFT_MS}} if has_gate else {}
    replica = {"engine": "fake", "launch": True, "model": "fake", "options": ENGINE}
    port = free_port()
    with tempfile.TemporaryDirectory() as home:
        config = Path(home) / "gateway.yaml"
        data = {
            "server": {"port": port},
            "logs": {"access": False, "level": "error"},
            "models": [{"name": "m", **slo, "replicas": [replica]}],
        }
        config.write_text(json.dumps(data))  # JSON is YAML
        command = [sys.executable, "-m", "goodgate", "serve", "--config", str(config)]
        process = subprocess.Popen(command, env={**os.environ, "GOODGATE_HOME": home})
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(ready(url))
            yield url
        finally:
            process.terminate()
            process.wait(15)


async def ready(url: str) -> None:
    async with asyncio.timeout(30), aiohttp.ClientSession() as client:
        while True:
            try:
                async with client.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # it does not listen yet
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()
