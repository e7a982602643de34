"""The burst table: what is counted, and over which time."""

from __future__ import annotations

import pytest

from arena.load.burst import Answer, Burst, row, summarise


def test_a_burst_counts_from_its_start_to_the_last_token_of_the_last_answer() -> None:
    answers = [Answer(1.5, 2.5, 130, 11), Answer(1.7, 3.0, 132, 14)]
    burst = summarise(answers, start_s=1.0)
    assert burst.tokens_per_s == pytest.approx(25 / 2.0)
    assert burst.ttft_ms == pytest.approx(600)
    assert burst.tpot_ms == pytest.approx(100)
    assert burst.prompt_tokens == 131


def test_one_token_answers_have_no_tpot() -> None:
    assert summarise([Answer(1.5, 1.5, 10, 1)], start_s=1.0).tpot_ms is None


def test_a_row_shows_the_median_and_the_extremes() -> None:
    bursts = [Burst(100, 5, 10, 130), Burst(300, 7, 12, 130), Burst(200, 6, None, 130)]
    table_row = row("native", 8, bursts)
    assert (table_row.tokens_per_s, table_row.lo, table_row.hi) == (200, 100, 300)
    assert (table_row.ttft_ms, table_row.tpot_ms, table_row.rounds) == (6, 11, 3)
