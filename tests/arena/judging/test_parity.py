"""Parity between engines: each disparity costs the rank of the one that has it, and of nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from arena.judging.findings import Disparity, Row
from arena.judging.parity import WeightsParity, Work, disparities
from tests.arena.judging.test_audit import row

HONEST = [row(seq, seq / 10) for seq in range(50)]
FILE = {"source_sha256": "a" * 64, "served_sha256": "a" * 64, "precision": "as in the file", "relation": "same"}


def compared(rows_of: dict[str, Sequence[Row]], **works: dict[str, Any]) -> list[Disparity]:
    """`works` adds a probe to an engine."""
    return disparities(
        {name: Work(cells=[rows], weights=FILE, **works.get(name, {})) for name, rows in rows_of.items()}
    )


def blocking(found: Sequence[Disparity]) -> list[tuple[str, str]]:
    return [(each.engine, each.check) for each in found if each.blocks]


def test_equal_engines_have_no_disparity() -> None:
    assert compared({"a": HONEST, "b": HONEST, "c": HONEST}) == []


@pytest.mark.replay("R15")
def test_an_engine_that_answers_shorter_loses_its_rank() -> None:
    short = [replace(r, out_tokens=12, finish_reason="stop") for r in HONEST]
    assert blocking(compared({"honest": HONEST, "short": short})) == [("short", "output_length")]


@pytest.mark.replay("R15")
def test_an_engine_that_answers_shorter_in_its_busiest_cell_only_loses_its_rank() -> None:
    """Over all its cells 99.6 % of the answers are whole: a mean would have let it pass."""
    busy = [replace(r, out_tokens=12) if r.seq == 7 else r for r in HONEST]
    works = {"honest": Work(cells=[HONEST] * 5), "sheds": Work(cells=[*[HONEST] * 4, busy])}
    assert blocking(disparities(works)) == [("sheds", "output_length")]


@pytest.mark.replay("R15")
def test_engines_that_all_end_where_they_like_are_compared_with_each_other() -> None:
    lengths = [20 + seq * 37 % 40 for seq in range(50)]
    free = [replace(r, out_tokens=length) for r, length in zip(HONEST, lengths, strict=True)]
    alike = compared({"a": free, "b": list(reversed(free))})
    assert blocking(alike) == []
    assert {each.check for each in alike} == {"output_length"}  # and it is told
    shorter = [replace(r, out_tokens=(r.out_tokens or 0) // 2) for r in free]
    assert blocking(compared({"a": free, "b": shorter})) == [("a", "output_length"), ("b", "output_length")]


def test_answers_that_the_model_ends_are_compared_in_their_distribution() -> None:
    free = [replace(r, out_tokens=10 + r.seq % 40, finish_reason="stop") for r in HONEST]
    shorter = [replace(r, out_tokens=(r.out_tokens or 0) // 2) for r in free]

    def judged(second: list[Row]) -> list[Disparity]:
        works = {name: Work(cells=[rows], weights=FILE) for name, rows in (("a", free), ("b", second))}
        return disparities(works, exact_output=False)

    assert judged(list(reversed(free))) == []
    assert {each.check for each in judged(shorter) if each.blocks} == {"output_length"}


@pytest.mark.replay("R21")
def test_an_engine_of_one_token_answers_is_not_ranked_however_fast_they_are() -> None:
    terse = [replace(r, out_tokens=1, n_chunks=1, n_reads=1, gap_cv=None, last_gen_ns=r.first_gen_ns) for r in HONEST]
    assert blocking(compared({"honest": HONEST, "terse": terse})) == [("terse", "output_length")]


def test_an_engine_without_usage_loses_its_rank() -> None:
    silent = [replace(r, out_tokens=None, in_tokens=None) for r in HONEST]
    assert blocking(compared({"silent": silent})) == [("silent", "output_length")]


@pytest.mark.replay("R36")
def test_an_engine_that_counts_other_prompts_loses_its_rank_and_a_token_more_does_not() -> None:
    nearly = [replace(r, in_tokens=131) for r in HONEST]
    other = [replace(r, in_tokens=171) for r in HONEST]
    found = compared({"a": HONEST, "b": nearly, "c": other})
    assert blocking(found) == [("c", "prompt_length")]
    assert "+31" in found[0].words


@pytest.mark.replay("R36")
def test_prompt_lengths_are_compared_only_over_prompts_that_both_have_met_and_the_probe_is_one_of_them() -> None:
    small = [row(seq, seq / 10, in_tokens=50) for seq in range(50)]
    large = [row(seq, seq / 10, in_tokens=500, prompt_id=f"q{seq}") for seq in range(50)]
    assert compared({"a": small, "b": large}) == []
    probes = {"a": {"probe": {"prompt_tokens": 50}}, "b": {"probe": {"prompt_tokens": 150}}}
    assert blocking(compared({"a": small, "b": large}, **probes)) == [("b", "prompt_length")]


@pytest.mark.replay("R36")
@pytest.mark.parametrize(("tokens", "fits"), [(100, True), (131, True), (40, False), (520, False)])
def test_a_prompt_that_was_cut_or_counted_many_times_is_found_without_a_rival(tokens: int, fits: bool) -> None:
    found = compared({"alone": HONEST}, alone={"probe": {"prompt_asked": 100, "prompt_tokens": tokens}})
    assert (found == []) == fits


def test_another_word_for_the_same_end_is_told_and_another_end_costs_the_rank() -> None:
    renamed = [replace(r, finish_reason="max_tokens") for r in HONEST]
    found = compared({"a": HONEST, "b": renamed})
    assert blocking(found) == []
    assert {(each.engine, each.check) for each in found} == {("a", "finish_reason"), ("b", "finish_reason")}


def test_a_warmer_prefix_cache_than_a_rivals_is_told() -> None:
    warm = [replace(r, cached_tokens=40) for r in HONEST]
    cold = [replace(r, cached_tokens=0) for r in HONEST]
    found = compared({"warm": warm, "cold": cold, "silent": HONEST})
    assert [(each.engine, each.check, each.blocks) for each in found] == [("warm", "cached_tokens", False)]
    assert "31% of its prompt tokens" in found[0].words


@pytest.mark.parametrize(
    ("weights", "same", "anything"),
    [
        (FILE, [], []),
        ({**FILE, "relation": "dequantised", "precision": "bfloat16"}, [], ["told"]),
        ({**FILE, "relation": "requantised", "precision": "q8_0"}, ["b"], ["told"]),
        ({**FILE, "source_sha256": "b" * 64}, ["b"], ["told"]),
        ({}, [], ["told"]),
    ],
)
def test_weights_that_differ_are_ranked_only_where_the_scenario_lets_them(
    weights: dict[str, str], same: list[str], anything: list[str]
) -> None:
    def judged(allowed: WeightsParity) -> list[Disparity]:
        works = {name: Work(cells=[HONEST], weights=FILE) for name in "ac"}
        return disparities({**works, "b": Work(cells=[HONEST], weights=weights)}, weights=allowed)

    assert [each.engine for each in judged("same") if each.blocks] == same
    assert [each.check for each in judged("any")] == ["weights"] * len(anything)
    assert not any(each.blocks for each in judged("any"))
