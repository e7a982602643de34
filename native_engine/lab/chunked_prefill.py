"""A long prompt arrives while others decode: in one piece it stalls them, in chunks it does not.

A step computes one token of every decode and up to `max_num_batched_tokens` in all; what is left goes to the prompt.
The smaller that is, the shorter the pause between two tokens of the others, and the longer the prompt takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from native_engine.lab.picture import (
    Chart,
    Rule,
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

TITLE = "Chunked prefill: a long prompt stalls nobody"
LONG = "long"


@dataclass(frozen=True, slots=True)
class AtChunk:
    """`budget`: `max_num_batched_tokens`. The longest pause of any of those who decode; what the prompt waits."""

    budget: int
    is_whole: bool  # the prompt fits into one step
    pause_ms: Spread
    ttft_ms: Spread
    prompt_steps: int  # until its first token was there


@dataclass(frozen=True, slots=True)
class Pauses:
    """One decoding request: seconds since the long prompt came, and the pause before the token that came then."""

    budget: int
    at_s: list[float]
    pause_ms: list[float]


@dataclass(frozen=True, slots=True)
class Found:
    num_decoding: int
    prompt_tokens: int
    usual_ms: float  # between two tokens before the prompt came
    chunks: list[AtChunk]
    courses: list[Pauses]  # of the repeat whose longest pause is the median one


def measure(bench: Workbench) -> Found:
    num_decoding, prompt_tokens, num_tokens = bench.pick((3, 384, 24), (6, 1024, 36))
    whole = prompt_tokens + 64
    budgets = bench.pick((64, whole), (64, 128, 256, 512, whole))
    repeats = bench.pick(2, 3)
    bench.need_context(prompt_tokens + 8)
    ran: dict[int, list[Course]] = {budget: [] for budget in budgets}
    for repeat in range(repeats):
        for budget in budgets:
            bench.say(f"chunked-prefill: {budget:,} tokens a step, repeat {repeat + 1} of {repeats}")
            ran[budget].append(_met(bench, num_decoding, prompt_tokens, num_tokens, budget))
    others = [str(number) for number in range(num_decoding)]
    before = [
        step.took_s
        for courses in ran.values()
        for course in courses
        for step in course.steps[2:]
        if step.ended_s <= course.added_s[LONG]
    ]
    return Found(
        num_decoding,
        prompt_tokens,
        median(before) * 1e3,
        [
            AtChunk(
                budget,
                budget == whole,
                pause_ms=Spread.of([max(_longest_pause(each, other) for other in others) for each in courses]),
                ttft_ms=Spread.of([each.ttft_s(LONG) * 1e3 for each in courses]),
                prompt_steps=_prompt_steps(courses[0]),
            )
            for budget, courses in ran.items()
        ],
        [Pauses(budget, *_pauses(_median_course(courses), others[0])) for budget, courses in ran.items()],
    )


def _met(bench: Workbench, num_decoding: int, prompt_tokens: int, num_tokens: int, budget: int) -> Course:
    """The others decode from the start, and are a quarter through when the prompt comes."""
    engine = bench.engine(max_num_batched_tokens=budget, max_num_seqs=num_decoding + 1, enable_prefix_caching=False)
    for number in range(num_decoding):
        engine.add(str(number), bench.prompt(8), greedy(num_tokens))
    prompt = bench.prompt(prompt_tokens)

    def feed(course: Course, now_s: float) -> None:
        if LONG not in course.added_s and len(course.steps) >= num_tokens // 4:
            engine.add(LONG, prompt, greedy(2))
            course.added_s[LONG] = now_s

    return drive(engine, feed)


def _prompt_steps(course: Course) -> int:
    came, first_s = course.added_s[LONG], course.token_s[LONG][0]
    return sum(came <= step.began_s and step.ended_s <= first_s for step in course.steps)


def _pauses(course: Course, request_id: str) -> tuple[list[float], list[float]]:
    """When its tokens came, since the long prompt did, and the pause before each, in ms; those before it came too."""
    came = course.added_s[LONG]
    at_s = [token_s - came for token_s in course.token_s[request_id][1:]]
    return at_s, [gap * 1e3 for gap in course.gaps_s(request_id)]


def _median_course(courses: list[Course]) -> Course:
    return sorted(courses, key=lambda course: _longest_pause(course, "0"))[len(courses) // 2]


def _longest_pause(course: Course, request_id: str) -> float:
    """Of those that ended after the prompt came."""
    return max(pause for at_s, pause in zip(*_pauses(course, request_id), strict=True) if at_s > 0)


def show(found: Found) -> Shown:
    return Shown(_says(found), (_course(found), _trade(found)), _tables(found))


def _says(found: Found) -> str:
    whole, small = found.chunks[-1], found.chunks[0]
    return (
        f"{found.num_decoding} answers are being written, a token each in {short(found.usual_ms)} ms, when a prompt of "
        f"{found.prompt_tokens:,} tokens arrives. Computed in one piece it makes all of them wait "
        f"{short(whole.pause_ms.median)} ms for one token. In steps of {small.budget} tokens the longest pause is "
        f"{short(small.pause_ms.median)} ms, {times(whole.pause_ms.median, small.pause_ms.median)} shorter; the prompt "
        f"itself waits {short(small.ttft_ms.median)} ms for its first token instead of {short(whole.ttft_ms.median)}, "
        "for its chunks share their steps with the others and each step has a base cost."
    )


def _name(found: Found, budget: int) -> str:
    return "the prompt in one piece" if budget == found.chunks[-1].budget else f"{budget} tokens a step"


def _course(found: Found) -> Chart:
    shown = [each for each in found.courses if each.budget in _shown(found)]
    pauses = [pause for each in shown for pause in each.pause_ms]
    last = max(each.at_s[-1] for each in shown)
    first = min(each.at_s[0] for each in shown)
    return chart(
        "The pause before each token of one answer",
        "In one piece the prompt makes one pause of its whole length; in chunks there are several short ones.",
        replace(linear_axis("seconds since the prompt came", last), low=first),
        log_axis("ms since the token before", min(pauses) / 1.3, max(pauses) * 1.3),
        [
            line(_name(found, each.budget), place, list(zip(each.at_s, each.pause_ms, strict=True)), unit="ms")
            for place, each in zip((0, 2, 1), shown, strict=False)
        ],
    )


def _shown(found: Found) -> tuple[int, ...]:
    """Three lines at most, or nobody sees any: the smallest chunks, the middle ones and the prompt in one piece."""
    budgets = [each.budget for each in found.chunks]
    return tuple(dict.fromkeys((budgets[0], budgets[len(budgets) // 2], budgets[-1])))


def _trade(found: Found) -> Chart:
    pause = [(each.budget, each.pause_ms) for each in found.chunks]
    ttft = [(each.budget, each.ttft_ms) for each in found.chunks]
    values = [found.usual_ms, *(end for _, spread in (*pause, *ttft) for end in (spread.low, spread.high))]
    return chart(
        "What the size of a step trades",
        "Larger steps stall the others for longer and bring the first token of the prompt sooner.",
        axis_of("tokens a step, the last takes the whole prompt", [each.budget for each in found.chunks]),
        log_axis("ms", min(values) / 1.3, max(values) * 1.3),
        [
            line("longest pause of the others", 3, pause, unit="ms"),
            line("first token of the prompt", 4, ttft, unit="ms"),
        ],
        rules=[Rule("y", found.usual_ms, "usual pause")],
    )


def _tables(found: Found) -> tuple[tuple[str, Table], ...]:
    return (
        table(
            f"A prompt of {found.prompt_tokens:,} tokens beside {found.num_decoding} decodes",
            ("tokens a step", "steps of the prompt", "longest pause of the others, ms", "first token of it, ms"),
            (
                (
                    f"{each.budget:,} (the whole prompt)" if each.is_whole else str(each.budget),
                    str(each.prompt_steps),
                    str(each.pause_ms),
                    str(each.ttft_ms),
                )
                for each in found.chunks
            ),
        ),
    )
