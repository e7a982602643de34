"""Several streams as one: in the order of their items, and none is left open, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from adapters.interleaving import interleaved


class Streams:
    """Streams whose items come at the given moments, in hundredths of a second; None: a failure."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def of(self, name: str, *moments: int | None) -> AsyncGenerator[str, None]:
        try:
            began = asyncio.get_running_loop().time()
            for moment in moments:
                if moment is None:
                    raise ValueError(name)
                await asyncio.sleep(began + moment / 100 - asyncio.get_running_loop().time())
                yield f"{name}{moment}"
        finally:
            self.closed.append(name)


async def test_items_come_in_the_order_of_their_moments_with_the_number_of_their_stream() -> None:
    streams = Streams()
    items = interleaved([streams.of("a", 2, 6), streams.of("b", 4), streams.of("c")])
    assert [item async for item in items] == [(0, "a2"), (1, "b4"), (0, "a6")]
    assert sorted(streams.closed) == ["a", "b", "c"]


@pytest.mark.parametrize("number", [1, 3])
async def test_leaving_early_closes_every_stream(number: int) -> None:
    streams = Streams()
    async with aclosing(interleaved([streams.of(str(name), 0, 500) for name in range(number)])) as items:
        assert await anext(items) == (0, "00")
    assert len(streams.closed) == number


async def test_the_first_failure_ends_the_whole_and_closes_the_others() -> None:
    streams = Streams()
    items = interleaved([streams.of("a", 1, 500), streams.of("b", 2, None), streams.of("c", 500)])
    with pytest.raises(ValueError, match="b"):
        async for _ in items:
            pass
    assert sorted(streams.closed) == ["a", "b", "c"]
