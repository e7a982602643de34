"""Tools with `strict: true`, whatever the engine does about it: a call that the client gets fits its schema."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, model

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str = "weather", *, strict: bool | None = True, parameters: Any = CITY) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


async def call(reply: Reply, index: int, name: str, *arguments: str) -> None:
    head = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
    for delta in (head, *({"index": index, "function": {"arguments": piece}} for piece in arguments)):
        choice = {"index": 0, "delta": {"tool_calls": [delta]}, "finish_reason": None}
        await reply.event(json.dumps({"choices": [choice]}).encode())


def calling(*calls: tuple[str, ...], says: str = "", reason: str = "tool_calls") -> Script:
    """An engine that answers with these calls: each a name and the pieces of its arguments."""

    async def script(reply: Reply) -> None:
        await reply.begin()
        if says:
            await reply.piece(says)
        for index, (name, *pieces) in enumerate(calls):
            await call(reply, index, name, *pieces)
        await reply.finish(reason)
        await reply.usage()
        await reply.done()

    return script


async def gateway_over(start: Start, upstream_of: UpstreamOf, *scripts: Script) -> Gateway:
    upstreams = [await upstream_of(script) for script in scripts]
    return await start(model(*(upstream.replica(f"r{number}") for number, upstream in enumerate(upstreams))))


def deltas_of(events: list[str]) -> list[dict[str, Any]]:
    choices = [choice for event in events if event != "[DONE]" for choice in json.loads(event)["choices"]]
    return [delta for choice in choices for delta in choice["delta"].get("tool_calls") or ()]


GOOD = ("weather", '{"city":', ' "Rome"}')
BAD = ("weather", '{"city": ', "5}")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_calls_that_fit_arrive_whole_and_in_order(start: Start, upstream_of: UpstreamOf, is_stream: bool) -> None:
    gateway = await gateway_over(start, upstream_of, calling(GOOD, ("now",), says="Let me see."))
    tools = [tool(), tool("now", parameters=None)]
    if is_stream:
        told = deltas_of(await gateway.events(tools=tools))
        assert [each.pop("index") for each in told] == [0, 1]
    else:
        _, body, _ = await gateway.chat(tools=tools)
        told = body["choices"][0]["message"]["tool_calls"]
        assert body["choices"][0]["message"]["content"] == "Let me see."
    functions = [each["function"] for each in told]
    assert functions == [{"name": "weather", "arguments": '{"city": "Rome"}'}, {"name": "now", "arguments": "{}"}]


async def test_text_goes_out_at_once_and_a_call_only_when_it_is_whole(start: Start, upstream_of: UpstreamOf) -> None:
    go_on = asyncio.Event()

    async def script(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("Let me see.")
        await call(reply, 0, "weather", '{"city": "Rome"')
        await go_on.wait()
        await call(reply, 1, "weather", '{"city": "Oslo"}')
        await reply.event(
            b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"}"}}]}}]}'
        )
        await reply.finish("tool_calls")
        await reply.done()

    gateway = await gateway_over(start, upstream_of, script)
    stream = await gateway.openai.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Weather?"}], tools=[tool()], stream=True
    )
    seen: list[Any] = []
    async for chunk in stream:
        delta = chunk.choices[0].delta
        if delta.content:
            seen.append(delta.content)
            go_on.set()
        seen.extend(each.function.arguments for each in delta.tool_calls or ())
    assert seen == ["Let me see.", '{"city": "Rome"}', '{"city": "Oslo"}']


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("calls", "fault"),
    [
        ([BAD], "`properties.city.type` does not hold"),
        ([("weather",)], "`required` does not hold"),
        ([("weather", '{"city": "Ro')], "they are no JSON"),
        ([GOOD, ("weather", '{"city": "Rome", "x": 1}')], "`additionalProperties` does not hold"),
        ([("wether", '{"city": "Rome"}')], "none of the tools"),
    ],
)
async def test_a_call_that_does_not_fit_is_an_error_by_name_and_nothing_of_it_goes_out(
    start: Start, upstream_of: UpstreamOf, calls: list[tuple[str, ...]], fault: str, is_stream: bool
) -> None:
    gateway = await gateway_over(start, upstream_of, calling(*calls))
    status, body, _ = await gateway.chat(tools=[tool()], stream=is_stream)
    assert (status, body["error"]["code"]) == (502, "tool_call_invalid")
    assert fault in body["error"]["message"]
    assert "Rome" not in body["error"]["message"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_another_replica_is_asked_where_nothing_has_gone_out(
    start: Start, upstream_of: UpstreamOf, is_stream: bool
) -> None:
    gateway = await gateway_over(start, upstream_of, calling(GOOD, BAD), calling(GOOD))
    if is_stream:
        told = deltas_of(await gateway.events(tools=[tool()]))
    else:
        status, body, headers = await gateway.chat(tools=[tool()])
        assert (status, headers["x-goodgate-replica"]) == (200, "r1")
        told = body["choices"][0]["message"]["tool_calls"]
    assert [each["function"]["arguments"] for each in told] == ['{"city": "Rome"}']


async def test_after_text_has_gone_out_the_stream_ends_with_the_error(start: Start, upstream_of: UpstreamOf) -> None:
    gateway = await gateway_over(start, upstream_of, calling(BAD, says="Let me see."), calling(GOOD))
    events = await gateway.events(tools=[tool()])
    assert not deltas_of([event for event in events if "error" not in json.loads(event)])
    assert json.loads(events[-1])["error"]["code"] == "tool_call_invalid"


async def test_the_other_dialects_keep_the_promise_too(start: Start, upstream_of: UpstreamOf) -> None:
    gateway = await gateway_over(start, upstream_of, calling(BAD))
    function = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
    with pytest.raises(openai.InternalServerError) as refused:
        await gateway.openai.responses.create(model="m", input="Weather?", tools=[function])
    assert refused.value.code == "tool_call_invalid"
    with pytest.raises(anthropic.InternalServerError, match="do not fit its strict schema"):
        await gateway.anthropic.messages.create(
            model="m",
            max_tokens=9,
            messages=[{"role": "user", "content": "Weather?"}],
            tools=[{"name": "weather", "input_schema": CITY, "strict": True}],
        )


async def test_a_call_that_the_limit_has_cut_is_left_out_and_the_reason_says_so(
    start: Start, upstream_of: UpstreamOf
) -> None:
    gateway = await gateway_over(start, upstream_of, calling(GOOD, ("weather", '{"city": "Os'), reason="length"))
    _, body, _ = await gateway.chat(tools=[tool()])
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length"
    assert [each["function"]["arguments"] for each in choice["message"]["tool_calls"]] == ['{"city": "Rome"}']


async def test_a_tool_that_is_not_strict_is_not_held_to_its_schema(start: Start, upstream_of: UpstreamOf) -> None:
    gateway = await gateway_over(start, upstream_of, calling(BAD))
    for tools in ([tool(strict=False)], [tool(strict=None)], [tool(strict=False), tool("other")]):
        _, body, _ = await gateway.chat(tools=tools)
        assert body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": 5}'


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "objekt"}, "Invalid enum value 'objekt'"),
        ({"$ref": "http://127.0.0.1:1/x.json"}, "leads out of it"),
        ({"properties": {"a": {"pattern": "(?!x)"}}}, "linear time"),
        ("none", "Expected `object | null`"),
    ],
)
async def test_a_schema_that_no_call_can_be_held_to_is_refused_by_its_place(
    start: Start, upstream_of: UpstreamOf, parameters: Any, words: str
) -> None:
    upstream = await upstream_of(calling(GOOD))
    gateway = await start(model(upstream.replica()))
    status, body, _ = await gateway.chat(tools=[tool("first"), tool(parameters=parameters)])
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "tools[1].function.parameters" in body["error"]["message"]
    assert words in body["error"]["message"]
    assert upstream.num_generations == 0
    status, _, _ = await gateway.chat(tools=[tool("weather", strict=False, parameters=CITY)])
    assert status == 200


async def test_more_strict_tools_than_can_be_checked_are_refused(start: Start, upstream_of: UpstreamOf) -> None:
    gateway = await gateway_over(start, upstream_of, calling(GOOD))
    status, body, _ = await gateway.chat(tools=[tool(f"t{number}") for number in range(129)])
    assert (status, body["error"]["message"]) == (400, "At most 128 tools may be strict.")


async def test_a_client_that_leaves_while_a_call_is_held_stops_the_engine(
    start: Start, upstream_of: UpstreamOf
) -> None:
    held = asyncio.Event()

    async def script(reply: Reply) -> None:
        await reply.begin()
        await call(reply, 0, "weather", '{"city": ')
        held.set()
        await reply.until_left()

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    asking = asyncio.create_task(gateway.chat(tools=[tool()], stream=True))
    await held.wait()
    asking.cancel()
    async with asyncio.timeout(5):
        while not upstream.num_closed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert upstream.num_closed == 1
