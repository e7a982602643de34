"""What the road through litellm costs, beside the direct one to the same server: alternating, in one run.

    python scripts/measure_cloud.py --python .venv/cloud/bin/python

It starts the scripted engine of adapters/servers/fake_server.py and asks it through `openai_compatible` and through
`litellm_cloud`. Printed: how long the worker takes to start and what it holds, how much later the first token comes,
and how fast pieces pass when the engine does not wait between them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from adapters.base import EngineAdapter
from adapters.registry import adapter_class
from adapters.types import ChatRequest

ENGINES = ("openai_compatible", "litellm_cloud")
TTFT_MS = 20


async def main(python: str, rounds: int) -> None:
    with (
        fake_server(ttft_ms=TTFT_MS, itl_ms=2, tokens=32) as slow,
        fake_server(ttft_ms=1, itl_ms=0, tokens=2000) as fast,
    ):
        await first_tokens(slow, python, rounds)
        await throughput(fast, python, rounds=max(3, rounds // 20))


async def first_tokens(url: str, python: str, rounds: int) -> None:
    adapters = {}
    for name in ENGINES:
        begun = time.perf_counter()
        adapters[name] = await started(name, url, python)
        print(f"{name}: ready in {time.perf_counter() - begun:.2f} s")
    for name, adapter in adapters.items():
        print(f"{name}: first request, first token after {(await ask(adapter))[0] * 1e3 - TTFT_MS:.1f} ms more")
    print(f"the worker holds {resident_mib(adapters['litellm_cloud']):.0f} MiB")
    times: dict[str, list[float]] = {name: [] for name in ENGINES}
    for _ in range(rounds):
        for name, adapter in adapters.items():
            times[name].append((await ask(adapter))[0] * 1e3 - TTFT_MS)
    for name, values in times.items():
        values.sort()
        p50, p99 = statistics.median(values), values[int(len(values) * 0.99)]
        print(f"{name}: first token after {p50:.2f} ms p50, {p99:.2f} ms p99, the engine's {TTFT_MS} ms not counted")
    for adapter in adapters.values():
        await adapter.close()


async def throughput(url: str, python: str, rounds: int) -> None:
    adapters = {name: await started(name, url, python) for name in ENGINES}
    costs: dict[str, list[float]] = {name: [] for name in ENGINES}
    for _ in range(rounds):
        for name, adapter in adapters.items():
            first_s, total_s, num_chunks = await ask(adapter, max_tokens=2000)
            costs[name].append((total_s - first_s) / num_chunks * 1e6)
    for name, values in costs.items():
        print(f"{name}: {statistics.median(values):.0f} us a piece at full speed, one stream")
    for adapter in adapters.values():
        await adapter.close()


async def started(name: str, url: str, python: str) -> EngineAdapter[Any]:
    mine = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "k", "python": python}
    cls = adapter_class(name)
    adapter = cls(msgspec.convert({"url": url, "model": MODEL} if name == ENGINES[0] else mine, cls.Options))
    await adapter.start()
    return adapter


MODEL = "fake"


async def ask(adapter: EngineAdapter[Any], **fields: Any) -> tuple[float, float, int]:
    """When the first piece came, when all was there, and in how many pieces."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    begun, first, num_chunks = time.perf_counter(), 0.0, 0
    async for _ in adapter.generate(msgspec.convert(body, ChatRequest), request_id=f"m-{begun}"):
        first = first or time.perf_counter() - begun
        num_chunks += 1
    return first, time.perf_counter() - begun, num_chunks


def resident_mib(adapter: Any) -> float:
    supervisor = adapter._worker._running._process.pid
    worker = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0]
    line = next(each for each in Path(f"/proc/{worker}/status").read_text().splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@contextmanager
def fake_server(**dials: Any) -> Iterator[str]:
    flags = [word for name, value in dials.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "adapters.servers.fake_server", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().split()[-1]}"
        finally:
            process.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="", help="a Python that has litellm (default: this one)")
    parser.add_argument("--rounds", type=int, default=100, help="requests of each kind (default 100)")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.python, arguments.rounds))
