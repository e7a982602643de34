"""A plan in, tokens out: lays the plan's chunks out as one flat step, runs the model on it, and samples.

runner = ModelRunner(model, cache, Sampler(eos_token_ids))
tokens = runner.run(plan)       # a list per chunk: a token for each of its last `num_sampled` rows
"""

from __future__ import annotations

import time
from itertools import islice

import numpy as np
import torch

from native_engine.attention.base import KVCache, StepBatch
from native_engine.memory import Costs
from native_engine.models.decoder import Decoder
from native_engine.sampler import Sampler, logprobs_of
from native_engine.step import BlockCopy, Moves, ScheduledChunk, StepPlan


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        sampler: Sampler,
        *,
        num_threads: int | None = None,
        host: KVCache | None = None,
        costs: Costs | None = None,
    ) -> None:
        """`num_threads`: None for torch's default, one per core. `host`: where blocks are swapped out to; what that
        costs is measured here, once at the start and then as it is done, and left in `costs`.
        """
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._num_threads = num_threads
        self._host = host
        self._costs = costs or Costs()
        if host is not None:
            self._timed_copy([BlockCopy(0, 0)], cache, host)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[list[int]]:
        if self._num_threads is not None and torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(
                self._num_threads
            )  # OpenMP keeps this per calling thread, so it is set where it counts
        self._move_blocks(plan.moves)
        token_ids = torch.tensor([token for chunk in plan.chunks for token in chunk.token_ids])
        batch = lay_out(plan.chunks, self._cache.block_size)
        told = prompt_rows(plan.chunks)
        logits = self._model.forward(token_ids, batch, self._cache, torch.cat([told, sampled_rows(plan.chunks)]))
        if logits is None:
            return [[] for _ in plan.chunks]
        _tell_prompts(plan.chunks, logits)
        logits = logits[len(told) :]
        # Behind a draft a row is sampled as if all of the draft held; where it does not, nobody looks at the row.
        sampling = [(chunk, count) for chunk in plan.chunks for count in range(chunk.num_sampled)]
        states = [chunk.sequence.ahead(chunk.draft_ids[:count]) for chunk, count in sampling]
        tokens = self._sampler.sample(logits, states)
        for row, (chunk, _) in enumerate(sampling):
            if (num_top := chunk.sequence.params.logprobs) is not None:
                chunk.logprobs.append(logprobs_of(logits[row], tokens[row], num_top))
        rest = iter(tokens)
        return [list(islice(rest, chunk.num_sampled)) for chunk in plan.chunks]

    def _move_blocks(self, moves: Moves) -> None:
        if self._host is not None and moves.swap_out:
            self._timed_copy(moves.swap_out, self._cache, self._host)
        if moves.copies:
            self._cache.copy_blocks(moves.copies)
        if self._host is not None and moves.swap_in:
            self._timed_copy(moves.swap_in, self._host, self._cache)

    def _timed_copy(self, copies: list[BlockCopy], source: KVCache, target: KVCache) -> None:
        started = time.perf_counter()
        target.copy_blocks(copies, source)
        self._costs.note_swap((time.perf_counter() - started) / len(copies))


def lay_out(chunks: list[ScheduledChunk], block_size: int) -> StepBatch:
    """Where each row of the step belongs: its position, its slot in the cache, its sequence's block table."""
    num_rows = [chunk.num_rows for chunk in chunks]
    width = max(len(chunk.sequence.block_table) for chunk in chunks)
    tables = np.zeros((len(chunks), width), np.int32)  # NO_BLOCK is any block: nobody reads behind a window
    for line, chunk in enumerate(chunks):
        tables[line, : len(chunk.sequence.block_table)] = chunk.sequence.block_table
    np.maximum(tables, 0, out=tables)
    sequences = np.repeat(np.arange(len(chunks), dtype=np.int32), num_rows)
    positions = np.concatenate(
        [np.arange(chunk.start, chunk.start + chunk.num_rows, dtype=np.int32) for chunk in chunks]
    )
    slots = tables[sequences, positions // block_size] * block_size + positions % block_size
    return StepBatch(*map(torch.from_numpy, (positions, slots, sequences, tables)))


def sampled_rows(chunks: list[ScheduledChunk]) -> torch.Tensor:
    """Rows of the step that predict a token: the last ones of each chunk, as many as it samples."""
    ends = np.cumsum([chunk.num_rows for chunk in chunks])
    rows = [np.arange(end - chunk.num_sampled, end) for end, chunk in zip(ends, chunks, strict=True)]
    return torch.from_numpy(np.concatenate(rows).astype(np.int64))


def prompt_rows(chunks: list[ScheduledChunk]) -> torch.Tensor:
    """Rows of the step that predict the `prompt_places` of its chunks, which want to know how likely those were."""
    rows: list[int] = []
    first = 0
    for chunk in chunks:
        rows += [first + place - 1 - chunk.start for place in chunk.prompt_places]
        first += chunk.num_rows
    return torch.tensor(rows, dtype=torch.int64)


def _tell_prompts(chunks: list[ScheduledChunk], logits: torch.Tensor) -> None:
    """The first of `logits` are those of `prompt_rows`."""
    row = 0
    for chunk in chunks:
        prompt_ids, num_top = chunk.sequence.prompt_ids, chunk.sequence.params.prompt_logprobs
        for place in chunk.prompt_places:
            chunk.prompt_logprobs.append(logprobs_of(logits[row], prompt_ids[place], num_top or 0))
            row += 1
