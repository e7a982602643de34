"""Each target of the fuzzer gets a moment of the suite; `python -m tests.fuzz --seconds 600` gives it more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import fuzz
from tests.gateway.bad_input import GOOD

SEEDS = st.integers(0, 2**32)


@pytest.mark.replay("A55")
@pytest.mark.parametrize("target", fuzz.DECODERS)
def test_any_body_is_a_request_or_refused(target: str) -> None:
    @settings(max_examples=150, deadline=None)
    @given(SEEDS)
    def any_body(seed: int) -> None:
        fuzz.try_body(target, seed)

    any_body()


@pytest.mark.replay("A34")
@settings(max_examples=300, deadline=None)
@given(SEEDS)
def test_any_stream_is_an_answer_or_the_engines_fault(seed: int) -> None:
    fuzz.try_stream(seed)


@pytest.mark.replay("A34", "A55")
@pytest.mark.parametrize("target", ["engine", "socket"])
async def test_any_bytes_on_a_socket_leave_a_gateway_that_answers(target: str) -> None:
    assert await fuzz.run(target, range(120)) == 120


def test_mutants_are_often_good_and_often_bad() -> None:
    """Neither kind alone would show anything."""
    for target in fuzz.DECODERS:
        outcomes = [_is_taken(target, seed) for seed in range(300)]
        assert 0.02 < sum(outcomes) / len(outcomes) < 0.98, target


def test_a_whole_body_of_each_route_is_taken() -> None:
    assert len(fuzz.WHOLE) == len(GOOD)
    for target, body in fuzz.WHOLE.items():
        fuzz.DECODERS[target](fuzz.json.dumps(body).encode())


def _is_taken(target: str, seed: int) -> bool:
    try:
        fuzz.DECODERS[target](fuzz.body_of(target, fuzz.Random(seed)))
    except fuzz.RequestError:
        return False
    return True
