"""Several streams read as one, for engines that give one choice at a time.

    async with aclosing(interleaved(streams)) as items:
        async for index, item in items: ...      # as they come; `index` is that of the stream

The first failure ends the whole. Closing it, early or at the end, closes every stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def interleaved(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    if len(streams) == 1:  # most often, and without a task for each item
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                if isinstance(task.exception(), StopAsyncIteration):
                    continue
                yield index, task.result()
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
