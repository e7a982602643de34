"""Bursts of requests straight into the engine: how fast is it, and where does a step's time go?

    python -m native_engine.bench --model PATH [--concurrency 1,8,32] [--prompt-tokens 130] [--out 64] [--profile]

Every prompt is different, so the prefix cache has no part in it. Greedy, end-of-text ignored. tok/s counts output
tokens over the wall time of the whole burst, prefill included; TTFT is from the burst's start; TPOT leaves out the
first token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from native_engine.config import Dtype, EngineConfig
from native_engine.engine import Engine
from native_engine.loading import LoadedModel, load
from native_engine.sampling_params import SamplingParams


@dataclass
class Burst:
    """Seconds since the burst's start, per request."""

    started: float
    token_times: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0

    @property
    def ttft_s(self) -> list[float]:
        return [times[0] for times in self.token_times.values()]

    @property
    def tpot_s(self) -> list[float]:
        return [(times[-1] - times[0]) / (len(times) - 1) for times in self.token_times.values() if len(times) > 1]

    @property
    def tokens_per_s(self) -> float:
        count = sum(map(len, self.token_times.values()))
        return count / max(times[-1] for times in self.token_times.values())


def run_burst(
    engine: Engine, vocab_size: int, requests: int, prompt_tokens: int, output_tokens: int, seed: int
) -> Burst:
    """Add all requests at once and step until the engine is idle."""
    source = random.Random(seed)
    params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
    burst = Burst(started=time.perf_counter())
    for number in range(requests):
        engine.add(str(number), source.choices(range(100, vocab_size), k=prompt_tokens), params)
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter() - burst.started
        burst.steps += 1
        for output in outputs:
            burst.token_times.setdefault(output.request_id, []).extend([now] * len(output.token_ids))
    return burst


class Profile:
    """Time inside the model's parts, by wrapping them. The wrapping itself costs a few microseconds a call."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._seconds: dict[str, float] = {}
        runner: Any = loaded.engine._runner
        model, backend = runner._model, runner._model._backend
        for name in ("attention", "add_rms_norm", "gate"):
            setattr(backend, name, self._timed(name, getattr(backend, name)))
        for name in ("qkv", "out", "gate_up", "down"):
            for layer in model._layers:
                object.__setattr__(layer, name, self._timed(f"linear {name}", getattr(layer, name)))
        model._head = self._timed("linear head", model._head)
        runner._sampler.sample = self._timed("sampler", runner._sampler.sample)
        runner.run = self._timed("runner in all", runner.run)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self._seconds[name] = 0.0

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            self._seconds[name] += time.perf_counter() - started
            return result

        return timed

    def reset(self) -> None:
        self._seconds = dict.fromkeys(self._seconds, 0.0)

    def lines(self, steps: int, wall_s: float) -> list[str]:
        runner = self._seconds["runner in all"]
        parts = {name: seconds for name, seconds in self._seconds.items() if name != "runner in all"}
        parts["runner, rest"] = runner - sum(parts.values())
        parts["scheduler and engine"] = wall_s - runner
        return [
            f"    {name:22s} {seconds / steps * 1e3:7.2f} ms a step  {seconds / wall_s:5.1%}"
            for name, seconds in sorted(parts.items(), key=lambda item: -item[1])
        ]


def main() -> None:
    options = _options()
    config = EngineConfig(
        dtype=options.dtype,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_threads=options.threads,
    )
    started = time.perf_counter()
    loaded = load(options.model, config)
    print(f"loaded in {time.perf_counter() - started:.1f} s, {config}")
    profile = Profile(loaded) if options.profile else None
    run_burst(loaded.engine, loaded.model_config.vocab_size, 4, options.prompt_tokens, 4, seed=0)
    for requests in options.concurrency:
        for repetition in range(options.repeat):
            if profile:
                profile.reset()
            seed = 1 + repetition + 1000 * requests
            burst = run_burst(
                loaded.engine, loaded.model_config.vocab_size, requests, options.prompt_tokens, options.out, seed
            )
            print(
                f"c={requests:<3d} {burst.tokens_per_s:7.1f} tok/s  "
                f"TTFT p50 {statistics.median(burst.ttft_s) * 1e3:6.1f} max {max(burst.ttft_s) * 1e3:6.1f} ms  "
                f"TPOT p50 {statistics.median(burst.tpot_s) * 1e3:6.2f} ms  {burst.steps} steps"
            )
            if profile:
                wall_s = max(times[-1] for times in burst.token_times.values())
                print("\n".join(profile.lines(burst.steps, wall_s)))


def _options() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m native_engine.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--concurrency", type=numbers, default=[1, 8, 32], metavar="N,N,...")
    parser.add_argument("--prompt-tokens", type=int, default=130)
    parser.add_argument("--out", type=int, default=64, help="output tokens per request; at least 2 to have a TPOT")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--max-num-batched-tokens", type=int, default=EngineConfig().max_num_batched_tokens)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="also print where a step's time goes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
