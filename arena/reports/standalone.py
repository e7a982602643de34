"""Charts as one SVG file that stands by itself: a title, a legend, charts two to a row, and what they were made of.

    path.write_text(sheet("The KV cache", "What a token costs.", Charts(charts, legend), ("Zen 5, 2 cores", "0.1.0")))

Its colours are those of the report (charts.css) and follow light and dark. Text is broken into lines by its length,
since SVG does not do it; widths of letters are guessed a little too wide.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence
from importlib.resources import files

from arena.reports.document import Chart, Charts
from arena.reports.svg import HEIGHT, WIDTH, draw, mark

MARGIN, GAP = 26, 34
CAPTION = 26  # above each chart
LINE = 19
SHEET_WIDTH = 2 * WIDTH + GAP + 2 * MARGIN
LETTER = 7.4  # the mean width of one, in units of the picture
OWN_STYLE = (
    "svg .title { font-size: 20px; font-weight: 680; fill: var(--ink); } "
    "svg .caption { font-size: 14px; font-weight: 620; fill: var(--ink); } "
    "svg .said { font-size: 14px; } svg .fact { font-size: 12px; } .sheet { fill: var(--card); }"
)


def sheet(title: str, says: str, charts: Charts, facts: Sequence[str]) -> str:
    """`says`: what to see, in a few sentences; they stand under the title, or in the free place of an odd number of
    charts. `facts`: a line each, at the foot."""
    is_odd = len(charts.charts) % 2 == 1
    top, head = _head(title, "" if is_odd else says, charts.legend)
    height, body = _grid(top, charts.charts, says if is_odd else "")
    bottom, foot = _facts(height, facts)
    style = files("arena.reports").joinpath("charts.css").read_text("utf-8")
    words = ". ".join([title, *(chart.alt for chart in charts.charts)])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SHEET_WIDTH} {bottom}" width="{SHEET_WIDTH}" '
            f'height="{bottom}" role="img" aria-label="{html.escape(words)}">',
            f"<style>{style}{OWN_STYLE}</style>",
            f'<rect class="sheet" width="{SHEET_WIDTH}" height="{bottom}"/>',
            *head,
            *body,
            *foot,
            "</svg>\n",
        ]
    )


def _head(title: str, says: str, legend: Sequence[tuple[int, str]]) -> tuple[int, list[str]]:
    y, x = MARGIN + 14, MARGIN
    lines = [_text(x, y, title, "title"), *_paragraph(x, y + 8, says, SHEET_WIDTH - 2 * MARGIN)]
    y += 8 + LINE * (len(lines) - 1) + (28 if legend else 10)
    for engine, name in legend:
        width = round(20 + LETTER * len(name) + 24)
        if x > MARGIN and x + width > SHEET_WIDTH - MARGIN:
            x, y = MARGIN, y + 22
        lines += [f'<g transform="translate({x} {y - 11})">{mark(engine)}</g>', _text(x + 20, y, name, "said")]
        x += width
    return y + 16, lines


def _grid(top: int, charts: Sequence[Chart], beside: str) -> tuple[int, list[str]]:
    lines = []
    for number, chart in enumerate(charts):
        x, y = _place(top, number)
        lines.append(_text(x, y + 16, chart.title, "caption"))
        lines.append(f'<g transform="translate({x} {y + CAPTION})">{draw(chart)}</g>')
    x, y = _place(top, len(charts))
    lines += _paragraph(x, y + 4, beside, WIDTH)
    return _place(top, 2 * ((len(charts) + 1) // 2))[1], lines


def _place(top: int, number: int) -> tuple[int, int]:
    """The upper left corner of the place of that number, two to a row."""
    return MARGIN + number % 2 * (WIDTH + GAP), top + number // 2 * (HEIGHT + CAPTION + 12)


def _paragraph(x: int, y: int, words: str, width: int) -> list[str]:
    lines = textwrap.wrap(words, int(width / LETTER))
    return [_text(x, y + LINE * number, each, "said") for number, each in enumerate(lines, 1)]


def _facts(top: int, facts: Sequence[str]) -> tuple[int, list[str]]:
    wrapped = list(_wrapped(facts, int((SHEET_WIDTH - 2 * MARGIN) / (LETTER - 1.1))))
    lines = [_text(MARGIN, top + 14 + 17 * number, words, "fact") for number, words in enumerate(wrapped)]
    return top + 14 + 17 * len(wrapped) + MARGIN // 2, lines


def _wrapped(facts: Sequence[str], width: int) -> Iterator[str]:
    for fact in facts:
        yield from textwrap.wrap(fact, width)


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{html.escape(words)}</text>'
