"""A twin of the model runner, without a model: its cache holds tokens where the real one holds keys and values.

It runs plans as the real runner does: first every chunk is written through its block table, then every chunk reads
all positions from 0 to its end through the same table. A read that does not find the right token at the right position
raises, so a wrong table, a block with two owners, a stale hit or an early free shows at once. The next token is a hash
of everything that was read, so outputs can be compared with `expected_output`, which knows no blocks and no batches.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from struct import pack

from native_engine.blocks import BlockPool
from native_engine.config import Preemption, SchedulerConfig
from native_engine.engine import Engine
from native_engine.sampling_params import SamplingParams
from native_engine.sequence import Sequence as Request
from native_engine.step import BlockCopy, ScheduledChunk, StepPlan, Wanted

VOCAB_SIZE = 50
EOS = 0


Cells = dict[tuple[int, int], tuple[int, int]]  # (block, offset) -> (position, token)


class PagedTwin:
    def __init__(self, pool: BlockPool, window: int | None = None) -> None:
        self.pool = pool
        self.window = window
        self.cells: Cells = {}
        self.host: Cells = {}
        self.now = 0.0  # of a machine on which every step takes a second
        self.plans: list[list[tuple[str, int, int, bool]]] = []  # per step: (request, start, length, samples)
        self.before_moves: Callable[[StepPlan], None] = lambda plan: None
        self.before_answer: Callable[[StepPlan], None] = lambda plan: None

    def run(self, plan: StepPlan) -> list[list[int]]:
        self.now += 1
        self.plans.append([(c.sequence.request_id, c.start, c.length, c.samples) for c in plan.chunks])
        self._check_plan(plan)
        self.before_moves(plan)
        for copies, source, target in (
            (plan.moves.swap_out, self.cells, self.host),
            (plan.moves.copies, self.cells, self.cells),
            (plan.moves.swap_in, self.host, self.cells),
        ):
            self._copy(copies, source, target)
        written: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            for position, token in enumerate(chunk.token_ids, start=chunk.start):
                cell = self._cell(chunk, position)
                assert cell not in written, f"two chunks write {cell} in one step"
                written.add(cell)
                self.cells[cell] = (position, token)
        self.before_answer(plan)
        return [self._sample(chunk) if chunk.samples else self._read(chunk)[:0] for chunk in plan.chunks]

    def _check_plan(self, plan: StepPlan) -> None:
        sequences = [chunk.sequence for chunk in plan.chunks]
        assert len(set(map(id, sequences))) == len(sequences), "a sequence is planned twice in one step"
        assert not set(map(id, sequences)) & set(map(id, plan.preempted)), "a preempted sequence is still planned"
        for chunk in plan.chunks:
            assert chunk.length >= 1, "a chunk without tokens"
            assert chunk.start == chunk.sequence.num_computed_tokens, "a chunk starts where nothing has been computed"
            assert chunk.samples == (chunk.end == chunk.sequence.num_tokens)
            assert chunk.samples or not chunk.draft_ids, "a draft where nothing is sampled"
            assert chunk.length == 1 or not chunk.draft_ids, "a draft behind a prompt"

    def _copy(self, copies: list[BlockCopy], source: Cells, target: Cells) -> None:
        assert len({copy.target for copy in copies}) == len(copies), "two copies into one block"
        offsets = range(self.pool.block_size)
        read = {(to, offset): source.get((of, offset)) for of, to in copies for offset in offsets}
        target.update({place: cell for place, cell in read.items() if cell is not None})

    def _cell(self, chunk: ScheduledChunk, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.pool.block_size)
        return chunk.sequence.block_table[block], offset

    def _read(self, chunk: ScheduledChunk) -> list[int]:
        """All tokens from 0 to the chunk's last row, as its rows find them."""
        first = 0 if self.window is None else max(0, chunk.start + 1 - self.window)
        end = chunk.start + chunk.num_rows
        found = [self.cells.get(self._cell(chunk, position)) for position in range(first, end)]
        expected = list(enumerate(chunk.sequence.token_ids[: chunk.end] + chunk.draft_ids))
        assert found == expected[first:], f"{chunk.sequence.request_id} reads what it did not write"
        return [token for _, token in expected]

    def _sample(self, chunk: ScheduledChunk) -> list[int]:
        tokens, sequence = self._read(chunk), chunk.sequence
        return [
            next_token(tokens[:end], sequence.num_prompt_tokens, sequence.params)
            for end in range(chunk.end, len(tokens) + 1)
        ]


class Guesser:
    """Guesses how a text goes on, mostly right for a while: it knows the rule, and errs at a place of its own."""

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        return [self._guess(chunk.sequence, count) for chunk, count in wanted]

    def _guess(self, sequence: Request, count: int) -> list[int]:
        tokens = list(sequence.token_ids)
        while len(tokens) < sequence.num_tokens + count:
            tokens.append(next_token(tokens, sequence.num_prompt_tokens, sequence.params))
        draft = tokens[sequence.num_tokens :]
        wrong = zlib.crc32(pack("<2I", sequence.num_tokens, tokens[0])) % (count + 2)
        if wrong < count:
            draft[wrong] = (draft[wrong] + 1) % VOCAB_SIZE
        return draft if wrong <= count else []


def next_token(prefix: Sequence[int], num_prompt_tokens: int, params: SamplingParams) -> int:
    """Some token that depends on the seed and every token of the prefix; no stop token before `min_tokens`."""
    token = zlib.crc32(pack(f"<{len(prefix)}I", *prefix), params.seed or 0) % VOCAB_SIZE
    if len(prefix) - num_prompt_tokens < params.min_tokens:
        while token == EOS or token in params.stop_token_ids:
            token = (token + 1) % VOCAB_SIZE
    return token


def expected_output(
    prompt_ids: Sequence[int], params: SamplingParams, max_len: int, begun: Sequence[int] = ()
) -> tuple[list[int], str]:
    """What the request must answer, whatever else goes on in the engine: its tokens and its finish reason. A fork has
    `begun` with its parent's."""
    tokens = [*prompt_ids, *begun]
    while True:
        token = next_token(tokens, len(prompt_ids), params)
        tokens.append(token)
        output = tokens[len(prompt_ids) :]
        may_stop = len(output) > params.min_tokens
        if may_stop and ((token == EOS and not params.ignore_eos) or token in params.stop_token_ids):
            return output, "stop"
        if len(output) == params.max_tokens or len(tokens) == max_len:
            return output, "length"


class Bench:
    """An engine on a twin, and the answers it has given so far. Every step ends with `check()`."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 10_000,
        caching: bool = True,
        eos_token_ids: frozenset[int] = frozenset([EOS]),
        preemption: Preemption = "recompute",
        host_blocks: int = 0,
        window: int | None = None,
        num_drafted: int = 0,
    ) -> None:
        self.config = SchedulerConfig(
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=eos_token_ids,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=caching,
            preemption=preemption,
            sliding_window=window,
            num_speculative_tokens=num_drafted,
        )
        self.pool = BlockPool(num_blocks, block_size)
        self.twin = PagedTwin(self.pool, window)
        host_pool = BlockPool(host_blocks, block_size) if host_blocks else None
        # Drafts depend on how long steps take: on the twin's own clock a test repeats.
        clock = (lambda: self.twin.now) if num_drafted else time.perf_counter
        drafter = Guesser() if num_drafted else None
        self.engine = Engine(self.config, self.pool, self.twin, host_pool=host_pool, drafter=drafter, clock=clock)
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.cached: dict[str, int] = {}

    def add(
        self, request_id: str, prompt_ids: Sequence[int], *, cache_salt: str | None = None, **params: object
    ) -> None:
        """Requests without `max_tokens` end after 8; they never end by chance, unless they ask to."""
        self.engine.add(
            request_id,
            prompt_ids,
            SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **params}),  # type: ignore[arg-type]
            cache_salt=cache_salt,
        )
        self.outputs[request_id] = []

    def step(self) -> None:
        for output in self.engine.step():
            assert output.request_id not in self.finish_reasons, "a finished request goes on"
            self.outputs[output.request_id] += output.token_ids
            self.cached[output.request_id] = output.num_cached_tokens
            if output.finish_reason is not None:
                self.finish_reasons[output.request_id] = output.finish_reason
        self.engine.check()

    def run(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps: {self.engine.stats()}")

    def answer_while_others_run(self, request_id: str, prompt_ids: Sequence[int], **options: object) -> list[int]:
        self.add(request_id, prompt_ids, **options)  # type: ignore[arg-type]
        while request_id not in self.finish_reasons:
            self.step()
        return self.outputs[request_id]

    def answer(self, request_id: str, prompt_ids: Sequence[int], **options: object) -> list[int]:
        """The answer of a request that runs to its end now, together with whatever is in the engine."""
        self.add(request_id, prompt_ids, **options)  # type: ignore[arg-type]
        self.run()
        return self.outputs[request_id]


def prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt whose tokens depend on the seed from the first one on."""
    return [1 + (seed * 7 + i * (seed + 3)) % (VOCAB_SIZE - 1) for i in range(length)]


def generates(prompt_ids: Sequence[int], num_tokens: int = 8) -> list[int]:
    """What a request of `Bench.add` answers when nothing goes wrong."""
    return expected_output(prompt_ids, SamplingParams(max_tokens=num_tokens, ignore_eos=True), max_len=10**9)[0]
