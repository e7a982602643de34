"""A soak as a picture: what the gateway held over time, with the faults as bands behind it. Pure: a report in, SVG out.

Path("docs/soak.svg").write_text(drawn(report))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from gateway.commands.bench.faults import Fault
from gateway.commands.bench.soak import Report
from gateway.commands.bench.verdict import WARM_UP_SHARE, Sample

WIDTH, LEFT, RIGHT, TOP, HEIGHT, GAP = 960, 74, 20, 58, 120, 26
PANELS = (
    ("rss_mb", "resident memory, MB", "MB"),
    ("files", "open files", "files"),
    ("tasks", "tasks", "tasks"),
)
STYLE = """
    .text { fill: #1c2733 } .small { fill: #51606e; font-size: 12px } .axis { stroke: #c3ccd4; stroke-width: 1 }
    .line { fill: none; stroke: #2f5d8a; stroke-width: 1.6 }
    .trend { stroke: #b4552d; stroke-width: 1.6; stroke-dasharray: 6 4 }
    .one { fill: #dfe9f2 } .other { fill: #e9e4f3 } .both { fill: #f7ddd2 } .gateway { fill: #e3efdd }
"""
BANDS = (("one", "first engine"), ("other", "second engine"), ("both", "both"), ("gateway", "configuration"))


def drawn(report: Report) -> str:
    end_s = report.samples[-1].at_s
    bottom = TOP + len(PANELS) * (HEIGHT + GAP)
    parts = [*_bands(report.faults, end_s, bottom), *_legend()]
    for place, (name, title, unit) in enumerate(PANELS):
        top = TOP + place * (HEIGHT + GAP)
        label = f"{title}: {report.slopes[name]} {unit} a minute after the warm-up"
        parts += _panel(report.samples, name, label, top, end_s)
    parts += _minutes(end_s, bottom)
    told = (
        f"{report.minutes:g} minutes at {report.rate:g} requests a second while engines fail in turn: "
        "memory, open files and tasks"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 34}" '
        f'font-family="system-ui, sans-serif" font-size="14" role="img" aria-label="{escape(told)}">\n'
        f"  <style>{STYLE}  </style>\n"
        f'  <rect width="{WIDTH}" height="{bottom + 34}" fill="#ffffff"/>\n'
        f'  <text class="text" x="{LEFT}" y="22" font-weight="600">{escape(told)}</text>\n  '
        + "\n  ".join(parts)
        + "\n</svg>\n"
    )


def _x(at_s: float, end_s: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * at_s / end_s


def _bands(faults: Sequence[Fault], end_s: float, bottom: float) -> Iterator[str]:
    for fault in faults:
        x, width = _x(fault.began_s, end_s), _x(fault.ended_s, end_s) - _x(fault.began_s, end_s)
        yield (
            f'<rect class="{_kind(fault)}" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{bottom - GAP - TOP:.1f}">'
            f"<title>{escape(fault.name)}</title></rect>"
        )


def _kind(fault: Fault) -> str:
    if not fault.where:
        return "gateway"
    return "both" if len(fault.where) > 1 else ("one", "other")[fault.where[0]]


def _legend() -> Iterator[str]:
    yield f'<text class="small" x="{LEFT}" y="44">a fault at:</text>'
    for place, (name, label) in enumerate(BANDS):
        x = LEFT + 74 + place * 128
        yield f'<rect class="{name}" x="{x}" y="34" width="14" height="12"/>'
        yield f'<text class="small" x="{x + 19}" y="44">{label}</text>'


def _panel(samples: Sequence[Sample], name: str, label: str, top: float, end_s: float) -> Iterator[str]:
    """One measure over time from zero on, its trend after the warm-up, and its scale."""
    values = [(each.at_s, float(getattr(each, name))) for each in samples]
    highest = _ceiling(max(value for _, value in values))

    def y(value: float) -> float:
        return top + HEIGHT * (1 - value / highest)

    for value in (0.0, highest / 2, highest):
        yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        yield f'<text class="small" x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
    points = " ".join(f"{_x(at, end_s):.1f},{y(value):.1f}" for at, value in values)
    yield f'<polyline class="line" points="{points}"/>'
    late = [(at, value) for at, value in values if at >= end_s * WARM_UP_SHARE]
    middle_at = sum(at for at, _ in late) / len(late)
    middle = sum(value for _, value in late) / len(late)
    spread = sum((at - middle_at) ** 2 for at, _ in late)
    per_s = sum((at - middle_at) * (value - middle) for at, value in late) / spread if spread else 0.0
    ends = [(at, middle + per_s * (at - middle_at)) for at in (late[0][0], late[-1][0])]
    (x1, y1), (x2, y2) = [(_x(at, end_s), y(value)) for at, value in ends]
    yield f'<line class="trend" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
    yield f'<text class="text" x="{LEFT + 8}" y="{top + 17}">{escape(label)}</text>'


def _minutes(end_s: float, bottom: float) -> Iterator[str]:
    step = next(each for each in (0.1, 0.5, 1, 2, 5, 10, 30, 60, math.inf) if end_s / 60 / each <= 8)
    minute = 0.0
    while minute * 60 <= end_s:
        x = _x(minute * 60, end_s)
        yield f'<text class="small" x="{x:.1f}" y="{bottom - 6}" text-anchor="middle">{minute:g}</text>'
        minute = round(minute + step, 3)
    yield f'<text class="small" x="{WIDTH - RIGHT}" y="{bottom + 16}" text-anchor="end">minutes</text>'


def _ceiling(value: float) -> float:
    """A round number not below it, with some room for the panel's words."""
    wanted = value * 1.3 or 1.0
    unit = 10 ** math.floor(math.log10(wanted))
    return float(next(step * unit for step in (1, 2, 4, 5, 6, 8, 10) if step * unit >= wanted))
