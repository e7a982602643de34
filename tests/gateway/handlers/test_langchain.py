"""LangChain's models for OpenAI as clients: what they send and read beyond the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, fake_model, model

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
FACES = {"chat": False, "responses": True}  # `use_responses_api`


class Sky(BaseModel):
    """The sky over a city."""

    city: str
    degrees: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


ChatModel = Callable[..., ChatOpenAI]


@pytest.fixture
async def chat_model() -> AsyncIterator[ChatModel]:
    """LangChain's model over a gateway; its connections are closed in the end, which it leaves to its user."""
    made: list[ChatOpenAI] = []

    def make(gateway: Gateway, face: str = "chat", **fields: Any) -> ChatOpenAI:
        url, responses = f"{gateway.url}/v1", FACES[face]
        made.append(
            ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0, use_responses_api=responses, **fields)
        )
        return made[-1]

    yield make
    for chat in made:
        await chat.root_async_client.close()


async def tell(reply: Reply, *deltas: dict[str, Any], reason: str = "stop") -> None:
    await reply.begin()
    for delta in deltas:
        await reply.event(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode())
    await reply.finish(reason)
    await reply.usage(30, 12)
    await reply.done()


def call(name: str, *arguments: str) -> list[dict[str, Any]]:
    head = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": piece}} for piece in arguments]
    return [{"tool_calls": [each]} for each in (head, *rest)]


async def weather_model(reply: Reply) -> None:
    turns = json.loads(reply.request.body)["messages"]
    if turns[-1]["role"] == "tool":
        await tell(reply, {"content": f"It is {turns[-1]['content']}."})
    else:
        await tell(reply, *call("weather", '{"city": "R', 'ome"}'), reason="tool_calls")


def sent(upstream: Upstream, number: int) -> dict[str, Any]:
    return dict(json.loads(upstream.requests[number - 1].body))


@pytest.mark.parametrize("face", FACES)
async def test_an_answer_comes_whole_and_streamed_with_its_account(
    start: Start, chat_model: ChatModel, face: str
) -> None:
    chat = chat_model(await start(fake_model(tokens=4)), face, stream_usage=True)
    whole = await chat.ainvoke("Hello")
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 4
    pieces = [piece async for piece in chat.astream("Hello")]
    assert "".join(piece.text for piece in pieces) == whole.text != ""
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 4


async def test_several_prompts_at_once_are_answered_apart(start: Start, chat_model: ChatModel) -> None:
    chat = chat_model(await start(fake_model(tokens=3)))
    assert [len(answer.text.split()) for answer in await chat.abatch(["one", "two", "three"])] == [3, 3, 3]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_strict", [None, True])
@pytest.mark.parametrize("face", FACES)
async def test_tools_and_their_results_go_round(
    start: Start, chat_model: ChatModel, upstream_of: UpstreamOf, face: str, is_strict: bool | None, is_stream: bool
) -> None:
    upstream = await upstream_of(weather_model)
    chat = chat_model(await start(model(upstream.replica())), face).bind_tools([weather], strict=is_strict)
    history: list[Any] = [HumanMessage("Weather?")]

    async def ask() -> Any:
        if not is_stream:
            return await chat.ainvoke(history)
        pieces = [piece async for piece in chat.astream(history)]
        return sum(pieces[1:], pieces[0])

    asked = await ask()
    assert [(each["name"], each["args"], each["id"]) for each in asked.tool_calls] == [
        ("weather", {"city": "Rome"}, "call_1")
    ]
    history += [asked, await weather.ainvoke(asked.tool_calls[0])]
    assert isinstance(history[-1], ToolMessage)
    assert (await ask()).text == "It is sunny in Rome."
    assert [turn["role"] for turn in sent(upstream, 2)["messages"]] == ["user", "assistant", "tool"]
    assert sent(upstream, 1)["tools"][0]["function"].get("strict") is is_strict


@pytest.mark.parametrize(("choice", "told"), [("any", "required"), ("weather", "weather"), ("none", "none")])
async def test_the_choice_of_a_tool_reaches_the_engine(
    start: Start, chat_model: ChatModel, upstream_of: UpstreamOf, choice: str, told: str
) -> None:
    upstream = await upstream_of(weather_model)
    chat = chat_model(await start(model(upstream.replica()))).bind_tools([weather], tool_choice=choice)
    await chat.ainvoke("Weather?")
    wanted = {"type": "function", "function": {"name": told}} if told == "weather" else told
    assert sent(upstream, 1)["tool_choice"] == wanted


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # LangChain dumps what the client has parsed
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("face", FACES)
async def test_a_structured_answer_is_the_type_that_was_asked_for(
    start: Start, chat_model: ChatModel, upstream_of: UpstreamOf, face: str, method: Any
) -> None:
    async def script(reply: Reply) -> None:
        if json.loads(reply.request.body).get("tools"):
            await tell(reply, *call("Sky", '{"city": "Rome", ', '"degrees": 27}'), reason="stop")
        else:
            await tell(reply, {"content": '{"city": "Rome", '}, {"content": '"degrees": 27}'})

    gateway = await start(model((await upstream_of(script)).replica()))
    chat = chat_model(gateway, face).with_structured_output(Sky, method=method)
    assert await chat.ainvoke("The sky over Rome, as JSON?") == Sky(city="Rome", degrees=27)
    assert [piece async for piece in chat.astream("The sky over Rome, as JSON?")][-1] == Sky(city="Rome", degrees=27)


async def test_a_conversation_goes_on_by_the_id_of_the_answer(
    start: Start, chat_model: ChatModel, upstream_of: UpstreamOf
) -> None:
    upstream = await upstream_of(lambda reply: reply.answer(f"answer {reply.number}"))
    chat = chat_model(await start(model(upstream.replica())), "responses", use_previous_response_id=True)
    first = await chat.ainvoke([HumanMessage("one")])
    assert isinstance(first, AIMessage)
    await chat.ainvoke([HumanMessage("one"), first, HumanMessage("two")])
    assert [turn["content"] for turn in sent(upstream, 2)["messages"]] == ["one", "answer 1", "two"]


async def test_vectors_come_for_texts_and_for_a_query(start: Start) -> None:
    gateway = await start(fake_model())
    embeddings = OpenAIEmbeddings(
        model="m",
        base_url=f"{gateway.url}/v1",
        api_key="none",
        max_retries=0,
        check_embedding_ctx_length=False,  # it would cut texts with OpenAI's tokenizer, which it fetches
    )
    vectors = await embeddings.aembed_documents(["one", "two"])
    assert len(vectors) == 2
    assert vectors[0] != vectors[1]
    assert await embeddings.aembed_query("one") == pytest.approx(vectors[0])
    await embeddings.async_client._client.close()
