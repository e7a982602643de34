"""OpenAI's agents kit as a client, unmodified: its runner drives the loop, through both faces of the gateway.

The kit makes every tool strict and asks for structured output by schema; it sends items of earlier answers back, or
`previous_response_id`. Tracing is off: nothing here may reach for the network.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import agents
import pytest
from pydantic import BaseModel

from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, model

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
QUIET = agents.RunConfig(tracing_disabled=True)


class Sky(BaseModel):
    city: str
    degrees: int


@agents.function_tool
async def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return {"Rome": "27", "Oslo": "9"}[city]


@agents.function_tool
def broken() -> str:
    """A tool that fails."""
    raise RuntimeError("no connection to the weather station")


def sent(upstream: Upstream, number: int) -> dict[str, Any]:
    return dict(json.loads(upstream.requests[number - 1].body))


async def tell(reply: Reply, *calls: tuple[str, str], text: str = "", thought: str = "") -> None:
    """A whole answer: thought, text, calls by name and arguments."""
    fields: list[dict[str, Any]] = [{"reasoning": thought}] if thought else []
    fields += [{"content": text}] if text else []
    for index, (name, arguments) in enumerate(calls):
        half = len(arguments) // 2
        head = {"index": index, "id": f"call_{reply.number}{index}", "type": "function"}
        fields.append({"tool_calls": [{**head, "function": {"name": name, "arguments": arguments[:half]}}]})
        fields.append({"tool_calls": [{"index": index, "function": {"arguments": arguments[half:]}}]})
    await reply.begin()
    for delta in fields:
        await reply.event(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode())
    await reply.finish("tool_calls" if calls else "stop")
    await reply.usage(30, 12)
    await reply.done()


async def weather_model(reply: Reply) -> None:
    """Asks for two cities at once, then for nothing more."""
    turns = json.loads(reply.request.body)["messages"]
    results = {turn["tool_call_id"]: turn["content"] for turn in turns if turn["role"] == "tool"}
    if results:
        await tell(reply, text=f"Rome {results['call_10']}, Oslo {results['call_11']}.")
    else:
        calls = [("get_weather", '{"city": "Rome"}'), ("get_weather", '{"city": "Oslo"}')]
        await tell(reply, *calls, thought="Two cities, two calls.")


FACES = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}


def agent(gateway: Gateway, face: str, **fields: Any) -> agents.Agent[Any]:
    spoken = FACES[face](model="m", openai_client=gateway.openai)
    return agents.Agent(name="Forecaster", instructions="Use your tools.", model=spoken, **fields)


COUNTED = agents.ModelSettings(include_usage=True)  # the kit asks a stream of chats for its account only then


async def run(asked: agents.Agent[Any], said: Any, *, is_stream: bool, **options: Any) -> Any:
    if not is_stream:
        return await agents.Runner.run(asked, said, run_config=QUIET, **options)
    result = agents.Runner.run_streamed(asked, said, run_config=QUIET, **options)
    async for _ in result.stream_events():
        pass
    return result


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("face", FACES)
async def test_the_runner_calls_its_tools_and_ends_with_the_answer(
    start: Start, upstream_of: UpstreamOf, face: str, is_stream: bool
) -> None:
    upstream = await upstream_of(weather_model)
    gateway = await start(model(upstream.replica()))
    asked = agent(gateway, face, tools=[get_weather], model_settings=COUNTED)
    result = await run(asked, "Where is it warmer?", is_stream=is_stream)
    assert result.final_output == "Rome 27, Oslo 9."
    assert result.context_wrapper.usage.output_tokens == 24
    first, second = sent(upstream, 1), sent(upstream, 2)
    assert first["tools"][0]["function"]["strict"] is True
    assert [turn["role"] for turn in second["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert [each["id"] for each in second["messages"][2]["tool_calls"]] == ["call_10", "call_11"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_runner_chains_its_turns_by_the_id_of_the_answer(
    start: Start, upstream_of: UpstreamOf, is_stream: bool
) -> None:
    upstream = await upstream_of(weather_model)
    gateway = await start(model(upstream.replica()))
    asked = agent(gateway, "responses", tools=[get_weather])
    result = await run(asked, "Where is it warmer?", is_stream=is_stream, auto_previous_response_id=True)
    assert result.final_output == "Rome 27, Oslo 9."
    assert [turn["role"] for turn in sent(upstream, 2)["messages"]][-3:] == ["assistant", "tool", "tool"]
    later = await run(asked, "And now?", is_stream=is_stream, previous_response_id=result.last_response_id)
    assert later.final_output == "Rome 27, Oslo 9."
    assert [turn["content"] for turn in sent(upstream, 3)["messages"]][-2:] == ["Rome 27, Oslo 9.", "And now?"]


@pytest.mark.parametrize("face", FACES)
async def test_a_conversation_goes_on_with_the_items_of_its_answers(
    start: Start, upstream_of: UpstreamOf, face: str
) -> None:
    upstream = await upstream_of(weather_model)
    gateway = await start(model(upstream.replica()))
    asked = agent(gateway, face, tools=[get_weather])
    result = await run(asked, "Where is it warmer?", is_stream=False)
    items = [*result.to_input_list(), {"role": "user", "content": "And now?"}]
    assert (await run(asked, items, is_stream=False)).final_output == "Rome 27, Oslo 9."
    roles = [turn["role"] for turn in sent(upstream, 3)["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]


@pytest.mark.parametrize("face", FACES)
async def test_a_tool_that_fails_and_one_that_was_forced(start: Start, upstream_of: UpstreamOf, face: str) -> None:
    async def script(reply: Reply) -> None:
        if reply.number == 1:
            await tell(reply, ("broken", "{}"))
        else:
            await tell(reply, text="I cannot know.")

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    settings = agents.ModelSettings(tool_choice="broken", parallel_tool_calls=False, temperature=0.2, max_tokens=99)
    result = await run(agent(gateway, face, tools=[broken], model_settings=settings), "Weather?", is_stream=False)
    assert result.final_output == "I cannot know."
    assert sent(upstream, 1)["tool_choice"] == {"type": "function", "function": {"name": "broken"}}
    told = sent(upstream, 2)["messages"][-1]
    assert (told["role"], told["tool_call_id"]) == ("tool", "call_10")
    assert "error occurred" in told["content"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("face", FACES)
async def test_a_structured_answer_is_the_type_that_was_asked_for(
    start: Start, upstream_of: UpstreamOf, face: str, is_stream: bool
) -> None:
    upstream = await upstream_of(lambda reply: tell(reply, text='{"city": "Rome", "degrees": 27}'))
    gateway = await start(model(upstream.replica()))
    result = await run(agent(gateway, face, output_type=Sky), "Weather?", is_stream=is_stream)
    assert result.final_output == Sky(city="Rome", degrees=27)
    assert sent(upstream, 1)["response_format"]["json_schema"]["strict"] is True


@pytest.mark.parametrize("face", FACES)
async def test_one_agent_hands_over_to_another(start: Start, upstream_of: UpstreamOf, face: str) -> None:
    async def script(reply: Reply) -> None:
        if "transfer_to_forecaster" in json.dumps(json.loads(reply.request.body).get("tools", ())):
            await tell(reply, ("transfer_to_forecaster", "{}"))
        else:
            await tell(reply, text="27 degrees.")

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    forecaster = agent(gateway, face)
    desk = agents.Agent(name="Desk", model=forecaster.model, handoffs=[forecaster])
    result = await run(desk, "Weather?", is_stream=True)
    assert (result.final_output, result.last_agent.name) == ("27 degrees.", "Forecaster")
