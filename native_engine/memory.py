"""Which sequence holds which blocks: growth, forks, copies on write, what is taken back and how it comes again.

    memory.make_room(sequence, victims)          # take blocks from those who may be asked, or leave all as it is
    memory.admit(sequence, hits)                 # a newcomer, or one that had to wait: its blocks up to its last token
    memory.grow(sequence)                        # one that runs
    plan.copies, ... = memory.moves              # what the runner has to copy before it computes
    memory.settle(undo=False)                    # the step has ended; undo=True: it failed, and nobody knows how far
    memory.advance(sequence, start, end)         # tokens that are computed now

A table maps a sequence's tokens to blocks, in order. Three things make it more than a list:

- Forks share blocks. Whoever is about to write into a shared block takes a fresh one first, and the plan copies it.
- A sequence that has to make room gives its last blocks back, no more than are needed. It keeps the others while it
  waits, and `num_computed_tokens` says how far they reach. What it gave back is computed again, or has been copied to
  a block of the host pool (swap), whichever is cheaper. It is looked up in the prefix cache first in any case.
- Behind a sliding window lies `NO_BLOCK`: nobody will read there again.

Nothing here touches tensors or a clock. What a plan reads is not given to others before the step has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from native_engine.blocks import BlockPool, extend_chain
from native_engine.config import SchedulerConfig
from native_engine.errors import require
from native_engine.sequence import Sequence
from native_engine.step import BlockCopy, Moves

NO_BLOCK = -1


@dataclass(slots=True)
class Costs:
    """What the engine has measured of itself, in seconds; 0: not yet."""

    prefill_s_per_token: float = 0.0
    swap_s_per_block: float = 0.0  # one way
    drafting_s: float = 0.0  # all drafts of a step

    def note_prefill(self, s_per_token: float) -> None:
        self.prefill_s_per_token = _smoothed(self.prefill_s_per_token, s_per_token)

    def note_swap(self, s_per_block: float) -> None:
        self.swap_s_per_block = _smoothed(self.swap_s_per_block, s_per_block)

    def note_drafting(self, seconds: float) -> None:
        self.drafting_s = _smoothed(self.drafting_s, seconds)

    def prefers_swap(self, block_size: int) -> bool:
        """A block out and in again costs less than to compute its tokens again."""
        is_known = self.prefill_s_per_token > 0 and self.swap_s_per_block > 0
        return is_known and 2 * self.swap_s_per_block < self.prefill_s_per_token * block_size


@dataclass(slots=True)
class MemoryCounters:
    copied_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    lost_tokens: int = 0  # given back, to be computed again where no cache has them


class _Copied(NamedTuple):
    """A copy on write of this step: the target is in the sequence's table, the source is not freed yet."""

    sequence: Sequence
    place: int  # in the table
    copy: BlockCopy


class _SwappedIn(NamedTuple):
    sequence: Sequence
    num_computed_before: int
    copies: list[BlockCopy]  # from the host pool, whose blocks are not freed yet


class Memory:
    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, host_pool: BlockPool | None = None, costs: Costs | None = None
    ) -> None:
        self.pool = pool
        self.host_pool = host_pool
        self.costs = costs or Costs()
        self.counters = MemoryCounters()
        self._config = config
        self._copied: list[_Copied] = []
        self._swapped_out: list[tuple[Sequence, BlockCopy]] = []
        self._swapped_in: list[_SwappedIn] = []

    @property
    def max_len(self) -> int:
        """The most tokens that a sequence can have: as many as it finds blocks for when it is alone."""
        window = self._config.sliding_window
        if window is not None and self.window_cap(window) <= self.pool.num_blocks:
            return self._config.max_model_len
        return min(self._config.max_model_len, self.pool.num_blocks * self.pool.block_size)

    def window_cap(self, window: int) -> int:
        """The most blocks that a sequence holds: the window, and what one step may add to it."""
        return self.pool.blocks_for(window + self._config.max_num_batched_tokens) + 1

    # ---- what a sequence needs

    def needed(self, sequence: Sequence, hits: SequenceOf[int] = ()) -> int:
        """Fresh blocks that it lacks to go on, when it has `hits` as well."""
        start = self._resumes_at(sequence, hits)
        return self._growth(sequence, start, hits) + self._writes_into_shared(sequence, start)

    def _growth(self, sequence: Sequence, start: int, hits: SequenceOf[int] = ()) -> int:
        return self.pool.blocks_for(self._reach(sequence, start)) - len(sequence.block_table) - len(hits)

    def _reach(self, sequence: Sequence, start: int) -> int:
        """All known tokens, so that no prompt is stopped by want of memory; behind a window as many as a step takes."""
        if self._config.sliding_window is None:
            return sequence.num_tokens
        return min(sequence.num_tokens, start + self._config.max_num_batched_tokens)

    def _resumes_at(self, sequence: Sequence, hits: SequenceOf[int]) -> int:
        if not hits and not sequence.host_table:
            return sequence.num_computed_tokens
        found = (len(sequence.block_table) + len(hits)) * self.pool.block_size
        return max(found, sequence.num_host_tokens)

    def _writes_into_shared(self, sequence: Sequence, start: int, besides: Iterable[Sequence] = ()) -> bool:
        """Others than `besides` read the block that the token at `start` goes into."""
        place = start // self.pool.block_size
        if place >= len(sequence.block_table):
            return False
        block = sequence.block_table[place]
        others = self._num_readers(block) - 1
        return others > sum(block in other.block_table for other in besides)

    def _num_readers(self, block: int) -> int:
        """Sources of this step's copies have one reader less than references."""
        return self.pool.num_references(block) - sum(copied.copy.source == block for copied in self._copied)

    # ---- giving

    def match(self, sequence: Sequence) -> list[int]:
        """What the prefix cache has *now* of what follows the sequence's own blocks. Never the last token: its row of
        logits is what the step is for; and nothing of a prompt all of whose logits are wanted."""
        held = len(sequence.block_table)
        if not self._config.enable_prefix_caching or sequence.num_computed_tokens != held * self.pool.block_size:
            return []
        if sequence.needs_whole_prompt:
            return []
        self._extend_hashes(sequence)
        num_usable_blocks = (sequence.num_tokens - 1) // self.pool.block_size
        return self.pool.match_prefix(sequence.block_hashes[:num_usable_blocks], sequence.token_ids)[held:]

    def admit(self, sequence: Sequence, hits: SequenceOf[int]) -> None:
        """Its blocks from the cache, from the host, and fresh ones. There must be room."""
        num_before = sequence.num_computed_tokens
        start = self._resumes_at(sequence, hits)
        visible = self._visible(sequence, hits)
        sequence.block_table += [NO_BLOCK] * (len(hits) - len(visible)) + self.pool.allocate(0, cached=visible)
        if hits:
            num_before = len(sequence.block_table) * self.pool.block_size
        self._swap_in(sequence, num_before, skipped=len(hits))
        sequence.num_computed_tokens = start
        self.grow(sequence)

    def num_free_beside(self, sequence: Sequence, hits: SequenceOf[int]) -> int:
        return self.pool.num_free_beside(self._visible(sequence, hits))

    def _visible(self, sequence: Sequence, hits: SequenceOf[int]) -> SequenceOf[int]:
        """Without those that lie behind the window already."""
        hidden = self._num_hidden((len(sequence.block_table) + len(hits)) * self.pool.block_size)
        return hits[max(0, hidden - len(sequence.block_table)) :]

    def _swap_in(self, sequence: Sequence, num_before: int, *, skipped: int) -> None:
        """Bring back what the cache did not have. The host's blocks are kept until the step has ended."""
        if self.host_pool is None:
            return
        known, wanted = sequence.host_table[:skipped], sequence.host_table[skipped:]
        self.host_pool.free(known)
        if wanted:
            targets = self.pool.allocate(len(wanted))
            sequence.block_table += targets
            copies = [BlockCopy(*pair) for pair in zip(wanted, targets, strict=True)]
            self._swapped_in.append(_SwappedIn(sequence, num_before, copies))
            self.counters.swapped_in_blocks += len(wanted)
        sequence.host_table, sequence.num_host_tokens = [], 0

    def grow(self, sequence: Sequence) -> None:
        """Room for the tokens to come, in blocks that it alone writes into. There must be room."""
        start = sequence.num_computed_tokens
        place, is_shared = start // self.pool.block_size, self._writes_into_shared(sequence, start)
        sequence.block_table += self.pool.allocate(self._growth(sequence, start))
        source = sequence.block_table[place]
        if is_shared:
            (sequence.block_table[place],) = self.pool.allocate(1)
            self._copied.append(_Copied(sequence, place, BlockCopy(source, sequence.block_table[place])))
            self.counters.copied_blocks += 1
        else:
            self.pool.withdraw(source)

    def reserve(self, sequence: Sequence, num_drafted: int, *, spare: int) -> int:
        """Room behind its last token for a draft, out of what is free beside `spare` blocks. Returns for how many
        tokens; `trim` gives back what they do not fill."""
        size, lacking = self.pool.block_size, self.pool.blocks_for(sequence.num_tokens + num_drafted)
        lacking -= len(sequence.block_table)
        sequence.block_table += self.pool.allocate(max(0, min(lacking, self.pool.num_free - spare)))
        return min(num_drafted, len(sequence.block_table) * size - sequence.num_tokens)

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks behind its last token: a draft is in them, or was."""
        num_kept = self.pool.blocks_for(sequence.num_tokens)
        self.pool.free(sequence.block_table[num_kept:])
        del sequence.block_table[num_kept:]

    def can_share(self, parent: Sequence, num_tokens: int) -> bool:
        """A window may hide from the parent what the next token after `num_tokens` still reads."""
        return num_tokens > 0 and parent.block_table.count(NO_BLOCK) <= self._num_hidden(num_tokens + 1)

    def share(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """The child holds what its parent holds of their first tokens."""
        table = parent.block_table[: self.pool.blocks_for(num_tokens)]
        self.pool.share(_blocks(table))
        child.block_table, child.num_computed_tokens = list(table), num_tokens
        child.block_hashes = parent.block_hashes[: num_tokens // self.pool.block_size]

    # ---- taking

    def make_room(
        self, sequence: Sequence, victims: SequenceOf[Sequence], hits: SequenceOf[int] = (), spare: int = 0
    ) -> list[Sequence] | None:
        """Take back as many blocks as `sequence` needs beside `spare` free ones, from `victims` in their order. Returns
        those that lost any. None: they have too little, and nothing was taken.

        Blocks that somebody else reads too set nothing free, so they are taken only where nothing else helps.
        """
        start = self._resumes_at(sequence, hits)

        def short() -> int:
            return self.needed(sequence, hits) + spare - self.num_free_beside(sequence, hits)

        lacking = short()
        if lacking > 0:
            lacking -= self._writes_into_shared(sequence, start)
            lacking += self._writes_into_shared(sequence, start, victims)
            if lacking > self._num_reclaimable(victims, {*hits, *sequence.block_table}):
                return None
        losers: list[Sequence] = []
        for shared_too in (False, True):
            for victim in victims:
                while short() > 0 and _blocks(victim.block_table):
                    if not shared_too and self._num_readers(victim.block_table[-1]) > 1:
                        break
                    self._take_last(victim)
                    if victim not in losers:
                        losers.append(victim)
        return losers

    def _num_reclaimable(self, victims: Iterable[Sequence], besides: set[int]) -> int:
        """Blocks that nobody but the victims holds."""
        held = Counter(block for victim in victims for block in _blocks(victim.block_table))
        return sum(self.pool.num_references(block) == count for block, count in held.items() if block not in besides)

    def _take_last(self, victim: Sequence) -> None:
        block = victim.block_table.pop()
        start = len(victim.block_table) * self.pool.block_size
        num_kept = victim.num_host_tokens if victim.host_table else victim.num_computed_tokens
        self.pool.free([block])
        if start >= num_kept:
            return
        victim.num_computed_tokens = start
        if self.host_pool is not None and self.host_pool.num_free and self._prefers_swap():
            (target,) = self.host_pool.allocate(1)
            victim.host_table.insert(0, target)
            victim.num_host_tokens = num_kept
            self._swapped_out.append((victim, BlockCopy(block, target)))
            self.counters.swapped_out_blocks += 1
            return
        self.counters.lost_tokens += num_kept - start
        self._drop_host(victim)
        if NO_BLOCK in victim.block_table:  # nobody has what lies behind the window any more: from the beginning
            self.counters.lost_tokens += start
            self.release(victim)

    def _prefers_swap(self) -> bool:
        if self._config.preemption == "auto":
            return self.costs.prefers_swap(self.pool.block_size)
        return self._config.preemption == "swap"

    def release(self, sequence: Sequence) -> None:
        """Give back everything it holds."""
        self.pool.free(_blocks(sequence.block_table))
        sequence.block_table, sequence.num_computed_tokens = [], 0
        self._drop_host(sequence)

    def _drop_host(self, sequence: Sequence) -> None:
        if self.host_pool is not None:
            self.host_pool.free(sequence.host_table)
            self._swapped_out = [each for each in self._swapped_out if each[0] is not sequence]
        sequence.host_table, sequence.num_host_tokens = [], 0

    # ---- a step

    @property
    def moves(self) -> Moves:
        """Of this step, in the order in which they are to be made."""
        return Moves(
            swap_out=[copy for _, copy in self._swapped_out],
            copies=[copied.copy for copied in self._copied],
            swap_in=[copy for swapped in self._swapped_in for copy in swapped.copies],
        )

    def settle(self, *, undo: bool) -> None:
        """The step has ended: what it copied from is not read any more. Where it failed, what it copied is unknown:
        sources of copies on write are taken again, and what went to the host or came from it counts as lost."""
        for sequence, place, copy in self._copied:
            if undo:
                sequence.block_table[place] = copy.source
            self.pool.free([copy.target if undo else copy.source])
        for sequence in {id(each): each for each, _ in self._swapped_out}.values():
            if undo and sequence.host_table:  # else it came back in the same step, or is gone
                self.counters.lost_tokens += sequence.num_host_tokens - sequence.num_computed_tokens
                self._drop_host(sequence)
                if NO_BLOCK in sequence.block_table:
                    self.release(sequence)
        for swapped in self._swapped_in:
            self._settle_swapped_in(swapped, undo=undo)
        self._copied, self._swapped_out, self._swapped_in = [], [], []

    def _settle_swapped_in(self, swapped: _SwappedIn, *, undo: bool) -> None:
        sequence, num_before, copies = swapped
        assert self.host_pool is not None  # they came from there
        self.host_pool.free([copy.source for copy in copies])
        if not undo:
            self._publish(sequence, num_before, sequence.num_computed_tokens)
            return
        self.counters.lost_tokens += sequence.num_computed_tokens - num_before
        sequence.num_computed_tokens = num_before
        if NO_BLOCK in sequence.block_table:
            self.release(sequence)

    def advance(self, sequence: Sequence, start: int, end: int) -> None:
        """The tokens from `start` to `end` are in the cache now: offer the blocks that they filled, and leave those
        behind the window."""
        sequence.num_computed_tokens = end
        self._publish(sequence, start, end)
        for place in range(self._num_hidden(end) - 1, -1, -1):
            if sequence.block_table[place] == NO_BLOCK:
                break
            self.pool.free([sequence.block_table[place]])
            sequence.block_table[place] = NO_BLOCK

    def _publish(self, sequence: Sequence, start: int, end: int) -> None:
        if not self._config.enable_prefix_caching:
            return
        size = self.pool.block_size
        self._extend_hashes(sequence)
        for place in range(start // size, end // size):
            tokens = sequence.token_ids[place * size : (place + 1) * size]
            self.pool.publish(sequence.block_table[place], sequence.block_hashes[place], tokens)

    def _num_hidden(self, num_computed: int) -> int:
        """Blocks behind the window of all tokens to come, and of the one before: a fork computes that again."""
        window = self._config.sliding_window
        return 0 if window is None else max(0, num_computed - window) // self.pool.block_size

    def _extend_hashes(self, sequence: Sequence) -> None:
        """Hashes depend on the tokens alone, so they are kept; what the cache holds of them is looked up each time."""
        extend_chain(
            sequence.block_hashes, sequence.token_ids, block_size=self.pool.block_size, keys=sequence.cache_keys
        )

    def check(self, holders: SequenceOf[Sequence]) -> None:
        """Raise `InvariantBroken` unless the books of both pools balance against these sequences' tables."""
        kept = [[copied.copy.source] for copied in self._copied]
        self.pool.check([*(_blocks(sequence.block_table) for sequence in holders), *kept])
        if self.host_pool is not None:
            arriving = [[copy.source for copy in swapped.copies] for swapped in self._swapped_in]
            self.host_pool.check([*(sequence.host_table for sequence in holders), *arriving])
        for sequence in holders:
            held = len(sequence.block_table) * self.pool.block_size
            require(
                sequence.num_computed_tokens <= min(held, sequence.num_tokens - 1),
                f"{sequence.request_id!r} claims {sequence.num_computed_tokens} computed tokens.",
            )
            future = sequence.block_table[sequence.num_computed_tokens // self.pool.block_size + 1 :]
            is_shared = any(self._num_readers(block) > 1 for block in future)
            require(not is_shared, f"{sequence.request_id!r} shares what it has yet to write.")
            hidden = sequence.block_table.count(NO_BLOCK)
            require(
                hidden <= self._num_hidden(max(sequence.num_computed_tokens, sequence.num_host_tokens) + 1),
                f"{sequence.request_id!r} lacks blocks that its window shows.",
            )


def _blocks(table: Iterable[int]) -> list[int]:
    return [block for block in table if block != NO_BLOCK]


def _smoothed(so_far: float, now: float) -> float:
    """The last ten or so measurements count; the first one alone, as long as there is no other."""
    return now if not so_far else so_far + (now - so_far) / 10
