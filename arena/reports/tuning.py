"""What a tuning found, for people: a table for the terminal, Markdown for a page, and goodput over a knob as a picture.

The picture stands alone (its colours are inside, light and dark), so that it can be kept in a page. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from rich import box
from rich.markup import escape as escape_markup
from rich.table import Table

from adapters.launching.knobs import Knob
from arena.race.tuning import Trial, Tuning, peak_words

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 92, 52
STYLE = """
    .ground { fill: #ffffff } .text { fill: #1c2733 } .small { fill: #51606e; font-size: 12px }
    .axis { stroke: #d5dce2; stroke-width: 1 } .line { fill: none; stroke: #0072b2; stroke-width: 2 }
    .whisker { stroke: #0072b2; stroke-width: 1.4; opacity: .55 } .dot { fill: #0072b2 } .best { fill: #d55e00 }
    @media (prefers-color-scheme: dark) {
      .ground { fill: #14181d } .text { fill: #e8edf2 } .small { fill: #a3b0bc } .axis { stroke: #333c45 }
      .line, .whisker { stroke: #56b4e9 } .dot { fill: #56b4e9 } .best { fill: #e69f00 }
    }
"""


def tuning_table(tuning: Tuning) -> Table:
    """All trials in the order in which they ran."""
    caption = [peak_words(tuning, knob) for knob in tuning.knobs]
    spent = tuning.told()
    unfinished = "it was stopped" if tuning.is_stopped else "the budget was spent before nothing was left to try"
    ended = "nothing was left to try" if tuning.is_finished else unfinished
    caption.append(f"spent: {spent['cells']} cells, {spent['minutes']:.1f} minutes of {tuning.budget.words()}; {ended}")
    table = Table(
        title=escape_markup(f"{tuning.engine}: settings and goodput"), title_justify="left", box=box.SIMPLE_HEAD,
        caption="\n".join(map(escape_markup, caption)), caption_justify="left",
    )  # fmt: skip
    for heading in (*(knob.option for knob in tuning.knobs), "goodput", "interval", "cells", ""):
        table.add_column(heading, justify="right")
    for trial in tuning.trials:
        values = [str(trial.settings[knob.option]) for knob in tuning.knobs]
        mark = "best" if trial is tuning.best and trial.goodput_rps else escape_markup(trial.words)
        table.add_row(*values, _rate(trial.goodput_rps), _interval(trial), str(trial.cells), mark)
    return table


def tuning_markdown(tuning: Tuning) -> str:
    head = [*(f"`{knob.option}`" for knob in tuning.knobs), "goodput, requests/s", "interval", "cells"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for trial in sorted(tuning.trials, key=lambda each: list(each.settings.values())):
        values = [str(trial.settings[knob.option]) for knob in tuning.knobs]
        rate = _rate(trial.goodput_rps) if not trial.words else trial.words
        cells = [*values, f"**{rate}**" if trial is tuning.best else rate, _interval(trial), str(trial.cells)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2f}"


def _interval(trial: Trial) -> str:
    if trial.lo is None:
        return "-"
    return f"{trial.lo:.2f} - {trial.hi:.2f}" if trial.hi is not None else f"above {trial.lo:.2f}"


def tuning_picture(tuning: Tuning, knob: Knob, title: str) -> str:
    """Goodput over one knob on a log scale, each rate with its interval; the best is marked. An SVG document."""
    curve = [trial for trial in tuning.curve(knob) if trial.goodput_rps is not None]
    told = peak_words(tuning, knob)
    parts = [*_frame(curve, knob), *_line(curve, knob, tuning.best)] if curve else []
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="14" role="img" aria-label="{escape(f"{title}. {told}")}">\n'
        f'  <style>{STYLE}  </style>\n  <rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>\n'
        f'  <text class="text" x="{LEFT - 46}" y="24" font-weight="600">{escape(title)}</text>\n'
        f'  <text class="small" x="{LEFT - 46}" y="44">{escape(told)}</text>\n  ' + "\n  ".join(parts) + "\n</svg>\n"
    )


def _frame(curve: list[Trial], knob: Knob) -> Iterator[str]:
    highest = _ceiling(curve)
    for step in range(5):
        value = highest * step / 4
        y = _y(value, highest)
        yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    for trial in curve:
        x = _x(trial, curve, knob)
        value = trial.settings[knob.option]
        yield f'<text class="small" x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{value}</text>'
    yield f'<text class="small" x="{LEFT - 46}" y="{TOP - 16}">requests/s within the limits</text>'
    label = escape(f"{knob.meaning} ({knob.option})")
    yield f'<text class="small" x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{label}</text>'


def _line(curve: list[Trial], knob: Knob, best: Trial | None) -> Iterator[str]:
    highest = _ceiling(curve)
    points = [(_x(trial, curve, knob), _y(trial.goodput_rps or 0.0, highest), trial) for trial in curve]
    for x, _, trial in points:
        low = _y(trial.lo or 0.0, highest)
        high = _y(min(trial.hi, highest) if trial.hi is not None else highest, highest)
        yield f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
    yield f'<polyline class="line" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)}"/>'
    for x, y, trial in points:
        told = escape(f"{trial.settings[knob.option]}: {_rate(trial.goodput_rps)} requests/s ({_interval(trial)})")
        kind, size = ("best", 6) if trial is best else ("dot", 4.5)
        yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"><title>{told}</title></circle>'


def _x(trial: Trial, curve: list[Trial], knob: Knob) -> float:
    ends = [math.log2(each.settings[knob.option]) for each in (curve[0], curve[-1])]
    share = (math.log2(trial.settings[knob.option]) - ends[0]) / ((ends[1] - ends[0]) or 1.0)
    return LEFT + 20 + share * (WIDTH - LEFT - RIGHT - 40)


def _y(value: float, highest: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / highest


def _ceiling(curve: list[Trial]) -> float:
    """A round number above every rate, and above the intervals that are not far beyond."""
    top = max(trial.goodput_rps or 0.0 for trial in curve) or 1.0
    wanted = max(top * 1.15, min(top * 1.6, max(trial.hi or 0.0 for trial in curve)))
    unit = 10 ** math.floor(math.log10(wanted))
    return float(next(step * unit for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * unit >= wanted))
