"""The plots of a report, as Plotly wants them: data and layouts, and the script that draws them. Pure.

Whatever comes from an engine is escaped, since Plotly reads some HTML in its texts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from arena.judging.results import QUANTILES, EngineResult, RaceResult, Sample, tpots
from arena.judging.stats import attainment_interval, holds, quantile
from arena.reports.wording import esc, rate_words


def all_plots(result: RaceResult, colours: dict[str, str]) -> dict[str, dict[str, Any]]:
    """By the id of their place in the page."""
    return {
        "attainment": attainment_plot(result, colours),
        "ttft-rate": latency_by_rate_plot(result, colours, "ttft"),
        "tpot-rate": latency_by_rate_plot(result, colours, "tpot"),
        "ttft-dist": distribution_plot(result, colours, "ttft"),
        "tpot-dist": distribution_plot(result, colours, "tpot"),
    }


def script(plots: dict[str, dict[str, Any]]) -> str:
    """Draw every plot that has a place, in the page's own ink, so that they fit its light and its dark dress."""
    data = json.dumps(plots).replace("<", "\\u003c")  # no text may end the script element
    return (
        f"const plots = {data};\n"
        """const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue(name).trim();
for (const [id, plot] of Object.entries(plots)) {
  const place = document.getElementById(id);
  if (!place) continue;
  const axis = {gridcolor: of('--line'), zeroline: false, linecolor: of('--line'), tickfont: {size: 11.5},
    automargin: true};
  const layout = {...plot.layout, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: {family: getComputedStyle(document.body).fontFamily, size: 12.5, color: of('--soft')},
    margin: {l: 52, r: 16, t: 30, b: 44}, hoverlabel: {font: {family: 'inherit'}},
    xaxis: {...axis, ...plot.layout.xaxis}, yaxis: {...axis, ...plot.layout.yaxis}};
  for (const shape of layout.shapes || []) if (shape.line.color === 'ink') shape.line.color = of('--soft');
  Plotly.newPlot(place, plot.data, layout, {displayModeBar: false, responsive: true});
}
"""
    )


def attainment_plot(result: RaceResult, colours: dict[str, str]) -> dict[str, Any]:
    slo = result.scenario.slo
    data, shapes = [], [_line_at(slo.percentile, "y")]
    for engine in result.engines:
        points = by_rate(engine)
        if not points:
            continue
        share = [100 * (1 - misses / n) for _, n, misses, _ in points]
        bounds = [attainment_interval(n, misses) for _, n, misses, _ in points]
        held = [stable and holds(n, misses, percentile=slo.percentile) for _, n, misses, stable in points]
        colour = colours[engine.engine_id]
        hover = [
            f"{esc(engine.name)}<br>{rate_words(rate)} requests/s<br>{n - misses} of {n} in time"
            f"{'' if stable else '<br>backlog grows'}"
            for rate, n, misses, stable in points
        ]
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": esc(engine.name),
                "x": [point[0] for point in points], "y": share,
                "text": hover, "hoverinfo": "text", "line": {"color": colour, "width": 2.5},
                "marker": {"size": 11, "color": colour, "symbol": ["circle" if ok else "circle-open" for ok in held],
                           "line": {"width": 2.5, "color": colour}},
                "error_y": {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3, "color": colour + "77",
                            "array": [100 * high - y for y, (_, high) in zip(share, bounds, strict=True)],
                            "arrayminus": [y - 100 * low for y, (low, _) in zip(share, bounds, strict=True)]},
            }
        )  # fmt: skip
        if engine.goodput and engine.goodput.rate_rps:
            line = {"color": colour, "width": 1.5, "dash": "dot"}
            shapes.append(_line_at(engine.goodput.rate_rps, "x", line))
    layout = {
        "xaxis": _rate_axis(result),
        "yaxis": {"title": {"text": "requests in time"}, "range": [-3, 104], "ticksuffix": " %"},
        "shapes": shapes, "legend": {"orientation": "h", "y": 1.12, "x": 0}, "showlegend": True, "hovermode": "closest",
    }  # fmt: skip
    return {"data": data, "layout": layout}


def latency_by_rate_plot(result: RaceResult, colours: dict[str, str], metric: str) -> dict[str, Any]:
    percentile = result.scenario.slo.percentile
    lines = []
    for engine in result.engines:
        rates = sorted({cell.rate_rps for cell in engine.cells if cell.is_valid and cell.samples})
        values = [_quantile(_samples_at(engine, rate), metric, percentile) for rate in rates]
        lines.append((f"{engine.name}", colours[engine.engine_id], rates, values))
    layout = {"title": _title(f"p{percentile:g} {metric.upper()}"), "xaxis": _rate_axis(result)}
    return _latency_plot(result, metric, lines, layout, "%{x:.3g} requests/s")


def distribution_plot(result: RaceResult, colours: dict[str, str], metric: str) -> dict[str, Any]:
    names = [f"p{percentile:g}" for percentile in QUANTILES]
    lines = []
    for engine in result.engines:
        rate = comparable_rate(result, engine)
        if rate is not None:
            values = [_quantile(_samples_at(engine, rate), metric, percentile) for percentile in QUANTILES]
            lines.append((f"{engine.name} at {rate_words(rate)}/s", colours[engine.engine_id], names, values))
    layout = {"title": _title(f"{metric.upper()} by percentile"), "xaxis": {"type": "category"}}
    return _latency_plot(result, metric, lines, layout, "%{x}")


Line: TypeAlias = tuple[str, str, Sequence[float] | Sequence[str], Sequence[float | None]]  # name, colour, x, ms


def _latency_plot(
    result: RaceResult, metric: str, lines: Sequence[Line], layout: dict[str, Any], place: str
) -> dict[str, Any]:
    """Latencies on a log axis with the limit across it. An infinite one (failures) is a triangle at the upper edge."""
    limit = result.scenario.slo.ttft_ms if metric == "ttft" else result.scenario.slo.tpot_ms
    finite = [value for _, _, _, values in lines for value in values if value is not None and 0 < value < math.inf]
    low, high = min([*finite, limit]) / 1.4, max([*finite, limit]) * 1.6
    data = []
    for name, colour, x, values in lines:
        ends = [value is not None and math.isinf(value) for value in values]
        words = [f"{value:.1f} ms" if value is not None and value < math.inf else "failed" for value in values]
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "x": x, "y": [min(high, v) if v else None for v in values],
                "text": words, "line": {"color": colour, "width": 2.5}, "showlegend": False, "cliponaxis": False,
                "marker": {"size": [12 if end else 8 for end in ends], "color": colour, "opacity": 1,
                           "symbol": ["triangle-up" if end else "circle" for end in ends]},
                "hovertemplate": f"{esc(name)}<br>{place}: %{{text}}<extra></extra>",
            }
        )  # fmt: skip
    label = {
        "text": f"limit {limit:g} ms", "x": 1, "xref": "paper", "xanchor": "right", "y": math.log10(limit),
        "yanchor": "bottom", "showarrow": False, "font": {"size": 11},
    }  # fmt: skip
    axis = {
        "type": "log", "title": {"text": "ms"}, "range": [math.log10(low), math.log10(high)],
        "tickvals": nice_ticks(low, high), "tickformat": "~r",
    }  # fmt: skip
    return {"data": data, "layout": {**layout, "yaxis": axis, "shapes": [_line_at(limit, "y")], "annotations": [label]}}


def comparable_rate(result: RaceResult, engine: EngineResult) -> float | None:
    """The tested rate of this engine that is nearest to the lowest goodput of all: a load that every engine carries."""
    goodputs = [other.goodput.rate_rps for other in result.engines if other.goodput and other.goodput.rate_rps]
    rates = {cell.rate_rps for cell in engine.cells if cell.is_valid and cell.samples}
    if not rates:
        return None
    reference = min(goodputs) if goodputs else min(rates)
    return min(rates, key=lambda rate: abs(math.log(rate / reference)))


def by_rate(engine: EngineResult) -> list[tuple[float, int, int, bool]]:
    """(rate, requests, misses, stable) over the valid cells of each rate."""
    points = []
    for rate in sorted({cell.rate_rps for cell in engine.cells if cell.is_valid and cell.samples}):
        cells = [cell for cell in engine.cells if cell.is_valid and cell.rate_rps == rate]
        stable = all(cell.status == "ok" for cell in cells)
        points.append((rate, sum(cell.requests for cell in cells), sum(cell.misses for cell in cells), stable))
    return points


def _samples_at(engine: EngineResult, rate: float) -> list[Sample]:
    return [sample for cell in engine.cells if cell.is_valid and cell.rate_rps == rate for sample in cell.samples]


def _quantile(samples: Sequence[Sample], metric: str, percentile: float) -> float | None:
    return quantile([sample.ttft_ms for sample in samples] if metric == "ttft" else tpots(samples), percentile)


def _log_range(values: Sequence[float]) -> list[float]:
    positive = [value for value in values if value > 0]
    return [math.log10(min(positive)) - 0.15, math.log10(max(positive)) + 0.15]


def _rate_axis(result: RaceResult) -> dict[str, Any]:
    rates = [cell.rate_rps for engine in result.engines for cell in engine.cells] or [1.0]
    return {
        "type": "log", "title": {"text": "offered requests/s"}, "range": _log_range(rates),
        "tickvals": nice_ticks(min(rates) / 1.3, max(rates) * 1.3), "tickformat": "~r",
    }  # fmt: skip


def nice_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 steps of a log axis; 1 to 9 where that would leave fewer than three."""
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        ticks = [
            step * 10.0**exponent
            for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for step in steps
            if low <= step * 10.0**exponent <= high
        ]
        if len(ticks) >= 3:
            break
    return [round(tick, 6) for tick in ticks]


def _title(text: str) -> dict[str, Any]:
    return {"text": text, "x": 0, "xref": "paper", "font": {"size": 13.5}}


def _line_at(value: float, axis: str, line: dict[str, Any] | None = None) -> dict[str, Any]:
    """A line across the whole plot. The colour "ink" is the page's, filled in when it is drawn."""
    other = "x" if axis == "y" else "y"
    return {
        "type": "line", f"{axis}0": value, f"{axis}1": value, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper",
        "layer": "below", "line": line or {"color": "ink", "width": 1.3, "dash": "dash"},
    }  # fmt: skip
