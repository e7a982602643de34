"""Speculative decoding: who gets a draft, how long it is, and what of it holds. Pure: no tensors, no clock.

A draft guesses the next tokens of a text. A step computes the last known token and the draft behind it, a row each, and
samples every row. While what is sampled is what was guessed, the row behind it has seen the right text, so its own
sample holds too: a step gives one token at least, and one more than the draft has at most.

No token changes. A row has the same bits in any company (layers.py), and what is sampled from it depends on the seed
and on its place in the text alone (sampler.py), so each token that holds is the one that a plain step would have given.
That is true of greedy and of sampled texts, and a draft that guesses badly costs time only (Leviathan et al.,
arXiv 2211.17192, accept by chance to keep a distribution; comparing with the sample itself keeps the very text).

    counts = choose(candidates, plain, rows, model, drafting_s)   # before the step
    verified([7, 9, 4], [7, 9, 5, 8])                             # after it: [7, 9, 5]
    record.note(3, 2, num_output_tokens=40)                       # and how the request's drafts are doing

Two things switch it off: a batch so deep that the rows of drafts cost more than they bring, which the engine's own
model of step times says, and a request whose drafts are refused: it rests, each time for longer.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from native_engine.step_time import StepTimeModel, StepWork, chunk_work

FIRST_CHANCE = 0.5  # of a request that has had no draft yet
WEIGHT = 0.25  # of a new draft in a request's chance
LEAST_CHANCE = 0.15  # below it a request rests
LATER_CHANCE = 0.18  # after a rest: one draft that is refused at once ends it
FIRST_REST, LONGEST_REST = 16, 256  # output tokens


@dataclass(slots=True)
class DraftRecord:
    """How the drafts of one request have done. `chance`: that its next drafted token holds if those before it do."""

    chance: float = FIRST_CHANCE
    rests_until: int = 0  # output tokens
    rest: int = FIRST_REST

    def note(self, num_proposed: int, num_accepted: int, num_output_tokens: int) -> None:
        """One more draft. Tokens behind the first that was refused were not put to the test."""
        num_tested = min(num_accepted + 1, num_proposed)
        self.chance += WEIGHT * (num_accepted / num_tested - self.chance)
        if self.chance >= FIRST_CHANCE:
            self.rest = FIRST_REST
        elif self.chance < LEAST_CHANCE:
            self.chance = LATER_CHANCE
            self.rests_until = num_output_tokens + self.rest
            self.rest = min(2 * self.rest, LONGEST_REST)

    def rests(self, num_output_tokens: int) -> bool:
        return num_output_tokens < self.rests_until


class Candidate(NamedTuple):
    """A request that may have a draft in the next step."""

    chance: float
    length: int  # drafted tokens at most
    context: int  # tokens so far


def choose(
    candidates: SequenceOf[Candidate], plain: StepWork, rows: int, model: StepTimeModel, drafting_s: float
) -> list[int]:
    """How many tokens to draft for each; 0: no draft. The likeliest first, as many as give the most tokens a second.

    `plain`: the step without drafts. `rows`: how many more it may have. `drafting_s`: what it takes to draft at all.
    Until the model of step times is warm, all that `rows` have room for.
    """
    counts = [0] * len(candidates)
    likeliest = sorted(range(len(candidates)), key=lambda number: -candidates[number].chance)
    best = plain.sampled / model.predict(plain)
    work, tokens, drafted = plain, float(plain.sampled), list(counts)
    for number in likeliest:
        chance, count, context = candidates[number]
        drafted[number] = min(count, rows)
        if not drafted[number]:
            break
        rows -= drafted[number]
        work += chunk_work(context, drafted[number], sampled=drafted[number])
        tokens += sum(chance**place for place in range(1, drafted[number] + 1))
        speed = tokens / (model.predict(work) + drafting_s)
        if speed > best or not model.is_warm:
            best, counts = speed, list(drafted)
    return counts


def verified(draft_ids: SequenceOf[int], sampled: list[int]) -> list[int]:
    """Of the tokens sampled behind the last known one and behind each of its draft, those that hold: as long as they
    are the draft's, and the first that is not."""
    for place, (drafted, token) in enumerate(zip(draft_ids, sampled, strict=False)):
        if drafted != token:
            return sampled[: place + 1]
    return sampled
