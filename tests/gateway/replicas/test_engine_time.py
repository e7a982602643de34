"""Whose time an engine's seconds are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.replicas.engine_time import EngineTime


def test_generations_share_the_seconds_that_they_are_open_together() -> None:
    time = EngineTime()
    first = time.opened(100.0)
    second = time.opened(102.0)
    assert time.share(first, 104.0) == 3.0
    assert time.share(second, 104.0) == 1.0
    time.closed(104.0)
    assert time.share(second, 105.0) == 2.0
    time.closed(105.0)
    third = time.opened(200.0)  # nobody pays for the time between
    assert time.share(third, 201.0) == 1.0


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=50))
def test_the_shares_add_up_to_the_time_in_which_the_engine_was_busy(steps: list[tuple[float, bool]]) -> None:
    time, now, busy_s, shares, marks = EngineTime(), 0.0, 0.0, 0.0, []
    for elapsed_s, opens in [*steps, *[(1.0, False)] * len(steps)]:
        busy_s += elapsed_s if marks else 0.0
        now += elapsed_s
        if opens:
            marks.append(time.opened(now))
        elif marks:
            shares += time.share(marks.pop(0), now)
            time.closed(now)
    assert shares == pytest.approx(busy_s)
