"""What an engine's Prometheus text says of its load."""

from __future__ import annotations

from adapters.base import Load
from adapters.wire.load_metrics import LoadMetrics, read_load, told_fields


def test_a_label_picks_its_own_values_and_their_sets_add_up() -> None:
    text = 'r{kind="active",model="a"} 3\nr{model="b",kind="active"} 2\nr{kind="waiting",model="a"} 7\n'
    names = LoadMetrics(running='r{kind="active"}', waiting='r{kind="waiting"}')
    assert read_load(text, names) == Load(running=5, waiting=7)


def test_a_label_value_may_hold_quotes_and_braces() -> None:
    text = 'r{model="odd \\"}{ name",kind="active"} 3\n'
    assert read_load(text, LoadMetrics(running='r{kind="active"}')).running == 3


def test_a_usage_may_be_a_share_or_count_against_a_capacity() -> None:
    assert read_load("used 0.5\nused 0.75\n", LoadMetrics(kv_usage="used")).kv_usage == 0.75
    counted = LoadMetrics(kv_usage="used", kv_capacity="all")
    assert read_load("used 10\nall 40\n", counted).kv_usage == 0.25
    assert read_load("used 10\n", counted).kv_usage is None
    assert read_load("used 10\nall 0\n", counted).kv_usage is None


def test_a_hit_rate_comes_from_queries_from_misses_or_from_itself() -> None:
    names = LoadMetrics(prefix_hits="h", prefix_queries="q", prefix_misses="m", prefix_hit_rate="r")
    assert read_load("h 1\nq 4\n", names).prefix_hit_rate == 0.25
    assert read_load("h 1\nm 3\n", names).prefix_hit_rate == 0.25
    assert read_load("r 0.5\n", names).prefix_hit_rate == 0.5
    assert read_load("h 0\nq 0\n", names).prefix_hit_rate is None


def test_lines_that_are_no_samples_tell_nothing() -> None:
    assert read_load("# TYPE r gauge\nr{a=\nr nan\nr\n", LoadMetrics(running="r")) == Load()


def test_what_an_engine_can_tell_follows_from_the_names_that_it_has() -> None:
    assert told_fields(None) == told_fields(LoadMetrics()) == frozenset()
    assert told_fields(LoadMetrics(running="r", kv_usage="k", kv_capacity="c")) == {"running", "kv_usage"}
    for names in (
        LoadMetrics(prefix_hit_rate="r"),
        LoadMetrics(prefix_hits="h", prefix_queries="q"),
        LoadMetrics(prefix_hits="h", prefix_misses="m"),
    ):
        assert told_fields(names) == {"prefix_hit_rate"}
    assert told_fields(LoadMetrics(prefix_hits="h")) == frozenset()
