"""Many prompts in one request, beside the requests of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

from adapters.types import Chunk, Usage
from gateway.fan_out import fan_out


class Silent:
    """A part that says nothing."""

    account: Callable[[Usage], None]

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        return
        yield


async def test_prompts_begin_one_after_the_other_and_others_have_their_turn_in_between() -> None:
    """To begin takes an engine's tokenizer: 256 prompts at once kept every other stream waiting for 0.3 s."""
    log: list[str] = []

    async def other_stream() -> None:
        while True:
            log.append("other")
            await asyncio.sleep(0)

    @asynccontextmanager
    async def part() -> AsyncIterator[Silent]:
        log.append("begin")
        yield Silent()

    other = asyncio.create_task(other_stream())
    async with fan_out([part] * 256, 1) as chunks:
        assert [chunk async for chunk in chunks] == []
    other.cancel()
    assert log.count("begin") == 256
    assert not any(pair == ("begin", "begin") for pair in pairwise(log))
