"""Charts as SVG: small, still, and readable without a script. Pure.

Colours are classes of the style sheet, so that a chart follows light and dark. An engine has a mark of its own beside
its colour and a dash of its own on its lines. Hovering over a mark tells its figures. The picture is drawn `WIDTH`
units wide and scaled to its place: at 306 px (a phone) its text is 10 px high.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from arena.reports.document import Area, Axis, Chart, Point, Rule, Series

WIDTH, HEIGHT = 380, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 40
ENGINES = 8  # marks, colours and dashes; a ninth engine begins again
DASHES = ("", "7 3", "2.5 2.5", "9 3 2 3", "4 2", "1 3", "12 4", "5 2 1 2")
OUTLINES: tuple[tuple[tuple[float, float], ...], ...] = (  # corners of each mark, in sizes from its middle
    (),  # a circle
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.25), (1.2, 0.85), (-1.2, 0.85)),
    ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
    ((0, 1.25), (1.2, -0.85), (-1.2, -0.85)),
    ((-0.45, -1.3), (0.45, -1.3), (0.45, 1.3), (-0.45, 1.3)),
    ((-1.3, -0.45), (1.3, -0.45), (1.3, 0.45), (-1.3, 0.45)),
    ((-1, -1), (1, -1), (-1, 1), (1, 1)),
)


def place(engine: int) -> int:
    """Which mark and colour an engine has."""
    return engine % ENGINES


def draw(chart: Chart) -> str:
    """The whole picture. Its words for those who cannot see it are `chart.alt`."""
    parts = [*_areas(chart), *_grid(chart), *_diagonal(chart), *_rules(chart)]
    parts += [part for series in chart.series for part in _series(chart, series)]
    parts += [_label(chart, rule) for rule in chart.rules if rule.label]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg {size} role="img" aria-label="{_esc(chart.alt)}">{"".join(parts)}</svg>'


def mark(engine: int) -> str:
    """An engine's mark alone, as it stands in a legend or before its name."""
    size = 'viewBox="-7 -7 14 14" width="14" height="14"'
    return f'<svg class="mark dot e{place(engine)}" {size} aria-hidden="true">{_shape(engine, 0, 0, 5)}</svg>'


def _areas(chart: Chart) -> Iterator[str]:
    for area in chart.areas:
        left, right = (_clip(_x(chart, value), LEFT, WIDTH - RIGHT) for value in _ends(area.x, chart.x))
        bottom, top = (_clip(_y(chart, value), TOP, HEIGHT - BOTTOM) for value in _ends(area.y, chart.y))
        if right - left < 0.5 or bottom - top < 0.5:
            continue
        yield (
            f'<rect class="area {area.tone}" x="{_n(left)}" y="{_n(top)}" width="{_n(right - left)}" '
            f'height="{_n(bottom - top)}"/>'
        )
        if _fits(area, right - left):
            yield f'<text class="tag" x="{_n(left + 4)}" y="{_n(bottom - 6)}">{_esc(area.label)}</text>'


def _fits(area: Area, width: float) -> bool:
    return len(area.label) * 6.2 + 6 < width


def _ends(ends: tuple[float | None, float | None], axis: Axis) -> tuple[float, float]:
    low, high = ends
    return (axis.low if low is None else low), (axis.high if high is None else high)


def _grid(chart: Chart) -> Iterator[str]:
    for value, words in chart.y.ticks:
        y = _n(_y(chart, value))
        yield f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{_n(_y(chart, value) + 4)}" text-anchor="end">{_esc(words)}</text>'
    for value, words in chart.x.ticks:
        x = _n(_x(chart, value))
        yield f'<path class="grid" d="M{x} {HEIGHT - BOTTOM}v4"/>'
        yield f'<text x="{x}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{_esc(words)}</text>'
    yield f'<path class="base" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
    yield f'<text class="label" x="4" y="13">{_esc(chart.y.label)}</text>'
    yield f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{_esc(chart.x.label)}</text>'


def _diagonal(chart: Chart) -> Iterator[str]:
    if chart.diagonal is None:
        return
    low, high = max(chart.x.low, chart.y.low), min(chart.x.high, chart.y.high)
    yield (
        f'<path class="rule" d="M{_n(_x(chart, low))} {_n(_y(chart, low))}'
        f'L{_n(_x(chart, high))} {_n(_y(chart, high))}"/>'
    )
    yield f'<text class="tag" x="{LEFT + 6}" y="{TOP + 12}">{_esc(chart.diagonal.label)}</text>'


def _rules(chart: Chart) -> Iterator[str]:
    for rule in chart.rules:
        kind = "rule" if rule.engine is None else f"rule thin e{place(rule.engine)}"
        if rule.axis == "y":
            yield f'<path class="{kind}" d="M{LEFT} {_n(_y(chart, rule.value))}H{WIDTH - RIGHT}"/>'
        else:
            yield f'<path class="{kind}" d="M{_n(_x(chart, rule.value))} {TOP}V{HEIGHT - BOTTOM}"/>'


def _label(chart: Chart, rule: Rule) -> str:
    """Of a level: above it at the left, where curves begin low; below it at the right, where there is no room above."""
    y = _y(chart, rule.value)
    if y > TOP + 14:
        return f'<text class="tag" x="{LEFT + 4}" y="{_n(y - 5)}">{_esc(rule.label)}</text>'
    return f'<text class="tag" x="{WIDTH - RIGHT}" y="{_n(y + 15)}" text-anchor="end">{_esc(rule.label)}</text>'


def _series(chart: Chart, series: Series) -> Iterator[str]:
    colour = place(series.engine)
    at = [(_x(chart, point.x), _y(chart, point.y), point) for point in series.points]
    yield f'<g class="e{colour}">'
    for x, _, point in at:
        if point.lo is not None and point.hi is not None:
            left, low, high = _n(x - 3), _n(_y(chart, point.lo)), _n(_y(chart, point.hi))
            yield f'<path class="whisker" d="M{_n(x)} {low}V{high}M{left} {low}h6M{left} {high}h6"/>'
    if series.has_line and len(at) > 1:
        is_alone = len(chart.series) == 1
        dash = f' stroke-dasharray="{DASHES[colour]}"' if DASHES[colour] and not is_alone else ""
        yield f'<path class="line"{dash} d="{_path([(x, y) for x, y, _ in at])}"/>'
    yield '<g class="dot">'
    size = 4.5 if series.has_line else 2.4
    yield from (_marked(series.engine, x, y, size, point) for x, y, point in at if series.has_marks or point.at_edge)
    yield "</g></g>"


def _marked(engine: int, x: float, y: float, size: float, point: Point) -> str:
    inside = f"<title>{_esc(point.words)}</title>" if point.words else ""
    if point.at_edge:  # an arrow upwards: the value lies beyond the chart
        return f'<path class="arrow" d="M{_n(x)} {_n(y + 3)}v-11m-4 4.5l4-4.5 4 4.5">{inside}</path>'
    return _shape(engine, x, y, size, inside, ' class="hollow"' if point.is_hollow else "")


def _shape(engine: int, x: float, y: float, size: float, inside: str = "", kind: str = "") -> str:
    """The engine's own shape. Outlines are chosen so that all look equally heavy."""
    outline = OUTLINES[place(engine)]
    if not outline:
        return f'<circle{kind} cx="{_n(x)}" cy="{_n(y)}" r="{_n(size)}">{inside}</circle>'
    corners = "L".join(f"{_n(x + dx * size)} {_n(y + dy * size)}" for dx, dy in outline)
    return f'<path{kind} d="M{corners}z">{inside}</path>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _x(chart: Chart, value: float) -> float:
    return LEFT + _share(value, chart.x) * (WIDTH - LEFT - RIGHT)


def _y(chart: Chart, value: float) -> float:
    return HEIGHT - BOTTOM - _share(value, chart.y) * (HEIGHT - TOP - BOTTOM)


def _share(value: float, axis: Axis) -> float:
    """Where a value lies on its axis, 0 to 1; what lies outside sits at the end."""
    if axis.is_log:
        share = math.log(max(value, axis.low) / axis.low) / math.log(axis.high / axis.low)
    else:
        share = (value - axis.low) / (axis.high - axis.low)
    return _clip(share, 0.0, 1.0)


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _n(value: float) -> str:
    """A tenth of a unit is finer than any screen shows."""
    return f"{value:.1f}".removesuffix(".0")


def _esc(text: str) -> str:
    return html.escape(text)
