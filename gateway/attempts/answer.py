"""What is asked of an engine, and what comes back: a question with one answer, or a stream of chunks.

async for chunk in answer:                     # an Answer
    if chunk.usage is not None:
        answer.account(chunk.usage)
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
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
    """A generation under way. Iterating gives its chunks, first those that are in hand; `account` is told the usage
    when it comes by."""

    def __init__(
        self,
        model: str,
        ready: Iterable[Chunk],
        rest: AsyncGenerator[Chunk, None],
        account: Callable[[Usage], None],
        *,
        by: Replica | None = None,
    ) -> None:
        self.model = model
        self.by = by  # the replica that answers, where it is one
        self.account = account
        self._ready = deque(ready)
        self._rest = rest
        self.num_given = 0

    def in_hand(self) -> list[Chunk]:
        """Those of the next chunks that nobody has to wait for: all of them where the client does not stream."""
        chunks = [*self._ready]
        self._ready.clear()
        self.num_given += len(chunks)
        return chunks

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    def __anext__(self) -> Awaitable[Chunk]:
        # Not a coroutine itself: every chunk passes here, and one frame less is a tenth of its cost.
        self.num_given += 1
        return _given(self._ready.popleft()) if self._ready else self._rest.__anext__()


async def read_rest(chunks: list[Chunk], rest: AsyncIterator[Chunk], num_choices: int, trace: Trace) -> None:
    """Adds everything that follows; `StreamInterrupted` if the answer is not whole."""
    async for chunk in rest:
        chunks.append(chunk)
        trace.num_pieces += 1
    if sum([chunk.finish_reason is not None for chunk in chunks]) < num_choices:
        raise StreamInterrupted("The engine's stream ended before the answer was whole.")


async def _given(chunk: Chunk) -> Chunk:
    return chunk
