"""Charts: what is failed or endless is seen, what is drawn lies inside, and dots are thinned without losing misses."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from arena.judging.cells import Sample
from arena.reports.document import Axis, Chart, Point, Series
from arena.reports.plots import distribution_charts, flow_charts, latency_by_rate, rate_charts
from arena.reports.svg import BOTTOM, ENGINES, HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw, mark
from arena.reports.timelines import MOST_DOTS, course_charts, scatter_charts, thinned
from arena.reports.tuned import tuning_charts
from tests.arena.reports.synthetic import synthetic_race

RESULT = synthetic_race()


def test_failures_leave_a_distribution_at_its_upper_edge_and_are_counted() -> None:
    """A curve over successes alone would flatter the engine that fails most."""
    first = RESULT.engines[0]
    lost = tuple(
        replace(cell, samples=tuple(Sample(scheduled_s=1, ttft_ms=math.inf, tpot_ms=None, ok=False) for _ in range(50)))
        for cell in first.cells
    )
    result = replace(RESULT, engines=(replace(first, cells=lost), *RESULT.engines[1:]))
    ttft = next(iter(distribution_charts(result)))
    assert ttft.series[0].points[-1].at_edge
    assert ttft.table is not None
    row = ttft.table.rows[0]
    assert row[1] == "\N{INFINITY}"
    assert row[-1] == row[-2] != "0"


def test_a_percentile_that_failed_is_an_arrow_and_not_a_gap() -> None:
    first = RESULT.engines[0]
    lost = tuple(
        replace(cell, samples=tuple(replace(sample, ok=False, ttft_ms=math.inf) for sample in cell.samples))
        for cell in first.cells
    )
    chart = latency_by_rate(replace(RESULT, engines=(replace(first, cells=lost),)), "ttft")
    assert all(point.at_edge and "failed" in point.words for point in chart.series[0].points)
    assert 'class="arrow"' in draw(chart)


def test_the_saturation_curve_leaves_the_diagonal_where_an_engine_is_full() -> None:
    good, saturation = flow_charts(RESULT)
    assert saturation.diagonal is not None
    for series in saturation.series:
        first, last = series.points[0], series.points[-1]
        assert first.y == pytest.approx(first.x, rel=0.25)
        assert last.y < 0.9 * last.x
    assert max(point.y for point in good.series[0].points) < 1.2 * max(point.y for point in saturation.series[0].points)


def test_a_race_without_raw_rows_has_no_curve_of_what_it_does_not_know() -> None:
    bare = replace(RESULT, traces=type(RESULT.traces)())
    assert list(flow_charts(bare)) == []
    assert course_charts(bare) == ((), ())
    assert [chart.title.split(",")[0] for chart in distribution_charts(bare)] == ["TTFT", "TPOT"]


def test_thinning_keeps_every_miss_it_has_room_for_and_the_order() -> None:
    items = list(range(5000))
    shown = thinned(items, [item % 100 == 0 for item in items])
    assert len(shown) <= MOST_DOTS
    assert {item for item in items if item % 100 == 0} <= set(shown)
    assert shown == sorted(shown)
    assert thinned(items[:50], [False] * 50) == items[:50]
    assert len(thinned(items, [True] * 5000)) <= MOST_DOTS


def test_a_dot_lies_inside_the_box_if_and_only_if_its_request_was_good() -> None:
    slo = RESULT.scenario.slo
    for chart in scatter_charts(RESULT):
        for point in chart.series[0].points:
            inside = point.x <= slo.ttft_ms and point.y <= slo.tpot_ms and not point.at_edge
            assert inside == (not point.is_hollow and not point.at_edge)


def test_everything_is_drawn_inside_its_chart() -> None:
    charts = [*rate_charts(RESULT), *distribution_charts(RESULT), *scatter_charts(RESULT)]
    charts += [chart for charts in course_charts(RESULT) for chart in charts]
    for chart in charts:
        line = re.compile(r'class="line"[^>]* d="M([^"]*)"')
        for path in line.findall(draw(chart)):
            for corner in path.split("L"):
                x, y = map(float, corner.split())
                assert LEFT <= x <= WIDTH - RIGHT
                assert TOP <= y <= HEIGHT - BOTTOM


def test_a_tuning_shows_goodput_over_each_knob_with_its_interior_peak() -> None:
    (charts,) = tuning_charts(RESULT)
    (chart,) = charts.charts
    rates = [point.y for point in chart.series[0].points]
    assert [point.x for point in chart.series[0].points] == [4, 8, 16, 32, 64]
    assert rates.index(max(rates)) == 2
    assert "an interior peak, 2.83 requests/s at 16" in chart.alt
    assert all(point.lo is not None and point.lo < point.y < (point.hi or 0) for point in chart.series[0].points)


def test_engines_differ_in_shape_and_not_by_colour_alone() -> None:
    shapes = {re.sub(r"class=\"[^\"]*\"", "", mark(engine)) for engine in range(ENGINES)}
    assert len(shapes) == ENGINES


def test_words_in_a_chart_cannot_become_markup() -> None:
    axis = Axis("<x>", 0, 1, ((0.5, "<t>"),))
    chart = Chart("t", '"><script>', axis, axis, (Series("s", 0, (Point(0.5, 0.5, "</title><script>"),)),))
    assert "<script" not in draw(chart)
    assert "<x>" not in draw(chart)
