"""/v1/responses over real sockets: the official client, events, conversations, agents' loops, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pydantic
import pytest

from gateway.app import PARTS
from tests.gateway.openai_responses import ASK, FOLDER, answer, check, events_of, read_events, types_of
from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, fake_model, model, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
NOTICED_WITHIN_S = 0.5
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
TEXT = [
    "created", "in_progress",
    "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
    "output_item.done",
]  # fmt: skip
REASONING = [each.replace("output_text", "reasoning_text") for each in TEXT[2:]]
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def delta(reply: Reply, **fields: Any) -> Awaitable[None]:
    return reply.event(json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}).encode())


async def calls(reply: Reply, *cities: str) -> None:
    """An engine's answer that calls `weather` for each city, the arguments of all calls interleaved."""
    await reply.begin()
    for index in range(len(cities)):
        head = {"index": index, "id": f"call_{reply.number}{index}", "type": "function"}
        await delta(reply, tool_calls=[{**head, "function": {"name": "weather", "arguments": ""}}])
    for pieces in zip(*(['{"city":', json.dumps(city), "}"] for city in cities), strict=True):
        for index, piece in enumerate(pieces):
            await delta(reply, tool_calls=[{"index": index, "function": {"arguments": piece}}])
    await reply.finish("tool_calls")
    await reply.usage(completion_tokens=9)
    await reply.done()


def sent(upstream: Upstream, number: int) -> dict[str, Any]:
    """The body of the engine's request, from 1."""
    return dict(json.loads(upstream.requests[number - 1].body))


@pytest.mark.skipif(FOLDER is None, reason="OpenAI's published description is not here (shared/data)")
def test_the_description_judges_what_these_tests_see() -> None:
    with pytest.raises(AssertionError, match="Response"):
        check("Response", {"id": "resp_1"})


# ------------------------------------------------------------------------------------------------------- whole answers


async def test_a_whole_answer_is_what_the_official_client_expects(start: Start) -> None:
    gateway = await start(fake_model(tokens=4))
    response = await gateway.openai.responses.create(model="m", input="Hello", metadata={"a": "b"}, user="u")
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", "m")
    assert len(response.output_text.split()) == 4
    assert [item.type for item in response.output] == ["message"]
    assert response.usage is not None
    assert (response.usage.output_tokens, response.usage.total_tokens) == (4, response.usage.input_tokens + 4)
    assert response.usage.input_tokens_details.cached_tokens == 0
    assert response.completed_at is not None
    assert (response.metadata, response.user, response.error) == ({"a": "b"}, "u", None)


async def test_a_whole_answer_has_the_form_of_the_description(start: Start) -> None:
    gateway = await start(fake_model(tokens=4))
    body = await answer(gateway, instructions="Be short.", temperature=0.5, top_p=1, prompt_cache_key="k")
    assert body["instructions"] == "Be short."
    assert (body["temperature"], body["top_p"], body["prompt_cache_key"]) == (0.5, 1, "k")
    assert (body["tool_choice"], body["tools"], body["truncation"], body["store"]) == ("auto", [], "disabled", True)


async def test_an_answer_that_reached_its_limit_is_incomplete(start: Start) -> None:
    gateway = await start(fake_model(tokens=9))
    body = await answer(gateway, max_output_tokens=2)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["completed_at"], body["output"][0]["status"]) == (None, "incomplete")
    events = await events_of(gateway, max_output_tokens=2)
    assert types_of(events) == [*TEXT, "incomplete"]
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-2]["item"]["status"] == "incomplete"


async def test_fields_reach_the_engine_in_the_words_of_a_chat(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(lambda reply: reply.answer("sunny"))
    gateway = await start(model(upstream.replica()))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = await answer(
        gateway,
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "In JSON."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        ],
        max_output_tokens=20,
        temperature=0,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
    )
    engine = sent(upstream, 1)
    assert engine["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "In JSON."},
        {"role": "user", "content": "ab"},
    ]
    assert (engine["max_completion_tokens"], engine["temperature"], engine["reasoning_effort"]) == (20, 0, "low")
    assert engine["response_format"]["json_schema"] == {"name": "n", "schema": schema, "strict": True}
    function = {key: WEATHER[key] for key in ("name", "description", "parameters", "strict")}
    assert engine["tools"] == [{"type": "function", "function": function}]
    assert engine["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert engine["parallel_tool_calls"] is False
    assert body["text"]["format"]["name"] == "n"
    assert (body["tools"], body["tool_choice"]) == ([WEATHER], {"type": "function", "name": "weather"})
    assert body["reasoning"] == {"effort": "low", "summary": "auto"}


class Weather(pydantic.BaseModel):
    sky: str


async def test_the_official_clients_parse_helper_gets_its_structure(start: Start, upstream_of: UpstreamOf) -> None:
    async def script(reply: Reply) -> None:
        await reply.begin()
        await delta(reply, content='{"sky": "blue"}')
        await reply.finish()
        await reply.done()

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    response = await gateway.openai.responses.parse(model="m", input="How is the sky?", text_format=Weather)
    assert response.output_parsed == Weather(sky="blue")
    assert sent(upstream, 1)["response_format"]["json_schema"]["schema"]["required"] == ["sky"]


async def test_log_probabilities_come_with_the_text(start: Start, upstream_of: UpstreamOf) -> None:
    async def script(reply: Reply) -> None:
        top = [{"token": "é", "logprob": -0.5}]
        content = [{"token": "é", "logprob": -0.5, "bytes": None, "top_logprobs": top}]
        choice = {"index": 0, "delta": {"content": "é"}, "logprobs": {"content": content}, "finish_reason": None}
        await reply.begin()
        await reply.event(json.dumps({"choices": [choice]}).encode())
        await reply.finish()
        await reply.done()

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = [{"token": "é", "logprob": -0.5, "bytes": [195, 169]}]
    body = await answer(gateway, **wanted)
    assert body["output"][0]["content"][0]["logprobs"] == [{**whole[0], "top_logprobs": whole}]
    events = await events_of(gateway, **wanted)
    assert events[4]["logprobs"] == events[5]["logprobs"] == body["output"][0]["content"][0]["logprobs"]
    assert (sent(upstream, 1)["logprobs"], sent(upstream, 1)["top_logprobs"]) == (True, 1)


# -------------------------------------------------------------------------------------------------------------- streams


async def test_a_stream_tells_its_events_in_order_and_the_same_as_the_whole_answer(start: Start) -> None:
    gateway = await start(fake_model(tokens=6))
    whole = await answer(gateway)
    events = await events_of(gateway)
    assert types_of(events) == [*TEXT, "completed"]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    final = events[-1]["response"]
    assert text == whole["output"][0]["content"][0]["text"] == final["output"][0]["content"][0]["text"]
    assert final["usage"] == whole["usage"]
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    assert {event["item_id"] for event in events if "item_id" in event} == {final["output"][0]["id"]}


async def test_the_official_clients_stream_helper_adds_up_to_the_response(start: Start) -> None:
    gateway = await start(fake_model(tokens=5))
    async with gateway.openai.responses.stream(model="m", input="Hello") as stream:
        pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert final.output_text == "".join(pieces) != ""
    assert (await gateway.openai.responses.retrieve(final.id)).output_text == final.output_text


async def test_reasoning_is_an_item_before_the_text(start: Start, upstream_of: UpstreamOf) -> None:
    async def script(reply: Reply) -> None:
        await reply.begin()
        for piece in ("Let me ", "think."):
            await delta(reply, reasoning=piece)
        await delta(reply, content="Done.")
        await reply.finish()
        await reply.usage()
        await reply.done()

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    body = await answer(gateway, include=["reasoning.encrypted_content"])
    assert [item["type"] for item in body["output"]] == ["reasoning", "message"]
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "Let me think."}]
    events = await events_of(gateway)
    assert types_of(events) == [*TEXT[:2], *REASONING, *TEXT[2:], "completed"]
    # It may be sent back, as agents do; no engine is given it.
    await answer(gateway, input=[{"role": "user", "content": "Hi"}, *body["output"], {"role": "user", "content": "?"}])
    assert [turn["content"] for turn in sent(upstream, 3)["messages"]] == ["Hi", "Done.", "?"]


@pytest.mark.replay("G20")
async def test_g20_parallel_calls_whose_arguments_interleave_stay_apart(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(lambda reply: calls(reply, "Rome", "Oslo", "Bern"))
    gateway = await start(model(upstream.replica()))
    events = await events_of(gateway, tools=[WEATHER])
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [json.loads(event["arguments"])["city"] for event in done] == ["Rome", "Oslo", "Bern"]
    assert [event["output_index"] for event in done] == [0, 1, 2]
    for event in done:
        pieces = [each["delta"] for each in events if "delta" in each and each["item_id"] == event["item_id"]]
        assert "".join(pieces) == event["arguments"]
    assert [item["arguments"] for item in added] == [""] * 3
    assert events[-1]["type"] == "response.completed"
    assert [item["call_id"] for item in events[-1]["response"]["output"]] == ["call_10", "call_11", "call_12"]


async def test_one_call_has_the_events_of_the_reference(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(lambda reply: calls(reply, "Rome"))
    gateway = await start(model(upstream.replica()))
    assert types_of(await events_of(gateway, tools=[WEATHER])) == [*TEXT[:2], *CALL, "completed"]


async def test_an_empty_answer_is_one_too(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(lambda reply: reply.answer())
    gateway = await start(model(upstream.replica()))
    events = await events_of(gateway)
    assert types_of(events) == [each for each in TEXT if not each.endswith("delta")] + ["completed"]
    assert (await gateway.openai.responses.create(model="m", input="Hi")).output_text == ""


# -------------------------------------------------------------------------------------------------------- conversations


async def test_an_answer_builds_on_the_one_before(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(lambda reply: reply.answer(f"answer {reply.number}"))
    gateway = await start(model(upstream.replica()))
    first = await gateway.openai.responses.create(model="m", input="one", instructions="Old instructions.")
    stream = await gateway.openai.responses.create(
        model="m", input="two", previous_response_id=first.id, instructions="New instructions.", stream=True
    )
    second = [event async for event in stream][-1]
    assert isinstance(second, openai.types.responses.ResponseCompletedEvent)
    assert second.response.previous_response_id == first.id
    await gateway.openai.responses.delete(first.id)  # the second one holds the whole conversation
    await gateway.openai.responses.create(model="m", input="three", previous_response_id=second.response.id)
    assert [(turn["role"], turn["content"]) for turn in sent(upstream, 2)["messages"]] == [
        ("system", "New instructions."), ("user", "one"), ("assistant", "answer 1"), ("user", "two"),
    ]  # fmt: skip
    assert [turn["content"] for turn in sent(upstream, 3)["messages"]] == [
        "one", "answer 1", "two", "answer 2", "three",
    ]  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_chained", [False, True])
async def test_an_agents_loop_calls_its_tools_until_the_answer_is_there(
    start: Start, upstream_of: UpstreamOf, is_stream: bool, is_chained: bool
) -> None:
    async def script(reply: Reply) -> None:
        if reply.number == 1:
            await calls(reply, "Rome", "Oslo")
        elif reply.number == 2:
            await calls(reply, "Bern")
        else:
            await reply.answer("All ", "sunny.")

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))

    async def ask(**fields: Any) -> Any:
        if not is_stream:
            return await gateway.openai.responses.create(model="m", tools=[WEATHER], store=is_chained, **fields)
        async with gateway.openai.responses.stream(model="m", tools=[WEATHER], store=is_chained, **fields) as stream:
            return await stream.get_final_response()

    history: list[Any] = [{"role": "user", "content": "Is it sunny?"}]
    response = await ask(input=history)
    while wanted := [item for item in response.output if item.type == "function_call"]:
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"sunny in {call.arguments}"}
            for call in wanted
        ]
        if is_chained:
            response = await ask(input=outputs, previous_response_id=response.id)
        else:
            history += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            history += outputs
            response = await ask(input=history)
    assert response.output_text == "All sunny."
    turns = sent(upstream, 3)["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "assistant", "tool"]
    assert [call["id"] for call in turns[1]["tool_calls"]] == [turns[2]["tool_call_id"], turns[3]["tool_call_id"]]
    assert turns[3]["content"] == 'sunny in {"city":"Oslo"}'


async def test_responses_are_given_out_again_and_deleted(start: Start) -> None:
    gateway = await start(fake_model(tokens=3))
    first = await answer(gateway, input=[{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"},
                                         {"role": "user", "content": "two"}])  # fmt: skip
    assert (await gateway.get(f"/v1/responses/{first['id']}"))[1] == first
    items = [item async for item in gateway.openai.responses.input_items.list(first["id"], order="asc", limit=2)]
    assert [item.content[0].text for item in items] == ["one", "1", "two"]
    status, latest = await gateway.get(f"/v1/responses/{first['id']}/input_items?limit=1")
    check("ResponseItemList", latest)
    assert (status, latest["has_more"], latest["data"][0]["content"][0]["text"]) == (200, True, "two")
    assert latest["first_id"] == latest["last_id"] == items[-1].id
    async with gateway.client.delete(f"{gateway.url}/v1/responses/{first['id']}") as deleted:
        assert await deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    for ask in (
        gateway.openai.responses.retrieve(first["id"]),
        gateway.openai.responses.delete(first["id"]),
        gateway.openai.responses.create(model="m", input="x", previous_response_id=first["id"]),
        gateway.openai.responses.input_items.list(first["id"]),
    ):
        with pytest.raises(openai.NotFoundError, match="There is no response") as gone:
            await ask
        assert gone.value.code == "response_not_found"


async def test_what_is_not_to_be_kept_is_not(start: Start) -> None:
    gateway = await start(fake_model())
    for is_stream in (False, True):
        if is_stream:
            response = (await events_of(gateway, store=False))[-1]["response"]
        else:
            response = await answer(gateway, store=False)
        assert response["store"] is False
        assert (await gateway.get(f"/v1/responses/{response['id']}"))[0] == 404


async def test_a_gateway_that_keeps_nothing_says_so(start: Start) -> None:
    gateway = await start(fake_model(), responses={"keep": "none"})
    assert (await answer(gateway))["store"] is False
    status, body, _ = await gateway.post("/v1/responses", {**ASK, "store": True})
    assert (status, body["error"]["param"]) == (400, "store")
    status, body, _ = await gateway.post("/v1/responses", {**ASK, "previous_response_id": "resp_1"})
    assert (status, body["error"]["param"]) == (404, "previous_response_id")
    assert "keeps no responses" in body["error"]["message"]


async def test_an_answer_too_large_to_keep_is_given_and_says_that_it_was_not_kept(start: Start) -> None:
    gateway = await start(fake_model(max_model_len=10_000_000), responses={"max_mib": 1})
    body = await answer(gateway, input="x" * (1 << 20))
    assert (body["status"], body["store"]) == ("completed", False)
    assert (await gateway.get(f"/v1/responses/{body['id']}"))[0] == 404


async def test_a_store_that_fails_takes_nothing_away_from_the_answer(start: Start) -> None:
    gateway = await start(fake_model(tokens=3), responses={"keep": "file"})
    first = await answer(gateway)
    store = gateway.app[PARTS].responses
    await store._do(lambda: store._db.execute("DROP TABLE responses"))
    assert (await answer(gateway))["store"] is False
    events = await events_of(gateway)
    assert (events[-1]["type"], events[-1]["response"]["store"]) == ("response.completed", False)
    status, body = await gateway.get(f"/v1/responses/{first['id']}")
    assert (status, body["error"]["code"]) == (500, "response_store_failed")


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"background": True}, "background", "open request"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "as `input`"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
        ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search'"),
        ({"tools": [WEATHER, {"type": "mcp", "server_label": "x"}]}, "tools[1]", "'mcp'"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0]", "defer_loading"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "w"}}, "tool_choice", "'w'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice", "name a function"),
        ({"tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice", "none, auto, required"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "schema"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "'fake'.*'text.format'"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "'reasoning.effort'"),
        ({"tools": [WEATHER]}, "tools", "'fake'"),
        ({"input": []}, "input", "nothing to answer"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "nothing to answer"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send the item"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "'computer_call'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0]", "role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0]", "'input_image'"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input", "call_id 'c'"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]}, "input", "'c' has no"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0]", "arguments"),
        ({"n": 2}, "n", "Unknown parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"model": "absent"}, "model", "no model"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_cannot_be_honoured_is_refused_by_the_callers_name_for_it(
    start: Start, fields: dict[str, Any], param: str, sentence: str, is_stream: bool
) -> None:
    gateway = await start(fake_model())
    with pytest.raises(openai.APIStatusError, match=sentence) as refused:
        await gateway.openai.responses.create(**ASK, extra_body=fields, stream=is_stream)
    assert refused.value.status_code == (404 if param == "model" else 400)
    assert refused.value.param == param
    assert gateway.open_requests.in_flight == 0


async def test_a_client_that_sends_null_for_every_optional_field_is_answered(start: Start) -> None:
    gateway = await start(fake_model())
    optional = [
        "instructions", "previous_response_id", "store", "stream", "stream_options", "max_output_tokens", "temperature",
        "top_p", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "max_tool_calls", "text", "reasoning",
        "include", "truncation", "metadata", "user", "safety_identifier", "prompt_cache_key", "service_tier",
        "background", "conversation", "prompt",
    ]  # fmt: skip
    await answer(gateway, **dict.fromkeys(optional))


@pytest.mark.parametrize("query", ["order=up", "limit=0", "limit=101", "limit=x", "after=msg_1", "include=x"])
async def test_pages_that_do_not_exist_are_refused(start: Start, query: str) -> None:
    gateway = await start(fake_model())
    id = (await answer(gateway))["id"]
    status, body = await gateway.get(f"/v1/responses/{id}/input_items?{query}")
    assert (status, body["error"]["param"]) == (400, query.split("=")[0])
    assert (await gateway.get(f"/v1/responses/{id}?stream=true"))[0] == 400


# ------------------------------------------------------------------------------------------------- failures and leaving


async def half_an_answer(reply: Reply) -> None:
    await reply.begin()
    await reply.piece("half")


async def cut(reply: Reply) -> None:
    await half_an_answer(reply)
    reply.reset()


async def ends_early(reply: Reply) -> None:
    await half_an_answer(reply)
    await reply.done()


async def reports_an_error(reply: Reply) -> None:
    await half_an_answer(reply)
    await reply.event(b'{"error": {"message": "out of memory", "code": 500}}')
    await reply.end()


@pytest.mark.replay("G23")
@pytest.mark.parametrize("script", [cut, ends_early, reports_an_error])
async def test_g23_a_late_failure_never_looks_like_success(
    start: Start, upstream_of: UpstreamOf, script: Script
) -> None:
    gateway = await start(model((await upstream_of(script)).replica()))
    events = await events_of(gateway)
    assert types_of(events) == [*TEXT[:5], "failed", "error"]
    failed = events[-2]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert failed["output"][0]["status"] == "incomplete"
    assert events[-1]["message"] == failed["error"]["message"] != ""
    assert (await gateway.get(f"/v1/responses/{failed['id']}"))[0] == 404
    stream = await gateway.openai.responses.create(model="m", input="Hi", stream=True)
    with pytest.raises(openai.APIError, match=r"engine|memory"):
        async for _ in stream:
            pass
    status, body, _ = await gateway.post("/v1/responses", ASK)
    assert (status, set(body)) == (502, {"error"})
    await until(lambda: gateway.open_requests.in_flight == 0)


async def test_an_early_failure_has_its_true_status(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(lambda reply: reply.status(400, b'{"error": {"message": "no", "code": 400}}'))
    gateway = await start(model(upstream.replica()))
    with pytest.raises(openai.BadRequestError):
        await gateway.openai.responses.create(model="m", input="Hi", stream=True)


async def test_a_shutdown_is_told_to_a_stream_that_it_ends(start: Start, upstream_of: UpstreamOf) -> None:
    async def stalls(reply: Reply) -> None:
        await half_an_answer(reply)
        await reply.until_left()

    gateway = await start(model((await upstream_of(stalls)).replica()))
    open_stream = asyncio.create_task(events_of(gateway))
    await until(lambda: gateway.open_requests.in_flight == 1)
    await asyncio.sleep(0.05)
    await gateway.open_requests.drain(0)
    events = await open_stream
    assert types_of(events)[-2:] == ["failed", "error"]
    assert events[-1]["code"] == "overloaded"


async def ask_and_leave(
    gateway: Gateway, after: Callable[[asyncio.StreamReader], Awaitable[object]], **fields: object
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = json.dumps({**ASK, **fields}).encode()
    head = "POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
    await after(reader)
    writer.close()


@pytest.mark.replay("W14", "G03")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_g03_a_client_that_leaves_stops_the_engine(
    start: Start, upstream_of: UpstreamOf, is_stream: bool
) -> None:
    async def three_pieces(reply: Reply) -> None:
        await reply.begin()
        for text in ("a", "b", "c"):
            await reply.piece(text)
        await reply.until_left()

    upstream = await upstream_of(three_pieces)
    gateway = await start(model(upstream.replica()))

    async def under_way(reader: asyncio.StreamReader) -> None:
        await until(lambda: upstream.num_generations == 1)
        await (reader.readuntil(b'"delta":"c"') if is_stream else asyncio.sleep(0.05))

    await ask_and_leave(gateway, under_way, stream=is_stream)
    await until(lambda: upstream.num_closed == 1, timeout_s=NOTICED_WITHIN_S)
    await until(lambda: gateway.open_requests.in_flight == 0, timeout_s=NOTICED_WITHIN_S)
    assert gateway.fleet.replicas[0].in_flight == 0


@pytest.mark.replay("G04")
async def test_g04_places_are_free_after_aborted_and_after_completed_responses(
    start: Start, upstream_of: UpstreamOf
) -> None:
    async def script(reply: Reply) -> None:
        await (reply.until_left() if reply.number <= 2 else reply.answer("ok"))

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()), server={"max_in_flight": 2})
    for number in (1, 2):
        await ask_and_leave(gateway, lambda _, n=number: until(lambda: upstream.num_generations == n), stream=True)
    await until(lambda: gateway.open_requests.in_flight == 0, timeout_s=NOTICED_WITHIN_S)
    for _ in range(3):
        both = await asyncio.gather(events_of(gateway), answer(gateway))
        assert gateway.open_requests.in_flight == 0  # at once: the place is free before the last event leaves
        assert both[0][-1]["type"] == "response.completed"


async def test_a_silent_stream_is_kept_open_by_comments(start: Start, upstream_of: UpstreamOf) -> None:
    async def pause(reply: Reply) -> None:
        await half_an_answer(reply)
        await asyncio.sleep(0.3)
        await reply.finish()
        await reply.done()

    gateway = await start(model((await upstream_of(pause)).replica()), server={"heartbeat_s": 0.1})
    async with gateway.client.post(f"{gateway.url}/v1/responses", json={**ASK, "stream": True}) as response:
        text = await response.text()
    assert text.count(": keep-alive\n\n") >= 2
    assert types_of(read_events(text)) == [*TEXT, "completed"]


# -------------------------------------------------------------------------------------------------------- a real engine


@pytest.mark.model
@pytest.mark.slow
async def test_the_native_engine_remembers_through_previous_response_id(start: Start) -> None:
    from adapters.config import goodgate_home
    from adapters.models.model_store import DEFAULT_MODEL, ModelStore

    store = ModelStore(goodgate_home())
    if DEFAULT_MODEL not in [each.name for each in store.list()]:
        store.pull(DEFAULT_MODEL)
    options = {"model": DEFAULT_MODEL, "kv_cache_mib": 64}
    gateway = await start(model({"engine": "native", "options": options}), is_ready=False)
    await until(lambda: gateway.fleet.replicas[0].is_ready, timeout_s=60)
    first = await answer(
        gateway, input="What is the capital of France? One short sentence.", max_output_tokens=32, temperature=0
    )
    assert "Paris" in first["output"][0]["content"][0]["text"]
    events = await events_of(
        gateway,
        input="Which city did you just name? Answer with its name.",
        previous_response_id=first["id"],
        max_output_tokens=32,
        temperature=0,
    )
    last = events[-1]["response"]
    assert "Paris" in last["output"][0]["content"][0]["text"]
    assert last["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert last["usage"]["input_tokens_details"]["cached_tokens"] > 0  # the first turn was in the prefix cache
