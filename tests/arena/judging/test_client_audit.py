"""What a cell tells of its client besides the lag of its sends."""

from __future__ import annotations

import pytest

from arena.judging import audit
from arena.judging.client_audit import (
    Counted,
    beyond_calibration,
    events_per_read,
    foreign_share,
    loop_lag,
    tokens_counted,
)
from arena.load.calibration import Calibration
from tests.arena.load.test_calibration import BUDGET, floor


def answer(usage: int | None = 64, events: int = 64, reads: int | None = None, *, known: bool = False) -> Counted:
    return Counted(usage=usage, events=events, tokens_known=known, n_chunks=events, n_recvs=reads or events)


def test_a_busy_neighbour_is_told_and_costs_a_cell_only_where_the_scenario_says_so() -> None:
    told = foreign_share(0.4, None)
    assert (told.ok, told.effect) == (False, "note")
    assert audit.verdict([told]) == ("ok", None)
    strict = foreign_share(0.4, 0.25)
    assert audit.verdict([strict])[0] == "invalid_client"
    assert foreign_share(0.2, 0.25).ok
    assert foreign_share(None, 0.25).ok


def test_a_client_that_stalled_between_sends_is_seen() -> None:
    assert not loop_lag([0.1] * 50 + [40.0], 5.0).ok
    assert loop_lag([0.1] * 50, 5.0).ok
    assert loop_lag([], 5.0).value is None


def test_tokens_of_events_are_held_against_the_usage_in_percent() -> None:
    assert tokens_counted([answer(), answer()]).value == 0
    merged = tokens_counted([answer(64, 16)])
    assert (merged.ok, merged.value) == (False, pytest.approx(-75))
    assert "do not say how many" in merged.words
    assert tokens_counted([answer(None, 10)]).value is None
    assert tokens_counted([answer(64, 64, known=True), answer(64, 65)]).ok


def test_events_that_come_in_lumps_are_seen_and_short_answers_say_nothing() -> None:
    lumps = events_per_read([answer(64, 64, reads=8), answer(64, 64, reads=8)])
    assert (lumps.ok, lumps.value, lumps.effect) == (False, 8.0, "note")
    assert events_per_read([answer(64, 64)]).ok
    assert events_per_read([answer(4, 4, reads=1)]).value is None


def test_a_cell_above_the_calibrated_rate_is_noted() -> None:
    known = Calibration(asked_rps=75, budget=BUDGET, floors=(floor(75),))  # 2,400 tokens/s
    assert beyond_calibration(2400, known).ok
    assert not beyond_calibration(2500, known).ok
