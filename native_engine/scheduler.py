"""Decides what the next step computes. Takes sequences and a block pool; touches no tensors, no clock, no threads.

    late = scheduler.sort_out_late(now)              # those that end unserved
    plan = scheduler.plan(now)                       # None: no work
    wanted = scheduler.wanted_drafts(plan)           # and scheduler.add_drafts(wanted, drafts), with speculation
    sampled = runner.run(plan)                       # per chunk a list of token ids
    finished = scheduler.commit(plan, sampled, now)  # or scheduler.rollback(plan), when the run failed

One rule: each sequence has `num_computed_tokens` and wants to reach the tokens it knows; a step spends a budget of
`max_num_batched_tokens` on the differences, or less where latency targets say so (pacing.py). In this order:

1. Memory. Oldest first, every running sequence gets the blocks for the tokens it knows, and a copy of the block that it
   is about to write into, where others read that too. When the pool is empty, the youngest give back as many of their
   last blocks as are needed. They are preempted: they keep their tokens and the rest of their blocks, and wait in their
   place in the line.
2. Tokens. Sequences that need one token (decodes) come first, so that a long prompt never makes them wait; then
   prompts, oldest first. A prompt that cannot end in this step leaves a share to those behind.
3. Admission, if nobody was preempted: strictly in order of arrival, while all known tokens of the head fit, with one
   block left over for every running sequence, so that an admission is not undone by the next decode. A head whose next
   block is being computed by somebody else waits to share it: equal prompts that arrive together are computed once.
4. What is left of the budget goes to the prompts that were capped, oldest first.

Memory (memory.py) is settled before tokens are spent, so nothing that is planned is ever taken back. Blocks for all
known tokens are taken at admission, so only decodes grow, and no prompt is preempted to make room for another prompt;
behind a sliding window a prompt holds what its window and one step need. The line is strict: whoever waits is let in by
place, which is when its first token is due. Without targets and priorities that is the order of arrival.

A fork stands in the line right behind its parent and shares its blocks. It runs at once where there is a seat, else it
waits without blocks. `branches` of a sequence are forked off when its first token is sampled: several answers to one
prompt, which is computed once. Each then computes the prompt's last token again, and samples on its own from there.

Drafts (speculation.py) come last: they take rows and blocks that nobody else wants, and are part of a plan, never of a
sequence. `commit` takes over the tokens that hold and gives back the blocks of the rest, so between two steps nothing
is left of a draft, in the prefix cache neither.

Nothing is counted as computed before `commit`. A step that fails can be rolled back, and planned again; what was to be
copied is kept until the step has ended.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from native_engine.blocks import BlockPool
from native_engine.config import SchedulerConfig
from native_engine.errors import GrammarFailed, InvalidParams, PromptTooLong, require
from native_engine.memory import Costs, Memory
from native_engine.pacing import NO_TARGETS, Pace
from native_engine.sequence import Sequence, Status
from native_engine.speculation import Candidate, choose, verified
from native_engine.step import ScheduledChunk, StepPlan, Wanted
from native_engine.step_time import StepTimeModel

# Of what a step has left, the part for a prompt that cannot end in it. Most, so that prompts end one after another and
# not all late together; not all, so that short prompts get past a long one.
LONG_PROMPT_SHARE = 0.75


@dataclass(slots=True)
class Counters:
    """Since the start. Queries and hits of the prefix cache are in tokens."""

    steps: int = 0
    preemptions: int = 0
    forks: int = 0
    put_back: int = 0  # late ones that let others pass
    late: int = 0  # ended unserved
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_hits_after_preemption: int = 0  # a sequence that meets its own blocks again; no sign of a useful cache


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        host_pool: BlockPool | None = None,
        costs: Costs | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`host_pool` and `costs`: for preemption by swap. `pace`: for latency targets."""
        self.config = config
        self.pool = pool
        self.memory = Memory(config, pool, host_pool, costs)
        self.pace = pace or Pace(NO_TARGETS, StepTimeModel())
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._num_arrived = 0
        self._in_flight: StepPlan | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_waiting(self) -> int:
        """Those in the line, and the branches that will be forked off."""
        return len(self.waiting) + sum(len(sequence.branches) for sequence in (*self.running, *self.waiting))

    @property
    def max_len(self) -> int:
        """The most tokens, prompt and output, that a sequence can have: the model's context, or what the pool holds."""
        return self.memory.max_len

    # ---- coming and going

    def add(self, sequence: Sequence, now: float = 0.0) -> None:
        """Put a new sequence in the line. What could never be computed is refused here, not later."""
        known = Counter(each.request_id for each in (sequence, *sequence.branches))
        for request_id, count in known.items():
            if count > 1 or request_id in self._by_id:
                raise InvalidParams(f"request_id must be unique, but {request_id!r} is in the engine already.")
        if sequence.num_tokens >= self.max_len:
            in_context = self.max_len == self.config.max_model_len
            limit = f"the context of {self.max_len}" if in_context else f"the KV cache of {self.max_len}"
            raise PromptTooLong(sequence.num_tokens, self.max_len - 1, limit)
        for each in (sequence, *sequence.branches):
            each.arrived_s = now
            self._by_id[each.request_id] = each
        sequence.arrival = (self.pace.due(sequence), self._num_arrived)
        self._num_arrived += 1
        insort(self.waiting, sequence, key=_by_arrival)

    def get(self, request_id: str) -> Sequence | None:
        """None: it is not here (any more)."""
        return self._by_id.get(request_id)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, whose tokens begin as its parent's do, go on from what has been computed of them."""
        require(self._in_flight is None, "A step is in flight; fork before it is planned or after it has ended.")
        if child.request_id in self._by_id:
            raise InvalidParams(f"request_id must be unique, but {child.request_id!r} is in the engine already.")
        self._by_id[child.request_id] = child
        if owner := self._owner_of_branch(parent):
            owner.branches.append(child)
        else:
            self._fork(parent, child)

    def abort(self, request_id: str) -> Sequence | None:
        """Drop a sequence, wherever it is. None: it is not here (any more).

        The step in flight may be reading and writing its blocks; then they are given back when the step has ended.
        """
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return None
        was_waiting = sequence.status is Status.WAITING
        sequence.status = Status.ABORTED
        if owner := self._owner_of_branch(sequence):
            owner.branches.remove(sequence)
        elif was_waiting:
            self.waiting.remove(sequence)
            self._promote_branch(sequence)
            self.memory.release(sequence)
        elif not self._is_in_flight(sequence):
            self._leave(sequence)
        return sequence

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        """The child runs where it would have been let in, else it waits; it holds its parent's place either way."""
        child.arrival = (*parent.arrival, parent.num_forks)
        child.arrived_s = parent.arrived_s
        child.first_token_s = parent.first_token_s if child.num_output_tokens else None
        child.prompt_logprobs = list(parent.prompt_logprobs)
        parent.num_forks += 1
        self.counters.forks += 1
        shared = min(parent.num_computed_tokens, child.num_tokens - 1)  # its last token's logits are still to come
        has_seat = len(self.running) < self.config.max_num_seqs and len(self.running) < self.pool.num_free
        if not has_seat or not self.memory.can_share(parent, shared):
            insort(self.waiting, child, key=_by_arrival)
            return
        self.memory.share(parent, child, shared)
        child.num_cached_tokens = parent.num_cached_tokens
        child.status = Status.RUNNING
        insort(self.running, child, key=_by_arrival)

    def _owner_of_branch(self, sequence: Sequence) -> Sequence | None:
        return next((each for each in self._everybody() if sequence in each.branches), None)

    def _branch_off(self, sequence: Sequence) -> None:
        """The prompt is there: each branch goes its own way from its last token."""
        branches, sequence.branches = sequence.branches, []
        for branch in branches:
            self._fork(sequence, branch)

    def _promote_branch(self, sequence: Sequence) -> None:
        """A sequence goes before its branches could be forked off: the first goes on in its place, with the others."""
        if sequence.branches:
            heir, *heir.branches = sequence.branches
            sequence.branches = []
            self._fork(sequence, heir)

    # ---- plan

    def sort_out_late(self, now: float) -> list[Sequence]:
        """Deal with those whose first token can no longer be in time, as the targets say. Returns those that end."""
        late = self.pace.late(
            self.waiting,
            self.running,
            now,
            most=self.config.max_num_batched_tokens,
            num_cached=lambda sequence: len(self.memory.match(sequence)) * self.pool.block_size,
        )
        if self.pace.targets.when_late == "refuse":
            return [each for sequence, ttft_s in late for each in self._refuse(sequence, ttft_s)]
        for sequence, _ in late:
            self._put_back(sequence)
        return []

    def _put_back(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.is_put_back = True
        sequence.arrival = (self.pace.due_again(sequence), *sequence.arrival[1:])
        insort(self.waiting, sequence, key=_by_arrival)
        self.counters.put_back += 1

    def _refuse(self, sequence: Sequence, ttft_s: float) -> list[Sequence]:
        """With the branches that would have been forked off it."""
        self.waiting.remove(sequence)
        branches, sequence.branches = sequence.branches, []
        for each in (sequence, *branches):
            each.status, each.expected_ttft_s = Status.LATE, ttft_s
            del self._by_id[each.request_id]
        self.memory.release(sequence)
        self.counters.late += 1
        return [sequence, *branches]

    def plan(self, now: float = 0.0) -> StepPlan | None:
        require(self._in_flight is None, "A step is in flight; commit it or roll it back before the next plan.")
        preempted = self._grow_running()
        chunks, room = self._spend_budget(now, max_admissions=self._max_admissions(preempted))
        require(bool(chunks) == self.has_work, "There is work, but no step could be planned for it.")
        if not chunks:
            return None
        self.counters.steps += 1
        self._in_flight = StepPlan(
            step_id=self.counters.steps, moves=self.memory.moves, chunks=chunks, preempted=preempted, room=room
        )
        return self._in_flight

    def _grow_running(self) -> list[Sequence]:
        """Give every running sequence the blocks for the tokens it knows; returns those that had to make room."""
        preempted: list[Sequence] = []
        for sequence in tuple(self.running):
            if sequence.status is not Status.RUNNING:
                continue
            if self.memory.needed(sequence) > self.pool.num_free:
                losers = self.memory.make_room(sequence, self._holders_behind(sequence))
                losers = [sequence] if losers is None else losers
                preempted += [self._preempt(loser) for loser in losers if loser.status is Status.RUNNING]
            if sequence.status is Status.RUNNING:
                self.memory.grow(sequence)
        return preempted

    def _holders_behind(self, sequence: Sequence) -> list[Sequence]:
        """Who is younger and may be asked for blocks: first those that wait with some, then those that run."""
        line = (*reversed(self.waiting), *reversed(self.running))
        return [each for each in line if each.block_table and each.arrival > sequence.arrival]

    def _preempt(self, sequence: Sequence) -> Sequence:
        self.running.remove(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.counters.preemptions += 1
        insort(self.waiting, sequence, key=_by_arrival)
        return sequence

    def _max_admissions(self, preempted: list[Sequence]) -> int:
        """Nobody is let in where somebody had to go. But where all have gone, and wait for what an older one holds that
        waits as well, that one goes on."""
        if not preempted:
            return len(self.waiting)
        return 0 if self.running else 1

    def _spend_budget(self, now: float, *, max_admissions: int) -> tuple[list[ScheduledChunk], int]:
        """The chunks, and what they leave of the budget."""
        budget = self.pace.budget(self.running, now, most=self.config.max_num_batched_tokens)
        chunks: list[ScheduledChunk] = []
        decodes_first = sorted(self.running, key=lambda sequence: sequence.num_uncomputed_tokens > 1)
        for sequence in decodes_first:
            if budget:
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].length
        for _ in range(max_admissions):
            head = self._admit_head() if budget else None
            if head is None:
                break
            chunks.append(self._chunk(head, budget))
            budget -= chunks[-1].length
        for chunk in chunks:
            extra = min(budget, chunk.sequence.num_tokens - chunk.end)
            chunk.length += extra
            budget -= extra
        for chunk in chunks:
            chunk.samples = chunk.end == chunk.sequence.num_tokens
        return chunks, budget

    def _chunk(self, sequence: Sequence, budget: int) -> ScheduledChunk:
        """All that is left to compute where it fits; else a share, so that one long prompt does not fill every step."""
        length = sequence.num_uncomputed_tokens
        if length > budget:
            length = max(1, int(budget * LONG_PROMPT_SHARE))
        return ScheduledChunk(sequence, start=sequence.num_computed_tokens, length=length, samples=False)

    def _admit_head(self) -> Sequence | None:
        """Let the first in line in, with what the prefix cache has of it *now* and blocks for the rest; or leave it."""
        if not self.waiting or len(self.running) >= self.config.max_num_seqs or not self.pace.may_join(self.running):
            return None
        sequence = self.waiting[0]
        hits = self.memory.match(sequence)
        if self._is_being_computed(sequence, num_hits=len(hits)):
            return None
        behind = [each for each in reversed(self.waiting) if each.block_table and each is not sequence]
        if self.memory.make_room(sequence, behind, hits, spare=len(self.running)) is None:
            return None
        self.memory.admit(sequence, hits)
        sequence.status = Status.RUNNING
        insort(self.running, self.waiting.popleft(), key=_by_arrival)
        self._count_hits(sequence, len(hits) * self.pool.block_size)
        return sequence

    def _is_being_computed(self, sequence: Sequence, *, num_hits: int) -> bool:
        """True where a running sequence has yet to compute the very block that `sequence` needs next."""
        block_index = len(sequence.block_table) + num_hits
        end = (block_index + 1) * self.pool.block_size
        has_begun = sequence.host_table or sequence.num_computed_tokens % self.pool.block_size
        reads_cache = self.config.enable_prefix_caching and not sequence.needs_whole_prompt
        if not reads_cache or end >= sequence.num_tokens or has_begun:
            return False  # no block that could be a hit
        wanted = sequence.block_hashes[block_index]
        return any(
            other.num_computed_tokens < end and other.block_hashes[block_index : block_index + 1] == [wanted]
            for other in self.running
        )

    def _count_hits(self, sequence: Sequence, num_tokens: int) -> None:
        if sequence.num_preemptions:
            self.counters.prefix_hits_after_preemption += num_tokens
        elif self.config.enable_prefix_caching:
            sequence.num_cached_tokens = num_tokens
            self.counters.prefix_queries += sequence.num_tokens
            self.counters.prefix_hits += num_tokens

    # ---- drafts

    def wanted_drafts(self, plan: StepPlan, drafting_s: float = 0.0) -> list[Wanted]:
        """Who should have a draft in this step, and of how many tokens at most. `drafting_s`: what drafting takes."""
        self._check_in_flight(plan)
        may_have = [Wanted(chunk, count) for chunk in plan.chunks if (count := self._longest_draft(chunk)) > 0]
        rows = min(plan.room, self.config.speculation_max_rows - plan.num_rows)
        if not may_have or rows < 1:
            return []
        candidates = [
            Candidate(chunk.sequence.drafts.chance, count, chunk.sequence.num_tokens) for chunk, count in may_have
        ]
        counts = choose(candidates, plan.work, rows, self.pace.model, drafting_s)
        return [Wanted(wanted.chunk, count) for wanted, count in zip(may_have, counts, strict=True) if count]

    def _longest_draft(self, chunk: ScheduledChunk) -> int:
        """A draft is for one that decodes, and has more than a token to come. A text that a grammar holds has none: its
        matcher stands behind the last known token, and cannot say what may follow a guess."""
        sequence = chunk.sequence
        is_free = sequence.matcher is None and not sequence.drafts.rests(sequence.num_output_tokens)
        if not chunk.samples or chunk.length > 1 or not is_free:
            return 0
        to_come = self.max_len - sequence.num_tokens
        if sequence.params.max_tokens is not None:
            to_come = min(to_come, sequence.params.max_tokens - sequence.num_output_tokens)
        return min(self.config.num_speculative_tokens, to_come - 1)

    def add_drafts(self, wanted: SequenceOf[Wanted], drafts: SequenceOf[SequenceOf[int]]) -> None:
        """A draft, maybe an empty one, for each that was wanted. They are cut to the blocks that nobody else needs."""
        require(len(drafts) == len(wanted), f"{len(drafts)} drafts for {len(wanted)} sequences.")
        for (chunk, count), draft in zip(wanted, drafts, strict=True):
            require(len(draft) <= count, f"A draft has {len(draft)} tokens where {count} were asked for.")
            self._check_tokens(draft)
            room = self.memory.reserve(chunk.sequence, len(draft), spare=len(self.running))
            chunk.draft_ids = list(draft[:room])

    def _note_draft(self, chunk: ScheduledChunk) -> None:
        if chunk.draft_ids:
            num_accepted = sum(map(int.__eq__, chunk.draft_ids, chunk.new_ids))
            self.counters.draft_tokens += len(chunk.draft_ids)
            self.counters.accepted_draft_tokens += num_accepted
            chunk.sequence.drafts.note(len(chunk.draft_ids), num_accepted, chunk.sequence.num_output_tokens)

    # ---- commit

    def commit(self, plan: StepPlan, sampled: SequenceOf[list[int]], now: float = 0.0) -> list[Sequence]:
        """Take over the results of a step: for each chunk its `num_sampled` tokens. Returns the sequences that it
        finished; `abort` has returned the aborted."""
        self._check_answers(plan, sampled)
        self._in_flight = None
        self.memory.settle(undo=False)
        finished: list[Sequence] = []
        for chunk, token_ids in zip(plan.chunks, sampled, strict=True):
            sequence = chunk.sequence
            if sequence.status is Status.ABORTED:
                self._leave(sequence)
                continue
            chunk.new_ids = self._append(sequence, verified(chunk.draft_ids, token_ids))
            self._note_draft(chunk)
            # The last new token is sampled, not computed. Those before it were drafted, and are in the cache.
            self.memory.advance(sequence, chunk.start, chunk.end + max(len(chunk.new_ids) - 1, 0))
            self.memory.trim(sequence)
            sequence.prompt_logprobs += chunk.prompt_logprobs[len(sequence.prompt_logprobs) - chunk.start :]
            if chunk.new_ids:
                if sequence.first_token_s is None:
                    sequence.first_token_s = now
                self._branch_off(sequence)
            if sequence.is_finished:
                self._leave(sequence)
                finished.append(sequence)
        return finished

    def rollback(self, plan: StepPlan) -> None:
        """The step was not run, or not to its end: count nothing of it as computed. The next plan holds it again."""
        self._check_in_flight(plan)
        self._in_flight = None
        self.memory.settle(undo=True)
        for chunk in plan.chunks:
            self.memory.trim(chunk.sequence)
            if chunk.sequence.status is Status.ABORTED:
                self._leave(chunk.sequence)

    def _append(self, sequence: Sequence, token_ids: list[int]) -> list[int]:
        """Of the tokens as many as come before the end of the text, the one that ends it included."""
        for count, token_id in enumerate(token_ids, start=1):
            self._append_one(sequence, token_id)
            if sequence.is_finished:
                return token_ids[:count]
        return token_ids

    def _append_one(self, sequence: Sequence, token_id: int) -> None:
        params = sequence.params
        may_stop = sequence.num_output_tokens >= params.min_tokens
        is_eos = token_id in self.config.eos_token_ids and not params.ignore_eos
        sequence.token_ids.append(token_id)
        if may_stop and (is_eos or token_id in params.stop_token_ids):
            sequence.status = Status.FINISHED_STOP
        elif sequence.num_output_tokens == params.max_tokens or sequence.num_tokens >= self.max_len:
            sequence.status = Status.FINISHED_LENGTH
        elif sequence.matcher is not None:
            try:
                sequence.matcher.accept(token_id)
            except GrammarFailed as error:
                sequence.status, sequence.failure = Status.FAILED, str(error)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._promote_branch(sequence)
        self.memory.release(sequence)
        if self._by_id.get(sequence.request_id) is sequence:  # an aborted id may be in use again
            del self._by_id[sequence.request_id]

    # ---- shared

    def _everybody(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return self._in_flight is not None and any(chunk.sequence is sequence for chunk in self._in_flight.chunks)

    def _check_in_flight(self, plan: StepPlan) -> None:
        require(plan is self._in_flight, f"Step {plan.step_id} is not in flight: it was committed or rolled back.")

    def _check_answers(self, plan: StepPlan, sampled: SequenceOf[list[int]]) -> None:
        """Before anything is changed: one answer per chunk, with as many valid tokens as were asked for."""
        self._check_in_flight(plan)
        require(len(sampled) == len(plan.chunks), f"{len(sampled)} answers for {len(plan.chunks)} chunks.")
        for chunk, token_ids in zip(plan.chunks, sampled, strict=True):
            self._check_tokens(token_ids)
            is_complete = len(token_ids) == chunk.num_sampled
            require(is_complete, f"{chunk.num_sampled} tokens were expected, but the runner gave {token_ids}.")

    def _check_tokens(self, token_ids: SequenceOf[int]) -> None:
        for token_id in token_ids:
            in_vocabulary = 0 <= token_id < self.config.vocab_size
            require(in_vocabulary, f"{token_id} was sampled or drafted, but is no token of the vocabulary.")

    def check(self) -> None:
        """Raise `InvariantBroken` unless the books balance: between any two calls, with a step in flight too."""
        self.memory.check(list(self._everybody()))
        for line in (self.running, self.waiting):
            arrivals = [sequence.arrival for sequence in line]
            require(arrivals == sorted(set(arrivals)), f"The line is out of order: {arrivals}.")
        require(len(self.running) <= self.config.max_num_seqs, "More sequences run than there are seats.")
        for sequence in self.waiting:
            require(sequence.status is Status.WAITING, f"{sequence.request_id!r} waits, but is {sequence.status}.")
        for sequence in self.running:
            runs = sequence.status is Status.RUNNING or (
                sequence.status is Status.ABORTED and self._is_in_flight(sequence)
            )
            require(runs, f"{sequence.request_id!r} is among the running, but is marked {sequence.status}.")
        branches = [branch for sequence in self._everybody() for branch in sequence.branches]
        alive = [s.request_id for s in (*self._everybody(), *branches) if s.status is not Status.ABORTED]
        require(sorted(alive) == sorted(self._by_id), "A sequence is known by its id, but stands nowhere.")


def _by_arrival(sequence: Sequence) -> tuple[float, ...]:
    return sequence.arrival
