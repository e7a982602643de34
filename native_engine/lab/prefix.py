"""A shared system prompt and the first token: what the prefix cache saves, and what a timestamp in front destroys.

Requests come one after another with the same system prompt and a question each. The cache finds a block by all tokens
up to its end, so whatever differs at the beginning makes all that follows another prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from native_engine.lab.picture import (
    Axis,
    Chart,
    Shown,
    Table,
    axis_of,
    chart,
    line,
    linear_axis,
    log_axis,
    table,
    times,
)
from native_engine.lab.workbench import Spread, Workbench, drive, greedy, short

TITLE = "Prefix caching: equal beginnings are computed once"
NUM_REQUESTS = 5
QUESTION_TOKENS, STAMP_TOKENS = 24, 12
LAYOUTS = {
    "plain": "system prompt, question",
    "stamp_last": "system prompt, time of day, question",
    "stamp_first": "time of day, system prompt, question",
}


@dataclass(frozen=True, slots=True)
class AtLength:
    """Of a system prompt of so many tokens, by layout: TTFT of the first request, and of the later ones, in ms; the
    share of a later prompt that was found in the cache."""

    num_tokens: int
    first_ms: dict[str, Spread]
    later_ms: dict[str, Spread]
    found_share: dict[str, float]


@dataclass(frozen=True, slots=True)
class Found:
    lengths: list[AtLength]
    in_order_ms: dict[str, list[Spread]]  # by layout, of the longest system prompt: TTFT of each request in turn


def measure(bench: Workbench) -> Found:
    lengths: tuple[int, ...] = bench.pick((64, 384), (64, 128, 256, 512, 1024))
    repeats = bench.pick(1, 3)
    bench.need_context(lengths[-1] + STAMP_TOKENS + QUESTION_TOKENS + 2)
    ran: dict[tuple[int, str], list[_Talk]] = {}
    for repeat in range(repeats):
        for length in lengths:
            for layout in LAYOUTS:
                bench.say(f"prefix: {LAYOUTS[layout]}, {length:,} tokens, repeat {repeat + 1} of {repeats}")
                ran.setdefault((length, layout), []).append(_talk(bench, length, layout))
    return Found(
        [
            AtLength(
                length,
                first_ms={layout: Spread.of([talk.ttft_ms[0] for talk in ran[length, layout]]) for layout in LAYOUTS},
                later_ms={
                    layout: Spread.of([ms for talk in ran[length, layout] for ms in talk.ttft_ms[1:]])
                    for layout in LAYOUTS
                },
                found_share={layout: ran[length, layout][0].found_share for layout in LAYOUTS},
            )
            for length in lengths
        ],
        {
            layout: [
                Spread.of([talk.ttft_ms[number] for talk in ran[lengths[-1], layout]]) for number in range(NUM_REQUESTS)
            ]
            for layout in LAYOUTS
        },
    )


@dataclass(frozen=True, slots=True)
class _Talk:
    ttft_ms: list[float]
    found_share: float


def _talk(bench: Workbench, num_tokens: int, layout: str) -> _Talk:
    """A fresh engine, whose cache is empty, and requests one after another."""
    engine = bench.engine(enable_prefix_caching=True)
    system = bench.prompt(num_tokens)
    ttft_ms, num_cached, num_prompt = [], 0, 0
    for number in range(NUM_REQUESTS):
        stamp, question = bench.prompt(STAMP_TOKENS), bench.prompt(QUESTION_TOKENS)
        prompt = {
            "plain": [*system, *question],
            "stamp_last": [*system, *stamp, *question],
            "stamp_first": [*stamp, *system, *question],
        }[layout]
        engine.add(str(number), prompt, greedy(1))
        course = drive(engine)
        ttft_ms.append(course.ttft_s(str(number)) * 1e3)
        if number:
            num_cached += course.num_cached[str(number)]
            num_prompt += len(prompt)
    return _Talk(ttft_ms, num_cached / num_prompt)


def show(found: Found) -> Shown:
    return Shown(_says(found), (_by_length(found), _in_order(found)), _tables(found))


def _says(found: Found) -> str:
    last = found.lengths[-1]
    plain, first, late = (last.later_ms[layout].median for layout in ("plain", "stamp_first", "stamp_last"))
    return (
        f"With a system prompt of {last.num_tokens:,} tokens the first request waits "
        f"{short(last.first_ms['plain'].median)} ms for its first token, and those after it {short(plain)} ms, "
        f"{times(last.first_ms['plain'].median, plain)} less: {last.found_share['plain']:.0%} of their prompts is "
        f"found in the cache. A time of day of {STAMP_TOKENS} tokens in front, another in each request, and "
        f"{last.found_share['stamp_first']:.0%} is found: every request waits {short(first)} ms. The same time of day "
        f"behind the system prompt leaves it at {short(late)} ms, with {last.found_share['stamp_last']:.0%} "
        "found. What changes belongs at the end of a prompt."
    )


def _by_length(found: Found) -> Chart:
    lines = {layout: [(each.num_tokens, each.later_ms[layout]) for each in found.lengths] for layout in LAYOUTS}
    values = [end for points in lines.values() for _, spread in points for end in (spread.low, spread.high)]
    return chart(
        "The first token of later requests",
        "A shared beginning keeps it level; with a timestamp in front it grows with the prompt.",
        axis_of("tokens in the system prompt", [each.num_tokens for each in found.lengths]),
        log_axis("TTFT, ms", min(values) / 1.3, max(values) * 1.3),
        [
            line(LAYOUTS[layout], place, points, unit="ms")
            for place, (layout, points) in zip((0, 2, 1), lines.items(), strict=True)
        ],
    )


def _in_order(found: Found) -> Chart:
    highest = max(spread.high for spreads in found.in_order_ms.values() for spread in spreads)
    return chart(
        f"Requests in turn, {found.lengths[-1].num_tokens:,} tokens of system prompt",
        "The first request is slow in every layout; the later ones collapse unless a timestamp stands in front.",
        Axis("request", 0.6, NUM_REQUESTS + 0.4, tuple((n, str(n)) for n in range(1, NUM_REQUESTS + 1))),
        linear_axis("TTFT, ms", highest),
        [
            line(LAYOUTS[layout], place, list(enumerate(found.in_order_ms[layout], 1)), unit="ms")
            for place, layout in zip((0, 2, 1), LAYOUTS, strict=True)
        ],
    )


def _tables(found: Found) -> tuple[tuple[str, Table], ...]:
    return (
        table(
            "TTFT of later requests, ms, and the share of their prompts that was in the cache",
            ("tokens in the system prompt", "first request", *LAYOUTS.values(), "found, in that order"),
            (
                (
                    f"{each.num_tokens:,}",
                    str(each.first_ms["plain"]),
                    *(str(each.later_ms[layout]) for layout in LAYOUTS),
                    ", ".join(f"{each.found_share[layout]:.0%}" for layout in LAYOUTS),
                )
                for each in found.lengths
            ),
        ),
    )
