"""Runs the simulation of the routing policies, and writes what comes of it: docs/routing.svg, and its tables in
docs/routing.md. Takes about a minute.

python scripts/routing_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from adapters.marked_page import placed  # noqa: E402
from gateway.routing.policies import POLICIES  # noqa: E402
from gateway.routing.simulation import GREY, MIXED, Machine, Result, Scenario, simulate  # noqa: E402

PAGE, FIGURE = ROOT / "docs" / "routing.md", ROOT / "docs" / "routing.svg"
RATES = (4, 8, 12, 16, 20, 24, 28, 32, 36)
SHOWN_RATES = (8, 16, 24, 32)
SEEDS = (1, 2, 3)
FLEETS: Mapping[str, tuple[Machine, ...]] = {
    "four replicas, one at half speed": MIXED,
    "another becomes ten times slower after 20 s": GREY,
}
COLOURS = {
    "round_robin": "#9aa5b1",
    "weighted": "#c7843a",
    "least_load": "#2f5d8a",
    "power_of_two": "#7a57a8",
    "goodput": "#b5404f",
    "session_affinity": "#58a8a0",
    "prefix_affinity": "#2c7a3f",
}  # a policy without one (`cost`, `order`: they prefer, whatever the load) is not drawn
WIDTH, HEIGHT, LEFT, TOP, BETWEEN = 400, 250, 55, 50, 80

Curves = Mapping[str, Mapping[str, Mapping[int, Sequence[Result]]]]  # by fleet, policy and rate


def measured() -> Curves:
    return {
        title: {
            policy: {
                rate: [simulate(policy, Scenario(rate_rps=rate, fleet=fleet, seed=seed)) for seed in SEEDS]
                for rate in RATES
            }
            for policy in COLOURS
        }
        for title, fleet in FLEETS.items()
    }


def figure(curves: Curves) -> str:
    height = TOP + HEIGHT + 100
    width = LEFT + 2 * WIDTH + BETWEEN + 25
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
            '     font-family="system-ui, sans-serif" font-size="13" role="img"',
            '     aria-label="Share of requests that meet their limits, by load and policy">',
            "  <style>.title{font-weight:600;fill:#1d3d5c} .small{fill:#51606e} .grid{stroke:#dde3ea}</style>",
            f'  <rect width="{width}" height="{height}" fill="#ffffff"/>',
            *(
                line
                for number, (title, by_policy) in enumerate(curves.items())
                for line in _panel(LEFT + number * (WIDTH + BETWEEN), title, by_policy)
            ),
            *_legend(height - 22),
            "</svg>\n",
        ]
    )


def _panel(left: int, title: str, by_policy: Mapping[str, Mapping[int, Sequence[Result]]]) -> Iterator[str]:
    bottom = TOP + HEIGHT
    yield f'  <text class="title" x="{left}" y="{TOP - 20}" font-size="15">{escape(title)}</text>'
    for percent in (0, 25, 50, 75, 100):
        y = bottom - HEIGHT * percent / 100
        yield f'  <path class="grid" d="M{left},{y:g} h{WIDTH}"/>'
        yield f'  <text class="small" x="{left - 8}" y="{y + 4:g}" text-anchor="end">{percent} %</text>'
    for rate in RATES:
        yield f'  <text class="small" x="{_x(left, rate):g}" y="{bottom + 20}" text-anchor="middle">{rate}</text>'
    middle = left + WIDTH / 2
    axes = "requests a second, and the share met"
    yield f'  <text class="small" x="{middle:g}" y="{bottom + 42}" text-anchor="middle">{axes}</text>'
    for policy, by_rate in by_policy.items():
        points = " ".join(
            f"{_x(left, rate):.1f},{bottom - HEIGHT * mean(each.attainment for each in results):.1f}"
            for rate, results in by_rate.items()
        )
        yield f'  <polyline points="{points}" fill="none" stroke="{COLOURS[policy]}" stroke-width="2.2"/>'


def _x(left: int, rate: int) -> float:
    return left + WIDTH * (rate - RATES[0]) / (RATES[-1] - RATES[0])


def _legend(y: int) -> Iterator[str]:
    x = LEFT
    for policy, colour in COLOURS.items():
        yield f'  <path d="M{x},{y - 4} h22" stroke="{colour}" stroke-width="4"/>'
        yield f'  <text class="small" x="{x + 28}" y="{y}">{policy}</text>'
        x += 50 + 7 * len(policy)


def tables(curves: Curves) -> str:
    return "\n\n".join(
        "\n".join(
            [
                f"| {title}, met at | {' | '.join(f'{rate}/s' for rate in SHOWN_RATES)} | from caches at 16/s |",
                f"|---|{'---|' * (len(SHOWN_RATES) + 1)}",
                *(_row(policy, by_rate) for policy, by_rate in by_policy.items()),
            ]
        )
        for title, by_policy in curves.items()
    )


def _row(policy: str, by_rate: Mapping[int, Sequence[Result]]) -> str:
    met = " | ".join(f"{mean(each.attainment for each in by_rate[rate]):.0%}" for rate in SHOWN_RATES)
    return f"| `{policy}` | {met} | {mean(each.hit_rate for each in by_rate[16]):.0%} |"


def main() -> None:
    assert POLICIES.keys() >= COLOURS.keys()
    curves = measured()
    FIGURE.write_text(figure(curves))
    PAGE.write_text(placed(PAGE.read_text(), "simulation", tables(curves)))
    print(f"{FIGURE.relative_to(ROOT)} and {PAGE.relative_to(ROOT)} are up to date")


if __name__ == "__main__":
    main()
