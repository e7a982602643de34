"""Several prompts as one stream of chunks: each prompt is a generation of its own, and all run at the same time.

Prompt p's choice k becomes choice p * n + k, usage is summed, and the first failure ends the whole. Leaving the block
cancels every part and waits until each has closed its engine's side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, TypeAlias

import msgspec

from adapters.types import Chunk, Usage

QUEUE_SIZE = 64  # chunks held for a slow client before the engines wait; bounds the memory of one request


class Part(Protocol):
    """What fan-out needs of an answer."""

    @property
    def account(self) -> Callable[[Usage], None]: ...

    def __aiter__(self) -> AsyncIterator[Chunk]: ...


Open: TypeAlias = Callable[[], AbstractAsyncContextManager[Part]]
_Item: TypeAlias = Chunk | Usage | Exception | None  # a piece, a part's usage, a part's failure, a part's end


@asynccontextmanager
async def fan_out(opens: Sequence[Open], num_choices: int) -> AsyncIterator[AsyncGenerator[Chunk, None]]:
    queue: asyncio.Queue[_Item] = asyncio.Queue(QUEUE_SIZE)
    tasks: list[asyncio.Task[None]] = []
    chunks = _merged(queue, len(opens))
    try:
        for number, open_part in enumerate(opens):
            tasks.append(asyncio.create_task(_pump(open_part, number * num_choices, queue)))
            await asyncio.sleep(0)  # to begin costs time, of tokenising: others have their turn after each
        yield chunks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await chunks.aclose()


async def _pump(open_part: Open, first_index: int, queue: asyncio.Queue[_Item]) -> None:
    try:
        async with open_part() as part:
            async for chunk in part:
                if chunk.usage is not None:
                    part.account(chunk.usage)
                    await queue.put(chunk.usage)
                else:
                    await queue.put(msgspec.structs.replace(chunk, index=first_index + chunk.index))
    except Exception as error:  # handed over whole: the reader raises it in the request's own task
        await queue.put(error)
    else:
        await queue.put(None)


async def _merged(queue: asyncio.Queue[_Item], num_open: int) -> AsyncGenerator[Chunk, None]:
    usages: list[Usage] = []
    while num_open:
        item = await queue.get()
        if item is None:
            num_open -= 1
        elif isinstance(item, Exception):
            raise item
        elif isinstance(item, Usage):
            usages.append(item)
        else:
            yield item
    if usages:
        yield Chunk(usage=_total(usages))


def _total(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=_sum_of_told(usage.cached_tokens for usage in usages),
        reasoning_tokens=_sum_of_told(usage.reasoning_tokens for usage in usages),
    )


def _sum_of_told(counts: Iterable[int | None]) -> int | None:
    told = [count for count in counts if count is not None]
    return sum(told) if told else None
