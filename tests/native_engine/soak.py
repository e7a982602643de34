"""Random arrivals, aborts and forks in a pool of 20 blocks, as long as one likes; answers held to those of no cache.

    python -m tests.native_engine.soak --minutes 20 [--seed 1]

The model is small and random, so that a minute holds thousands of steps; scheduler, memory and kernels are those that
serve. Ends with status 1 at the first token that differs, the first step whose books are wrong, or a block that stays.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from native_engine.config import EngineConfig
from native_engine.engine import Choice, Engine
from native_engine.loading import make_model
from native_engine.models.decoder import Decoder
from native_engine.sampling_params import SamplingParams
from native_engine.weights import open_checkpoint
from tests.native_engine.test_differential import LARGE, alone, engine_of, random_request, shrunk
from tests.native_engine.tiny_llama import VOCAB_SIZE, write_tiny_llama

BLOCKS = 20
MOST_AT_ONCE = 12
CHECKED_SHARE = 0.25  # of the requests: to compute one alone takes longer than to compute it among others


@dataclass(slots=True)
class Asked:
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    is_aborted: bool = False


class Soak:
    """An engine, who asks it, and what has come of it. `AssertionError`: a promise was broken."""

    def __init__(self, model: Decoder, seed: int) -> None:
        self.model = model
        self.source = random.Random(seed)
        self.engine: Engine = shrunk(engine_of(model, max_num_seqs=8, max_num_batched_tokens=24), BLOCKS)
        self.counts: Counter[str] = Counter()
        self._stems = [self.source.choices(range(3, VOCAB_SIZE), k=40) for _ in range(4)]
        self._open: dict[str, Asked] = {}
        self._ended: list[Asked] = []

    def step(self) -> None:
        """Whoever comes, leaves or is forked now; one step of the engine; its books; and an answer that has ended."""
        if len(self._open) < MOST_AT_ONCE and self.source.random() < 0.25:
            self._arrive()
        if self._open and self.source.random() < 0.02:
            self._abort(self.source.choice([*self._open]))
        if self._open and self.source.random() < 0.02:
            self._fork(self.source.choice([*self._open]))
        self._compute()
        while self._ended:
            self._compare(self._ended.pop())

    def drain(self) -> None:
        """Everybody's end. Then no block is held."""
        while self.engine.has_work:
            self._compute()
        while self._ended:
            self._compare(self._ended.pop())
        assert not self._open, f"{sorted(self._open)} never ended"
        assert self.engine.stats().kv_blocks_used == 0, self.engine.stats()

    def _arrive(self) -> None:
        prompt, params = random_request(self.source, self._stems)
        count = self.source.choice([1, 1, 1, 3])
        choices = [replace(params, seed=self.source.randrange(2**63)) for _ in range(count)]
        names = [f"r{self.counts['asked'] + number}" for number in range(count)]
        others = [Choice(name, choice) for name, choice in zip(names[1:], choices[1:], strict=True)]
        self.engine.add(names[0], prompt, choices[0], others=others)
        self._open |= {name: Asked(prompt, choice) for name, choice in zip(names, choices, strict=True)}
        self.counts["asked"] += count
        self.counts["branches"] += count - 1

    def _abort(self, name: str) -> None:
        if self.engine.abort(name):
            asked = self._open.pop(name)
            asked.is_aborted = True
            self._ended.append(asked)
            self.counts["aborted"] += 1

    def _fork(self, name: str) -> None:
        """With its parent's seed, a fork must go on as its parent does."""
        parent = self._open[name]
        most = parent.params.max_tokens
        if not parent.tokens or (most is not None and len(parent.tokens) >= most):
            return
        child = f"r{self.counts['asked']}"
        self.engine.fork(name, child)
        self._open[child] = Asked(parent.prompt, parent.params, list(parent.tokens))
        self.counts.update(asked=1, forks=1)

    def _compute(self) -> None:
        for output in self.engine.step():
            asked = self._open[output.request_id]
            asked.tokens += output.token_ids
            if output.finish_reason is not None:
                asked.reason = output.finish_reason
                self._ended.append(self._open.pop(output.request_id))
        self.engine.check()
        self.counts["steps"] += 1

    def _compare(self, asked: Asked) -> None:
        self.counts["ended"] += 1
        if self.source.random() > CHECKED_SHARE:
            return
        expected, reason, _ = alone(self.model, asked.prompt, asked.params)
        if asked.is_aborted:
            assert asked.tokens == expected[: len(asked.tokens)], asked
        else:
            assert (asked.tokens, asked.reason) == (expected, reason), (asked, expected, reason)
        self.counts["compared"] += 1


def resident_mib() -> float:
    words = Path("/proc/self/statm").read_text().split() if sys.platform == "linux" else ["0", "0"]
    return int(words[1]) * 4096 / (1 << 20)


def soak(minutes: float, seed: int, console: Console) -> Soak:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(write_tiny_llama(Path(folder), seed=7))
        model = make_model(checkpoint, EngineConfig(**LARGE), kernel_cache=Path(folder))
        run, began = Soak(model, seed), time.monotonic()
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("soak", total=minutes * 60)
            next_s = tenth_s = minutes * 6
            while (passed_s := time.monotonic() - began) < minutes * 60:
                for _ in range(50):
                    run.step()
                progress.update(bar, completed=passed_s)
                if passed_s > next_s:
                    next_s += tenth_s
                    progress.print(
                        f"{passed_s / 60:5.1f} min  {run.counts['steps']:>8,} steps  {run.counts['ended']:>7,} ended  "
                        f"{resident_mib():6.1f} MiB resident"
                    )
        run.drain()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    run = soak(arguments.minutes, arguments.seed, Console())
    stats = run.engine.stats()
    print(", ".join(f"{name} {count:,}" for name, count in run.counts.items()))
    print(
        f"preemptions {stats.num_preemptions:,}, copies {stats.copied_blocks:,}, prefix hits {stats.prefix_hits:,} of "
        f"{stats.prefix_queries:,} tokens, blocks held at the end {stats.kv_blocks_used} of {stats.kv_blocks_total}"
    )


if __name__ == "__main__":
    main()
