"""One attempt after the other, while the failures are such that the next replica may do better.

    answer = await first_to_answer(stack, router.route(...), partial(attempts.generate, trace, request, None, ask))

Only ever before anything has reached the client: once this has answered there is no second attempt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import TypeVar

from adapters.errors import GoodgateError
from gateway.replicas.replica import Replica

T = TypeVar("T")


async def first_to_answer(
    stack: AsyncExitStack,
    replicas: AsyncGenerator[Replica, None],
    attempt: Callable[[Replica], AbstractAsyncContextManager[T]],
) -> T:
    """One attempt after the other, until one answers or fails for good. One that answers stays open on the stack, and
    below it the route, which keeps its model loaded."""
    failure: GoodgateError | None = None
    await stack.enter_async_context(aclosing(replicas))
    try:
        async for replica in replicas:
            try:
                return await stack.enter_async_context(attempt(replica))
            except GoodgateError as error:
                if not error.retryable:
                    raise
                failure = error
    except GoodgateError:
        await replicas.aclose()  # the model may have to make room for those that are tried next
        raise
    assert failure is not None  # a route gives at least one replica, or raises
    raise failure
