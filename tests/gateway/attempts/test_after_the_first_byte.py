"""A stream that breaks after its first byte: its client sees that in every dialect, nothing is begun anew in silence,
and the records say so."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, model, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]

WORDS = [f"w{number} " for number in range(60)]
HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 100},
    "/v1/responses": {"input": "Hello"},
}
# What an answer that is whole ends with, in each dialect.
WHOLE = re.compile(r'\[DONE\]|"finish_reason": ?"\w+"|message_stop|"end_turn"|response\.completed')


async def some(reply: Reply, num_words: int) -> None:
    await reply.begin()
    for word in WORDS[:num_words]:
        if "/completions" in reply.request.path and "chat" not in reply.request.path:
            await reply.event(b'{"choices":[{"index":0,"text":"%s","finish_reason":null}]}' % word.encode())
        else:
            await reply.piece(word)
    await asyncio.sleep(0.05)  # the gateway has read it


async def reset_after_40(reply: Reply) -> None:
    await some(reply, 40)
    reply.reset()


async def reset_after_1(reply: Reply) -> None:
    await some(reply, 1)
    reply.reset()


async def reset_inside_a_chunk(reply: Reply) -> None:
    await some(reply, 20)
    await reply.raw(b'3e\r\ndata: {"choices":[{"index":0,"delta":{"content":"SECRET')
    await asyncio.sleep(0.02)
    reply.reset()


async def end_without_done(reply: Reply) -> None:
    await some(reply, 40)
    await reply.end()


async def silence_after_20(reply: Reply) -> None:
    await some(reply, 20)
    await reply.until_left()


FAULTS = [reset_after_40, reset_after_1, reset_inside_a_chunk, end_without_done, silence_after_20]


@pytest.mark.replay("F06", "F07", "F08", "S08", "S09", "G23", "G25")
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("script", FAULTS)
async def test_f06_f07_f08_s08_s09_an_answer_that_breaks_off_is_never_shown_as_whole(
    start: Start, upstream_of: UpstreamOf, script: Script, path: str
) -> None:
    bad, good = await upstream_of(script), await upstream_of(script)
    gateway = await start(
        model(bad.replica("a", token_timeout_s=0.4), good.replica("b"), routing="round_robin"),
        ledger={"keep": "file"},
    )
    async with gateway.client.post(gateway.url + path, json={"model": "m", "stream": True, **BODIES[path]}) as response:
        assert response.status == 200
        text = await response.text()
    code = "engine_timeout" if script is silence_after_20 else "stream_interrupted"
    assert not WHOLE.search(text)
    assert '"error"' in text
    assert "w0 " in text
    assert "SECRET" not in text
    assert good.num_generations == 0
    assert await errors(gateway) == {code: 1}
    assert await outcomes(gateway) == {code: 1}
    await until(lambda: bad.num_closed == 1 or script is end_without_done)
    await until(lambda: gateway.open_requests.in_flight == 0)


async def errors(gateway: Gateway) -> dict[str, float]:
    return await _samples(gateway, r'goodgate_errors_total\{code="(\w+)",model="m"\}')


async def outcomes(gateway: Gateway) -> dict[str, float]:
    return await _samples(gateway, r'goodgate_attempts_total\{.*outcome="(\w+)".*\}')


async def _samples(gateway: Gateway, series: str) -> dict[str, float]:
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        text = await response.text()
    return {label: float(value) for label, value in re.findall(rf"^{series} (\S+)$", text, re.MULTILINE)}


async def test_a_whole_answer_after_a_break_is_still_possible(start: Start, upstream_of: UpstreamOf) -> None:
    """The break concerns the one request: the next is served by the same replica."""

    async def once_broken(reply: Reply) -> None:
        if reply.number == 1:
            await reset_after_40(reply)
        else:
            await reply.answer("a", "b")

    gateway = await start(model((await upstream_of(once_broken)).replica()))
    *texts, last = await gateway.events()
    assert len(texts) == 41  # the opening and the words
    assert json.loads(last)["error"]["code"] == "stream_interrupted"
    assert (await gateway.events())[-1] == "[DONE]"
