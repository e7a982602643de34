"""What one step of the engine computes: pure data, made by the scheduler, read by the runner.

A plan is a list of moves, and a list of chunks, one per sequence. The moves come first. A chunk is a
run of known tokens whose keys and values are to be computed and written through the sequence's block table: position
`p` lives in block `block_table[p // block_size]` at offset `p % block_size`. Attention of a row reads every position
from 0 to its own.

A chunk that `samples` may have a draft behind its last token (speculation.py): guessed tokens, a row each, at the
positions that follow. The runner answers with a list per chunk: a token sampled behind the last known token and behind
each of its draft; none where the chunk does not sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from native_engine.logprobs import Logprobs
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
    length: int  # of known tokens
    samples: bool  # the chunk ends at the last known token, so its last row predicts the next one
    draft_ids: list[int] = field(default_factory=list)
    new_ids: list[int] = field(default_factory=list)  # what its sequence has gained, once the step is committed
    logprobs: list[Logprobs] = field(default_factory=list)  # the runner's, of each token that it samples, where wanted
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # and of each of `prompt_places`

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def token_ids(self) -> list[int]:
        """One for each row."""
        return self.sequence.token_ids[self.start : self.end] + self.draft_ids

    @property
    def num_rows(self) -> int:
        return self.length + len(self.draft_ids)

    @property
    def num_sampled(self) -> int:
        """Its last rows."""
        return 1 + len(self.draft_ids) if self.samples else 0

    @property
    def prompt_places(self) -> range:
        """The places in the prompt that its rows predict, where their log-probabilities are wanted."""
        if self.sequence.params.prompt_logprobs is None:
            return range(0)
        return range(self.start + 1, min(self.end + 1, self.sequence.num_prompt_tokens))


class Wanted(NamedTuple):
    """A draft is wanted for the chunk's sequence, of so many tokens at most."""

    chunk: ScheduledChunk
    length: int


@dataclass(slots=True)
class StepPlan:
    step_id: int
    moves: Moves
    chunks: list[ScheduledChunk]
    preempted: list[Sequence]
    room: int = 0  # rows that the step's budget has left

    @property
    def num_tokens(self) -> int:
        """Known ones."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks)

    @property
    def work(self) -> StepWork:
        parts = (chunk_work(chunk.start, chunk.num_rows, sampled=chunk.num_sampled) for chunk in self.chunks)
        return sum(parts, start=StepWork(0, 0, 0))
