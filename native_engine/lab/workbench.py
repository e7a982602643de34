"""One model, engines around it, and what became of requests: what every experiment works with.

    bench = Workbench(model, config, is_quick=False, say=print)
    engine = bench.engine(max_num_seqs=8)
    engine.add("a", bench.prompt(128), greedy(32))
    course = drive(engine)
    course.ttft_s("a"), course.gaps_s("a")

An engine is the one that serves, with a cache of its own; the model is loaded once. Prompts are random tokens, never
the same twice, so that nothing is found in a cache unless an experiment means it to be. Decoding is greedy and goes on
to `max_tokens`, so that lengths are what was asked for.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, TypeVar

from native_engine.capacity import MIB, bytes_per_token
from native_engine.config import EngineConfig
from native_engine.engine import Engine
from native_engine.errors import InvalidParams
from native_engine.loading import make_engine
from native_engine.models.decoder import Decoder
from native_engine.sampling_params import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """What repeats gave: their median, the least and the most."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        if self.count == 1 or short(self.low) == short(self.high):
            return short(self.median)
        return f"{short(self.median)} ({short(self.low)} to {short(self.high)})"


def short(value: float) -> str:
    """Three digits, never as a power of ten."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 1 else f"{value:.3g}"


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


class Workbench:
    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        is_quick: bool = False,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        """`config`: what engines are made with where an experiment says nothing else; the model was made for it."""
        self.model = model
        self.config = config
        self.is_quick = is_quick
        self.say = say
        self._source = random.Random(0)

    @property
    def max_len(self) -> int:
        """The model's context."""
        return self.model.config.max_model_len

    @property
    def token_bytes(self) -> int:
        return bytes_per_token(self.model.config, self.config.dtype, self.config.kv_cache_dtype)

    def mib_for(self, num_tokens: int) -> int:
        """A pool that holds so many tokens, in MiB: `kv_cache_mib`."""
        return -(-num_tokens * self.token_bytes // MIB)

    def engine(self, **changes: Any) -> Engine:
        """`changes`: fields of `EngineConfig`."""
        return make_engine(self.model, replace(self.config, **changes))

    def prompt(self, num_tokens: int) -> list[int]:
        """The lower ids are left out: special tokens lie there."""
        vocab_size = self.model.config.vocab_size
        return self._source.choices(range(vocab_size // 3, vocab_size), k=num_tokens)

    def pick(self, quick: T, full: T) -> T:
        """The smaller form of an experiment, or the whole one."""
        return quick if self.is_quick else full

    def need_context(self, num_tokens: int) -> None:
        if self.max_len < num_tokens:
            raise InvalidParams(
                f"This experiment needs a context of {num_tokens:,} tokens, and the model has {self.max_len:,}; "
                "choose another with --model."
            )

    def warm_up(self) -> None:
        """The first calls of a kernel take longer, and no experiment is about that."""
        engine = self.engine()
        for number, length in enumerate((min(300, self.max_len - 8), 40, 40)):
            engine.add(f"warm-up {number}", self.prompt(length), greedy(4))
        drive(engine)


class Step(NamedTuple):
    began_s: float
    ended_s: float
    num_tokens: int  # that were given out

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(slots=True)
class Course:
    """What became of the requests of one engine, in seconds since it was set off."""

    added_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    token_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    token_ids: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_cached: dict[str, int] = field(default_factory=dict)  # tokens of its prompt that were found in the cache
    steps: list[Step] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_s.values()))

    @property
    def seconds(self) -> float:
        return self.steps[-1].ended_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def ttft_s(self, request_id: str) -> float:
        return self.token_s[request_id][0] - self.added_s[request_id]

    def gaps_s(self, request_id: str) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_s[request_id])]

    def tpot_s(self, request_id: str) -> float:
        times = self.token_s[request_id]
        return (times[-1] - times[0]) / (len(times) - 1)


def drive(engine: Engine, before_step: Callable[[Course, float], None] = lambda course, now_s: None) -> Course:
    """Step until the engine has no work. `before_step` may add requests; it is called once more when there is none."""
    course = Course()
    started = time.perf_counter()
    while True:
        began = time.perf_counter() - started
        before_step(course, began)
        if not engine.has_work:
            return course
        outputs = engine.step()
        ended = time.perf_counter() - started
        course.steps.append(Step(began, ended, sum(len(output.token_ids) for output in outputs)))
        for output in outputs:
            course.token_s[output.request_id] += [ended] * len(output.token_ids)
            course.token_ids[output.request_id] += output.token_ids
            course.num_cached[output.request_id] = output.num_cached_tokens
