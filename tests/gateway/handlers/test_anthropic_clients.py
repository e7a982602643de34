"""Anthropic's own client, unmodified, over a real socket: in front of scripted engines and of our own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool

from adapters.config import goodgate_home
from adapters.models.model_store import DEFAULT_MODEL, ModelStore
from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, fake, fake_model, model, until
from tests.native_engine.tiny_llama import CHAT_TEMPLATE, tiny_config, write_tiny_llama

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOTICED_WITHIN_S = 0.5


async def delta(reply: Reply, **fields: Any) -> None:
    await reply.event(json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}).encode())


async def call(reply: Reply, number: int, call_id: str, name: str, *arguments: str) -> None:
    head = {"index": number, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
    await delta(reply, tool_calls=[head])
    for piece in arguments:
        await delta(reply, tool_calls=[{"index": number, "function": {"arguments": piece}}])


def events_in(text: str) -> list[tuple[str, Any]]:
    """Every event of a stream with its data, strictly: two lines each, and nothing else."""
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


async def stream_text(gateway: Gateway, **fields: Any) -> str:
    async with gateway.client.post(f"{gateway.url}/v1/messages", json={**ASKED, "stream": True, **fields}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return await response.text()


# ------------------------------ text


async def test_an_answer_is_what_the_client_expects(start: Start) -> None:
    gateway = await start(fake_model(tokens=4))
    raw = await gateway.anthropic.messages.with_raw_response.create(
        **ASKED, system="Be brief.", extra_body={"temperature": 0}
    )
    message = await raw.parse()
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "m")
    assert message.content[0].type == "text"
    assert len(message.content[0].text.split()) == 4
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 4)  # "system: Be brief.\nuser: Hello"
    assert message.usage.cache_read_input_tokens == 0
    assert message._request_id == raw.headers["request-id"] == raw.headers["x-request-id"]


async def test_a_stream_is_the_same_message_in_pieces(start: Start) -> None:
    gateway = await start(fake_model(tokens=4))
    whole = await gateway.anthropic.messages.create(**ASKED)
    async with gateway.anthropic.messages.stream(**ASKED) as stream:
        pieces = [text async for text in stream.text_stream]
        streamed = await stream.get_final_message()
        assert stream.request_id is not None
    assert len(pieces) == 4
    told = streamed.to_dict()
    assert told.pop("stop_details") is None  # the client's own
    assert {**told, "id": whole.id} == whole.to_dict()


async def test_the_events_have_anthropics_order_and_names(start: Start) -> None:
    gateway = await start(fake_model(tokens=2))
    names = [name for name, _ in events_in(await stream_text(gateway))]
    assert names == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip


async def test_the_limit_and_a_stop_sequence_are_told_apart(start: Start) -> None:
    gateway = await start(fake_model(tokens=8))
    cut = await gateway.anthropic.messages.create(**{**ASKED, "max_tokens": 3})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    whole = await gateway.anthropic.messages.create(**ASKED)
    assert whole.content[0].type == "text"
    word = whole.content[0].text.split()[3]
    stopped = await gateway.anthropic.messages.create(**ASKED, stop_sequences=["zebra", word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    async with gateway.anthropic.messages.stream(**ASKED, stop_sequences=[word]) as stream:
        assert (await stream.get_final_message()).stop_sequence == word


@pytest.mark.parametrize("field", ["stop_reason", "matched_stop"])
async def test_the_stop_sequence_is_the_one_that_vllm_and_sglang_name(
    start: Start, upstream_of: UpstreamOf, field: str
) -> None:
    async def script(reply: Reply) -> None:
        told = "END" if reply.number == 1 else 128001  # the id of the model's own end
        await reply.begin()
        await reply.piece("a")
        end = {"index": 0, "delta": {}, "finish_reason": "stop", field: told}
        await reply.event(json.dumps({"choices": [end]}).encode())
        await reply.done()

    gateway = await start(model((await upstream_of(script)).replica()))
    ends = [await gateway.anthropic.messages.create(**ASKED, stop_sequences=["END"]) for _ in range(2)]
    assert [(end.stop_reason, end.stop_sequence) for end in ends] == [("stop_sequence", "END"), ("end_turn", None)]


async def test_keys_versions_and_betas_are_taken_and_a_beta_route_is_the_same_route(start: Start) -> None:
    gateway = await start(fake_model(tokens=2))
    status, body, headers = await gateway.post(
        "/v1/messages?beta=true",
        ASKED,
        **{
            "x-api-key": "k",
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "x-2025-01-01",
            "x-request-id": "mine",
        },
    )
    assert (status, body["type"]) == (200, "message")
    assert headers["request-id"] == headers["x-request-id"] == "mine"


async def test_a_message_is_counted_and_falls_back_like_any_chat(start: Start, upstream_of: UpstreamOf) -> None:
    async def fail(reply: Reply) -> None:
        await reply.status(500, b'{"error": {"message": "broken"}}')

    bad = await upstream_of(fail)
    gateway = await start(model(bad.replica("bad"), fake("good", tokens=3)))
    raw = await gateway.anthropic.messages.with_raw_response.create(**ASKED)
    assert raw.headers["x-goodgate-replica"] == "good"
    assert bad.num_generations == 1
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        metrics = await response.text()
    assert 'route="/v1/messages"' in metrics
    assert 'goodgate_completion_tokens_total{engine="fake",model="m",replica="good"} 3.0' in metrics


# ------------------------------ tools


async def weather_engine(reply: Reply) -> None:
    """A model that asks for two cities at once, mixing the pieces of its calls, and then tells what it was told."""
    turns = json.loads(reply.request.body)["messages"]
    await reply.begin()
    if turns[-1]["role"] == "user":
        await delta(reply, reasoning="Two cities,")
        await delta(reply, reasoning=" two calls.")
        await reply.piece("Let me look.")
        await call(reply, 0, "call_a", "get_weather", '{"city": ')
        await call(reply, 1, "call_b", "get_weather", '{"city": "Rome"}')
        await delta(reply, tool_calls=[{"index": 0, "function": {"arguments": '"Paris"}'}}])
        await reply.finish("tool_calls")
    else:
        answers = {turn["tool_call_id"]: turn["content"] for turn in turns if turn["role"] == "tool"}
        await reply.piece(f"Paris {answers['call_a']}, Rome {answers['call_b']}.")
        await reply.finish()
    await reply.usage(30, 12)
    await reply.done()


def weather(city: str) -> str:
    return {"Paris": "18", "Rome": "27"}[city]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_agent_works_through_its_loop_of_tools(start: Start, upstream_of: UpstreamOf, is_stream: bool) -> None:
    upstream = await upstream_of(weather_engine)
    gateway = await start(model(upstream.replica()))
    history: list[Any] = [{"role": "user", "content": "Where is it warmer, in Paris or in Rome?"}]
    for _ in range(5):
        asked = {**ASKED, "messages": history, "tools": [WEATHER], "system": "Use your tools."}
        if is_stream:
            async with gateway.anthropic.messages.stream(**asked) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await gateway.anthropic.messages.create(**asked)
        history.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            break
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        history.append({"role": "user", "content": results})
    assert message.content[0].text == "Paris 18, Rome 27."
    assert message.stop_reason == "end_turn"
    assert [block.type for block in history[1]["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert history[1]["content"][0].thinking == "Two cities, two calls."
    sent = json.loads(upstream.requests[1].body)
    assert [turn["role"] for turn in sent["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert sent["messages"][2]["content"] == "Let me look."
    assert [each["id"] for each in sent["messages"][2]["tool_calls"]] == ["call_a", "call_b"]
    assert json.loads(sent["messages"][2]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert sent["tools"][0]["function"]["parameters"] == WEATHER["input_schema"]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_the_clients_own_tool_runner_runs_its_tools(
    start: Start, upstream_of: UpstreamOf, is_stream: bool
) -> None:
    asked_for = []

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        asked_for.append(city)
        return weather(city)

    gateway = await start(model((await upstream_of(weather_engine)).replica()))
    runner: Any = gateway.anthropic.beta.messages.tool_runner(**ASKED, tools=[get_weather], stream=is_stream)
    if is_stream:
        async for stream in runner:
            last = await stream.get_final_message()
    else:
        last = await runner.until_done()
    assert asked_for == ["Paris", "Rome"]
    assert last.content[0].text == "Paris 18, Rome 27."


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "get_weather"},
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
    ],
)
async def test_the_choice_of_tools_reaches_the_engine_and_a_named_call_ends_as_tool_use(
    start: Start, upstream_of: UpstreamOf, choice: Any, sent: dict[str, Any]
) -> None:
    async def script(reply: Reply) -> None:
        await reply.begin()
        await call(reply, 0, "call_a", "get_weather", '{"city": "Paris"}')
        await reply.finish("stop")  # what OpenAI says after a call that was forced by name
        await reply.done()

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    message = await gateway.anthropic.messages.create(**ASKED, tools=[WEATHER], tool_choice=choice)
    body = json.loads(upstream.requests[0].body)
    assert {field: body[field] for field in ("tool_choice", "parallel_tool_calls") if field in body} == sent
    assert message.stop_reason == "tool_use"


# ------------------------------ recorded streams of Anthropic's own API

PLACES = [
    Path(os.environ.get("GOODGATE_RECORDINGS", "shared/data")),
    *(parent / "shared/data" for parent in Path(__file__).resolve().parents[3:5]),
]
FOLDER = next((place for place in PLACES if (place / "sse/anthropic-sdk-python").is_dir()), None)
RECORDED = ["tool_use_response", "fallback_credit_response", "stream-a-refusal"]  # of blocks that engines have, too
REASONS = {"tool_use": "tool_calls", "end_turn": "stop", "refusal": "content_filter", "max_tokens": "length"}


def recording(name: str) -> bytes:
    if FOLDER is None:
        pytest.skip("no folder of recorded replies (shared/data)")
    return (FOLDER / f"sse/anthropic-sdk-python/{name}.sse").read_bytes()


def bare(events: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """What an engine of ours can say at all: no signatures, no pings, and no pieces that are empty."""
    told = []
    for name, data in events:
        piece = data.get("delta", {})
        if name == "ping" or "signature" in piece or "" in (piece.get("partial_json"), piece.get("thinking")):
            continue
        if name == "message_start":
            data = {"type": name, "message": {key: data["message"][key] for key in ("type", "role", "content")}}
        elif name == "message_delta":
            data = {"type": name, "delta": {key: piece[key] for key in ("stop_reason", "stop_sequence")}}
        elif name == "content_block_start":
            block = {key: value for key, value in data["content_block"].items() if key != "caller"}
            data = {**data, "content_block": block}
        told.append((name, data))
    return told


def as_openai(events: list[tuple[str, Any]]) -> Script:
    """An engine that says in OpenAI's words what was recorded in Anthropic's."""

    async def script(reply: Reply) -> None:
        await reply.begin()
        calls = -1
        for _, data in events:
            block, piece = data.get("content_block", {}), data.get("delta", {})
            if block.get("type") == "tool_use":
                calls += 1
                await call(reply, calls, block["id"], block["name"])
            elif piece.get("type") == "text_delta":
                await delta(reply, content=piece["text"])
            elif piece.get("type") == "thinking_delta":
                await delta(reply, reasoning=piece["thinking"])
            elif piece.get("type") == "input_json_delta":
                await delta(reply, tool_calls=[{"index": calls, "function": {"arguments": piece["partial_json"]}}])
            elif "stop_reason" in piece:
                await reply.finish(REASONS[piece["stop_reason"]])
        await reply.done()

    return script


def as_recorded(data: bytes) -> Script:
    async def script(reply: Reply) -> None:
        await reply.begin()
        await reply.block(data)
        await reply.end()

    return script


@pytest.mark.replay("W25")
@pytest.mark.parametrize("name", RECORDED)
async def test_our_stream_is_event_for_event_what_anthropic_sent(
    start: Start, upstream_of: UpstreamOf, name: str
) -> None:
    events = events_in(recording(name).decode().rstrip("\n") + "\n\n")
    gateway = await start(model((await upstream_of(as_openai(events))).replica()))
    ours = events_in(await stream_text(gateway, tools=[WEATHER]))
    assert bare(ours) == bare(events)
    recorded_start, our_start = events[0][1]["message"], ours[0][1]["message"]
    assert set(our_start) <= set(recorded_start)
    assert set(our_start["usage"]) <= set(recorded_start["usage"])


@pytest.mark.replay("W25")
@pytest.mark.parametrize("name", RECORDED)
async def test_the_client_makes_the_same_message_of_both_and_of_the_answer_in_one_piece(
    start: Start, upstream_of: UpstreamOf, name: str
) -> None:
    def said(message: Any) -> Any:
        blocks = [block.to_dict() for block in message.content]
        content = [{k: v for k, v in block.items() if k not in ("caller", "signature")} for block in blocks]
        return content, message.stop_reason, message.stop_sequence

    data = recording(name)
    anthropics = await upstream_of(as_recorded(data))
    async with (
        anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{anthropics.port}", api_key="none") as client,
        client.messages.stream(**ASKED) as stream,
    ):
        wanted = said(await stream.get_final_message())
    engine = await upstream_of(as_openai(events_in(data.decode().rstrip("\n") + "\n\n")))
    gateway = await start(model(engine.replica()))
    async with gateway.anthropic.messages.stream(**ASKED, tools=[WEATHER]) as stream:
        assert said(await stream.get_final_message()) == wanted
    assert said(await gateway.anthropic.messages.create(**ASKED, tools=[WEATHER])) == wanted


# ------------------------------ failures


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "nobody"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"tools": [WEATHER]}, anthropic.BadRequestError, "engine 'fake' cannot honour the parameter 'tools'"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            anthropic.BadRequestError,
            "engine 'fake' cannot honour the parameter 'thinking'",
        ),
        ({"output_config": {"effort": "low"}}, anthropic.BadRequestError, "'output_config.effort'"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            anthropic.BadRequestError,
            "'output_config.format'",
        ),
        ({"extra_body": {"mcp_servers": []}}, anthropic.BadRequestError, "mcp_servers"),
    ],
)
async def test_refusals_are_anthropics_errors_and_name_the_field_as_the_client_wrote_it(
    start: Start, fields: dict[str, Any], kind: type[anthropic.APIStatusError], words: str
) -> None:
    gateway = await start(fake_model())
    for ask in (gateway.anthropic.messages.create, _streamed(gateway)):
        with pytest.raises(kind, match=words) as raised:
            await ask(**{**ASKED, **fields})
        body: Any = raised.value.body
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        assert body["request_id"] == raised.value.request_id
        assert raised.value.type == body["error"]["type"]


async def test_a_prompt_that_does_not_fit_is_told_in_the_words_that_agents_look_for(start: Start) -> None:
    gateway = await start(fake_model(max_model_len=20))
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*the context holds 20"):
        await gateway.anthropic.messages.create(**ASKED)


def _streamed(gateway: Gateway) -> Callable[..., Awaitable[Any]]:
    async def ask(**fields: Any) -> Any:
        async with gateway.anthropic.messages.stream(**fields) as stream:
            return await stream.get_final_message()

    return ask


@pytest.mark.parametrize(
    ("status", "body", "wanted", "kind"),
    [
        (400, {"message": "no"}, 400, "invalid_request_error"),
        (401, {"message": "no"}, 502, "api_error"),
        (413, {"message": "no"}, 413, "request_too_large"),
        (429, {"message": "no"}, 503, "overloaded_error"),
        (500, {"message": "no"}, 502, "api_error"),
        (504, {"message": "no"}, 504, "timeout_error"),
    ],
)
async def test_what_an_engine_answers_has_anthropics_type(
    start: Start, upstream_of: UpstreamOf, status: int, body: Any, wanted: int, kind: str
) -> None:
    async def script(reply: Reply) -> None:
        await reply.status(status, json.dumps({"error": body}).encode())

    gateway = await start(model((await upstream_of(script)).replica()))
    got, answer, headers = await gateway.post("/v1/messages", ASKED)
    assert (got, answer["error"]["type"]) == (wanted, kind)
    assert answer["request_id"] == headers["request-id"]
    assert ("Retry-After" in headers) == (wanted == 503)


async def test_what_never_reaches_a_handler_is_told_in_the_same_shape(start: Start) -> None:
    gateway = await start(fake_model(), server={"max_body_mib": 1})
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        async with gateway.client.get(gateway.url + path) as response:
            told = await response.json()
        assert (response.status, told["error"]["type"]) == (405, "invalid_request_error")
        assert response.headers["Allow"] == "POST"
    status, told, _ = await gateway.post("/v1/messages", b'"' + b"x" * (2 << 20) + b'"')
    assert (status, told["error"]["type"]) == (413, "request_too_large")
    status, told, _ = await gateway.post("/v1/messages", b"{")
    assert (status, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")


GLUED = b'data: {"choices":[{"index":0,"delta":{"content":"b"}\nevent: error\ndata: {"message":"gone"}\n\n'
FRAME = b'data: {"error":{"message":"gone","code":500}}\n\n'


@pytest.mark.replay("G17")
@pytest.mark.parametrize("broken", [GLUED, FRAME, None], ids=["glued to a cut line", "an error frame", "cut off"])
async def test_g17_a_late_failure_is_an_error_event_with_nothing_after_it(
    start: Start, upstream_of: UpstreamOf, broken: bytes | None
) -> None:
    async def script(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("a")
        if broken is None:
            reply.reset()
        else:
            await reply.block(broken)
            await reply.finish()
            await reply.done()

    gateway = await start(model((await upstream_of(script)).replica()))
    events = events_in(await stream_text(gateway))
    assert [name for name, _ in events] == ["message_start", "content_block_start", "content_block_delta", "error"]
    assert events[2][1]["delta"]["text"] == "a"
    assert (events[-1][1]["type"], events[-1][1]["error"]["type"]) == ("error", "api_error")
    assert events[-1][1]["request_id"].startswith("req-")
    with pytest.raises(anthropic.APIError):
        await _streamed(gateway)(**ASKED)
    with pytest.raises(anthropic.InternalServerError):
        await gateway.anthropic.messages.create(**ASKED)
    assert gateway.open_requests.in_flight == 0


@pytest.mark.replay("W18")
async def test_a_silent_stream_is_kept_open_by_pings(start: Start, upstream_of: UpstreamOf) -> None:
    async def pause(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("a")
        await asyncio.sleep(0.35)
        await reply.piece("b")
        await reply.finish()
        await reply.done()

    gateway = await start(model((await upstream_of(pause)).replica()), server={"heartbeat_s": 0.1})
    events = events_in(await stream_text(gateway))
    assert [data for name, data in events if name == "ping"][:2] == [{"type": "ping"}] * 2
    message = await _streamed(gateway)(**ASKED)
    assert message.content[0].text == "ab"


async def test_a_shutdown_that_takes_too_long_tells_open_streams_in_anthropics_words(
    start: Start, upstream_of: UpstreamOf
) -> None:
    async def hang(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("a")
        await reply.until_left()

    upstream = await upstream_of(hang)
    gateway = await start(model(upstream.replica()))
    asking = asyncio.create_task(stream_text(gateway))
    await until(lambda: gateway.open_requests.in_flight == 1 and upstream.num_generations == 1)
    await asyncio.sleep(0.05)
    await gateway.open_requests.drain(0.05)
    events = events_in(await asking)
    assert events[-1][0] == "error"
    assert events[-1][1]["error"]["type"] == "overloaded_error"


# ------------------------------ clients that leave


async def three_pieces(reply: Reply) -> None:
    await reply.begin()
    for text in ("a", "b", "c"):
        await reply.piece(text)
    await reply.until_left()


@pytest.mark.replay("W14", "G03")
@pytest.mark.parametrize("is_stream", [True, False])
async def test_g03_a_client_that_leaves_messages_closes_the_engines_connection(
    start: Start, upstream_of: UpstreamOf, is_stream: bool
) -> None:
    upstream = await upstream_of(three_pieces)
    gateway = await start(model(upstream.replica()))
    num_tasks = len(asyncio.all_tasks())
    if is_stream:
        async with gateway.anthropic.messages.stream(**ASKED) as stream:
            seen = 0
            async for _ in stream.text_stream:
                seen += 1
                if seen == 3:
                    break
    else:
        asking = asyncio.create_task(gateway.anthropic.messages.create(**ASKED))
        await until(lambda: upstream.num_generations == 1)
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: upstream.num_closed == 1, timeout_s=NOTICED_WITHIN_S)
    await until(lambda: gateway.open_requests.in_flight == 0, timeout_s=NOTICED_WITHIN_S)
    assert gateway.fleet.replicas[0].in_flight == 0
    await until(lambda: len(asyncio.all_tasks()) <= num_tasks + 1)  # the client's own connection


# ------------------------------ counting


async def test_tokens_are_counted_as_the_answer_counts_them(start: Start) -> None:
    gateway = await start(fake_model(tokens=1))
    asked: Any = {"model": "m", "system": "Be brief.", "messages": ASKED["messages"]}
    counted = await gateway.anthropic.messages.count_tokens(**asked)
    message = await gateway.anthropic.messages.create(**asked, max_tokens=5)
    assert counted.input_tokens == message.usage.input_tokens == 5


async def test_tools_are_counted_where_the_engine_can_and_refused_where_it_cannot(
    start: Start, upstream_of: UpstreamOf
) -> None:
    async def ids(reply: Reply) -> None:
        await reply.status(200, b'{"count": 2, "max_model_len": 4096, "tokens": [5, 6]}')

    upstream = await upstream_of(ids)
    gateway = await start(model(fake("cannot"), upstream.replica("can")), model(fake(), name="none"))
    counted = await gateway.anthropic.messages.count_tokens(
        model="m", messages=ASKED["messages"], tools=[WEATHER], tool_choice={"type": "auto"}
    )
    assert counted.input_tokens == 2
    assert json.loads(upstream.requests[0].body)["tools"][0]["function"]["name"] == "get_weather"
    with pytest.raises(anthropic.BadRequestError, match="engine 'fake' cannot honour the parameter 'tools'"):
        await gateway.anthropic.messages.count_tokens(model="none", messages=ASKED["messages"], tools=[WEATHER])


async def test_an_engine_without_a_tokenizer_is_named(start: Start, upstream_of: UpstreamOf) -> None:
    async def ids(reply: Reply) -> None:
        await reply.status(200, b'{"tokens": [5, 6]}')

    gateway = await start(model((await upstream_of(ids)).replica(engine="openai_compatible")))
    with pytest.raises(anthropic.BadRequestError, match="'openai_compatible' does not offer tokenize of messages"):
        await gateway.anthropic.messages.count_tokens(model="m", messages=ASKED["messages"])


# ------------------------------ the engine of our own


async def test_the_native_engine_counts_tools_as_a_message_with_them_is_counted(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    offered = "{% if tools %}<tool_call>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tool_call>{% endif %}"
    write_tiny_llama(folder, tiny_config(max_model_len=1024), chat_template=offered + CHAT_TEMPLATE)
    options = {"model": str(folder), "home": str(tmp_path), "kv_cache_mib": 16, "num_threads": 1}
    gateway = await start(model({"engine": "native", "options": options}), is_ready=False)
    await until(lambda: gateway.fleet.replicas[0].is_ready, timeout_s=60)
    counted = [
        await gateway.anthropic.messages.count_tokens(model="m", messages=ASKED["messages"], tools=tools)
        for tools in ([], [WEATHER])
    ]
    message = await gateway.anthropic.messages.create(**{**ASKED, "max_tokens": 4}, tools=[WEATHER])
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted[1].input_tokens
    assert counted[1].input_tokens > counted[0].input_tokens + 100


@pytest.mark.model
async def test_the_real_model_answers_anthropics_client_and_counts_as_it_is_counted(start: Start) -> None:
    home = goodgate_home()
    store = ModelStore(home)
    if DEFAULT_MODEL not in [each.name for each in store.list()]:
        store.pull(DEFAULT_MODEL)
    options = {"model": DEFAULT_MODEL, "home": str(home), "kv_cache_mib": 64}
    gateway = await start(model({"engine": "native", "options": options}), is_ready=False)
    await until(lambda: gateway.fleet.replicas[0].is_ready, timeout_s=60)
    asked: Any = {
        "model": "m",
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "What is the capital of France? One short sentence."}],
            }
        ],
    }
    greedy = {**asked, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = await gateway.anthropic.messages.create(**greedy)
    assert whole.content[0].type == "text"
    assert "Paris" in whole.content[0].text
    async with gateway.anthropic.messages.stream(**greedy) as stream:
        streamed = await stream.get_final_message()
    assert streamed.content[0].type == "text"
    assert streamed.content[0].text == whole.content[0].text
    assert (streamed.usage.cache_read_input_tokens or 0) > 0  # the prompt of the first answer
    counted = await gateway.anthropic.messages.count_tokens(**asked)
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    stopped = await gateway.anthropic.messages.create(**greedy, stop_sequences=["Paris"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
