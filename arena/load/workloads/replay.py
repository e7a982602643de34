"""Prompts as a trace has them: of the recorded lengths, and where blocks of prompts were hashed, sharing what was
shared.
"""

from __future__ import annotations

import numpy as np

from arena.load.arrivals import first_row
from arena.load.plan import Prompt
from arena.load.spec import Cache, TraceWorkload
from arena.load.traces import BLOCK_TOKENS, Trace
from arena.load.workloads.synthetic import question
from arena.load.workloads.words import CellKey, prompt, shared_stream, stream, words

_HASH_SPACE = 1 << 32  # ids of one round through the trace; a second round shares nothing with the first


def trace_prompt(workload: TraceWorkload, trace: Trace, cache: Cache, cell: CellKey, seq: int) -> Prompt:
    """The row that is due: arrivals of kind `trace` begin at the same one."""
    lap, row = divmod(first_row(trace, cell.schedule_seed()) + seq, len(trace))
    tokens = int(min(trace.prompt_tokens[row], workload.max_prompt_tokens))
    output_tokens = int(min(trace.output_tokens[row], workload.max_output_tokens))
    if trace.hash_ids and trace.hash_ids[row]:
        ids = [lap * _HASH_SPACE + number for number in trace.hash_ids[row]]
        text = _of_blocks(ids, tokens, workload.seed, cache, cell)
    else:
        text = question(tokens, stream(workload.seed, cell, seq))
    return prompt([{"role": "user", "content": text}], output_tokens, tokens)


def clipped(workload: TraceWorkload, trace: Trace) -> list[str]:
    """How many rows the caps touch, in words."""
    told = []
    for what, lengths, cap in (
        ("prompts", trace.prompt_tokens, workload.max_prompt_tokens),
        ("answers", trace.output_tokens, workload.max_output_tokens),
    ):
        touched = int(np.count_nonzero(lengths > cap))
        if touched:
            share = touched / len(trace)
            told.append(f"{trace.name}: {touched} of {len(trace)} {what} ({share:.1%}) are cut to {cap} tokens.")
    return told


def _of_blocks(ids: list[int], tokens: int, seed: int, cache: Cache, cell: CellKey) -> str:
    """Equal ids give equal text, so equal beginnings of the list give equal beginnings of the prompt."""
    blocks = []
    for place, number in enumerate(ids):
        count = min(BLOCK_TOKENS, tokens - place * BLOCK_TOKENS)
        if count > 0:
            blocks.append(words(count, shared_stream(seed, cell, cache, number)))
    return " ".join(blocks)
