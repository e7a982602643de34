"""Does speculation pay? Output tokens a second with and without it, in turn, on texts that repeat and on free ones.

    python -m native_engine.bench_speculation --model PATH [--concurrency 1,8] [--speculation ngram] [--rounds 5]

Both engines share the loaded model, and answer the same requests one after the other, each first every other time. The
ratio is the median over the rounds. A token that differs between the two ends the run: it would be a fault.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from native_engine.config import EngineConfig
from native_engine.engine import Engine
from native_engine.loading import load, make_engine
from native_engine.sampling_params import SamplingParams

PLACES = ("harbour", "mill", "library", "station", "orchard", "market", "bridge", "school")
FACTS = (
    "The {place} of the town was built in {year} by {count} people who had come from the north.",
    "In the winter of {later} the roof of the {place} burnt down, and the council met for {count} days.",
    "Since then the {place} has had two doors, a clock that is {count} minutes late, and a garden.",
    "Visitors of the {place} pay nothing before noon, and {count} crowns after it.",
    "Its keeper, whose name is not known, wrote a book about the {place} with {year} pages.",
)
CHAT = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def report_on(number: int) -> str:
    place, year = PLACES[number % len(PLACES)], 1701 + 23 * number
    return " ".join(fact.format(place=place, year=year, later=year + 41, count=3 + number) for fact in FACTS)


@dataclass(frozen=True)
class Workload:
    name: str
    question: Callable[[int], str]
    params: SamplingParams


GREEDY = SamplingParams(temperature=0, ignore_eos=True)
WORKLOADS = (
    Workload("copy", lambda number: f"Repeat this text word for word:\n\n{report_on(number)}", GREEDY),
    Workload("summary", lambda number: f"Summarise this text:\n\n{report_on(number)}", GREEDY),
    Workload("free", lambda number: f"Tell me a story about the {PLACES[number % len(PLACES)]}.", GREEDY),
    Workload(
        "free, sampled",
        lambda number: f"Tell me a story about the {PLACES[number % len(PLACES)]}.",
        replace(GREEDY, temperature=0.8, top_p=0.95),
    ),
)


@dataclass
class Run:
    answers: list[list[int]]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


_names = count()


def serve(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Run:
    """All at once, to their end."""
    place = {str(next(_names)): index for index in range(len(prompts))}
    answers: list[list[int]] = [[] for _ in prompts]
    started = time.perf_counter()
    for (name, index), prompt in zip(place.items(), prompts, strict=True):
        engine.add(name, prompt, replace(params, seed=index))
    while engine.has_work:
        for output in engine.step():
            answers[place[output.request_id]] += output.token_ids
    return Run(answers, time.perf_counter() - started)


def main() -> None:
    options = _options()
    config = EngineConfig(
        speculation=options.speculation,
        draft_model=options.draft_model,
        num_speculative_tokens=options.num_speculative_tokens,
        num_threads=options.threads,
    )
    loaded = load(options.model, config)
    plain_config = replace(config, speculation="off", draft_model=None)
    # The same weights under a scheduler without drafts; each engine has a cache of its own.
    plain = make_engine(loaded.engine._runner._model, plain_config)  # type: ignore[attr-defined]
    engines = {"off": plain, options.speculation: loaded.engine}
    for workload in WORKLOADS:
        for concurrency in options.concurrency:
            ratios: list[float] = []
            speeds: dict[str, list[float]] = {name: [] for name in engines}
            before = loaded.engine.stats()
            params = replace(workload.params, max_tokens=options.out)
            for round_number in range(options.rounds + 1):
                first = round_number * concurrency
                texts = [CHAT.format(question=workload.question(first + index)) for index in range(concurrency)]
                prompts = [loaded.tokenizer.encode(text) for text in texts]
                turn = list(engines) if round_number % 2 else list(reversed(engines))
                runs = {name: serve(engines[name], prompts, params) for name in turn}
                if runs["off"].answers != runs[options.speculation].answers:
                    raise SystemExit(f"{workload.name}: speculation has changed a token.")
                if round_number:  # the first one warms up
                    for name, run in runs.items():
                        speeds[name].append(run.tokens_per_s)
                    ratios.append(runs[options.speculation].tokens_per_s / runs["off"].tokens_per_s)
            after = loaded.engine.stats()
            drafted = after.draft_tokens - before.draft_tokens
            accepted = after.accepted_draft_tokens - before.accepted_draft_tokens
            told = "  ".join(f"{name} {statistics.median(each):6.1f} tok/s" for name, each in speeds.items())
            print(
                f"{workload.name:14s} c={concurrency:<3d} {told}  ratio {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})  accepted {accepted} of {drafted}",
                flush=True,
            )


def _options() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="python -m native_engine.bench_speculation", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--speculation", choices=("ngram", "draft"), default="ngram")
    parser.add_argument("--draft-model", type=Path, default=None)
    parser.add_argument("--num-speculative-tokens", type=int, default=EngineConfig().num_speculative_tokens)
    parser.add_argument("--concurrency", type=numbers, default=[1, 8], metavar="N,N,...")
    parser.add_argument("--out", type=int, default=96, help="output tokens per request")
    parser.add_argument("--rounds", type=int, default=5, help="beside a first one that warms up")
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
