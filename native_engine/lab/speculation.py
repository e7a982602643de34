"""Speculation: guess the next tokens from the text so far, and check all guesses in one step.

A step takes nearly as long for a few rows as for one, so guesses that are right are tokens for nothing, and wrong ones
cost little. The guesses are the continuations of the text's own last tokens where they stood before. The tokens are
those without speculation, whatever is guessed. With many requests at once rows are no longer free.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from native_engine.lab.picture import Chart, Shown, Table, axis_of, chart, line, linear_axis, table, times
from native_engine.lab.workbench import Course, Spread, Workbench, drive, greedy, short

TITLE = "Speculation: several tokens a step where the text repeats itself"
REPEATING, FREE = "a prompt that repeats itself", "a prompt of random tokens"
KINDS = (REPEATING, FREE)
PHRASE_TOKENS, PHRASES = 24, 6
USUAL_DRAFT = 4


@dataclass(frozen=True, slots=True)
class AtDraft:
    """One request at a time, with drafts of so many tokens; 0: without speculation."""

    kind: str
    num_draft_tokens: int
    tokens_per_s: Spread
    tokens_per_step: float
    accepted_share: float  # of the tokens that were guessed


@dataclass(frozen=True, slots=True)
class AtDepth:
    """So many requests at once, whose prompts repeat themselves, without drafts and with the usual ones."""

    depth: int
    plain_per_s: Spread  # tokens
    speculative_per_s: Spread


@dataclass(frozen=True, slots=True)
class Found:
    num_tokens: int  # of an answer
    drafts: list[AtDraft]
    depths: list[AtDepth]
    tokens_are_equal: bool  # with every draft length those without


@dataclass(frozen=True, slots=True)
class _Run:
    course: Course
    num_guessed: int
    num_accepted: int


def measure(bench: Workbench) -> Found:
    drafts: tuple[int, ...] = bench.pick((0, 4), (0, 2, 4, 8))
    depths: tuple[int, ...] = bench.pick((1, 8), (1, 8, 32))
    num_tokens, repeats = bench.pick(24, 48), bench.pick(1, 2)
    bench.need_context(PHRASE_TOKENS * PHRASES + num_tokens + 1)
    prompts = {REPEATING: bench.prompt(PHRASE_TOKENS) * PHRASES, FREE: bench.prompt(PHRASE_TOKENS * PHRASES)}
    ran: dict[tuple[str, int], list[_Run]] = {}
    many: dict[tuple[int, int], list[_Run]] = {}
    for repeat in range(repeats):
        for kind in KINDS:
            for count in drafts:
                bench.say(f"speculation: {kind}, drafts of {count}, repeat {repeat + 1} of {repeats}")
                ran.setdefault((kind, count), []).append(_run(bench, [prompts[kind]], num_tokens, count))
        for depth in depths:
            repeating = [bench.prompt(PHRASE_TOKENS) * PHRASES for _ in range(depth)]
            for count in (0, USUAL_DRAFT) if repeat % 2 == 0 else (USUAL_DRAFT, 0):
                bench.say(f"speculation: {depth} at once, drafts of {count}, repeat {repeat + 1} of {repeats}")
                many.setdefault((depth, count), []).append(_run(bench, repeating, num_tokens, count))
    return Found(
        num_tokens,
        [_at_draft(kind, count, ran[kind, count]) for kind in KINDS for count in drafts],
        [AtDepth(depth, _speed(many[depth, 0]), _speed(many[depth, USUAL_DRAFT])) for depth in depths],
        all(
            run.course.token_ids == ran[kind, 0][0].course.token_ids for (kind, _), runs in ran.items() for run in runs
        ),
    )


def _run(bench: Workbench, prompts: list[list[int]], num_tokens: int, num_draft_tokens: int) -> _Run:
    how: dict[str, Any] = {"speculation": "ngram", "num_speculative_tokens": num_draft_tokens}
    engine = bench.engine(enable_prefix_caching=False, max_num_seqs=len(prompts), **(how if num_draft_tokens else {}))
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, greedy(num_tokens))
    course = drive(engine)
    stats = engine.stats()
    return _Run(course, stats.draft_tokens, stats.accepted_draft_tokens)


def _decode_per_s(course: Course) -> float:
    """Tokens a second once every prompt has been computed."""
    began = max(times_s[0] for times_s in course.token_s.values())
    after = sum(token_s > began for times_s in course.token_s.values() for token_s in times_s)
    return after / (course.seconds - began)


def _speed(runs: list[_Run]) -> Spread:
    return Spread.of([_decode_per_s(run.course) for run in runs])


def _at_draft(kind: str, num_draft_tokens: int, runs: list[_Run]) -> AtDraft:
    guessed = sum(run.num_guessed for run in runs)
    return AtDraft(
        kind,
        num_draft_tokens,
        _speed(runs),
        median(run.course.num_tokens / len(run.course.steps) for run in runs),
        sum(run.num_accepted for run in runs) / guessed if guessed else 0.0,
    )


def show(found: Found) -> Shown:
    return Shown(_says(found), (_by_draft(found), _by_depth(found)), _tables(found))


def _says(found: Found) -> str:
    by_kind = {kind: [each for each in found.drafts if each.kind == kind] for kind in KINDS}
    words = []
    for kind, rows in by_kind.items():
        best = max(rows, key=lambda each: each.tokens_per_s.median)
        words.append(
            f"After {kind}, {short(rows[0].tokens_per_s.median)} tokens a second become "
            f"{short(best.tokens_per_s.median)} with drafts of {best.num_draft_tokens} "
            f"({best.accepted_share:.0%} of the guesses are right, {best.tokens_per_step:.1f} tokens a step)."
        )
    last = found.depths[-1]
    same = "the same" if found.tokens_are_equal else "NOT the same, which is a fault"
    gain = times(last.speculative_per_s.median, last.plain_per_s.median)
    return (
        f"{' '.join(words)} With {last.depth} requests at once, drafts of {USUAL_DRAFT} give {gain} the "
        "speed; the engine guesses less where its model of step times says that it would not pay. The tokens are "
        f"{same} in all cases."
    )


def _by_draft(found: Found) -> Chart:
    lines = {
        kind: [(each.num_draft_tokens, each.tokens_per_s) for each in found.drafts if each.kind == kind]
        for kind in KINDS
    }
    highest = max(spread.high for points in lines.values() for _, spread in points)
    return chart(
        "One request: speed by the length of a draft",
        "Drafts bring more tokens a second where the text repeats itself.",
        linear_axis("tokens guessed at a time", max(each.num_draft_tokens for each in found.drafts)),
        linear_axis("tokens a second", highest),
        [line(kind, place, points, unit="tokens/s") for place, (kind, points) in enumerate(lines.items())],
    )


def _by_depth(found: Found) -> Chart:
    plain = [(each.depth, each.plain_per_s) for each in found.depths]
    speculative = [(each.depth, each.speculative_per_s) for each in found.depths]
    return chart(
        "Many requests: speed with and without drafts",
        "The gain of drafts by how many requests are decoded at once.",
        axis_of("requests at once, prompts that repeat themselves", [each.depth for each in found.depths]),
        linear_axis("tokens a second", max(spread.high for _, spread in (*plain, *speculative))),
        [
            line("without drafts", 7, plain, unit="tokens/s"),
            line(f"with drafts of {USUAL_DRAFT}", 2, speculative, unit="tokens/s"),
        ],
    )


def _tables(found: Found) -> tuple[tuple[str, Table], ...]:
    return (
        table(
            f"One request, answers of {found.num_tokens} tokens",
            ("prompt, tokens guessed at a time", "tokens/s", "tokens a step", "guesses that were right"),
            (
                (
                    f"{each.kind}, {each.num_draft_tokens}",
                    str(each.tokens_per_s),
                    f"{each.tokens_per_step:.2f}",
                    f"{each.accepted_share:.0%}" if each.num_draft_tokens else "-",
                )
                for each in found.drafts
            ),
        ),
        table(
            f"Many requests, drafts of {USUAL_DRAFT}",
            ("at once", "without, tokens/s", "with drafts, tokens/s"),
            ((str(each.depth), str(each.plain_per_s), str(each.speculative_per_s)) for each in found.depths),
        ),
    )
