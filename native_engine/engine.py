"""The engine: token ids in, token ids out, one step at a time.

    engine = Engine(config, BlockPool(num_blocks, block_size), runner)
    engine.add("a", prompt_ids, SamplingParams(max_tokens=16))
    while engine.has_work:
        for output in engine.step():
            print(output.request_id, output.token_ids, output.finish_reason)

`step()` is the whole program: plan -> run -> commit. What is decided lives in scheduler.py and blocks.py, what is
computed behind `Runner`. One thread owns an engine and makes all calls; nothing here locks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from native_engine.blocks import BlockPool
from native_engine.config import SchedulerConfig
from native_engine.errors import InvalidParams, StepFailed
from native_engine.logprobs import Logprobs
from native_engine.memory import Costs
from native_engine.pacing import NO_TARGETS, Pace, Targets
from native_engine.sampling_params import SamplingParams
from native_engine.scheduler import Scheduler
from native_engine.sequence import CacheKey, FinishReason, Matcher, Sequence, Status
from native_engine.step import ScheduledChunk, StepPlan, Wanted
from native_engine.step_time import StepTimeModel

LONG_STEP_TOKENS = 32  # beside the decodes: from here on a step's time is that of its tokens


class Drafter(Protocol):
    def propose(self, wanted: SequenceOf[Wanted]) -> list[list[int]]:
        """Guess how each text goes on: a draft of at most `length` tokens, an empty one where there is no guess.

        Any guess will do: a bad one costs time and changes no token."""


class Runner(Protocol):
    def run(self, plan: StepPlan) -> list[list[int]]:
        """Compute the plan's chunks; a list of tokens for each, as long as its `num_sampled`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One more answer to a prompt. `matcher`: as in `Engine.add`."""

    request_id: str
    params: SamplingParams
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step added to a request. The token that stopped it, end-of-text included, is among `token_ids`."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    logprobs: list[Logprobs] = field(default_factory=list)  # of `token_ids`, where wanted
    prompt_logprobs: list[Logprobs] = field(
        default_factory=list
    )  # beside the first token: of the prompt's, but the first
    failure: str = ""  # beside the finish reason "error"
    expected_ttft_s: float = 0.0  # beside the finish reason "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A moment's load, and counts since the start. Prefix queries and hits are in tokens."""

    num_running: int
    num_waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    prefix_queries: int
    prefix_hits: int
    prefix_hits_after_preemption: int
    num_preemptions: int
    num_forks: int
    num_put_back: int
    num_late: int
    copied_blocks: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    draft_tokens: int
    accepted_draft_tokens: int
    lost_tokens: int  # of preempted requests: to be computed again where no cache has them
    num_steps: int
    last_step_s: float
    step_time_error: float  # what the model of step times errs by at its 99th percentile, of the step's time


class Engine:
    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        runner: Runner,
        *,
        host_pool: BlockPool | None = None,
        costs: Costs | None = None,
        targets: Targets = NO_TARGETS,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._pool = pool
        self._costs = costs or Costs()
        self.targets = targets
        self._step_times = StepTimeModel()
        self._scheduler = Scheduler(config, pool, host_pool, self._costs, Pace(targets, self._step_times))
        self._runner = runner
        self._clock = clock
        self._last_step_s = 0.0
        self._drafter = drafter

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def max_len(self) -> int:
        """The most tokens, prompt and output together, that a request can have."""
        return self._scheduler.max_len

    def add(
        self,
        request_id: str,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        matcher: Matcher | None = None,
        others: SequenceOf[Choice] = (),
    ) -> None:
        """Queue a request, or raise `PromptTooLong` or `InvalidParams`. Cached prefixes are shared within one salt.

        `matcher`: a fresh one of `params.grammar` (structured.py), exactly where there is a grammar.
        `others`: more answers to the same prompt, which is computed once. Each is a request of its own otherwise, with
        the tokens that it would have alone; its first one comes a step after this one's.
        """
        if not prompt_ids:
            raise InvalidParams("prompt_ids must hold at least one token.")
        self._check_token_ids("prompt_ids", prompt_ids)
        keys = () if cache_salt is None else (CacheKey("salt", cache_salt),)
        first, *rest = (
            self._sequence(list(prompt_ids), choice, keys) for choice in (Choice(request_id, params, matcher), *others)
        )
        if any(choice.params.prompt_logprobs != params.prompt_logprobs for choice in others):
            raise InvalidParams("prompt_logprobs must be the same for all answers to a prompt.")
        first.branches = rest
        self._scheduler.add(first, self._clock())

    def fork(self, request_id: str, child_id: str, params: SamplingParams | None = None) -> None:
        """Let a second text go on from where a request is now. It shares what has been computed, and counts the tokens
        so far as its own output; `params`: its parent's, if None. Without a seed it draws one.

        Raises `InvalidParams` where the request is not in the engine, or is held by a grammar: that stands where it is.
        """
        parent = self._scheduler.get(request_id)
        if parent is None:
            raise InvalidParams(f"request_id must be that of a request in the engine, not {request_id!r}.")
        params = params or parent.params
        if parent.matcher is not None or params.grammar is not None:
            raise InvalidParams("grammar must be None where a request is forked.")
        if params.max_tokens is not None and parent.num_output_tokens >= params.max_tokens:
            raise InvalidParams(f"max_tokens must be above the {parent.num_output_tokens} tokens that are there.")
        if params.prompt_logprobs != parent.params.prompt_logprobs:
            raise InvalidParams("prompt_logprobs must be the parent's.")
        child = self._sequence(parent.prompt_ids, Choice(child_id, params), parent.cache_keys)
        child.token_ids = list(parent.token_ids)
        self._scheduler.fork(parent, child)

    def _sequence(self, prompt_ids: list[int], choice: Choice, keys: tuple[CacheKey, ...]) -> Sequence:
        params = choice.params
        if (choice.matcher is None) != (params.grammar is None):
            raise InvalidParams("grammar must come with a matcher of it, and a matcher with its grammar.")
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias])
        return Sequence(
            choice.request_id,
            prompt_ids,
            params,
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            cache_keys=keys,
            matcher=choice.matcher,
        )

    def abort(self, request_id: str) -> bool:
        """Stop a request; nothing more comes of it. False: it had ended already, or never was."""
        return self._scheduler.abort(request_id) is not None

    def step(self) -> list[StepOutput]:
        """Compute one step. Where the runner fails, the step is taken back, and `StepFailed` names who was in it: they
        can be aborted, or be in the next step again."""
        started = self._clock()
        late = [_ended_late(sequence) for sequence in self._scheduler.sort_out_late(started)]
        plan = self._scheduler.plan(started)
        if plan is None:
            return late
        try:
            drafting_s = self._draft(plan)
            sampled = self._runner.run(plan)
        except Exception as error:
            self._scheduler.rollback(plan)
            raise StepFailed([chunk.sequence.request_id for chunk in plan.chunks]) from error
        ended = self._clock()
        self._last_step_s = ended - started
        if ended > started + drafting_s:
            self._step_times.observe(plan.work, self._last_step_s - drafting_s)
        self._scheduler.commit(plan, sampled, ended)
        if plan.num_tokens - len(plan.chunks) >= LONG_STEP_TOKENS:
            self._costs.note_prefill((self._last_step_s - drafting_s) / plan.num_rows)
        return late + [
            _output(chunk) for chunk in plan.chunks if chunk.new_ids and chunk.sequence.status is not Status.ABORTED
        ]

    def _draft(self, plan: StepPlan) -> float:
        """Give the plan its drafts. Returns the seconds that it took."""
        if self._drafter is None:
            return 0.0
        wanted = self._scheduler.wanted_drafts(plan, self._costs.drafting_s)
        if not wanted:
            return 0.0
        started = self._clock()
        self._scheduler.add_drafts(wanted, self._drafter.propose(wanted))
        drafting_s = self._clock() - started
        self._costs.note_drafting(drafting_s)
        return drafting_s

    def check(self) -> None:
        """Raise `InvariantBroken` unless blocks, tables and queues agree. Cheap enough for every step of a test."""
        self._scheduler.check()

    def stats(self) -> Stats:
        counters, memory = self._scheduler.counters, self._scheduler.memory.counters
        return Stats(
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            kv_blocks_total=self._pool.num_blocks,
            kv_blocks_used=self._pool.num_used,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            prefix_hits_after_preemption=counters.prefix_hits_after_preemption,
            num_preemptions=counters.preemptions,
            num_forks=counters.forks,
            num_put_back=counters.put_back,
            num_late=counters.late,
            copied_blocks=memory.copied_blocks,
            swapped_out_blocks=memory.swapped_out_blocks,
            swapped_in_blocks=memory.swapped_in_blocks,
            draft_tokens=counters.draft_tokens,
            accepted_draft_tokens=counters.accepted_draft_tokens,
            lost_tokens=memory.lost_tokens,
            num_steps=counters.steps,
            last_step_s=self._last_step_s,
            step_time_error=self._step_times.error(99),
        )

    def _check_token_ids(self, field: str, token_ids: SequenceOf[int]) -> None:
        """An id outside the vocabulary would fail deep in a step that other requests share."""
        for token_id in token_ids:
            if not (isinstance(token_id, int) and 0 <= token_id < self._config.vocab_size):
                raise InvalidParams(f"{field} must hold ids from 0 to {self._config.vocab_size - 1}, not {token_id!r}.")


def _ended_late(sequence: Sequence) -> StepOutput:
    return StepOutput(
        sequence.request_id,
        [],
        sequence.status.finish_reason,
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens,
        expected_ttft_s=sequence.expected_ttft_s,
    )


def _output(chunk: ScheduledChunk) -> StepOutput:
    sequence = chunk.sequence
    return StepOutput(
        sequence.request_id,
        chunk.new_ids,
        sequence.status.finish_reason,
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens,
        chunk.logprobs[: len(chunk.new_ids)],
        sequence.prompt_logprobs if sequence.num_output_tokens == len(chunk.new_ids) else [],
        sequence.failure,
    )
