"""The failure scenarios of failoverbench as the official client sees them, and their scores: a model with one broken
engine, two retries, and another model as its fallback; the answer has sixty words, and thirty seconds to come.

All times are a tenth of the benchmark's, the gateway's deadlines with them; only `Retry-After` has whole seconds.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from tests.fault_matrix import SCENARIOS, SCORES
from tests.gateway.rig import HELLO, Gateway, Reply, Script, Start, Upstream, free_port, model, until

UpstreamOf = Callable[..., Awaitable[Upstream]]

SCALE = 0.1
LIMIT_S = 30 * SCALE
DOWN_S = 3.0  # of S15's six: how long it was makes no difference after the first second
WORDS = [f"word{number} " for number in range(60)]
PATIENCE = {"connect_timeout_s": 5 * SCALE, "first_token_timeout_s": 12 * SCALE, "token_timeout_s": 12 * SCALE}


async def some(reply: Reply, num_words: int) -> None:
    await reply.begin()
    for word in WORDS[:num_words]:
        await reply.piece(word)


async def well(reply: Reply) -> None:
    await some(reply, 60)
    await reply.finish()
    await reply.usage(completion_tokens=60)
    await reply.done()


def refuses(status: int, *headers: str, code: str = "x", times: int = 10**9) -> Script:
    body = json.dumps({"error": {"message": "no", "type": "x", "code": code}}).encode()

    async def script(reply: Reply) -> None:
        if reply.number <= times:
            await reply.status(status, body, "Connection: close", *headers)
        else:
            await well(reply)

    return script


async def resets_once(reply: Reply) -> None:
    if reply.number == 1:
        reply.reset()
    else:
        await well(reply)


async def begins_after_20_s(reply: Reply) -> None:
    await asyncio.sleep(20 * SCALE)
    await well(reply)


async def is_cut_after_40_words(reply: Reply) -> None:
    await some(reply, 40)
    await asyncio.sleep(0.05)  # a reset overtakes what has not been read yet
    reply.reset()


async def stalls_after_20_words(reply: Reply) -> None:
    await some(reply, 20)
    await asyncio.sleep(30 * SCALE)
    await well(reply)


async def is_filtered(reply: Reply) -> None:
    await some(reply, 5)
    await reply.finish("content_filter")
    await reply.done()


@dataclass(frozen=True)
class Scenario:
    """`num_asked`: how often, at most, the engine may be asked for it; `reason`: how a whole answer ends."""

    engine: Script
    num_asked: int
    answered_by: str = "spare"
    reason: str = "stop"


# S15 is a test of its own.
PLAYED = {
    "S01": Scenario(refuses(429, "Retry-After: 2", times=1), num_asked=1),  # the fallback is there before its time
    "S02": Scenario(refuses(429), num_asked=4),
    "S03": Scenario(refuses(500, times=1), num_asked=2),
    "S04": Scenario(refuses(503), num_asked=3),
    "S05": Scenario(resets_once, num_asked=2),
    "S07": Scenario(begins_after_20_s, num_asked=1),
    "S08": Scenario(is_cut_after_40_words, num_asked=1),
    "S09": Scenario(stalls_after_20_words, num_asked=1),
    "S12": Scenario(refuses(400, code="context_length_exceeded"), num_asked=1),
    "S13": Scenario(is_filtered, num_asked=1, answered_by="m", reason="content_filter"),
    "S16": Scenario(refuses(500), num_asked=3),
}


@dataclass(frozen=True)
class Seen:
    score: str
    model: str = ""
    replica: str = ""


async def seen(gateway: Gateway, reason: str, *, is_stream: bool) -> Seen:
    """What becomes of one request, to a client that does nothing by itself."""
    try:
        async with asyncio.timeout(LIMIT_S):
            raw = await gateway.openai.chat.completions.with_raw_response.create(**HELLO, stream=is_stream)
            text, ended, by = await (_streamed if is_stream else _whole)(raw.parse())
    except openai.APIError:
        return Seen("safe")
    except TimeoutError:
        return Seen("failed")
    is_well = ended == reason and (reason != "stop" or text == "".join(WORDS))
    return Seen("passed" if is_well else "failed", by, raw.headers["x-goodgate-replica"])


async def _whole(answer: Any) -> tuple[str, str | None, str]:
    choice = answer.choices[0]
    return choice.message.content, choice.finish_reason, answer.model


async def _streamed(chunks: Any) -> tuple[str, str | None, str]:
    text, reason, by = "", None, ""
    async for chunk in chunks:
        by = chunk.model
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason, by


async def serving(start: Start, broken: dict[str, Any], upstream_of: UpstreamOf, **fields: Any) -> Gateway:
    spare = await upstream_of(well)
    return await start(
        model(broken, fallbacks=["spare"], context_fallbacks=["spare"], max_attempts=3),
        model(spare.replica("spare-0"), name="spare"),
        **fields,
    )


@pytest.mark.replay("S01", "S02", "S03", "S04", "S05", "S07", "S08", "S09", "S12", "S13", "S16")
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("number", PLAYED)
async def test_a_scenario_has_the_score_that_the_page_tells(
    start: Start, upstream_of: UpstreamOf, number: str, is_stream: bool
) -> None:
    scenario = PLAYED[number]
    engine = await upstream_of(scenario.engine)
    gateway = await serving(start, engine.replica("m-0", **PATIENCE), upstream_of)
    result = await seen(gateway, scenario.reason, is_stream=is_stream)
    assert result.score == (SCORES[number].streamed if is_stream else SCORES[number].whole)
    assert 1 <= engine.num_generations <= scenario.num_asked
    if result.score == "passed":
        assert (result.model, result.replica) == (scenario.answered_by, f"{scenario.answered_by}-0")
    if (result.score, result.model) == ("passed", "spare"):
        assert await accounted(gateway) == {"spare": 60}
    await until(lambda: gateway.open_requests.in_flight == 0)


async def accounted(gateway: Gateway) -> dict[str, float]:
    """Completion tokens by model."""
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        text = await response.text()
    tokens = re.findall(r'^goodgate_completion_tokens_total\{.*model="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in tokens if float(value)}


@pytest.mark.replay("S15")
async def test_s15_an_engine_that_is_back_is_used_again_and_nobody_is_refused_meanwhile(
    start: Start, upstream_of: UpstreamOf
) -> None:
    port = free_port()
    broken = {"engine": "vllm", "name": "m-0", "options": {"url": f"http://127.0.0.1:{port}", "model": "served"}}
    health = {"interval_s": 5 * SCALE, "recheck_s": 5 * SCALE}
    gateway = await serving(start, broken, upstream_of, health=health, is_ready=False)
    await until(lambda: gateway.fleet.models["spare"].replicas[0].is_ready)
    down_until = time.monotonic() + DOWN_S
    while time.monotonic() < down_until:
        assert (await seen(gateway, "stop", is_stream=True)).model == "spare"
        await asyncio.sleep(0.1)
    await upstream_of(well, port)
    back_at = time.monotonic()
    await until(lambda: gateway.fleet.models["m"].replicas[0].is_ready)
    answer = await seen(gateway, "stop", is_stream=True)
    assert answer == Seen(SCORES["S15"].streamed, "m", "m-0")
    assert (await seen(gateway, "stop", is_stream=False)).score == SCORES["S15"].whole
    assert time.monotonic() - back_at < 30 * SCALE


def test_every_scenario_is_played() -> None:
    assert {*PLAYED, "S15"} == set(SCENARIOS)
