"""Prompts of random words: single questions, shared beginnings, conversations, answers after a schema.

Nothing but what is meant to be shared can be served from a prefix cache: words are drawn afresh for each request from a
stream of its own (seeds, rung, replicate, seq), the varying words come first and the constant question last. Only what
the chat template puts in front of every message is shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arena.load.arrivals import SECOND_NS
from arena.load.plan import Prompt, Turn
from arena.load.spec import Cache, ConversationWorkload, SharedPrefix, StructuredWorkload, SyntheticWorkload
from arena.load.workloads.lengths import Columns, draw
from arena.load.workloads.words import CellKey, Message, prompt, shared_stream, stream, words

QUESTION = "Write a story that uses all of these words."
QUESTION_TOKENS = 10
FORM = "Fill in the JSON form with these words."
FORM_TOKENS = 9


def synthetic_prompt(workload: SyntheticWorkload, columns: Columns, cache: Cache, cell: CellKey, seq: int) -> Prompt:
    rng = stream(workload.seed, cell, seq)
    tokens, output_tokens = draw(workload.prompt, rng, columns), draw(workload.output, rng, columns)
    text = question(tokens, rng)
    system, prefix_tokens = shared_prefix(workload.prefix, workload.seed, cache, cell, rng)
    return prompt([*system, {"role": "user", "content": text}], output_tokens, prefix_tokens + tokens)


def structured_prompt(workload: StructuredWorkload, columns: Columns, cell: CellKey, seq: int) -> Prompt:
    rng = stream(workload.seed, cell, seq)
    tokens = draw(workload.prompt, rng, columns)
    text = question(tokens, rng, FORM, FORM_TOKENS)
    form = {"type": "json_schema", "json_schema": {"name": "form", "strict": True, "schema": workload.schema}}
    output_tokens = draw(workload.output, rng, columns)
    return prompt([{"role": "user", "content": text}], output_tokens, tokens, response_format=form)


def conversation(
    workload: ConversationWorkload, columns: Columns, cache: Cache, cell: CellKey, number: int
) -> Sequence[Turn]:
    """All turns of one conversation. An answer in the history has the length that was asked for, and other words than
    the engine gave: what it says cannot be known before it is asked.
    """
    rng = stream(workload.seed, cell, number)
    history, told_tokens = shared_prefix(workload.prefix, workload.seed, cache, cell, rng)
    turns, after_s = [], 0.0
    for _ in range(int(rng.integers(workload.min_turns, workload.max_turns + 1))):
        tokens, output_tokens = draw(workload.prompt, rng, columns), draw(workload.output, rng, columns)
        history = [*history, {"role": "user", "content": question(tokens, rng)}]
        told_tokens += tokens
        turns.append(Turn(round(after_s * SECOND_NS), prompt(history, output_tokens, told_tokens)))
        history = [*history, {"role": "assistant", "content": words(output_tokens, rng)}]
        told_tokens += output_tokens
        after_s += float(rng.uniform(workload.min_think_s, workload.max_think_s))
    return turns


def question(tokens: int, rng: np.random.Generator, ask: str = QUESTION, ask_tokens: int = QUESTION_TOKENS) -> str:
    """So many tokens of text, the question at the end; a text too short for it goes without."""
    if tokens <= ask_tokens:
        return words(tokens, rng)
    return f"{words(tokens - ask_tokens, rng)}\n\n{ask}"


def shared_prefix(
    prefix: SharedPrefix | None, seed: int, cache: Cache, cell: CellKey, rng: np.random.Generator
) -> tuple[list[Message], int]:
    """The system message that this request shares with others, if it does, and its length."""
    if prefix is None or rng.random() >= prefix.share:
        return [], 0
    group = int(np.searchsorted(_popularity(prefix), rng.random(), side="right"))
    text = words(prefix.tokens, shared_stream(seed, cell, cache, group))
    return [{"role": "system", "content": text}], prefix.tokens


def _popularity(prefix: SharedPrefix) -> np.ndarray:
    """Cumulated shares of the groups, the most popular first: Zipf's law, group k in proportion to k ** -zipf."""
    weights = np.arange(1, prefix.groups + 1, dtype=float) ** -prefix.zipf
    shares = np.cumsum(weights / weights.sum())
    shares[-1] = 1.0
    return shares
