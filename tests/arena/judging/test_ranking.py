"""Rank sets: sure differences separate, everything else shares its ranks."""

from arena.judging.knee import Knee
from arena.judging.ladder import Outcome, SearchSettings
from arena.judging.ranking import RankSet, compare_all, rank_sets

SETTINGS = SearchSettings()


def knee(holds_at: int, *, requests: int = 120) -> Knee:
    """An engine that holds up to a rung and fails right above it."""
    return Knee(
        [
            Outcome(holds_at, SETTINGS.rate(holds_at), requests, 0),
            Outcome(holds_at + 1, SETTINGS.rate(holds_at + 1), requests, requests // 2),
        ],
        SETTINGS,
    )


def test_engines_that_cannot_be_told_apart_share_their_ranks() -> None:
    better = {("a", "b"): 0.6, ("a", "c"): 0.9999, ("b", "c"): 0.9999}
    assert rank_sets(["a", "b", "c"], better) == {"a": RankSet(1, 2), "b": RankSet(1, 2), "c": RankSet(3, 3)}


def test_a_middle_engine_may_tie_with_both_of_its_neighbours() -> None:
    better = {("a", "b"): 0.9, ("b", "c"): 0.9, ("a", "c"): 0.9999}
    assert rank_sets(["a", "b", "c"], better) == {"a": RankSet(1, 2), "b": RankSet(1, 3), "c": RankSet(2, 3)}


def test_more_pairs_demand_more_certainty_of_each() -> None:
    assert rank_sets(["a", "b"], {("a", "b"): 0.99})["a"] == RankSet(1, 1)
    three = {("a", "b"): 0.99, ("a", "c"): 0.5, ("b", "c"): 0.5}
    assert rank_sets(["a", "b", "c"], three)["a"] == RankSet(1, 3)


def test_a_lone_engine_ranks_first_and_nobody_ranks_nowhere() -> None:
    assert rank_sets(["a"], {}) == {"a": RankSet(1, 1)}
    assert rank_sets([], {}) == {}


def test_equal_evidence_is_a_tie_and_three_times_the_rate_is_not() -> None:
    knees = {"a": knee(8, requests=300), "b": knee(8, requests=300), "c": knee(2, requests=300)}
    ranks = rank_sets(["a", "b", "c"], compare_all(knees))
    assert ranks == {"a": RankSet(1, 2), "b": RankSet(1, 2), "c": RankSet(3, 3)}


def test_a_few_requests_separate_nobody_by_one_rung() -> None:
    ranks = rank_sets(["a", "b"], compare_all({"a": knee(5, requests=12), "b": knee(4, requests=12)}))
    assert ranks == {"a": RankSet(1, 2), "b": RankSet(1, 2)}


def test_a_rank_set_reads_as_people_write_it() -> None:
    assert str(RankSet(1, 1)) == "1"
    assert str(RankSet(1, 2)) == "1\N{EN DASH}2"
