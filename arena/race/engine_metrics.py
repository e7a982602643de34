"""What an engine tells of itself while a cell runs: its Prometheus metrics, asked for once a second by the driver.

    async with watched(target) as pages:
        ...                                     # a cell runs
    metric_rows(pages, epoch_unix_ns)           # [MetricRow(t_ns=..., metric='running{model="m"}', value=3.0), ...]

A page keeps only the lines that differ from those of the page before, and no buckets of histograms; it is parsed when
the cell is over. So a page of vLLM's costs the driver about a millisecond, and an engine that tells nothing costs one
request. Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from adapters.errors import EngineProtocolError
from arena.load.asking import whole
from arena.load.plan import Target
from arena.load.spool import MetricRow

EVERY_S = 1.0
TIMEOUT_S = 2.0
PATH = "/metrics"
MOST_BYTES = 16 << 20  # a page of vLLM's has some 100 KiB
MOST_LINES = 4000  # it has some hundred beside its buckets
MOST_CHARS = 1000  # of a line


class Page(NamedTuple):
    t_unix_ns: int
    lines: list[str]  # samples that are new or have another value than before


@asynccontextmanager
async def watched(target: Target, *, every_s: float = EVERY_S) -> AsyncIterator[list[Page]]:
    """The list fills while the block runs. It stays empty where the engine has no metrics, or tells us none."""
    pages: list[Page] = []
    task = asyncio.create_task(_watch(target, pages, every_s))
    try:
        yield pages
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def metric_rows(pages: Sequence[Page], epoch_unix_ns: int | None) -> list[MetricRow]:
    """On the cell's clock: what was seen before its start has a negative time. What is no number is left out."""
    if epoch_unix_ns is None:
        return []
    return [
        MetricRow(t_ns=page.t_unix_ns - epoch_unix_ns, metric=_series(name, labels), value=value)
        for page in pages
        for name, labels, value in _samples(page.lines)
        if math.isfinite(value)
    ]


async def _watch(target: Target, pages: list[Page], every_s: float) -> None:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=dict(target.headers)) as client:
        known: set[str] = set()
        while True:
            lines = await _ask(client, target.url + PATH)
            if lines is None and not pages:
                return
            if lines is not None:  # else a gap: the engine was too busy to tell
                pages.append(Page(time.time_ns(), [line for line in lines if line not in known]))
                known = set(lines)
            await asyncio.sleep(every_s)


async def _ask(client: aiohttp.ClientSession, url: str) -> list[str] | None:
    try:
        async with client.get(url, allow_redirects=False) as response:
            text = (await whole(response, MOST_BYTES)).decode("utf-8") if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError, EngineProtocolError):
        return None
    if text is None or response.content_type == "application/json":
        return None
    lines = [line for line in text.splitlines() if line and line[0] != "#" and "_bucket{" not in line]
    return [line for line in lines[:MOST_LINES] if len(line) <= MOST_CHARS]


def _samples(lines: Sequence[str]) -> list[tuple[str, dict[str, str], float]]:
    """A line that is no sample tells nothing; the others still do."""
    found = []
    for line in lines:
        with suppress(ValueError, IndexError):
            for family in text_string_to_metric_families(line + "\n"):
                found += [(sample.name, sample.labels, float(sample.value)) for sample in family.samples]
    return found


def _series(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name
