"""Faults of the wire that were met in the field, replayed through the whole gateway: what the client sees of them.

What the adapters make of them is in tests/contract; the list of all is docs/wire-faults.md.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import openai
import pytest

from tests.contract.tgi_twin import TGITwin
from tests.gateway.rig import HELLO, Gateway, Reply, Script, Start, Upstream, fake_model, model, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


@pytest.fixture
async def tgi() -> AsyncIterator[TGITwin]:
    async with TGITwin() as twin:
        yield twin


def served_by(tgi: TGITwin, **options: Any) -> dict[str, Any]:
    return model({"engine": "tgi", "options": {"url": tgi.url, **options}})


# ------------------------------ streams


@pytest.mark.replay("W02")
async def test_one_event_of_300_kb_reaches_the_client_whole(start: Start, upstream_of: UpstreamOf) -> None:
    long = "x" * 300_000

    async def script(reply: Reply) -> None:
        await reply.answer(long)

    gateway = await start(model((await upstream_of(script)).replica()))
    stream = await gateway.openai.chat.completions.create(**HELLO, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == long


@pytest.mark.replay("W18")
async def test_comments_and_pings_of_the_engine_are_not_passed_on(start: Start, upstream_of: UpstreamOf) -> None:
    noise = b": keep-alive\n\n:\n\ndata: : keepalive\n\nevent: ping\ndata: {}\n\nid: 7\n\n"

    async def script(reply: Reply) -> None:
        await reply.begin()
        await reply.block(noise)
        await reply.piece("a")
        await reply.block(noise)
        await reply.finish()
        await reply.done()

    gateway = await start(model((await upstream_of(script)).replica()))
    async with gateway.client.post(f"{gateway.url}/v1/chat/completions", json={**HELLO, "stream": True}) as response:
        lines = [line for line in (await response.text()).split("\n") if line]
    assert all(line.startswith("data: {") for line in lines[:-1])
    assert lines[-1] == "data: [DONE]"


@pytest.mark.replay("W22")
async def test_every_token_passes_at_once_and_no_proxy_is_invited_to_hold_it(
    start: Start, upstream_of: UpstreamOf
) -> None:
    sent: list[float] = []

    async def script(reply: Reply) -> None:
        await reply.begin()
        for text in "abcde":
            sent.append(time.monotonic())
            await reply.piece(text)
            await asyncio.sleep(0.1)
        await reply.finish()
        await reply.done()

    gateway = await start(model((await upstream_of(script)).replica()))
    seen = []
    headers = {"Accept-Encoding": "gzip, deflate, br"}
    request = gateway.client.post(f"{gateway.url}/v1/chat/completions", json={**HELLO, "stream": True}, headers=headers)
    async with request as response:
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "no-cache" in response.headers["Cache-Control"]
        assert not {"Content-Length", "Content-Encoding"} & set(response.headers)
        async for line in response.content:
            if b'"content":"' in line and b'"content":""' not in line:
                seen.append(time.monotonic())
    assert len(seen) == len(sent) == 5
    lags = sorted(there - here for here, there in zip(sent, seen, strict=True))
    assert lags[2] < 0.05  # the median: a busy machine may delay one, a buffer would delay all but the last


@pytest.mark.replay("W23")
async def test_a_compressed_answer_leaves_plain_and_without_the_engines_header(
    start: Start, upstream_of: UpstreamOf
) -> None:
    body = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'

    async def script(reply: Reply) -> None:
        packed = gzip.compress(body)
        await reply.raw(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
            b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(packed), packed)
        )

    gateway = await start(model((await upstream_of(script)).replica()))
    for fields in ({"stream": True}, {}):
        # A client that unpacks nothing: what it reads is what was sent.
        async with (
            aiohttp.ClientSession(auto_decompress=False) as client,
            client.post(f"{gateway.url}/v1/chat/completions", json={**HELLO, **fields}) as response,
        ):
            assert "Content-Encoding" not in response.headers
            assert b'"content":"a"' in await response.read()


# ------------------------------ sizes


@pytest.mark.replay("W24")
async def test_a_prompt_of_3_mb_reaches_the_engine_whole(start: Start, upstream_of: UpstreamOf) -> None:
    async def script(reply: Reply) -> None:
        await reply.answer("ok")

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    prompt = "word " * 600_000
    status, body, _ = await gateway.chat(messages=[{"role": "user", "content": prompt}])
    assert (status, body["choices"][0]["message"]["content"]) == (200, "ok")
    assert json.loads(upstream.requests[0].body)["messages"][0]["content"] == prompt


@pytest.mark.replay("W24")
async def test_an_engine_that_takes_less_than_we_do_says_413_in_our_envelope(start: Start, tgi: TGITwin) -> None:
    gateway = await start(served_by(tgi))
    status, body, _ = await gateway.chat(messages=[{"role": "user", "content": "x" * (3 << 20)}])
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    assert body["error"]["message"] == "Failed to buffer the request body: length limit exceeded"


# ------------------------------ requests


@pytest.mark.replay("W06")
async def test_the_official_client_may_ask_for_what_tgi_itself_refuses(start: Start, tgi: TGITwin) -> None:
    gateway = await start(served_by(tgi))
    answer = await gateway.openai.chat.completions.create(
        **HELLO, temperature=0, top_p=1, stop="nothing", presence_penalty=0, max_tokens=5
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert tgi.requests[-1][1]["stop"] == ["nothing"]
    assert not {"top_p", "presence_penalty"} & set(tgi.requests[-1][1])


@pytest.mark.replay("W12")
async def test_a_part_that_no_engine_here_reads_is_refused_and_texts_are_joined(start: Start, tgi: TGITwin) -> None:
    gateway = await start(served_by(tgi))
    text = {"type": "text", "text": "Hello"}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    status, body, _ = await gateway.chat(messages=[{"role": "user", "content": [text, image]}])
    assert (status, body["error"]["param"]) == (400, "messages")
    assert tgi.requests == []
    assert (await gateway.chat(messages=[{"role": "user", "content": [text, text]}]))[0] == 200
    assert tgi.requests[-1][1]["messages"][0]["content"] == "HelloHello"


@pytest.mark.replay("W21")
async def test_a_field_that_engines_once_ignored_is_refused_by_name(start: Start, upstream_of: UpstreamOf) -> None:
    async def script(reply: Reply) -> None:
        await reply.answer("ok")

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    for field, value in {"guided_json": {"type": "object"}, "guided_regex": "a+", "grammar": "root ::= x"}.items():
        status, body, _ = await gateway.chat(**{field: value})
        assert (status, body["error"]["param"]) == (400, field)
    assert upstream.num_generations == 0


@pytest.mark.replay("W27")
async def test_a_presence_penalty_is_refused_where_the_engine_would_mistake_it(start: Start, tgi: TGITwin) -> None:
    gateway = await start(served_by(tgi))
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.openai.chat.completions.create(**HELLO, presence_penalty=0.5)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "presence_penalty")
    assert tgi.requests == []


# ------------------------------ errors


@pytest.mark.replay("W07", "G17")
async def test_an_error_under_status_200_reaches_the_official_client_as_its_exception(
    start: Start, tgi: TGITwin
) -> None:
    gateway = await start(served_by(tgi))
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await gateway.openai.chat.completions.create(**HELLO, max_tokens=4000, stream=stream)
        assert refused.value.code == "context_length_exceeded"


# ------------------------------ tools


@pytest.mark.replay("W04")
async def test_a_tool_call_of_an_engine_that_never_says_tool_calls_is_one_to_the_official_client(
    start: Start, tgi: TGITwin
) -> None:
    gateway = await start(served_by(tgi))
    asked: dict[str, Any] = {**HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 99}
    whole = (await gateway.openai.chat.completions.create(**asked)).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"city": "alpha"}  # type: ignore[union-attr]
    stream = await gateway.openai.chat.completions.create(**asked, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [call.function.name for call in calls if call.function and call.function.name] == ["weather"]
    assert json.loads("".join(call.function.arguments or "" for call in calls if call.function)) == {"city": "alpha"}
    assert choices[-1].finish_reason == "tool_calls"


# ------------------------------ leaving


@pytest.mark.replay("W14")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_request_is_queued_gives_its_place_back(
    start: Start, stream: bool
) -> None:
    """The engine has one place; who waits for it and leaves must not take it later."""
    gateway = await start(fake_model(ttft_ms=300, max_concurrent=1))
    served = asyncio.create_task(gateway.chat())
    await until(lambda: gateway.open_requests.in_flight == 1)
    waiting = asyncio.create_task(_post(gateway, stream=stream))
    await until(lambda: gateway.open_requests.in_flight == 2)
    waiting.cancel()
    await until(lambda: gateway.open_requests.in_flight == 1, timeout_s=0.5)
    assert (await served)[0] == 200
    assert gateway.open_requests.in_flight == 0


async def _post(gateway: Gateway, **fields: Any) -> bytes:
    body = io.BytesIO(json.dumps({**HELLO, **fields}).encode())
    headers = {"Content-Type": "application/json"}
    async with gateway.client.post(f"{gateway.url}/v1/chat/completions", data=body, headers=headers) as response:
        return await response.read()
