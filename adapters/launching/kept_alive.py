"""Keep a launched engine running: start it, and start it again when it ends by itself.

    async with aclosing(kept_alive(process)) as changes:
        async for change in changes:
            ...                                # Ready, or Restarting with its reason and delay

Leaving the block stops the engine, whatever it is doing: loading, serving, or waiting for its next start. When to try
again, and when to give up, is decided in launching/restart.py. A first start that fails for any reason but the engine's
own crash is not repeated: a wrong option, a missing model or a taken port would be as wrong a second later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeAlias

from msgspec import Struct

from adapters.errors import EngineUnavailable
from adapters.launching.launch import EngineCrashed, EngineProcess
from adapters.launching.restart import DEFAULT, Crashes, Policy

# The engine refuses its command line (the convention of argparse, and of shells), or it cannot be run, or is not there.
_REFUSALS = (2, 126, 127)


class Ready(Struct, frozen=True):
    """The engine answers, so long after its start."""

    after_s: float


class Restarting(Struct, frozen=True):
    """The engine has ended by itself, or did not start again. It is started after the delay."""

    failure: EngineUnavailable
    delay_s: float


Change: TypeAlias = Ready | Restarting


class GaveUp(EngineUnavailable):
    """The engine has crashed too often in a row; the message tells the last of its ends."""

    def __init__(self, name: str, times: int, last: EngineUnavailable) -> None:
        given_up = f"{name} is not started again after {times} quick crashes in a row. The last: "
        super().__init__(f"{given_up}{last.message}")
        self.for_records = f"{given_up}{last.for_records}"


async def kept_alive(process: EngineProcess, policy: Policy = DEFAULT) -> AsyncGenerator[Change, None]:
    """Raises what a first start raises that cannot be repaired by another, and `GaveUp`."""
    crashes = Crashes()
    try:
        while True:
            try:
                after_s = await process.start()
            except EngineUnavailable as error:
                if crashes.in_a_row == 0 and not _may_pass(error):
                    raise
                failure, uptime_s = error, None
            else:
                yield Ready(after_s)
                await process.wait()
                failure, uptime_s = process.failure(), process.uptime_s
            crashes = crashes.and_one(uptime_s, policy)
            delay_s = crashes.delay_s(policy)
            if delay_s is None:
                raise GaveUp(process.spec.name, crashes.quick, failure) from failure
            yield Restarting(failure, delay_s)
            await asyncio.sleep(delay_s)
    finally:
        await process.stop()


async def one_life(process: EngineProcess) -> AsyncGenerator[Change, None]:
    """The same for an engine that is not started again: its first end is raised."""
    try:
        yield Ready(await process.start())
        await process.wait()
        raise process.failure()
    finally:
        await process.stop()


def _may_pass(error: EngineUnavailable) -> bool:
    return isinstance(error, EngineCrashed) and error.exit_code not in _REFUSALS
