"""Sampling parameters are refused where they are made, with the field named."""

from __future__ import annotations

import math

import pytest

from native_engine.errors import EngineError, InvalidParams
from native_engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("stop", ("",)),
        ("stop_token_ids", (-5,)),
        ("logit_bias", ((5, 100.1),)),
        ("logit_bias", ((5, math.nan),)),
        ("logit_bias", ((5, 1.0), (5, 2.0))),
        ("bad_words", ("a", "")),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_field_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be ") as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, InvalidParams)
    assert isinstance(caught.value, EngineError)


def test_more_wanted_tokens_than_allowed_ones_are_refused() -> None:
    with pytest.raises(InvalidParams, match="min_tokens must be at most max_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_the_edges_of_every_range_are_allowed() -> None:
    params = SamplingParams(
        max_tokens=1, min_tokens=1, temperature=0, top_p=1, top_k=0, min_p=1, repetition_penalty=0.01
    )
    assert params.is_greedy
    assert not SamplingParams().is_greedy
