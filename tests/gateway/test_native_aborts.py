"""Clients that leave the native engine at random points: its line is empty, its blocks are free, memory stays."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections import Counter
from pathlib import Path

import psutil
import pytest

from gateway.app import PARTS
from gateway.records.record import Record
from native_engine.blocks import Published
from tests.gateway.rig import Gateway, Start, until
from tests.gateway.test_aborts import records_in
from tests.gateway.test_cancellation import at_rest, leave
from tests.gateway.test_native_failures import folder, native, serving

__all__ = ["folder"]
NUM_AT_ONCE = 15


async def aborts(gateway: Gateway, dice: random.Random, number: int) -> None:
    """Some wait for one of four seats, some are in a prompt of several steps, some have all but ended."""

    async def abort() -> None:
        words = "".join(dice.choices("abcdefgh ", k=dice.choice([5, 60, 300])))
        body = {"model": "m", "prompt": words, "max_tokens": dice.choice([1, 20, 150]), "stream": dice.random() < 0.7}
        await leave(gateway, "/v1/completions", body, dice.uniform(0.005, 0.25), is_reset=dice.random() < 0.5)

    for _ in range(number // NUM_AT_ONCE):
        await asyncio.gather(*(abort() for _ in range(NUM_AT_ONCE)))
    await until(lambda: at_rest(gateway))
    await until(lambda: not native(gateway)._engine.has_work)
    await until(lambda: not gateway.app[PARTS].ledger._waiting)


def phase(record: Record) -> str:
    if not record.has_left:
        return "at the end"
    return "before its first token" if record.ttft_s is None else "amid tokens"


def num_of_ours() -> int:
    """Objects of our own types, but for what is known of cached blocks: a pool fills with those."""
    gc.collect()
    ours = ("gateway.", "adapters.", "native_engine.")
    kinds = (type(each) for each in gc.get_objects())
    return sum(kind is not Published and str(kind.__module__).startswith(ours) for kind in kinds)


@pytest.mark.replay("F14")
async def test_f14_clients_that_leave_the_native_engine_at_random_points_leave_no_block_and_no_memory(
    start: Start, folder: Path, native_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "goodgate")  # pytest keeps every line of the log, which are objects too
    dials = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_mib": 1}
    gateway = await serving(start, folder, native_home, dials=dials)
    dice, engine, process = random.Random(1), native(gateway), psutil.Process()
    expected = (await gateway.chat(temperature=0, max_tokens=8))[1]["choices"]
    await aborts(gateway, dice, 60)
    num_objects, resident = num_of_ours(), process.memory_info().rss
    await aborts(gateway, dice, 150)
    assert num_of_ours() - num_objects < 15  # of 150 requests
    assert process.memory_info().rss - resident < 8 << 20
    engine._engine.check()
    stats = engine._engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert not engine._streams
    assert not engine._commands
    await until(lambda: len(records_in(tmp_path)) > 150)
    phases = Counter(phase(record) for record in records_in(tmp_path))
    assert min(phases[each] for each in ("before its first token", "amid tokens", "at the end")) >= 5, phases
    assert (await gateway.chat(temperature=0, max_tokens=8))[1]["choices"] == expected
