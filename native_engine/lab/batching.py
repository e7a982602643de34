"""Static against continuous batching, by how much answers differ in length.

Static: the engine gets as many requests as it has seats, and the next ones when the longest of them has ended.
Continuous: it has them all, and a seat that falls free is taken in the next step. The engine, its kernels and the total
of tokens are the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from native_engine.lab.picture import Chart, Shown, Table, chart, line, linear_axis, table, times
from native_engine.lab.workbench import Course, Spread, Workbench, drive, greedy, short

TITLE = "Continuous batching: a free seat is taken in the next step"
STATIC, CONTINUOUS = "static: a batch ends with its longest answer", "continuous"
PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class AtVariance:
    """`variation`: standard deviation of the answers' lengths by their mean."""

    variation: float
    longest: int
    static_per_s: Spread  # tokens
    continuous_per_s: Spread
    static_seats: float  # the share of seats that gave a token, over all steps
    continuous_seats: float


@dataclass(frozen=True, slots=True)
class Seats:
    """When each step ended, and how many sequences it gave a token to."""

    ended_s: list[float]
    taken: list[int]


@dataclass(frozen=True, slots=True)
class Found:
    num_requests: int
    num_seats: int
    num_tokens: int  # of all answers together, the same everywhere
    variances: list[AtVariance]
    static: Seats  # of the most varied answers, first repeat
    continuous: Seats


def measure(bench: Workbench) -> Found:
    num_requests, num_seats, mean = bench.pick((12, 4, 10), (32, 8, 24))
    spreads = bench.pick((0.0, 1.0), (0.0, 0.6, 1.2))
    repeats = bench.pick(1, 3)
    answers = {spread: lengths(spread, num_requests, mean) for spread in spreads}
    bench.need_context(PROMPT_TOKENS + max(map(max, answers.values())))
    ran: dict[tuple[float, bool], list[Course]] = {}
    for repeat in range(repeats):
        for spread, outputs in answers.items():
            for is_static in (True, False) if repeat % 2 == 0 else (False, True):
                words = "static" if is_static else "continuous"
                bench.say(f"batching: {words}, spread {spread:g}, repeat {repeat + 1} of {repeats}")
                ran.setdefault((spread, is_static), []).append(_served(bench, outputs, num_seats, is_static=is_static))
    return Found(
        num_requests,
        num_seats,
        num_requests * mean,
        [
            AtVariance(
                variation(outputs),
                max(outputs),
                static_per_s=Spread.of([course.tokens_per_s for course in ran[spread, True]]),
                continuous_per_s=Spread.of([course.tokens_per_s for course in ran[spread, False]]),
                static_seats=_seats_used(ran[spread, True][0], num_seats),
                continuous_seats=_seats_used(ran[spread, False][0], num_seats),
            )
            for spread, outputs in answers.items()
        ],
        _seats(ran[spreads[-1], True][0]),
        _seats(ran[spreads[-1], False][0]),
    )


def lengths(spread: float, count: int, mean: int) -> list[int]:
    """Answers' lengths, log-normal with that spread of the logarithm, at least 2, and `count` times `mean` in all."""
    source = random.Random(2)
    drawn = [math.exp(spread * source.gauss(0, 1)) for _ in range(count)]
    rest = count * mean - 2 * count
    whole = [2 + int(rest * each / sum(drawn)) for each in drawn]
    for number in range(count * mean - sum(whole)):
        whole[number % count] += 1
    return whole


def variation(outputs: Sequence[int]) -> float:
    mean = sum(outputs) / len(outputs)
    return math.sqrt(sum((each - mean) ** 2 for each in outputs) / len(outputs)) / mean


def _served(bench: Workbench, outputs: Sequence[int], num_seats: int, *, is_static: bool) -> Course:
    engine = bench.engine(max_num_seqs=num_seats, enable_prefix_caching=False)
    waiting = list(enumerate(outputs))

    def feed(course: Course, _: float) -> None:
        if engine.has_work:
            return
        size = num_seats if is_static else len(waiting)
        for number, num_tokens in waiting[:size]:
            engine.add(str(number), bench.prompt(PROMPT_TOKENS), greedy(num_tokens))
        del waiting[:size]

    return drive(engine, feed)


def _seats_used(course: Course, num_seats: int) -> float:
    return course.num_tokens / (len(course.steps) * num_seats)


def _seats(course: Course) -> Seats:
    return Seats([step.ended_s for step in course.steps], [step.num_tokens for step in course.steps])


def show(found: Found) -> Shown:
    return Shown(_says(found), (_speed(found), _taken(found)), _tables(found))


def _says(found: Found) -> str:
    even, varied = found.variances[0], found.variances[-1]
    return (
        f"{found.num_requests} answers of {found.num_tokens:,} tokens in all, {found.num_seats} seats. Where every "
        f"answer is as long as the others, both ways give {short(even.static_per_s.median)} and "
        f"{short(even.continuous_per_s.median)} tokens a second. Where they vary by {varied.variation:.0%} of their "
        f"mean (the longest has {varied.longest}), static batching gives {short(varied.static_per_s.median)} and "
        f"continuous batching {short(varied.continuous_per_s.median)}, "
        f"{times(varied.continuous_per_s.median, varied.static_per_s.median)} as much: static batches leave "
        f"{1 - varied.static_seats:.0%} of their seats empty while the longest answer goes on, continuous ones "
        f"{1 - varied.continuous_seats:.0%}, most of it at the very end, when nobody waits any more."
    )


def _speed(found: Found) -> Chart:
    static = [(100 * each.variation, each.static_per_s) for each in found.variances]
    continuous = [(100 * each.variation, each.continuous_per_s) for each in found.variances]
    return chart(
        "Speed by how much answers differ",
        "Both are equal where answers are equally long; static batching falls as they differ more.",
        linear_axis("standard deviation of the answers' length, % of the mean", static[-1][0]),
        linear_axis("tokens a second", max(spread.high for _, spread in (*static, *continuous))),
        [line(STATIC, 1, static, unit="tokens/s"), line(CONTINUOUS, 0, continuous, unit="tokens/s")],
    )


def _taken(found: Found) -> Chart:
    return chart(
        f"Seats that are taken, answers varying by {found.variances[-1].variation:.0%}",
        "Static batches drain again and again; a continuous one stays full until nobody waits.",
        linear_axis("seconds", max(found.static.ended_s[-1], found.continuous.ended_s[-1])),
        linear_axis("sequences in the step", found.num_seats),
        [
            line(name, place, steps(seats), has_marks=False)
            for name, place, seats in ((STATIC, 1, found.static), (CONTINUOUS, 0, found.continuous))
        ],
    )


def steps(seats: Seats) -> list[tuple[float, float]]:
    """The corners of a line that keeps each step's level until its end, and falls to nothing after the last."""
    began = [0.0, *seats.ended_s[:-1]]
    corners = [
        (at, float(level))
        for begin, end, level in zip(began, seats.ended_s, seats.taken, strict=True)
        for at in (begin, end)
    ]
    return [*corners, (seats.ended_s[-1], 0.0)]


def _tables(found: Found) -> tuple[tuple[str, Table], ...]:
    return (
        table(
            "By how much answers differ",
            ("deviation / mean", "longest", "static, tokens/s", "continuous", "seats used, static", "continuous"),
            (
                (
                    f"{each.variation:.0%}",
                    str(each.longest),
                    str(each.static_per_s),
                    str(each.continuous_per_s),
                    f"{each.static_seats:.0%}",
                    f"{each.continuous_seats:.0%}",
                )
                for each in found.variances
            ),
        ),
    )
