"""Whether something that ran for long stays as it is: slopes by least squares, and what is claimed of a soak. Pure.

slope([(0, 90.0), (60, 90.1), ...])        # Slope(rate=0.1, error=0.02)
claims(...)                                # each with what was found, and whether it holds
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

# Of the time, which no slope is taken of: memory goes up in steps to what the worst minute needs. In half an hour, each
# fault has by then been met by either engine and by both, and again.
WARM_UP_SHARE = 0.5
MIN_MINUTES = 5.0  # in less time, warming up and leaking look the same
SETTLED_FILES = 2  # at the end: the scrape that asks is a connection, and one may just be coming or going


class Sample(Struct, frozen=True):
    """What is open and held at one time, in seconds from the start."""

    at_s: float
    rss_mb: float
    files: int
    tasks: int
    in_flight: int
    cpu_s: float


class Slope(Struct, frozen=True):
    """`error` is the standard error of the rate."""

    rate: float
    error: float

    def is_flat(self, limit: float) -> bool:
        """No growth beyond the limit can be told from the noise."""
        return self.rate - 2 * self.error <= limit

    def __str__(self) -> str:
        return f"{self.rate:+.3f} ± {2 * self.error:.3f}"


class Claim(Struct, frozen=True):
    name: str
    found: str
    holds: bool


def slope(points: Sequence[tuple[float, float]], per: float = 60) -> Slope:
    """Of values over seconds, by the minute; an infinite error where there are too few to tell."""
    n = len(points)
    if n < 3:
        return Slope(0.0, math.inf)
    mean_x = sum(x for x, _ in points) / n
    mean_y = sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return Slope(0.0, math.inf)
    each = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - each * (x - mean_x)) ** 2 for x, y in points)
    return Slope(each * per, math.sqrt(rest / (n - 2) / spread) * per)


def slopes(samples: Sequence[Sample]) -> dict[str, Slope]:
    """After the warm-up, by what they are of."""
    begin = samples[-1].at_s * WARM_UP_SHARE if samples else 0.0
    late = [each for each in samples if each.at_s >= begin]
    return {name: slope([(each.at_s, getattr(each, name)) for each in late]) for name in ("rss_mb", "files", "tasks")}


def claims(
    outcomes: Mapping[str, int],
    samples: Sequence[Sample],
    before: Sample,
    after: Sample,
    *,
    left_open: int,
    lost_records: int,
    reloads: tuple[int, int, int],
) -> list[Claim]:
    """What a soak shows. `before` and `after` are of an idle gateway; `reloads`: asked for, put in force, refused."""
    return [
        *_of_outcomes(outcomes),
        *_of_slopes(samples),
        Claim(
            "at the end tasks, files and requests are what they were",
            f"{after.tasks} tasks, {after.files} files, {after.in_flight} requests; before: "
            f"{before.tasks}, {before.files}, {before.in_flight}",
            after.tasks <= before.tasks and after.files <= before.files + SETTLED_FILES and after.in_flight == 0,
        ),
        Claim("no engine works for anybody who has gone", f"{left_open} generations", left_open == 0),
        Claim("each request has its record", f"{lost_records} lost", lost_records == 0),
        Claim(
            "each good configuration was put in force, and no bad one",
            "of {} readings {} in force, {} refused".format(*reloads),
            reloads[0] == reloads[1] + reloads[2],
        ),
    ]


def _of_outcomes(outcomes: Mapping[str, int]) -> list[Claim]:
    return [
        Claim(claim, f"{outcomes.get(name, 0)} of {sum(outcomes.values())}", outcomes.get(name, 0) == 0)
        for name, claim in {
            "hung": "no request hung",
            "truncated": "no part was shown as a whole answer",
            "broken": "no answer ended without a word of why",
            "wrong": "no request was answered as another should be",
        }.items()
    ]


def _of_slopes(samples: Sequence[Sample]) -> list[Claim]:
    """Memory, files and tasks do not grow; nothing is said of a run too short to tell."""
    if not samples or samples[-1].at_s < MIN_MINUTES * 60:
        return []
    found = slopes(samples)
    return [
        Claim(f"{what} does not grow", f"{found[name]} {unit} a minute", found[name].is_flat(0.1))
        for name, what, unit in (
            ("rss_mb", "resident memory", "MB"),
            ("files", "the number of open files", "files"),
            ("tasks", "the number of tasks", "tasks"),
        )
    ]
