"""What a broken engine's stream looks like to the client: whole, or visibly broken. Never a quiet end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import openai
import pytest

from adapters.base import Capabilities, EngineAdapter, EngineOptions, Health, ModelInfo
from adapters.types import Chunk, GenerateRequest, Usage
from tests.gateway.rig import HELLO, Reply, Script, Start, Upstream, model

UpstreamOf = Callable[[Script], Awaitable[Upstream]]


async def finish_then_eof(reply: Reply) -> None:
    await reply.begin()
    await reply.piece("a")
    await reply.finish()
    await reply.end()


@pytest.mark.replay("W03")
async def test_a_missing_done_is_supplied_exactly_once(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(finish_then_eof)
    gateway = await start(model(upstream.replica()))
    events = await gateway.events()
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"


async def cut_chunked(reply: Reply) -> None:
    await reply.begin()
    await reply.piece("a")
    await reply.piece("b")


async def clean_eof_without_finish(reply: Reply) -> None:
    await cut_chunked(reply)
    await reply.end()


async def rst(reply: Reply) -> None:
    await cut_chunked(reply)
    await asyncio.sleep(0.05)
    reply.reset()


async def rst_inside_an_event(reply: Reply) -> None:
    await cut_chunked(reply)
    await reply.raw(b'40\r\ndata: {"choices":[{"index":0,"delta":{"con')
    await asyncio.sleep(0.05)
    reply.reset()


async def error_event(reply: Reply) -> None:
    await cut_chunked(reply)
    await reply.event(b'{"error":{"message":"boom","type":"server_error","code":500}}')
    await reply.end()


async def error_event_then_done(reply: Reply) -> None:
    await cut_chunked(reply)
    await reply.event(b'{"error":{"message":"boom","type":"server_error","code":500}}')
    await reply.done()


async def not_json(reply: Reply) -> None:
    await cut_chunked(reply)
    await reply.event(b'{"choices":[{]}')
    await reply.done()


BROKEN = [cut_chunked, clean_eof_without_finish, rst, rst_inside_an_event, error_event, error_event_then_done, not_json]


@pytest.mark.replay("W08", "G23")
@pytest.mark.parametrize("script", BROKEN)
async def test_g23_a_stream_that_breaks_ends_in_one_error_and_no_done(
    start: Start, upstream_of: UpstreamOf, script: Script
) -> None:
    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    events = await gateway.events()
    assert "[DONE]" not in events
    errors = [json.loads(event)["error"] for event in events if "error" in json.loads(event)]
    assert len(errors) == 1
    assert set(errors[0]) == {"message", "type", "param", "code"}
    assert "error" in json.loads(events[-1])
    finishes = [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]]
    assert set(finishes) == {None}
    assert upstream.num_generations == 1  # after the first byte there is no second try


@pytest.mark.replay("W08")
@pytest.mark.parametrize("script", [rst, error_event])
async def test_the_official_client_raises_on_a_broken_stream(
    start: Start, upstream_of: UpstreamOf, script: Script
) -> None:
    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    stream = await gateway.openai.chat.completions.create(**HELLO, stream=True)
    text: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            text.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError):
        await read()
    assert "".join(text) == "ab"


@pytest.mark.replay("G16")
async def test_g16_done_inside_the_text_does_not_end_the_stream(start: Start, upstream_of: UpstreamOf) -> None:
    text = "before\n\ndata: [DONE]\n\nafter"

    async def script(reply: Reply) -> None:
        await reply.begin()
        await reply.event(json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode())
        await reply.finish()
        await reply.done()

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    stream = await gateway.openai.chat.completions.create(**HELLO, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text


@pytest.mark.replay("W16")
async def test_events_without_choices_are_harmless_wherever_they_come(start: Start, upstream_of: UpstreamOf) -> None:
    async def script(reply: Reply) -> None:
        await reply.begin()
        for text in ("a", "b"):
            await reply.event(b'{"choices":[]}')
            await reply.piece(text)
        await reply.event(b'{"choices":[]}')
        await reply.finish()
        await reply.event(b'{"choices":[]}')
        await reply.done()

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    events = [json.loads(event) for event in (await gateway.events())[:-1]]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "ab"


def usage_script(when: str) -> Script:
    """An engine that tells its usage at the end, or in every event, or never asked-for nulls before."""
    usage = b'{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}'

    async def script(reply: Reply) -> None:
        on_each = usage if when == "every event" else b"null"
        await reply.begin()
        for text in (b"a", b"b"):
            await reply.event(b'{"choices":[{"index":0,"delta":{"content":"%s"}}],"usage":%s}' % (text, on_each))
        await reply.event(b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":%s}' % on_each)
        if when == "at the end":
            await reply.event(b'{"choices":[],"usage":%s}' % usage)
        await reply.done()

    return script


@pytest.mark.replay("W17", "G15")
@pytest.mark.parametrize("when", ["at the end", "every event"])
async def test_g15_usage_is_counted_always_and_shown_only_to_who_asked(
    start: Start, upstream_of: UpstreamOf, when: str
) -> None:
    upstream = await upstream_of(usage_script(when))
    gateway = await start(model(upstream.replica()))
    without = [json.loads(event) for event in (await gateway.events())[:-1]]
    assert not any("usage" in event for event in without)
    shown = [json.loads(event) for event in (await gateway.events(stream_options={"include_usage": True}))[:-1]]
    assert [event["usage"] for event in shown[:-1]] == [None] * (len(shown) - 1)
    assert shown[-1]["choices"] == []
    assert shown[-1]["usage"]["total_tokens"] == 5
    assert json.loads(upstream.requests[0].body)["stream_options"]["include_usage"] is True
    metrics = await (await gateway.client.get(f"{gateway.url}/metrics")).text()
    assert 'goodgate_completion_tokens_total{engine="vllm",model="m",replica="vllm-0"} 4.0' in metrics


class Told(EngineAdapter[EngineOptions]):
    """An engine that yields what the test tells it to."""

    engine = "told"
    Options = EngineOptions
    capabilities = Capabilities(parameters=frozenset({"tools", "n", "logprobs", "top_logprobs"}))
    script: list[Any]

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> Health:
        return Health(True)

    async def models(self) -> list[ModelInfo]:
        return []

    async def generate(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        for item in self.script:
            if isinstance(item, Exception):
                raise item
            yield item


def told(*script: Any) -> dict[str, Any]:
    return {"told": type("Told", (Told,), {"script": list(script)})}


TOLD = {"engine": "told"}
END = (Chunk(finish_reason="stop"), Chunk(usage=Usage(1, 1)))


async def test_a_fault_in_an_adapter_is_a_500_with_the_requests_id_and_says_nothing_more(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start(model(TOLD), engines=told(KeyError("secret prompt")))
    status, body, headers = await gateway.chat()
    assert status == 500
    assert body["error"]["code"] == "internal_error"
    assert headers["x-request-id"] in body["error"]["message"]
    assert "secret" not in json.dumps(body)
    assert "Traceback" in caplog.text or any(record.exc_info for record in caplog.records)


async def test_a_fault_in_an_adapter_in_mid_stream_is_an_error_event(start: Start) -> None:
    gateway = await start(model(TOLD), engines=told(Chunk(text="a"), KeyError("x")))
    events = await gateway.events()
    assert json.loads(events[-1])["error"]["code"] == "internal_error"
    assert "[DONE]" not in events
    assert gateway.open_requests.in_flight == 0


async def test_an_engine_that_ends_without_a_chunk_or_a_finish_is_an_error_in_both_modes(start: Start) -> None:
    gateway = await start(model(TOLD), engines=told())
    assert (await gateway.chat())[0] == 502
    gateway = await start(model(TOLD), engines=told(Chunk(text="a"), Chunk(usage=Usage(1, 1))))
    status, body, _ = await gateway.chat()
    assert (status, body["error"]["code"]) == (502, "stream_interrupted")
    assert json.loads((await gateway.events())[-1])["error"]["code"] == "stream_interrupted"


async def test_a_choice_that_nobody_asked_for_is_a_protocol_error(start: Start) -> None:
    gateway = await start(model(TOLD), engines=told(Chunk(text="a", index=4), *END))
    status, body, _ = await gateway.chat()
    assert (status, body["error"]["code"]) == (502, "engine_protocol_error")


async def test_text_in_the_finish_chunk_still_ends_with_an_empty_delta(start: Start) -> None:
    gateway = await start(model(TOLD), engines=told(Chunk(text="a", finish_reason="length"), Chunk(usage=Usage(1, 1))))
    _, piece, last = [json.loads(event)["choices"][0] for event in (await gateway.events())[:-1]]
    assert piece["delta"] == {"content": "a"}
    assert piece["finish_reason"] is None
    assert (last["delta"], last["finish_reason"]) == ({}, "length")


@pytest.mark.replay("W13", "W15")
async def test_tool_calls_reasoning_and_logprobs_survive_in_both_modes(start: Start) -> None:
    calls = [
        [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}],
        [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{"}}],
        [{"index": 0, "function": {"arguments": "{}"}}],
        [{"index": 1, "function": {"arguments": "}"}}],
    ]
    probs = [
        {"content": [{"token": token, "logprob": -1.0, "bytes": None, "top_logprobs": []}], "refusal": None}
        for token in "xy"
    ]
    script = [
        Chunk(reasoning="hm"),
        *(Chunk(text=token, logprobs=_raw(each)) for token, each in zip("xy", probs, strict=True)),
        *(Chunk(tool_calls=_raw(call)) for call in calls),
        Chunk(finish_reason="tool_calls"),
        Chunk(usage=Usage(1, 1)),
    ]
    gateway = await start(model(TOLD), engines=told(*script))
    _, body, _ = await gateway.chat()
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == "hm"
    assert [(call["id"], call["function"]) for call in message["tool_calls"]] == [
        ("a", {"name": "f", "arguments": "{}"}),
        ("b", {"name": "g", "arguments": "{}"}),
    ]
    assert [each["token"] for each in body["choices"][0]["logprobs"]["content"]] == ["x", "y"]
    events = [json.loads(event)["choices"][0] for event in (await gateway.events())[:-1]]
    assert [e["delta"]["tool_calls"] for e in events if "tool_calls" in e["delta"]] == calls
    assert [e["logprobs"] for e in events if e["logprobs"]] == probs


@pytest.mark.replay("A34")
@pytest.mark.parametrize(
    "calls", [[{"index": "0"}], [{"function": "f"}], [{"function": {"arguments": {}}}], {"index": 0}, [1], "f"]
)
async def test_a34_tool_calls_that_make_no_sense_are_the_engines_fault(start: Start, calls: object) -> None:
    script = [Chunk(tool_calls=_raw(calls)), Chunk(finish_reason="tool_calls"), Chunk(usage=Usage(1, 1))]
    gateway = await start(model(TOLD), engines=told(*script))
    status, body, _ = await gateway.chat()
    assert (status, body["error"]["code"]) == (502, "engine_protocol_error")


@pytest.mark.replay("A34")
@pytest.mark.parametrize("logprobs", [{"content": 5}, {"content": "x"}, {"content": None, "refusal": None}, [1], 7])
async def test_a34_logprobs_that_make_no_sense_do_not_spoil_the_answer(start: Start, logprobs: object) -> None:
    script = [Chunk(text="a", logprobs=_raw(logprobs)), Chunk(finish_reason="stop"), Chunk(usage=Usage(1, 1))]
    gateway = await start(model(TOLD), engines=told(*script))
    status, body, _ = await gateway.chat()
    assert (status, body["choices"][0]["message"]["content"]) == (200, "a")


def _raw(value: object) -> Any:
    import msgspec

    return msgspec.Raw(json.dumps(value).encode())
