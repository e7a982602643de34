"""The sampler: each parameter does what its name says, and no row depends on its neighbours."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from native_engine.sampler import Sampler, draw, logprobs_of, uniform
from native_engine.sampling_params import Grammar, SamplingParams
from native_engine.sequence import Sequence

EOS = 3


def sequence(prompt: list[int], output: list[int] | None = None, seed: int = 0, **params: Any) -> Sequence:
    result = Sequence("r", prompt, SamplingParams(**params), seed=seed, arrival=0)
    result.token_ids += output or []
    return result


def sample(scores: list[float], *sequences: Sequence) -> list[int]:
    return Sampler([EOS]).sample(torch.tensor([scores] * len(sequences)), sequences)


def shares(scores: list[float], draws: int = 4000, **params: Any) -> dict[int, float]:
    """How often each token is drawn, over seeds."""
    row, counts = torch.tensor(scores), Counter[int]()
    for seed in range(draws):
        counts[draw(row, SamplingParams(**params), uniform(seed, 0))] += 1
    return {token: count / draws for token, count in counts.items()}


def test_greedy_takes_the_largest_and_the_lower_id_of_equals() -> None:
    assert sample([1.0, 5.0, 5.0, 0.0], sequence([0], temperature=0)) == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    scores = [1.0, 0.0, 2.0, -1.0]
    expected = torch.softmax(torch.tensor(scores) / temperature, -1)
    for token, share in shares(scores, temperature=temperature).items():
        assert share == pytest.approx(float(expected[token]), abs=0.03)


def test_top_k_leaves_exactly_k_tokens_even_among_equals() -> None:
    assert set(shares([1.0, 2.0, 2.0, 2.0, 0.0], 300, top_k=2)) == {1, 2}
    assert set(shares([1.0, 2.0, 2.0], 50, top_k=1)) == {1}
    assert set(shares([1.0, 1.0], 100, top_k=500)) == {0, 1}


def test_top_p_leaves_the_fewest_tokens_that_reach_p() -> None:
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(shares(scores, 500, top_p=0.45)) == {0}
    assert set(shares(scores, 500, top_p=0.79)) == {0, 1}
    assert set(shares(scores, 1000, top_p=0.9)) == {0, 1, 2}


def test_top_p_counts_what_top_k_left() -> None:
    scores = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert set(shares(scores, 500, top_p=0.55, top_k=2)) == {0}  # 0.4 of 0.7 is 57 %


def test_min_p_drops_what_is_unlikely_beside_the_likeliest() -> None:
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(shares(scores, 1000, min_p=0.25)) == {0, 1, 2}
    assert set(shares(scores, 1000, min_p=1.0)) == {0}


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**64 - 1), top_p=st.floats(0.01, 1.0), spread=st.sampled_from([0.01, 1.0, 8.0]))
def test_top_p_agrees_with_a_full_sort_on_a_large_vocabulary(seed: int, top_p: float, spread: float) -> None:
    scores = torch.randn(6000, generator=torch.Generator().manual_seed(seed % 2**32)) * spread
    token = draw(scores, SamplingParams(top_p=top_p), uniform(seed, 0))
    chances = torch.softmax(scores.double(), -1)
    before = float(chances[chances > chances[token]].sum())
    assert before < top_p + 1e-5, "a token was drawn although likelier ones reach top_p already"


def test_a_seed_fixes_the_text_whatever_the_neighbours() -> None:
    scores = [0.0] * 50
    alone = [sample(scores, sequence([1], [0] * step, seed=11))[0] for step in range(20)]
    crowd = [
        sample(scores, sequence([1], seed=5), sequence([1], [0] * step, seed=11), sequence([2], temperature=0))[1]
        for step in range(20)
    ]
    assert crowd == alone
    assert len(set(alone)) > 5, "the number must change from token to token"
    assert alone != [sample(scores, sequence([1], [0] * step, seed=12))[0] for step in range(20)]


def test_uniform_fills_its_range_evenly_over_seeds_and_over_indices() -> None:
    for numbers in ([uniform(seed, 3) for seed in range(4000)], [uniform(2**64 - 1, index) for index in range(4000)]):
        counts = Counter(int(number * 8) for number in numbers)
        assert min(numbers) >= 0
        assert max(numbers) < 1
        assert all(400 < counts[eighth] < 600 for eighth in range(8))


def test_repetition_penalty_weakens_tokens_of_prompt_and_output_whatever_their_sign() -> None:
    assert sample([2.0, 1.5, 0.0], sequence([0], temperature=0)) == [0]
    assert sample([2.0, 1.5, 0.0], sequence([0], temperature=0, repetition_penalty=1.5)) == [1]
    assert sample([-1.0, -1.5], sequence([1], [0], temperature=0, repetition_penalty=2.0)) == [0]
    assert sample([-1.0, -1.5], sequence([0, 0], temperature=0, repetition_penalty=2.0)) == [1]


def test_presence_and_frequency_penalties_look_at_the_output_alone() -> None:
    scores = [2.0, 1.8, 1.0]
    assert sample(scores, sequence([0, 0], temperature=0, presence_penalty=0.5)) == [0]
    assert sample(scores, sequence([2], [0], temperature=0, presence_penalty=0.5)) == [1]
    assert sample(scores, sequence([2], [0, 0, 0], temperature=0, presence_penalty=0.1)) == [0]
    assert sample(scores, sequence([2], [0, 0, 0], temperature=0, frequency_penalty=0.1)) == [1]
    assert sample(scores, sequence([2], [2, 2], temperature=0, presence_penalty=-2.0)) == [2]


def test_no_stop_token_is_sampled_before_min_tokens() -> None:
    scores = [0.0, 1.0, 2.0, 9.0]
    assert sample(scores, sequence([1], temperature=0)) == [EOS]
    assert sample(scores, sequence([1], [0], temperature=0, min_tokens=2)) == [2]
    assert sample(scores, sequence([1], [0], temperature=0, min_tokens=2, stop_token_ids=(2,))) == [1]
    assert sample(scores, sequence([1], [0, 0], temperature=0, min_tokens=2, stop_token_ids=(2,))) == [EOS]
    assert sample(scores, sequence([1], [0], temperature=0, min_tokens=2, ignore_eos=True)) == [EOS]


def test_the_logits_of_one_request_are_never_changed_by_the_penalties_of_another() -> None:
    penalised = sequence([0], temperature=0, repetition_penalty=5.0)
    assert sample([2.0, 1.9], penalised, sequence([0], temperature=0)) == [1, 0]


def test_a_bias_is_added_to_the_logit_and_minus_a_hundred_bans() -> None:
    scores = [2.0, 1.5, 0.0]
    assert sample(scores, sequence([0], temperature=0, logit_bias=((1, 0.6),))) == [1]
    assert sample(scores, sequence([0], temperature=0, logit_bias=((0, -100.0), (1, -100.0)))) == [2]
    assert sample(scores, sequence([0], temperature=0, logit_bias=((2, 100.0),)), sequence([0], temperature=0)) == [
        2,
        0,
    ]
    assert sample([0.0, 1.0, 2.0, 0.0], sequence([1], temperature=0, min_tokens=2, logit_bias=((EOS, 100.0),))) == [2]


def test_a_bias_comes_before_the_penalties() -> None:
    """It is added to what the model says, and what is penalised is the sum."""
    biased = sequence([0], [1], temperature=0, logit_bias=((1, 4.0),), repetition_penalty=4.0)
    assert sample([2.0, 1.0, 1.9], biased) == [2], "5 / 4 is less than 1.9; 1 / 4 + 4 would be more"


class Only:
    """A grammar in which these may come."""

    def __init__(self, *token_ids: int) -> None:
        self.allowed = np.isin(np.arange(6), token_ids)

    def accept(self, token_id: int) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_bias_and_no_bad_word_lets_a_token_through_that_the_grammar_forbids(temperature: float) -> None:
    scores = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    sampler = Sampler([EOS], [b"a", b"b", b"c", b"", b"d", b"e"])
    fields: dict[str, Any] = {"temperature": temperature, "grammar": Grammar("regex", "b|c")}

    def sampled(seed: int, **params: Any) -> int:
        held = sequence([0], seed=seed, **fields, **params)
        held.matcher = Only(1, 2)
        return sampler.sample(scores, [held])[0]

    for seed in range(10):
        assert sampled(seed, logit_bias=((4, 100.0), (0, 100.0), (1, -100.0), (2, -100.0))) in (1, 2)
        assert sampled(seed, bad_words=("b", "d")) == 2
        assert sampled(seed, bad_words=("b", "c")) in (1, 2)


def test_bad_words_are_left_out_and_no_other_row_knows_of_them() -> None:
    sampler = Sampler([EOS], [b"a", b"b", b"ab", b""])
    held = sequence([0], [0], temperature=0, bad_words=("ab",))
    scores = torch.tensor([[0.0, 2.0, 1.0, -1.0]] * 2)
    assert sampler.sample(scores, [held, sequence([0], [0], temperature=0)]) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling_leaves_the_logits_as_they_are(dtype: torch.dtype) -> None:
    logits = torch.tensor([[2.0, 1.9, 0.5, 3.0]] * 2, dtype=dtype)
    before = logits.clone()
    changed = sequence([0], [1], repetition_penalty=3.0, logit_bias=((2, 9.0),), min_tokens=9)
    Sampler([EOS]).sample(logits, [changed, sequence([0], temperature=0)])
    assert torch.equal(logits, before)


def test_log_probabilities_are_those_of_the_softmax_and_equals_come_by_their_ids() -> None:
    told = logprobs_of(torch.tensor([1.0, 3.0, 3.0, 0.0]), 3, 3)
    chances = torch.softmax(torch.tensor([1.0, 3.0, 3.0, 0.0]), -1).tolist()
    assert math.exp(told.logprob) == pytest.approx(chances[3])
    assert [token for token, _ in told.top] == [1, 2, 0]
    assert [math.exp(logprob) for _, logprob in told.top] == pytest.approx([chances[1], chances[2], chances[0]])
    assert logprobs_of(torch.zeros(3), 0, 20).top[-1].token_id == 2, "no more than there are"


def test_bf16_logits_are_sampled_as_they_are() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5]]).bfloat16()
    assert Sampler([EOS]).sample(logits, [sequence([0], temperature=0)]) == [1]


@pytest.mark.parametrize("temperature", [1e-5, 1e-7, 1e-30, 1e-45])
def test_a_temperature_next_to_zero_takes_the_likeliest_token_and_not_a_random_last_one(temperature: float) -> None:
    """Dividing first makes infinities, their difference is no number, and the last id of the vocabulary comes out."""
    assert sample([1.0, 50.0, 20.0, 0.0], sequence([0], temperature=temperature)) == [1]


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": -1e39},
        {"frequency_penalty": 1e39},
    ],
)
def test_an_extreme_penalty_still_gives_a_token_that_the_scores_allow(params: dict[str, float]) -> None:
    scores = [3.0, -2.0, 1.0, -torch.inf, -torch.inf]
    for seed in range(20):
        assert sample(scores, sequence([0, 1], [0, 1, 1], seed=seed, **params))[0] in (0, 1, 2)


def naive_chances(scores: list[float], *, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The filters in plain Python, as the module's contract words them."""
    likeliest = max(scores)
    chances = [math.exp((score - likeliest) / temperature) for score in scores]
    kept = [token for token in range(len(scores)) if chances[token] >= min_p]
    kept.sort(key=lambda token: (-chances[token], token))
    kept = kept[: top_k or len(kept)]
    total, running, nucleus = sum(chances[token] for token in kept), 0.0, []
    for token in kept:
        nucleus.append(token)
        running += chances[token]
        if running >= top_p * total * (1 - 1e-9):
            break
    mass = sum(chances[token] for token in nucleus)
    return [chances[token] / mass if token in nucleus else 0.0 for token in range(len(scores))]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.3, "top_k": 7, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.0, "top_k": 0, "top_p": 0.8, "min_p": 0.0},
        {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.15},
        {"temperature": 0.9, "top_k": 9, "top_p": 0.85, "min_p": 0.05},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.5, "min_p": 0.02},
    ],
)
def test_filters_together_draw_as_a_naive_reference_does(params: dict[str, Any]) -> None:
    scores = torch.randn(24, generator=torch.Generator().manual_seed(8)).mul(1.7).tolist()
    expected = naive_chances(scores, **params)
    draws = 6000
    row, counts = torch.tensor(scores), Counter[int]()
    for seed in range(draws):
        counts[draw(row, SamplingParams(**params), uniform(seed, 5))] += 1
    allowed = [token for token, chance in enumerate(expected) if chance]
    assert set(counts) <= set(allowed)
    statistic = sum((counts[token] - draws * expected[token]) ** 2 / (draws * expected[token]) for token in allowed)
    degrees = len(allowed) - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees) + 8  # beyond the 99.9th percentile of chi-square


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_penalties_together_are_those_of_a_naive_reference(data: st.DataObject) -> None:
    size = 12
    scores = data.draw(st.lists(st.floats(-5, 5, width=32), min_size=size, max_size=size))
    prompt = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    output = data.draw(st.lists(st.integers(0, size - 1), max_size=8))
    repetition, presence, frequency = data.draw(st.tuples(*[st.sampled_from([0.5, 1.0, 1.3, 2.0])] * 3))
    expected = list(scores)
    for token in set(prompt + output):
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(output):
        expected[token] -= presence + frequency * output.count(token)
    row = torch.tensor(scores)
    penalised = sequence(
        prompt, output, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    Sampler([])._adjust(row, penalised)
    torch.testing.assert_close(row, torch.tensor(expected), atol=1e-5, rtol=1e-5)
