"""A request that had to give blocks back: what does it cost to compute them again, and what to copy them out and in?

One request has read a prompt. Others that stand before it in the line fork into so many that their next blocks have to
be its last ones. When they have ended it goes on. Counted is what coming back costs it: the copies to the host pool and
back, or the steps that compute its tokens again, up to its next token. The prefix cache is off: it would often still
have what was given back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from native_engine.engine import Choice, Engine
from native_engine.errors import require
from native_engine.lab.picture import Chart, Shown, Table, axis_of, chart, line, log_axis, table, times
from native_engine.lab.workbench import Course, Spread, Workbench, drive, greedy, short
from native_engine.sampling_params import SamplingParams
from native_engine.step import Moves

TITLE = "Preemption: to compute again, or to copy out and in"
RECOMPUTE, SWAP = "computed again", "swapped: copied out and in, then one step"
USUAL = "a step when nothing happens"
VICTIM = "victim"
NUM_DECODES = 4  # of the victim before the others come
# Of those who take the blocks: before it in the line, and as many tokens as need them a second block each.
TAKERS = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, priority=-1)


@dataclass(frozen=True, slots=True)
class AtLoss:
    num_blocks: int
    num_tokens: int  # that were given back
    recompute_ms: Spread  # from the room being there to the next token
    swap_ms: Spread  # that, and the copy out before
    copies_ms: Spread  # of it, both copies alone


@dataclass(frozen=True, slots=True)
class Found:
    block_size: int
    token_bytes: int
    decode_ms: float  # a step of this request when nothing happens
    losses: list[AtLoss]


@dataclass(frozen=True, slots=True)
class _Return:
    num_lost: int
    back_s: float
    copies_out_s: float
    copies_in_s: float
    decode_s: float


def measure(bench: Workbench) -> Found:
    counts: tuple[int, ...] = bench.pick((2, 8), (1, 2, 4, 8, 16, 32))
    repeats = bench.pick(2, 3)
    bench.need_context((counts[-1] + 8) * bench.config.block_size)
    ran: dict[tuple[int, str], list[_Return]] = {}
    for repeat in range(repeats):
        for count in counts:
            for way in ("recompute", "swap") if repeat % 2 == 0 else ("swap", "recompute"):
                bench.say(f"preemption: {way}, {count} blocks, repeat {repeat + 1} of {repeats}")
                ran.setdefault((count, way), []).append(_preempted(bench, count, way))
    return Found(
        bench.config.block_size,
        bench.token_bytes,
        median(each.decode_s for runs in ran.values() for each in runs) * 1e3,
        [_at_loss(count, ran[count, "recompute"], ran[count, "swap"]) for count in counts],
    )


def _at_loss(num_blocks: int, recomputed: list[_Return], swapped: list[_Return]) -> AtLoss:
    return AtLoss(
        num_blocks,
        recomputed[0].num_lost,
        recompute_ms=Spread.of([each.back_s * 1e3 for each in recomputed]),
        swap_ms=Spread.of([(each.back_s + each.copies_out_s) * 1e3 for each in swapped]),
        copies_ms=Spread.of([(each.copies_out_s + each.copies_in_s) * 1e3 for each in swapped]),
    )


def _preempted(bench: Workbench, num_blocks: int, way: str) -> _Return:
    """The pool holds the victim, a prompt, and a block for each fork of it. In their next blocks the forks lack as many
    as shall be given back."""
    block_size = bench.config.block_size
    num_forks = num_blocks + 2
    engine = bench.engine(
        enable_prefix_caching=False,
        max_num_seqs=num_forks + 1,
        max_num_batched_tokens=256,
        kv_cache_mib=bench.mib_for((num_blocks + num_forks + 4) * block_size),
        preemption=way,
        swap_space_mib=bench.mib_for((num_blocks + 2) * block_size) if way == "swap" else 0,
    )
    moved = _Moved(engine)
    held = engine.stats().kv_blocks_total - num_forks - 2
    engine.add(VICTIM, bench.prompt((held - 1) * block_size + 4), greedy(block_size))
    first, *others = (Choice(str(number), TAKERS) for number in range(num_forks))
    prompt = bench.prompt(block_size - 2)

    def follow(course: Course, _: float) -> None:
        num_victim, num_ended = len(course.token_s[VICTIM]), _num_ended(course)
        if num_victim == NUM_DECODES and num_ended == 0 and first.request_id not in course.added_s:
            engine.add(first.request_id, prompt, first.params, others=others)
            course.added_s[first.request_id] = course.seconds
        if num_ended == num_forks and course.token_s[VICTIM][-1] > _last_s(course, num_forks):
            engine.abort(VICTIM)

    course = drive(engine, follow)
    stats = engine.stats()
    require(stats.num_preemptions == 1, f"{stats.num_preemptions} requests were preempted, and 1 should have been.")
    ended_s = _last_s(course, num_forks)
    return _Return(
        stats.lost_tokens,
        back_s=next(token_s for token_s in course.token_s[VICTIM] if token_s > ended_s) - ended_s,
        copies_out_s=moved.out_s,
        copies_in_s=moved.in_s,
        decode_s=median(course.gaps_s(VICTIM)[: NUM_DECODES - 1]),
    )


def _num_ended(course: Course) -> int:
    return sum(
        len(times_s) == TAKERS.max_tokens for request_id, times_s in course.token_s.items() if request_id != VICTIM
    )


def _last_s(course: Course, num_forks: int) -> float:
    return max(course.token_s[str(number)][-1] for number in range(num_forks))


class _Moved:
    """The time of an engine's copies to its host pool and back, by wrapping what makes them."""

    def __init__(self, engine: Engine) -> None:
        self.out_s = self.in_s = 0.0
        runner: Any = engine._runner
        runner._move_blocks = self._timed(runner._move_blocks)

    def _timed(self, move: Callable[[Moves], None]) -> Callable[[Moves], None]:
        def timed(moves: Moves) -> None:
            started = time.perf_counter()
            move(moves)
            took_s = time.perf_counter() - started
            self.out_s += took_s if moves.swap_out else 0.0
            self.in_s += took_s if moves.swap_in else 0.0

        return timed


def show(found: Found) -> Shown:
    return Shown(_says(found), (_pause(found), _per_block(found)), _tables(found))


def _says(found: Found) -> str:
    first, last = found.losses[0], found.losses[-1]
    return (
        f"A request that gave {last.num_tokens:,} tokens away gets its next one after "
        f"{short(last.recompute_ms.median)} ms where they are computed again, and after "
        f"{short(last.swap_ms.median)} ms where their {last.num_blocks} blocks were copied out and in: the copies take "
        f"{short(last.copies_ms.median)} ms of that, the rest is the step that any token takes "
        f"({short(found.decode_ms)} ms). With {first.num_tokens} tokens it is {short(first.recompute_ms.median)} and "
        f"{short(first.swap_ms.median)} ms. What is computed again grows with every token; a copy of a block takes "
        f"{times(_again_ms(found, last), last.copies_ms.median / last.num_blocks)} less than computing it. On a CPU "
        "the host's memory could as well have been the pool's, so the engine computes again unless told otherwise."
    )


def _again_ms(found: Found, loss: AtLoss) -> float:
    """What a block costs that is computed again: beyond the step that comes anyway."""
    return max(loss.recompute_ms.median - found.decode_ms, 1e-3) / loss.num_blocks


def _pause(found: Found) -> Chart:
    again = [(each.num_tokens, each.recompute_ms) for each in found.losses]
    swap = [(each.num_tokens, each.swap_ms) for each in found.losses]
    values = [found.decode_ms, *(end for _, spread in (*again, *swap) for end in (spread.low, spread.high))]
    return chart(
        "From the room being there to the next token",
        "Computing again grows with the tokens that were given back; swapping stays near the time of one step.",
        axis_of("tokens that were given back", [each.num_tokens for each in found.losses]),
        log_axis("ms", min(values) / 1.3, max(values) * 1.3),
        [
            line(RECOMPUTE, 1, again, unit="ms"),
            line(SWAP, 0, swap, unit="ms"),
            line(USUAL, 7, [(points[0], found.decode_ms) for points in (again[0], again[-1])], has_marks=False),
        ],
    )


def _per_block(found: Found) -> Chart:
    again = [(each.num_blocks, _again_ms(found, each)) for each in found.losses]
    copies = [(each.num_blocks, each.copies_ms.median / each.num_blocks) for each in found.losses]
    values = [y for _, y in (*again, *copies)]
    return chart(
        f"A block of {found.block_size} tokens ({found.token_bytes * found.block_size / 1e3:,.0f} kB)",
        "Two copies of a block take far less than computing it again.",
        axis_of("blocks that were given back", [each.num_blocks for each in found.losses]),
        log_axis("ms a block", min(values) / 1.5, max(values) * 1.5),
        [
            line("computing a block again, beyond that step", 3, again, unit="ms"),
            line("copying it out and in", 2, copies, unit="ms"),
        ],
    )


def _tables(found: Found) -> tuple[tuple[str, Table], ...]:
    return (
        table(
            "What coming back costs",
            ("tokens given back", "blocks", "computed again, ms", "swapped, ms", "of it both copies, ms"),
            (
                (
                    f"{each.num_tokens:,}",
                    str(each.num_blocks),
                    str(each.recompute_ms),
                    str(each.swap_ms),
                    str(each.copies_ms),
                )
                for each in found.losses
            ),
        ),
    )
