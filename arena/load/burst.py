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
from typing import Any

import aiohttp
import msgspec
from rich.table import Table

from adapters.errors import EngineError, GoodgateError
from adapters.launching.launch import EngineProcess
from adapters.wire.sse import EventSplitter

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
            async with process, _client(process.url) as client:
                served = await _served_model(client)
                await _burst(client, served, WARM_UP_REQUESTS, shape, rng)
                for depth in shape.concurrency:
                    say(f"{engine}: {depth} at once (pass {number + 1} of {shape.passes})")
                    for _ in range(shape.rounds):
                        burst = await _burst(client, served, depth, shape, rng)
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


async def _burst(client: aiohttp.ClientSession, model: str, depth: int, shape: BurstShape, rng: random.Random) -> Burst:
    bodies = [_body(model, shape, rng) for _ in range(depth)]
    start_s = time.perf_counter()
    answers = await asyncio.gather(*(_ask(client, body) for body in bodies))
    return summarise(answers, start_s)


def _body(model: str, shape: BurstShape, rng: random.Random) -> bytes:
    """Every prompt starts with a number of its own, so that no engine can answer from its prefix cache."""
    words = WORDS.split()
    prompt = f"{rng.randrange(10**9)} " + " ".join(rng.choice(words) for _ in range(shape.prompt_words))
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": shape.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def _ask(client: aiohttp.ClientSession, body: bytes) -> Answer:
    try:
        return await _read_answer(client, body)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineError(
            f"The engine did not answer: {str(error) or type(error).__name__}; look at its log."
        ) from error


async def _read_answer(client: aiohttp.ClientSession, body: bytes) -> Answer:
    splitter = EventSplitter()
    stamps: list[float] = []
    usage: dict[str, Any] | None = None
    headers = {"Content-Type": "application/json"}
    async with client.post("/v1/completions", data=body, headers=headers) as response:
        if response.status != 200:
            raise EngineError(f"The engine answered {response.status}: {(await response.text())[:200]}")
        async for data in response.content.iter_any():
            now = time.perf_counter()
            for event in splitter.feed(data):
                if event.data == b"[DONE]":
                    continue
                payload = msgspec.json.decode(event.data)
                if "error" in payload:
                    raise EngineError(f"The engine broke off: {payload['error']}")
                if any(choice.get("text") for choice in payload.get("choices") or []):
                    stamps.append(now)
                usage = payload.get("usage") or usage
    if not stamps or usage is None:
        raise EngineError("The engine sent no text or no usage; look at its log.")
    return Answer(stamps[0], stamps[-1], usage["prompt_tokens"], usage["completion_tokens"])


def _client(url: str) -> aiohttp.ClientSession:
    """A connection for each request: some engines (llama.cpp) close it after a stream without saying so."""
    return aiohttp.ClientSession(url, timeout=PATIENCE, connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def _served_model(client: aiohttp.ClientSession) -> str:
    async with client.get("/v1/models") as response:
        listing = await response.json(content_type=None)
    if not listing.get("data"):
        raise GoodgateError("The engine lists no model; look at its log.")
    name: str = listing["data"][0]["id"]
    return name
