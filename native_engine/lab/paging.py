"""What paging saves of memory, and what the size of a block trades.

The same requests, held at once in three ways (native_engine/paging.py counts them): a stretch of the longest length for
each, blocks as they are needed, and blocks of equal beginnings once. Beside the formula stand the blocks that the
engine really holds when all prompts have been computed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from native_engine.lab.picture import (
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
from native_engine.lab.workbench import Course, Spread, Workbench, drive, greedy, short
from native_engine.paging import Reservation, Reserved, paging_figures

TITLE = "Paging: memory for the tokens that are there"
CONTIGUOUS, PAGED, SHARED = "one stretch of the whole context each", "blocks (paged)", "blocks, equal beginnings once"
MB = 1e6
MOST_TOKENS = 100  # of an answer; nobody may end while blocks are counted
NUM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that so many requests take; of the two paged ways also what the engine held."""

    num_requests: int
    contiguous_bytes: int
    paged_bytes: int
    shared_bytes: int
    paged_engine_bytes: int
    shared_engine_bytes: int


@dataclass(frozen=True, slots=True)
class BlockSize:
    block_size: int
    wasted_share: float  # of the memory of blocks that nobody shares
    shared_share: float  # of that memory, what sharing saves
    step_ms: Spread  # a decode step of sequences that each have read a prompt


@dataclass(frozen=True, slots=True)
class Found:
    max_model_len: int
    block_size: int
    prefix_tokens: int
    mean_tokens: float
    held: list[Held]
    sizes: list[BlockSize]
    num_decoding: int
    context: int


def measure(bench: Workbench) -> Found:
    prefix, counts = 100, bench.pick((4, 8), (4, 8, 12, 16, 20, 24))
    bench.need_context(prefix + 360)
    prompts = _prompts(bench, prefix, counts[-1])
    paged = _held_by_engine(bench, prompts, counts, shares=False)
    shared = _held_by_engine(bench, prompts, counts, shares=True)
    held = []
    for count in counts:
        by_paged = _figures(bench, paged[count].known, bench.config.block_size)
        by_shared = _figures(bench, shared[count].known, bench.config.block_size)
        held.append(
            Held(
                count,
                contiguous_bytes=by_paged["contiguous"].reserved,
                paged_bytes=by_paged["paged"].reserved,
                shared_bytes=by_shared["paged+prefix"].reserved,
                paged_engine_bytes=paged[count].num_bytes,
                shared_engine_bytes=shared[count].num_bytes,
            )
        )
    num_decoding, context = bench.pick((4, 128), (8, 512))
    return Found(
        bench.max_len,
        bench.config.block_size,
        prefix,
        sum(map(len, prompts)) / len(prompts),
        held,
        _sizes(bench, prompts, num_decoding, context),
        num_decoding,
        context,
    )


def _prompts(bench: Workbench, prefix: int, count: int) -> list[list[int]]:
    """One system prompt, and behind it questions of very different lengths: a few are long."""
    source = random.Random(1)
    system = bench.prompt(prefix)
    return [[*system, *bench.prompt(min(240, max(4, round(source.lognormvariate(4, 0.9)))))] for _ in range(count)]


@dataclass(frozen=True, slots=True)
class _Seen:
    num_bytes: int
    known: list[Reserved]  # the requests with the tokens that had keys and values then


def _held_by_engine(
    bench: Workbench, prompts: Sequence[list[int]], counts: Sequence[int], *, shares: bool
) -> dict[int, _Seen]:
    """Requests come in groups and go on. When all of a group have their first token, blocks are counted."""
    bench.say(f"paging: what {counts[-1]} requests hold{', equal beginnings once' if shares else ''}")
    room = sum(len(prompt) + MOST_TOKENS + bench.config.block_size for prompt in prompts)
    engine = bench.engine(enable_prefix_caching=shares, kv_cache_mib=bench.mib_for(room))
    seen: dict[int, _Seen] = {}
    given: Counter[int] = Counter()
    for count in counts:
        for number in range(len(given), count):
            engine.add(str(number), prompts[number], greedy(MOST_TOKENS))
        while len(given) < count:
            given.update(int(output.request_id) for output in engine.step())
        # The newest token of each is known, but has no keys and values yet.
        known = [Reserved(prompt, given[number] - 1) for number, prompt in enumerate(prompts[:count])]
        seen[count] = _Seen(engine.stats().kv_blocks_used * bench.token_bytes * bench.config.block_size, known)
    return seen


def _figures(bench: Workbench, known: Sequence[Reserved], block_size: int) -> dict[str, Reservation]:
    counted = paging_figures(known, block_size=block_size, max_model_len=bench.max_len, token_bytes=bench.token_bytes)
    return {each.name: each for each in counted}


def _sizes(bench: Workbench, prompts: Sequence[list[int]], num_decoding: int, context: int) -> list[BlockSize]:
    sizes: tuple[int, ...] = bench.pick((16, 32, 128), (16, 32, 64, 128))
    step_ms: dict[int, list[float]] = {size: [] for size in sizes}
    repeats = bench.pick(2, 3)
    for repeat in range(repeats):
        for size in sizes:
            bench.say(f"paging: steps with blocks of {size}, repeat {repeat + 1} of {repeats}")
            step_ms[size].append(_step_ms(bench, size, num_decoding, context))
    found = []
    for size in sizes:
        figures = _figures(bench, [Reserved(prompt, 0) for prompt in prompts], size)
        paged, shared = figures["paged"], figures["paged+prefix"]
        found.append(BlockSize(size, paged.waste_share, 1 - shared.reserved / paged.reserved, Spread.of(step_ms[size])))
    return found


def _step_ms(bench: Workbench, block_size: int, num_decoding: int, context: int) -> float:
    """The median step in which all decode, and nobody's prompt is computed any more."""
    room = num_decoding * (context + 2 * NUM_STEPS + block_size)
    engine = bench.engine(block_size=block_size, enable_prefix_caching=False, kv_cache_mib=bench.mib_for(room))
    for number in range(num_decoding):
        engine.add(str(number), bench.prompt(context), greedy(10_000))
    steps: list[float] = []

    def look(course: Course, _: float) -> None:
        if course.steps and len(course.token_s) == num_decoding:
            steps.append(course.steps[-1].took_s)
        if len(steps) > NUM_STEPS:
            for number in range(num_decoding):
                engine.abort(str(number))

    drive(engine, look)
    return median(steps[1:]) * 1e3  # the first had a prompt in it


def show(found: Found) -> Shown:
    return Shown(_says(found), (_memory(found), _shares(found), _steps(found)), _tables(found))


def _says(found: Found) -> str:
    last = found.held[-1]
    small, large = found.sizes[0], found.sizes[-1]
    agree = all(
        (each.paged_bytes, each.shared_bytes) == (each.paged_engine_bytes, each.shared_engine_bytes)
        for each in found.held
    )
    fits = "exactly what" if agree else "NOT what"
    return (
        f"{last.num_requests} requests of {found.mean_tokens:.0f} tokens on average take "
        f"{last.contiguous_bytes / MB:,.0f} MB when each reserves the context of {found.max_model_len:,} tokens, "
        f"{last.paged_bytes / MB:,.0f} MB in blocks of {found.block_size} "
        f"({times(last.contiguous_bytes, last.paged_bytes)} less), and {last.shared_bytes / MB:,.0f} MB where the "
        f"{found.prefix_tokens} tokens that all begin with are held once. The engine held {fits} the formula says. "
        f"The size of a block trades: with {small.block_size} tokens {small.wasted_share:.0%} of the memory is "
        f"wasted in last blocks and {small.shared_share:.0%} is saved by sharing; with {large.block_size} it is "
        f"{large.wasted_share:.0%} and {large.shared_share:.0%}, since only whole blocks are shared. A decode step of "
        f"{found.num_decoding} texts of {found.context} tokens takes {short(small.step_ms.median)} ms with the "
        f"smallest and {short(large.step_ms.median)} ms with the largest blocks."
    )


def _memory(found: Found) -> Chart:
    ways = (
        (CONTIGUOUS, 1, [(each.num_requests, each.contiguous_bytes / MB) for each in found.held]),
        (PAGED, 0, [(each.num_requests, each.paged_bytes / MB) for each in found.held]),
        (SHARED, 2, [(each.num_requests, each.shared_bytes / MB) for each in found.held]),
    )
    held = [(each.num_requests, each.paged_engine_bytes / MB) for each in found.held]
    held += [(each.num_requests, each.shared_engine_bytes / MB) for each in found.held]
    values = [y for _, _, points in ways for _, y in points]
    return chart(
        "Memory by requests that are held at once",
        "One stretch each takes many times the memory of blocks; sharing takes less again; the engine's own blocks lie "
        "on the lines.",
        axis_of("requests", [each.num_requests for each in found.held]),
        log_axis("MB", min(values) / 1.5, max(values) * 1.5),
        [
            *(line(name, place, points, has_marks=False) for name, place, points in ways),
            line("what the engine held", 3, held, unit="MB", has_line=False),
        ],
    )


def _shares(found: Found) -> Chart:
    wasted = [(each.block_size, 100 * each.wasted_share) for each in found.sizes]
    saved = [(each.block_size, 100 * each.shared_share) for each in found.sizes]
    return chart(
        "What the size of a block trades: memory",
        "Larger blocks waste more at the ends of texts and share less of their beginnings.",
        axis_of("tokens in a block", [each.block_size for each in found.sizes]),
        linear_axis("% of the memory of paging without sharing", max(y for _, y in (*wasted, *saved))),
        [
            line("wasted in last blocks", 4, wasted, unit="%"),
            line("saved by sharing", 6, saved, unit="%"),
        ],
    )


def _steps(found: Found) -> Chart:
    points = [(each.block_size, each.step_ms) for each in found.sizes]
    return chart(
        "What the size of a block trades: time",
        "A decode step by the size of a block.",
        axis_of("tokens in a block", [each.block_size for each in found.sizes]),
        linear_axis("ms", max(spread.high for _, spread in points)),
        [line(f"a step of {found.num_decoding} texts of {found.context} tokens", 7, points, unit="ms")],
    )


def _tables(found: Found) -> tuple[tuple[str, Table], ...]:
    return (
        table(
            "Memory of the same requests, MB",
            ("requests", "one stretch each", "paged", "engine", "paged, shared", "engine, shared"),
            (
                (
                    str(each.num_requests),
                    *(
                        f"{value / MB:,.1f}"
                        for value in (
                            each.contiguous_bytes,
                            each.paged_bytes,
                            each.paged_engine_bytes,
                            each.shared_bytes,
                            each.shared_engine_bytes,
                        )
                    ),
                )
                for each in found.held
            ),
        ),
        table(
            "The size of a block",
            ("tokens in a block", "wasted", "saved by sharing", "decode step, ms"),
            (
                (str(each.block_size), f"{each.wasted_share:.1%}", f"{each.shared_share:.1%}", str(each.step_ms))
                for each in found.sizes
            ),
        ),
    )
