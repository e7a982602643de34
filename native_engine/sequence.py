"""One request on its way through the engine: the tokens it knows, the blocks it owns, and how far it has been computed.

There are no prefill and decode phases. A sequence knows `token_ids` (prompt and output so far), and the first
`num_computed_tokens` of them have keys and values in the cache. A step computes some of the rest; the step that
computes the last known token samples the next one. A fresh prompt, a chunk of it, a decode, and the replay after a
preemption are all this one rule.

    WAITING --admit--> RUNNING --commit--> FINISHED_STOP | FINISHED_LENGTH
       ^                  |
       '----preempt-------'          abort: from any state that is not finished --> ABORTED

A commit may also end in FAILED: the sequence's grammar cannot be followed any further. One that waits may end in LATE:
its first token cannot be in time any more.

Only the scheduler changes a sequence. Everybody else reads.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol

from native_engine.logprobs import Logprobs
from native_engine.sampling_params import SamplingParams
from native_engine.speculation import DraftRecord

FinishReason = Literal["stop", "length", "abort", "error", "late"]


class Matcher(Protocol):
    """Where a sequence stands in its grammar. It moves with each token that is committed, and only then: a step that
    is taken back, a preemption and the replay after it leave it where it is.
    """

    @property
    def allowed(self) -> Any:
        """What may come next, bool [vocab_size]."""

    def accept(self, token_id: int) -> None:
        """Raises `GrammarFailed`."""


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED_STOP = "stop"
    FINISHED_LENGTH = "length"
    ABORTED = "abort"
    FAILED = "error"
    LATE = "late"

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        if self is Status.FINISHED_STOP:
            return "stop"
        if self is Status.FINISHED_LENGTH:
            return "length"
        if self is Status.FAILED:
            return "error"
        if self is Status.LATE:
            return "late"
        return "abort" if self is Status.ABORTED else None


class CacheKey(NamedTuple):
    """What keeps equal tokens apart in the prefix cache, besides the tokens before them: a tenant's salt, for one.

    The kind is part of the key, so that a salt never equals an adapter that happens to have the same name.
    """

    kind: str
    value: str


@dataclass(eq=False, slots=True)
class Sequence:
    """`seed` is resolved, 0 <= seed < 2**64. `arrival` is the place in the line, which the scheduler gives for life; a
    fork's begins with its parent's, so it comes right after it. Times are seconds of the engine's clock.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    cache_keys: tuple[CacheKey, ...] = ()
    matcher: Matcher | None = None  # of `params.grammar`
    arrival: tuple[float, ...] = ()
    status: Status = Status.WAITING
    token_ids: list[int] = field(init=False)
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of `token_ids`, filled lazily
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache at the first admission
    host_table: list[int] = field(default_factory=list)  # blocks of the host pool that follow `block_table`
    num_host_tokens: int = 0  # how far those reach
    num_preemptions: int = 0
    num_forks: int = 0
    branches: list[Sequence] = field(default_factory=list)  # to be forked off when the prompt has been computed
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # of its prompt's second token, third, ...
    failure: str = ""  # why it FAILED
    arrived_s: float = 0.0
    first_token_s: float | None = None
    is_put_back: bool = False  # it will be late, so others may pass
    expected_ttft_s: float = 0.0  # of one that is LATE
    drafts: DraftRecord = field(default_factory=DraftRecord)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def needs_whole_prompt(self) -> bool:
        """The log-probabilities of its prompt are still to come, and come only where the prompt is computed."""
        is_wanted = self.params.prompt_logprobs is not None
        return is_wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    def ahead(self, draft_ids: list[int]) -> Sequence:
        """As it would be with these tokens behind it, for whoever samples there: a copy that nobody else knows."""
        if not draft_ids:
            return self
        other = copy(self)
        other.token_ids = self.token_ids + draft_ids
        return other
