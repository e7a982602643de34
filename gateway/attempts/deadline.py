"""The time that the whole answer may take, whoever gives it and however often it is tried.

async with within(model.config.total_timeout_s):      # DeadlineExceeded
    ...

The other deadlines (to connect, to the first token, between tokens) are each attempt's own, in adapters/wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from adapters.errors import DeadlineExceeded


@asynccontextmanager
async def within(timeout_s: float) -> AsyncIterator[None]:
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            yield
    except TimeoutError:
        if not clock.expired():
            raise
        raise DeadlineExceeded(
            f"The answer was not whole within {timeout_s:g} s; ask for less, or wait longer."
        ) from None
