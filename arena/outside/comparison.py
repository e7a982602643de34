"""The others and ours against one engine, in turn, and the tables of what each said.

    runs = against_truth(case, tools, bench)     # the scripted engine: what is true is known, in everybody's words
    runs = against_engine(url, ..., tools, bench)   # a real one: what ours stamped stands for the truth
    print(table(runs))

Tools alternate: a b c, c b a. Each round has prompts of its own, so that no prefix cache can serve them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from arena.load import scripted_engine as scripted
from arena.load.burst import WORDS
from arena.load.scripted_engine import DONE, RunningEngine, Script, Step, finish_event, text_event, usage_event
from arena.outside import ours
from arena.outside.answers import from_log
from arena.outside.definitions import DEFINITIONS, Answer, throughput
from arena.outside.tools import Claims, Load, Tool

OURS = "Goodgate"
DIFFERS = 0.02  # definitions that come out closer than this are shown as one
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where tools are installed, where their files go, and how much they send."""

    home: Path
    folder: Path
    tokenizer: Path
    rounds: int
    requests: int
    say: Say


@dataclass(frozen=True, slots=True)
class Run:
    """One tool's word on one run, and the answers that it was about."""

    claims: Claims
    answers: Sequence[Answer]


Runs = Mapping[str, Sequence[Run]]


@dataclass(frozen=True, slots=True)
class Case:
    title: str
    script: Script
    tokens: int


def _stream(title: str, *, events: int, gap_ms: float, tokens: int = 1, role: bool = False) -> Case:
    """The first words at 200 ms; the finish reason, the usage and [DONE] come with the last."""
    steps = [Step(0.0, scripted.role_event())] if role else []
    for index in range(events):
        usage = tokens * (index + 1) if tokens > 1 else None
        steps.append(Step(200 + gap_ms * index, text_event("word " * tokens, usage=usage)))
    count = events * tokens
    steps.append(Step(steps[-1].at_ms, finish_event() + usage_event(count) + DONE))
    return Case(title, Script(steps=[Step(step.at_ms, _named(step.data)) for step in steps]), count)


def _named(events: str) -> str:
    """AIPerf reads only events that say what they are."""
    return events.replace("data: {", 'data: {"object":"chat.completion.chunk",')


CASES = (
    _stream("16 events of a token each, 20 ms apart, the first after 200 ms", events=16, gap_ms=20),
    _stream("The same after an event that only names the role", events=16, gap_ms=20, role=True),
    _stream("8 events of four tokens each, 40 ms apart, with the count in every event", events=8, gap_ms=40, tokens=4),
)
SCRIPTED_RATE_RPS = 10.0


def against_truth(engine: RunningEngine, case: Case, tools: Sequence[Tool], bench: Bench) -> Runs:
    engine.play(case.script)

    def measured(name: str, load: Load, folder: Path) -> Run:
        engine.take_log()
        claims = _claims(name, tools, bench, load, folder)[0]
        return Run(claims, from_log(engine.take_log(), case.script, last=len(load.prompts)))

    loads = _loads(engine.url, scripted.MODEL, bench, rate_rps=SCRIPTED_RATE_RPS, tokens=case.tokens, words=20)
    return _in_turn(tools, bench, loads, measured, case.title)


def against_engine(url: str, model: str, tools: Sequence[Tool], bench: Bench, *, rate_rps: float, tokens: int) -> Runs:
    """Answers are those of our own runs, whoever's claims they stand beside."""

    def measured(name: str, load: Load, folder: Path) -> Run:
        return Run(*_claims(name, tools, bench, load, folder))

    loads = _loads(url, model, bench, rate_rps=rate_rps, tokens=tokens, words=120)
    runs = _in_turn(tools, bench, loads, measured, url)
    seen = [answer for run in runs[OURS] for answer in run.answers]
    return {name: [Run(run.claims, seen) for run in told] for name, told in runs.items()}


def _claims(
    name: str, tools: Sequence[Tool], bench: Bench, load: Load, folder: Path
) -> tuple[Claims, Sequence[Answer]]:
    if name == OURS:
        return ours.measure(load, folder)
    tool = next(tool for tool in tools if tool.name == name)
    return tool.measure(bench.home, load, folder), ()


def _loads(url: str, model: str, bench: Bench, *, rate_rps: float, tokens: int, words: int) -> Iterator[Load]:
    """Loads without end, equal but for their words."""
    rng = random.Random(7)
    vocabulary = WORDS.split()
    while True:
        prompts = [
            " ".join([str(rng.randrange(10**8, 10**9)), *rng.choices(vocabulary, k=words)])
            for _ in range(bench.requests)
        ]
        yield Load(
            url=url,
            model=model,
            tokenizer=bench.tokenizer,
            prompts=prompts,
            rate_rps=rate_rps,
            output_tokens=tokens,
        )


def _in_turn(
    tools: Sequence[Tool],
    bench: Bench,
    loads: Iterator[Load],
    measured: Callable[[str, Load, Path], Run],
    title: str,
) -> Runs:
    names = [OURS, *(tool.name for tool in tools)]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(bench.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            bench.say(f"{title}: {name}, round {number + 1} of {bench.rounds}")
            folder = bench.folder / f"{len(list(bench.folder.iterdir())):03}"
            runs[name].append(measured(name, next(loads), folder))
    return runs


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    said: Callable[[Claims], float | None]
    true: Callable[[Sequence[Answer], str], float | None]  # of answers, as that tool defines it


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _p99(values: Sequence[float]) -> float | None:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))] if values else None


def _ttfts(answers: Sequence[Answer], tool: str) -> list[float]:
    return [DEFINITIONS[tool](answer).ttft_ms for answer in answers]


def _tpots(answers: Sequence[Answer], tool: str) -> list[float]:
    return [tpot for answer in answers if (tpot := DEFINITIONS[tool](answer).tpot_ms) is not None]


def _itls(answers: Sequence[Answer], tool: str) -> list[float]:
    return [gap for answer in answers for gap in DEFINITIONS[tool](answer).itl_ms]


FIGURES = (
    Figure("TTFT p50, ms", lambda c: c.ttft_p50_ms, lambda a, tool: _median(_ttfts(a, tool))),
    Figure("TTFT p99, ms", lambda c: c.ttft_p99_ms, lambda a, tool: _p99(_ttfts(a, tool))),
    Figure("TPOT p50, ms", lambda c: c.tpot_p50_ms, lambda a, tool: _median(_tpots(a, tool))),
    Figure("ITL p50, ms", lambda c: c.itl_p50_ms, lambda a, tool: _median(_itls(a, tool))),
    Figure("ITL mean, ms", lambda c: c.itl_mean_ms, lambda a, tool: statistics.fmean(_itls(a, tool))),
    Figure("output tokens/s", lambda c: c.output_tokens_per_s, lambda a, tool: throughput(a)),
)


def table(runs: Runs, versions: Mapping[str, str]) -> str:
    """Medians over the rounds. In brackets what is true in the tool's own words, where that is not what we mean."""
    header = "| | true, as we define it | " + " | ".join(f"{name} {versions[name]}".strip() for name in runs) + " |"
    rows = [header, f"|---|{'---|' * (len(runs) + 1)}"]
    for figure in FIGURES:
        truth = _over([figure.true(run.answers, OURS) for told in runs.values() for run in told])
        cells = [_cell(figure, name, told) for name, told in runs.items()]
        rows.append(f"| {figure.title} | {_shown(truth)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(figure: Figure, name: str, told: Sequence[Run]) -> str:
    said = _over([figure.said(run.claims) for run in told])
    own = _over([figure.true(run.answers, name) for run in told])
    as_ours = _over([figure.true(run.answers, OURS) for run in told])
    differs = own is not None and as_ours is not None and abs(own - as_ours) > DIFFERS * as_ours
    return f"{_shown(said)} ({_shown(own)})" if differs else _shown(said)


def _over(values: Sequence[float | None]) -> float | None:
    return _median([value for value in values if value is not None])


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
