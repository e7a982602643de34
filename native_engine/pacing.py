"""Who comes first, and how much a step may take on, so that answers keep their latency targets. Pure: no clock.

    pace = Pace(Targets(ttft_s=1.0, tpot_s=0.06, when_late="relegate"), StepTimeModel())
    pace.due(sequence)                        # its place in the line: earliest due first
    pace.budget(running, now, most=256)       # tokens that the next step may compute
    pace.may_join(running)                    # another one, and all still decode in time
    pace.late(waiting, running, now, ...)     # whose first token can no longer be in time

Everything rests on how long a step takes (step_time.py). Decodes set the pace: a step takes on as much of the prompts
as leaves the most urgent decode its next token in time, so TPOT holds by construction and chunks are as long as they
can be (slack-based chunks: Niyama, arXiv 2503.22562; admission by predicted feasibility: SABER, arXiv 2506.19677).
Until the model of step times is warm, and without targets, nothing is held back.

The line is one of due times: when a request came, plus the TTFT target, plus `PATIENCE_S` for each point of its
priority. Among equals that is the order of arrival. Who waits becomes the most urgent one in the end, so a flood of
more important requests delays others, but starves nobody; and a late one that is put back is put back once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from native_engine.errors import InvalidParams
from native_engine.sequence import Sequence
from native_engine.step_time import StepTimeModel, StepWork, chunk_work

WhenLate = Literal["queue", "relegate", "refuse"]

PATIENCE_S = 10.0  # one point of priority
LEAST_CHUNK = 16  # prompts get on by so many tokens in every step, whatever it costs the decodes
MARGIN = 0.9  # of a decode's slack: predictions err
# A decode that is ahead of its pace may wait, but no reader likes a pause.
LONGEST_PAUSE = 2.0  # steps take at most so many times the TPOT target
SECOND_CHANCE = 10.0  # a late request is put back by so many TTFT targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """`None`: no such target. `when_late`: what becomes of a request whose first token cannot be in time any more. It
    keeps its place, or lets those pass that can still make it, or ends with an error while the client can still go
    elsewhere."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    when_late: WhenLate = "queue"

    def __post_init__(self) -> None:
        for name, seconds in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if seconds is not None and not 0 < seconds < math.inf:
                raise InvalidParams(f"{name}_target_ms must be above 0 and finite, not {seconds * 1000:g}.")
        if self.when_late not in get_args(WhenLate):
            raise InvalidParams(f"when_late must be one of {', '.join(get_args(WhenLate))}, not {self.when_late!r}.")
        if self.when_late != "queue" and self.ttft_s is None:
            raise InvalidParams(f"ttft_target_ms must be given where when_late is {self.when_late}.")


NO_TARGETS = Targets()


class Late(NamedTuple):
    sequence: Sequence
    ttft_s: float  # expected


class Pace:
    def __init__(self, targets: Targets, model: StepTimeModel) -> None:
        self.targets = targets
        self.model = model

    def due(self, sequence: Sequence) -> float:
        """In seconds of the engine's clock; what the line is sorted by."""
        return sequence.arrived_s + (self.targets.ttft_s or 0.0) + PATIENCE_S * sequence.params.priority

    def due_again(self, sequence: Sequence) -> float:
        """Of one that is put back."""
        return self.due(sequence) + SECOND_CHANCE * (self.targets.ttft_s or 0.0)

    def budget(self, running: Iterable[Sequence], now: float, *, most: int) -> int:
        """Tokens that the next step may compute: decodes, and as much of the prompts as leaves them their time."""
        decodes, prompts = _split(running)
        if self.targets.tpot_s is None or not self.model.is_warm or not decodes:
            return most
        slack = min(self._next_token_due(sequence) for sequence in decodes) - now
        limit_s = MARGIN * min(slack, LONGEST_PAUSE * self.targets.tpot_s)
        work = _decode_work(decodes)
        start = prompts[0].num_computed_tokens if prompts else 0
        for length in range(most - len(decodes), LEAST_CHUNK, -LEAST_CHUNK):
            if self.model.predict(work + chunk_work(start, length, sampled=1)) <= limit_s:
                return len(decodes) + length
        return min(len(decodes) + LEAST_CHUNK, most)

    def may_join(self, running: SequenceOf[Sequence]) -> bool:
        """With one more of their kind, a step that only decodes keeps TPOT."""
        if self.targets.tpot_s is None or not self.model.is_warm or not running:
            return True
        work = _decode_work(running)
        more = StepWork(1, work.context // len(running), 1)
        return self.model.predict(work + more) <= self.targets.tpot_s

    def late(
        self,
        waiting: Iterable[Sequence],
        running: SequenceOf[Sequence],
        now: float,
        *,
        most: int,
        num_cached: Callable[[Sequence], int],
    ) -> list[Late]:
        """Those of the line whose first token will not be in time, if prompts go on at today's speed. Only those that
        have not begun: what has been computed is not thrown away. `num_cached`: how much of a prompt is in the cache.
        """
        if self.targets.ttft_s is None or self.targets.when_late == "queue" or not self.model.is_warm:
            return []
        ahead = sum(sequence.num_uncomputed_tokens for sequence in running if sequence.num_uncomputed_tokens > 1)
        tokens_per_s = self._prefill_speed(running, now, most=most)
        found: list[Late] = []
        for sequence in waiting:
            tokens = ahead + sequence.num_uncomputed_tokens
            waited = now - sequence.arrived_s
            is_fresh = not sequence.num_output_tokens and not sequence.num_preemptions and not sequence.is_put_back
            if is_fresh and waited + tokens / tokens_per_s > self.targets.ttft_s:
                tokens -= num_cached(sequence)
                if waited + tokens / tokens_per_s > self.targets.ttft_s:
                    found.append(Late(sequence, waited + tokens / tokens_per_s))
                    continue
            ahead = tokens
        return found

    def _prefill_speed(self, running: SequenceOf[Sequence], now: float, *, most: int) -> float:
        """Tokens of prompts a second, beside those that decode."""
        decodes, _ = _split(running)
        length = max(self.budget(running, now, most=most) - len(decodes), 1)
        return length / self.model.predict(_decode_work(decodes) + chunk_work(0, length, sampled=1))

    def _next_token_due(self, sequence: Sequence) -> float:
        """By the targets' own measure: the mean gap since the first token."""
        if sequence.first_token_s is None:
            return sequence.arrived_s + (self.targets.ttft_s or math.inf)
        return sequence.first_token_s + (self.targets.tpot_s or math.inf) * sequence.num_output_tokens


def _split(running: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Those that need one token, and those with more of a prompt to compute."""
    decodes: list[Sequence] = []
    prompts: list[Sequence] = []
    for sequence in running:
        (prompts if sequence.num_uncomputed_tokens > 1 else decodes).append(sequence)
    return decodes, prompts


def _decode_work(sequences: Iterable[Sequence]) -> StepWork:
    """One token of each."""
    rows = context = 0
    for sequence in sequences:
        rows += 1
        context += sequence.num_tokens
    return StepWork(rows, context, rows)
