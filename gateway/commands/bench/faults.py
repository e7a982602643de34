"""What goes wrong in a soak, in turn, for as long as it lasts: first at one engine, then at the other, then at both.

async for fault in cycling(engines, gateway, config, seconds): ...    # each when it is over
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from msgspec import Struct

from gateway.commands.bench.engine import Mode
from gateway.commands.bench.processes import Engine, Gateway

KILL, RELOAD, BAD_RELOAD = "kill", "reload", "bad reload"
CYCLE = [*(mode for mode in Mode if mode is not Mode.WELL), KILL, RELOAD, BAD_RELOAD]
LONGEST_S = 10.0  # of one fault
CALM_SHARE = 0.5  # after each, of its time
BAD_CONFIG = "models: [{name: m, replicas: ["


class Fault(Struct, frozen=True):
    """`where`: the places of the engines that had it; empty where it was the gateway's configuration."""

    name: str
    where: tuple[int, ...]
    began_s: float
    ended_s: float


async def cycling(
    engines: Sequence[Engine], gateway: Gateway, config: Path, seconds: float, text: Callable[[int], str]
) -> AsyncIterator[Fault]:
    """One fault after the other, all of them at least once. `text(n)` is the n-th configuration."""
    began = time.monotonic()
    each_s = min(LONGEST_S, seconds / (len(CYCLE) * (1 + CALM_SHARE)))
    step_s = each_s * (1 + CALM_SHARE)
    for number in range(int(seconds / step_s + 0.01)):
        cycle, place = divmod(number, len(CYCLE))
        name = CYCLE[place]
        where = () if name in (RELOAD, BAD_RELOAD) else _places(cycle, len(engines))
        began_s = time.monotonic() - began
        if where:
            await _at([engines[each] for each in where], name, each_s)
        else:
            _reload(gateway, config, BAD_CONFIG if name == BAD_RELOAD else text(cycle))
            await asyncio.sleep(each_s)
        yield Fault(name, where, began_s, time.monotonic() - began)
        await asyncio.sleep((number + 1) * step_s - (time.monotonic() - began))


def _reload(gateway: Gateway, config: Path, text: str) -> None:
    config.write_text(text)
    gateway.reload()


def _places(cycle: int, num_engines: int) -> tuple[int, ...]:
    """One engine a cycle, then all of them."""
    turn = cycle % (num_engines + 1)
    return (turn,) if turn < num_engines else tuple(range(num_engines))


async def _at(engines: Sequence[Engine], name: str, seconds: float) -> None:
    for engine in engines:
        if name == KILL:
            engine.kill()
        else:
            engine.tell(Mode(name))
    await asyncio.sleep(seconds)
    for engine in engines:
        if name == KILL:
            await asyncio.to_thread(engine.restart)
        else:
            engine.tell(Mode.WELL)
