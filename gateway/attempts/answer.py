"""What is asked of an engine, and what comes back: a question with one answer, or a stream of chunks.

async for chunk in answer:                     # an Answer
    if chunk.usage is not None:
        answer.account(chunk.usage)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from adapters.base import EngineAdapter
from adapters.errors import StreamInterrupted
from adapters.types import Chunk, Usage
from gateway.records.trace import Trace
from gateway.replicas.replica import Replica
from gateway.routing.router import Check

T = TypeVar("T")


def _no_tokens(_: object) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Generic[T]):
    """Something an engine answers in one piece."""

    check: Check
    ask: Callable[[EngineAdapter[Any]], Awaitable[T]]
    num_tokens: Callable[[T], int] = _no_tokens  # read by the engine for this answer, where that is accounted for
    expected_tokens: int = 0  # what that number may be, before it is known


class Answer:
    """A generation under way. Iterating gives its chunks; `account` is told the usage when it comes by."""

    def __init__(
        self,
        model: str,
        first: Chunk,
        rest: AsyncGenerator[Chunk, None],
        account: Callable[[Usage], None],
        *,
        by: Replica | None = None,
    ) -> None:
        self.model = model
        self.by = by  # the replica that answers, where it is one
        self.account = account
        self._first: Chunk | None = first
        self._rest = rest
        self.num_given = 0

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    def __anext__(self) -> Awaitable[Chunk]:
        # Not a coroutine itself: every chunk passes here, and one frame less is a tenth of its cost.
        self.num_given += 1
        if self._first is None:
            return self._rest.__anext__()
        first, self._first = self._first, None
        return _given(first)


async def read_whole(
    first: Chunk, rest: AsyncIterator[Chunk], num_choices: int, trace: Trace
) -> AsyncGenerator[Chunk, None]:
    """Everything after the first chunk, already read; `StreamInterrupted` if the answer is not whole."""
    read = []
    async for chunk in rest:
        read.append(chunk)
        trace.num_pieces += 1
    num_finished = sum(chunk.finish_reason is not None for chunk in (first, *read))
    if num_finished < num_choices:
        raise StreamInterrupted("The engine's stream ended before the answer was whole.")
    return _replay(read)


async def _replay(chunks: Sequence[Chunk]) -> AsyncGenerator[Chunk, None]:
    for chunk in chunks:
        yield chunk


async def _given(chunk: Chunk) -> Chunk:
    return chunk
