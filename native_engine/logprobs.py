"""How likely tokens were: of the model's own distribution, before temperature, penalties, biases and masks.

Pure data; `logprobs_of` in sampler.py makes it.
"""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float


class Logprobs(NamedTuple):
    """Of one place in a text: the token that stands there, and the likeliest ones that could have. Equals are in the
    order of their ids."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
