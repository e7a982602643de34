"""What an adapter hands to its client: a generation or a question, in the engine's own words.

Exchange(path="/generate", body={...}, reader=reader)       # for EngineClient.stream
Post("/v1/embeddings", {...})                               # for EngineClient.ask
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from adapters.types import Chunk


class Reader(Protocol):
    """Turns one stream's bytes into chunks, without I/O."""

    @property
    def is_done(self) -> bool:
        """Nothing that follows matters."""

    @property
    def is_cut(self) -> bool:
        """Done before the engine is, which has to be stopped."""

    @property
    def num_chunks(self) -> int: ...

    def feed(self, data: bytes) -> Iterable[Chunk]: ...

    def finish(self) -> list[Chunk]:
        """The stream is over. Raises `StreamInterrupted` if it ended too early."""


class Post(Struct, frozen=True):
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = {}


class Exchange(Struct, frozen=True, kw_only=True):
    """One generation: what to send, who reads the answer, and what to tell an engine that is left before its end."""

    path: str
    body: Mapping[str, Any]
    reader: Reader
    headers: Mapping[str, str] = {}
    farewell: Post | None = None
    content_type: str = "text/event-stream"  # what a success looks like
    # Reads an answer that came in one piece, as JSON; None: such an answer is none.
    read_whole: Callable[[bytes], list[Chunk]] | None = None
