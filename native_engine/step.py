"""What one step of the engine computes: pure data, made by the scheduler, read by the runner.

A plan is a list of moves, and a list of chunks, one per sequence. The moves come first. A chunk is a
run of known tokens whose keys and values are to be computed and written through the sequence's block table: position
`p` lives in block `block_table[p // block_size]` at offset `p % block_size`. Attention of a chunk reads every position
from 0 to the chunk's end. The runner answers with one entry per chunk: the sampled token where `samples` is set, None
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from native_engine.sequence import Sequence
from native_engine.step_time import StepWork, chunk_work


class BlockCopy(NamedTuple):
    source: int
    target: int


class Moves(NamedTuple):
    """Whole blocks to be copied before a step computes: first out to the host pool, then within the cache, then back
    from the host pool. Within each, every source is read before any target is written."""

    swap_out: list[BlockCopy]
    copies: list[BlockCopy]  # a sequence is about to write where others read, and goes on in a block of its own
    swap_in: list[BlockCopy]


@dataclass(slots=True)
class ScheduledChunk:
    sequence: Sequence
    start: int
    length: int
    samples: bool  # the chunk ends at the last known token, so its last row predicts the next one

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.start : self.end]


@dataclass(slots=True)
class StepPlan:
    step_id: int
    moves: Moves
    chunks: list[ScheduledChunk]
    preempted: list[Sequence]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def work(self) -> StepWork:
        parts = (chunk_work(chunk.start, chunk.length, samples=chunk.samples) for chunk in self.chunks)
        return sum(parts, start=StepWork(0, 0, 0))
