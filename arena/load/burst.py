"""A quick look at raw speed: c requests at once, all different, and the output tokens per second of the whole burst.

A burst is closed-loop and says nothing about latency targets; `arena run` is the verdict. Engines take turns, alone on
the machine, in the order A B C, C B A, so that a drift of the machine touches all of them alike.

    rows = await burst_table({"native": make_native, "vllm": make_vllm}, BurstShape(concurrency=(1, 32)))
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from rich.table import Table

from adapters.errors import EngineFailed, EngineProtocolError
from adapters.launching.launch import EngineProcess
from arena.load.asking import Refused, ask, model_names

COMPLETIONS = "/v1/completions"
WORDS = "time river stone market window garden engine letter winter summer bridge signal copper silver morning evening"
WARM_UP_REQUESTS = 4
PATIENCE = aiohttp.ClientTimeout(total=600)  # a deep burst on a slow machine takes minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstShape:
    """120 words are about 130 tokens for the tokenizer of the default model; the engines report the true count."""

    concurrency: tuple[int, ...] = (1, 8, 32)
    prompt_words: int = 120
    output_tokens: int = 64
    rounds: int = 3  # of each depth, each time an engine is up
    passes: int = 2  # how often each engine is started
    seed: int = 11


@dataclass(frozen=True, slots=True)
class Answer:
    """Stamps in seconds of one clock; `prompt_tokens` and `output_tokens` as the engine counts them."""

    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Burst:
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float | None
    prompt_tokens: float


@dataclass(frozen=True, slots=True)
class BurstRow:
    """Medians over all rounds of one engine at one depth; `lo` and `hi` are the slowest and the fastest round."""

    engine: str
    concurrency: int
    tokens_per_s: float
    lo: float
    hi: float
    ttft_ms: float
    tpot_ms: float | None
    prompt_tokens: float
    rounds: int


async def burst_table(
    engines: Mapping[str, Callable[[], EngineProcess]], shape: BurstShape, say: Callable[[str], None] = lambda _: None
) -> list[BurstRow]:
    """One row per engine and depth. An engine that does not start, or breaks, raises: a table has no holes."""
    bursts: dict[tuple[str, int], list[Burst]] = {}
    rng = random.Random(shape.seed)
    for number in range(shape.passes):
        for engine in list(engines) if number % 2 == 0 else reversed(list(engines)):
            say(f"{engine}: starting (pass {number + 1} of {shape.passes})")
            process = engines[engine]()
            async with process, _client() as client:
                served = await _first_model(client, process.url)
                fire = partial(send_burst, client, process.url, served, shape, rng)
                await fire(WARM_UP_REQUESTS)
                for depth in shape.concurrency:
                    say(f"{engine}: {depth} at once (pass {number + 1} of {shape.passes})")
                    for _ in range(shape.rounds):
                        burst = await fire(depth)
                        bursts.setdefault((engine, depth), []).append(burst)
    return [row(engine, depth, bursts[engine, depth]) for engine in engines for depth in shape.concurrency]


def render(rows: Sequence[BurstRow]) -> Table:
    """One line per engine and depth."""
    table = Table(box=None, header_style="bold")
    table.add_column("engine")
    for heading in ("at once", "tokens/s", "slowest-fastest", "TTFT p50", "TPOT p50", "prompt tokens", "rounds"):
        table.add_column(heading, justify="right")
    for each in rows:
        tpot = "-" if each.tpot_ms is None else f"{each.tpot_ms:.1f} ms"
        table.add_row(
            each.engine,
            str(each.concurrency),
            f"{each.tokens_per_s:.0f}",
            f"{each.lo:.0f}-{each.hi:.0f}",
            f"{each.ttft_ms:.0f} ms",
            tpot,
            f"{each.prompt_tokens:.0f}",
            str(each.rounds),
        )
    return table


def row(engine: str, depth: int, bursts: Sequence[Burst]) -> BurstRow:
    speeds = [burst.tokens_per_s for burst in bursts]
    tpots = [burst.tpot_ms for burst in bursts if burst.tpot_ms is not None]
    return BurstRow(
        engine=engine,
        concurrency=depth,
        tokens_per_s=statistics.median(speeds),
        lo=min(speeds),
        hi=max(speeds),
        ttft_ms=statistics.median(burst.ttft_ms for burst in bursts),
        tpot_ms=statistics.median(tpots) if tpots else None,
        prompt_tokens=statistics.median(burst.prompt_tokens for burst in bursts),
        rounds=len(bursts),
    )


def summarise(answers: Sequence[Answer], start_s: float) -> Burst:
    """Tokens per second count from the start of the burst to the last token of the last answer, prefill included."""
    gaps = [(a.last_token_s - a.first_token_s) / (a.output_tokens - 1) * 1e3 for a in answers if a.output_tokens > 1]
    return Burst(
        tokens_per_s=sum(a.output_tokens for a in answers) / (max(a.last_token_s for a in answers) - start_s),
        ttft_ms=statistics.median(a.first_token_s - start_s for a in answers) * 1e3,
        tpot_ms=statistics.median(gaps) if gaps else None,
        prompt_tokens=statistics.mean(a.prompt_tokens for a in answers),
    )


async def send_burst(
    client: aiohttp.ClientSession, url: str, model: str, shape: BurstShape, rng: random.Random, depth: int
) -> Burst:
    bodies = [_body(model, shape, rng) for _ in range(depth)]
    start_s = time.monotonic()  # the clock of the stamps
    answers = await asyncio.gather(*(_ask(client, url, body) for body in bodies))
    return summarise(answers, start_s)


def _body(model: str, shape: BurstShape, rng: random.Random) -> dict[str, Any]:
    """Every prompt starts with a number of its own, so that no engine can answer from its prefix cache."""
    words = WORDS.split()
    prompt = f"{rng.randrange(10**9)} " + " ".join(rng.choice(words) for _ in range(shape.prompt_words))
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": shape.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _ask(client: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Answer:
    try:
        answer = (await ask(client, url + COMPLETIONS, body)).answer
    except Refused as refusal:
        raise EngineFailed(f"{url}{COMPLETIONS} refuses a burst: {refusal}.") from refusal
    prompt, output = answer.in_tok_usage, answer.out_tok_usage
    if answer.first_gen_ns is None or answer.last_gen_ns is None or prompt is None or output is None:
        raise EngineProtocolError(f"{url} sent no text or no usage; look at its log.")
    return Answer(answer.first_gen_ns / 1e9, answer.last_gen_ns / 1e9, prompt, output)


def _client() -> aiohttp.ClientSession:
    """A connection for each request: some engines (llama.cpp) close it after a stream without saying so."""
    return aiohttp.ClientSession(timeout=PATIENCE, connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def _first_model(client: aiohttp.ClientSession, url: str) -> str:
    names = await model_names(client, url)
    if not names:
        raise EngineProtocolError(f"{url} lists no model; look at its log.")
    return names[0]
