"""Logits to tokens.

Greedy rows go together in one argmax. Every other row is sampled on its own, with one random number that is a
function of the request's seed and of how many tokens it has so far. So a request's text does not depend on its
neighbours, nor on whether it was preempted and computed again.

The order is biases, penalties, what must not come (stop tokens before `min_tokens`, what the grammar does not allow,
bad words), temperature, min-p, top-k, top-p; ties are broken by the lower token id. The logits stay as they are, for
their log-probabilities to be told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from functools import lru_cache

import torch

from native_engine.bad_words import BadWords, Vocabulary
from native_engine.errors import InvalidParams
from native_engine.logprobs import Logprobs, TokenLogprob
from native_engine.sampling_params import SamplingParams
from native_engine.sequence import Sequence

# Sorting a whole vocabulary takes milliseconds. Top-p rarely needs more than its first few hundred entries.
TOP_P_GUESSES = (256, 4096)
MAX_KEPT_WORDS = 256  # lists of bad words that stay prepared


class Sampler:
    def __init__(self, eos_token_ids: Collection[int], token_bytes: SequenceOf[bytes] = ()) -> None:
        """`token_bytes`: what each token stands for; bad words need it."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocabulary = Vocabulary(token_bytes)
        self._bad_words = lru_cache(MAX_KEPT_WORDS)(self._prepare)

    def sample(self, logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> list[int]:
        """One token per row of `logits` [rows, vocab]; row i belongs to sequence i."""
        scores = logits.float()
        adjusted = [row for row, sequence in enumerate(sequences) if self._needs_adjusting(sequence)]
        if adjusted and scores is logits:
            scores = logits.clone()
        for row in adjusted:
            self._adjust(scores[row], sequences[row])
        tokens: list[int] = scores.argmax(-1).tolist()
        for row, sequence in enumerate(sequences):
            if not sequence.params.is_greedy:
                tokens[row] = draw(scores[row], sequence.params, uniform(sequence.seed, sequence.num_output_tokens))
        return tokens

    @staticmethod
    def _needs_adjusting(sequence: Sequence) -> bool:
        params = sequence.params
        return (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
            or sequence.num_output_tokens < params.min_tokens
            or sequence.matcher is not None
            or bool(params.logit_bias or params.bad_words)
        )

    def _adjust(self, scores: torch.Tensor, sequence: Sequence) -> None:
        """Apply the biases and penalties, forbid to stop before `min_tokens`, what the grammar does not allow, and bad
        words; in place. Where a grammar leaves nothing but a bad word, the word comes."""
        params = sequence.params
        if params.logit_bias:
            token_ids, biases = zip(*params.logit_bias, strict=True)
            scores[torch.tensor(token_ids)] += torch.tensor(biases)
        if params.repetition_penalty != 1:
            apply_repetition_penalty(scores, sequence.token_ids, params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            apply_count_penalties(scores, sequence.output_ids, params.presence_penalty, params.frequency_penalty)
        scores.clamp_(max=torch.finfo(scores.dtype).max)  # an extreme penalty overflows, and infinities have no softmax
        if sequence.num_output_tokens < params.min_tokens:
            eos = frozenset() if params.ignore_eos else self._eos_token_ids
            for token in eos.union(params.stop_token_ids):
                scores[token] = -torch.inf
        if sequence.matcher is not None:
            scores.masked_fill_(torch.from_numpy(~sequence.matcher.allowed), -torch.inf)
        if params.bad_words:
            bad = torch.from_numpy(self._bad_words(params.bad_words).completed_by(sequence.output_ids))
            others = scores.index_fill(0, bad, -torch.inf)
            if others.isfinite().any():
                scores.copy_(others)

    def _prepare(self, words: tuple[str, ...]) -> BadWords:
        if not self._vocabulary:
            raise InvalidParams("bad_words need an engine that knows the bytes of its tokens.")
        return BadWords(words, self._vocabulary)


@torch.inference_mode()
def logprobs_of(logits: torch.Tensor, token_id: int, num_top: int) -> Logprobs:
    """Of one row [vocab], as it comes from the model. By itself, so that it has the same bits in any company."""
    row = torch.log_softmax(logits.float(), -1)
    likeliest = _largest(row, num_top).tolist() if num_top else []
    return Logprobs(token_id, float(row[token_id]), tuple(TokenLogprob(each, float(row[each])) for each in likeliest))


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that is fixed for this seed and index, and looks random over either."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def apply_repetition_penalty(scores: torch.Tensor, token_ids: SequenceOf[int], penalty: float) -> None:
    """Scores of tokens in prompt or output move away from being chosen: positive ones shrink, negative ones grow."""
    seen = torch.tensor(sorted(set(token_ids)))
    values = scores[seen]
    scores[seen] = torch.where(values > 0, values / penalty, values * penalty)


def apply_count_penalties(scores: torch.Tensor, output_ids: SequenceOf[int], presence: float, frequency: float) -> None:
    """OpenAI's penalties: once for having been generated at all, and once for each time."""
    if output_ids:
        seen, counts = torch.unique(torch.tensor(output_ids), return_counts=True)
        scores[seen] -= presence + frequency * counts


def draw(scores: torch.Tensor, params: SamplingParams, u: float) -> int:
    """Sample from softmax(scores / temperature) after the filters, by inverting its distribution at `u`."""
    # The most likely token weighs 1. Shifted before it is divided: a small temperature must not make infinities.
    weights = torch.exp((scores - scores.max()) / params.temperature)
    if params.min_p > 0:
        weights[weights < params.min_p] = 0.0
    if not params.top_k and params.top_p == 1:
        return _invert(weights.cumsum(0, dtype=torch.float64), u)
    candidates = _largest(weights, params.top_k) if params.top_k else _enough_for_top_p(weights, params.top_p)
    mass = weights[candidates].cumsum(0, dtype=torch.float64)
    total = mass[-1] if params.top_k else weights.sum(dtype=torch.float64)
    kept = int(torch.searchsorted(mass, params.top_p * total)) + 1  # the fewest tokens that reach top_p
    return int(candidates[_invert(mass[:kept], u)])


def _invert(mass: torch.Tensor, u: float) -> int:
    """The index at which the running sum `mass` passes `u` of its end. Entries of no weight are never hit."""
    index = int(torch.searchsorted(mass, u * mass[-1], right=True))
    return min(index, len(mass) - 1)


def _largest(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest weights, descending; equal weights in order of their index."""
    if count >= len(weights):
        return weights.sort(descending=True, stable=True).indices
    least = weights.topk(count).values[-1]
    candidates = torch.nonzero(weights >= least).flatten()  # more than `count` where the last place is tied
    return candidates[weights[candidates].sort(descending=True, stable=True).indices][:count]


def _enough_for_top_p(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    wanted = top_p * weights.sum(dtype=torch.float64)
    for count in TOP_P_GUESSES:
        if count < len(weights):
            candidates = _largest(weights, count)
            # the same running sum as the caller's, so that both agree on whether it reaches `wanted`
            if weights[candidates].cumsum(0, dtype=torch.float64)[-1] >= wanted:
                return candidates
    return _largest(weights, len(weights))
