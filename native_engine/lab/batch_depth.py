"""How deep should a batch be? Speed grows with its depth, and so does a token's time; goodput has its peak between.

So many seats, and requests that wait for them. A seat that falls free is taken at once, so that prompts are computed
beside those who decode, as in serving. A request is good if its time per output token keeps a limit; goodput counts the
tokens of the good ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from native_engine.lab.picture import Chart, Rule, Shown, Table, axis_of, chart, line, linear_axis, table
from native_engine.lab.workbench import Course, Spread, Workbench, drive, greedy, short

TITLE = "Batch depth: most tokens are not most tokens in time"
LIMIT = 2.0  # times what a token takes alone
PROMPT_TOKENS = 48


@dataclass(frozen=True, slots=True)
class AtDepth:
    depth: int
    tokens_per_s: Spread
    good_tokens_per_s: Spread
    tpot_ms: Spread  # medians over requests
    slow_tpot_ms: Spread  # 9 of 10 requests are faster
    good_share: float  # of requests, over all repeats


@dataclass(frozen=True, slots=True)
class Found:
    limit_ms: float
    depths: list[AtDepth]

    @property
    def best(self) -> AtDepth:
        return max(self.depths, key=lambda each: each.good_tokens_per_s.median)


@dataclass(frozen=True, slots=True)
class _Run:
    seconds: float
    answers: list[tuple[int, float]]  # tokens, seconds a token


def measure(bench: Workbench) -> Found:
    depths: tuple[int, ...] = bench.pick((1, 4, 16), (1, 2, 4, 8, 16, 32, 64))
    repeats = bench.pick(1, 3)
    bench.need_context(PROMPT_TOKENS + 64)
    ran: dict[int, list[_Run]] = {depth: [] for depth in depths}
    for repeat in range(repeats):
        for depth in depths:
            bench.say(f"batch-depth: {depth} at once, repeat {repeat + 1} of {repeats}")
            ran[depth].append(_run(bench, depth))
    alone = Spread.of([seconds for run in ran[1] for _, seconds in run.answers])
    limit_s = LIMIT * alone.median
    return Found(limit_s * 1e3, [_at_depth(depth, ran[depth], limit_s) for depth in depths])


def _run(bench: Workbench, depth: int) -> _Run:
    engine = bench.engine(max_num_seqs=depth, enable_prefix_caching=False)
    count = max(4, depth + depth // 2)
    lengths = [bench.pick((10, 14, 18), (16, 24, 32))[number % 3] for number in range(count)]
    for number, num_tokens in enumerate(lengths):
        engine.add(str(number), bench.prompt(PROMPT_TOKENS), greedy(num_tokens))
    course: Course = drive(engine)
    return _Run(course.seconds, [(length, course.tpot_s(str(number))) for number, length in enumerate(lengths)])


def _at_depth(depth: int, runs: list[_Run], limit_s: float) -> AtDepth:
    answers = [answer for run in runs for answer in run.answers]
    return AtDepth(
        depth,
        tokens_per_s=Spread.of([sum(tokens for tokens, _ in run.answers) / run.seconds for run in runs]),
        good_tokens_per_s=Spread.of(
            [sum(tokens for tokens, tpot_s in run.answers if tpot_s <= limit_s) / run.seconds for run in runs]
        ),
        tpot_ms=Spread.of([_quantile([tpot_s for _, tpot_s in run.answers], 0.5) * 1e3 for run in runs]),
        slow_tpot_ms=Spread.of([_quantile([tpot_s for _, tpot_s in run.answers], 0.9) * 1e3 for run in runs]),
        good_share=sum(tpot_s <= limit_s for _, tpot_s in answers) / len(answers),
    )


def _quantile(values: list[float], share: float) -> float:
    """A value that occurred: the lowest that so many do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def show(found: Found) -> Shown:
    return Shown(_says(found), (_speed(found), _tpot(found)), _tables(found))


def _says(found: Found) -> str:
    alone, deepest, best = found.depths[0], found.depths[-1], found.best
    is_inside = alone.depth < best.depth < deepest.depth
    place = "and falls on both sides of it" if is_inside else "at the end of what was tried"
    grows = all(later.tokens_per_s.median >= earlier.tokens_per_s.median for earlier, later in pairwise(found.depths))
    fastest = max(found.depths, key=lambda each: each.tokens_per_s.median)
    most = "the deeper the more" if grows else f"the most at {fastest.depth}"
    return (
        f"One request alone gets {short(alone.tokens_per_s.median)} tokens a second; {fastest.depth} at once get "
        f"{short(fastest.tokens_per_s.median)} together ({most}), but then a token takes "
        f"{short(fastest.tpot_ms.median)} ms instead of {short(alone.tpot_ms.median)}. Under a limit of "
        f"{short(found.limit_ms)} ms a token ({LIMIT:g} times what it takes alone), goodput is highest at a depth of "
        f"{best.depth}, with {short(best.good_tokens_per_s.median)} tokens a second in time, {place}: at "
        f"{deepest.depth} it is {short(deepest.good_tokens_per_s.median)} of "
        f"{short(deepest.tokens_per_s.median)}. A queue in front of {best.depth} seats serves more people in time "
        "than a batch of them all."
    )


def _speed(found: Found) -> Chart:
    every = [(each.depth, each.tokens_per_s) for each in found.depths]
    good = [(each.depth, each.good_tokens_per_s) for each in found.depths]
    return chart(
        "Tokens a second by depth",
        "Speed grows with depth; the tokens of requests that keep the limit have a peak and fall.",
        axis_of("requests at once", [each.depth for each in found.depths]),
        linear_axis("tokens a second", max(spread.high for _, spread in every)),
        [
            line("all tokens", 0, every, unit="tokens/s"),
            line("of requests that kept the limit (goodput)", 2, good, unit="tokens/s"),
        ],
    )


def _tpot(found: Found) -> Chart:
    median = [(each.depth, each.tpot_ms) for each in found.depths]
    slow = [(each.depth, each.slow_tpot_ms) for each in found.depths]
    return chart(
        "Time per output token by depth",
        "A token takes longer the deeper the batch, until it passes the limit.",
        axis_of("requests at once", [each.depth for each in found.depths]),
        linear_axis("TPOT, ms", max(found.limit_ms, *(spread.high for _, spread in slow))),
        [line("the median request", 3, median, unit="ms"), line("the slowest tenth begins here", 4, slow, unit="ms")],
        rules=[Rule("y", found.limit_ms, f"limit {found.limit_ms:.0f} ms")],
    )


def _tables(found: Found) -> tuple[tuple[str, Table], ...]:
    return (
        table(
            f"By depth, limit {short(found.limit_ms)} ms a token",
            ("at once", "tokens/s", "in time, tokens/s", "TPOT p50, ms", "TPOT p90, ms", "requests in time"),
            (
                (
                    str(each.depth),
                    str(each.tokens_per_s),
                    str(each.good_tokens_per_s),
                    str(each.tpot_ms),
                    str(each.slow_tpot_ms),
                    f"{each.good_share:.0%}",
                )
                for each in found.depths
            ),
        ),
    )
