"""Each deadline is a clock of its own: it ends what it is for, and lets everything else take its time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

import pytest

from tests.gateway.rig import Reply, Script, Start, Upstream, model, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]

SHORT_S, PAUSE_S, GENEROUS_S = 0.25, 0.6, 30.0
CLOCKS = ("connect_timeout_s", "first_token_timeout_s", "token_timeout_s", "total_timeout_s")


async def pause_before_the_first_token(reply: Reply) -> None:
    await reply.begin()
    await asyncio.sleep(PAUSE_S)
    for _ in range(3):
        await reply.piece("word ")
    await reply.finish()
    await reply.done()


async def pause_between_tokens(reply: Reply) -> None:
    await reply.begin()
    await reply.piece("word ")
    await asyncio.sleep(PAUSE_S)
    await reply.piece("word ")
    await reply.piece("word ")
    await reply.finish()
    await reply.done()


async def no_pause_but_a_long_answer(reply: Reply) -> None:
    await reply.begin()
    for _ in range(3):
        await reply.piece("word ")
        await asyncio.sleep(PAUSE_S / 4)
    await reply.finish()
    await reply.done()


ENDS = {
    (pause_before_the_first_token, "first_token_timeout_s"): "engine_timeout",
    (pause_before_the_first_token, "total_timeout_s"): "deadline_exceeded",
    (pause_between_tokens, "token_timeout_s"): "engine_timeout",
    (pause_between_tokens, "total_timeout_s"): "deadline_exceeded",
    (no_pause_but_a_long_answer, "total_timeout_s"): "deadline_exceeded",
}


@pytest.mark.replay("G33")
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize(
    "script", [pause_before_the_first_token, pause_between_tokens, no_pause_but_a_long_answer], ids=lambda s: s.__name__
)
async def test_g33_only_the_clock_that_is_for_it_ends_an_answer(
    start: Start, upstream_of: UpstreamOf, script: Script, clock: str
) -> None:
    seconds = {each: SHORT_S if each == clock else GENEROUS_S for each in CLOCKS}
    total_timeout_s = seconds.pop("total_timeout_s")
    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica(**seconds), total_timeout_s=total_timeout_s))
    began = time.monotonic()
    async with gateway.client.post(
        f"{gateway.url}/v1/chat/completions",
        json={"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True},
    ) as response:
        text = await response.text()
    expected = ENDS.get((script, clock))
    if expected is None:
        assert text.count("word ") == 3
        assert text.endswith("data: [DONE]\n\n")
        return
    assert SHORT_S <= time.monotonic() - began < GENEROUS_S / 2
    assert json.loads(text.removesuffix("\n\n").rpartition("data: ")[2])["error"]["code"] == expected
    assert "[DONE]" not in text
    assert upstream.num_generations == 1
    await until(lambda: upstream.num_closed == 1)
    await until(lambda: gateway.open_requests.in_flight == 0)
