"""LangChain's model for OpenAI as a client: what it sends and reads beyond the official client. Skipped without it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import pytest

from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, fake_model, model

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

UpstreamOf = Callable[[Script], Awaitable[Upstream]]


def chat_model(gateway: Gateway) -> langchain_openai.ChatOpenAI:
    return langchain_openai.ChatOpenAI(
        model="m", base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, stream_usage=True
    )


async def test_an_answer_comes_whole_and_streamed_with_its_account(start: Start) -> None:
    chat = chat_model(await start(fake_model(tokens=4)))
    whole = await chat.ainvoke("Hello")
    assert (whole.usage_metadata["output_tokens"], whole.response_metadata["finish_reason"]) == (4, "stop")
    pieces = [piece async for piece in chat.astream("Hello")]
    assert "".join(piece.content for piece in pieces) == whole.content
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 4


async def test_tools_and_their_results_go_round(start: Start, upstream_of: UpstreamOf) -> None:
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    async def script(reply: Reply) -> None:
        if json.loads(reply.request.body)["messages"][-1]["role"] == "tool":
            await reply.answer("It is sunny.")
            return
        call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "R'}}
        await reply.begin()
        for delta in (call, {"index": 0, "function": {"arguments": 'ome"}'}}):
            choice = {"index": 0, "delta": {"tool_calls": [delta]}, "finish_reason": None}
            await reply.event(json.dumps({"choices": [choice]}).encode())
        await reply.finish("tool_calls")
        await reply.done()

    upstream = await upstream_of(script)
    chat = chat_model(await start(model(upstream.replica()))).bind_tools([weather])
    asked = await chat.ainvoke("Weather?")
    assert [(call["name"], call["args"], call["id"]) for call in asked.tool_calls] == [
        ("weather", {"city": "Rome"}, "c1")
    ]
    result = {"role": "tool", "content": weather(**asked.tool_calls[0]["args"]), "tool_call_id": "c1"}
    answer = await chat.ainvoke([{"role": "user", "content": "Weather?"}, asked, result])
    assert answer.content == "It is sunny."
