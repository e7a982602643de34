"""The burst table: what is counted, and over which time."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from adapters.errors import EngineError
from arena.load.burst import Answer, Burst, BurstShape, row, send_burst, summarise

USAGE = {"prompt_tokens": 9, "completion_tokens": 4}


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def test_a_burst_counts_from_its_start_to_the_last_token_of_the_last_answer() -> None:
    answers = [Answer(1.5, 2.5, 130, 11), Answer(1.7, 3.0, 132, 14)]
    burst = summarise(answers, start_s=1.0)
    assert burst.tokens_per_s == pytest.approx(25 / 2.0)
    assert burst.ttft_ms == pytest.approx(600)
    assert burst.tpot_ms == pytest.approx(100)
    assert burst.prompt_tokens == 131


def test_one_token_answers_have_no_tpot() -> None:
    assert summarise([Answer(1.5, 1.5, 10, 1)], start_s=1.0).tpot_ms is None


def test_a_row_shows_the_median_and_the_extremes() -> None:
    bursts = [Burst(100, 5, 10, 130), Burst(300, 7, 12, 130), Burst(200, 6, None, 130)]
    table_row = row("native", 8, bursts)
    assert (table_row.tokens_per_s, table_row.lo, table_row.hi) == (200, 100, 300)
    assert (table_row.ttft_ms, table_row.tpot_ms, table_row.rounds) == (6, 11, 3)


async def whole(request: web.Request) -> web.Response:
    body = await request.json()
    events = [*({"choices": [{"text": "hello "}]} for _ in range(body["max_tokens"])), {"choices": [], "usage": USAGE}]
    lines = [*map(json.dumps, events), "[DONE]"]
    return web.Response(text="".join(f"data: {line}\n\n" for line in lines), content_type="text/event-stream")


async def test_a_burst_sends_so_many_at_once_and_counts_what_the_engine_says() -> None:
    async with serving(whole) as url, aiohttp.ClientSession() as client:
        burst = await send_burst(client, url, "m", BurstShape(output_tokens=4), random.Random(1), 3)
    assert burst.prompt_tokens == 9
    assert burst.tokens_per_s > 0


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (web.Response(status=400, text="no such field"), "refuses a burst: HTTP 400 no such field"),
        (web.Response(text="data: [1]\n\n", content_type="text/event-stream"), "not OpenAI's"),
        (web.Response(text="data: [DONE]\n\n", content_type="text/event-stream"), "no text or no usage"),
    ],
)
async def test_a_burst_that_is_not_answered_is_told_in_a_sentence(answer: web.Response, told: str) -> None:
    async def say(_request: web.Request) -> web.Response:
        return answer

    async with serving(say) as url, aiohttp.ClientSession() as client:
        with pytest.raises(EngineError, match=told):
            await send_burst(client, url, "m", BurstShape(), random.Random(1), 1)
