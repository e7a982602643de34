"""What other gateways have got wrong, replayed through this one: each test is named after what a client saw."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from tests.gateway.rig import HELLO, Reply, Script, Start, Upstream, fake, fake_model, model

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
OPENAIS_REASONS = {"stop", "length", "tool_calls", "content_filter", "function_call"}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g", "h")
]


def scripted(*choices: dict[str, Any], usage: dict[str, Any] | None = None, reason: str | None = "stop") -> Script:
    """An engine that sends each of `choices` as an event."""

    async def play(reply: Reply) -> None:
        await reply.begin()
        for choice in choices:
            event = {"choices": [{"index": 0, "finish_reason": None, **choice}]}
            await reply.event(json.dumps(event).encode())
        if reason is not None:
            await reply.finish(reason)
        if usage is not None:
            await reply.event(json.dumps({"choices": [], "usage": usage}).encode())
        await reply.done()

    return play


def say(text: str) -> dict[str, Any]:
    return {"delta": {"content": text}}


# ------------------------------ accounts


@pytest.mark.replay("G18")
async def test_g18_the_engines_account_is_passed_on_and_never_counted_again(
    start: Start, upstream_of: UpstreamOf
) -> None:
    """mlx-dspark#37: a gateway counted with a tokenizer of its own, and billed something else."""
    usage = {
        "prompt_tokens": 1234,
        "completion_tokens": 77,
        "total_tokens": 1311,
        "prompt_tokens_details": {"cached_tokens": 1024},
        "completion_tokens_details": {"reasoning_tokens": 70},
    }
    upstream = await upstream_of(scripted(say("one"), say(" two three"), usage=usage))
    gateway = await start(model(upstream.replica()))
    assert (await gateway.chat())[1]["usage"] == usage
    events = await gateway.events(stream_options={"include_usage": True})
    assert json.loads(events[-2])["usage"] == usage
    whole = await gateway.openai.chat.completions.create(**HELLO)
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 70


@pytest.mark.replay("G18")
async def test_g18_the_details_of_a_list_of_prompts_are_added_up(start: Start, upstream_of: UpstreamOf) -> None:
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    upstream = await upstream_of(scripted({"text": "a"}, usage=usage))
    gateway = await start(model(upstream.replica()))
    _, body, _ = await gateway.post("/v1/completions", {"model": "m", "prompt": ["a", "b"]})
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }


# ------------------------------ tools


def call(index: int, **function: str) -> dict[str, Any]:
    head = {"id": f"call-{index}", "type": "function"} if "name" in function else {}
    return {"delta": {"tool_calls": [{"index": index, **head, "function": function}]}}


@pytest.mark.replay("G20")
async def test_g20_three_parallel_calls_stay_three_though_their_arguments_interleave(
    start: Start, upstream_of: UpstreamOf
) -> None:
    """litellm#7621: they were squeezed into one."""
    names = "fgh"
    choices = [
        *(call(index, name=name, arguments="") for index, name in enumerate(names)),
        *(call(index, arguments='{"x": ') for index in (2, 0, 1)),
        *(call(index, arguments=f"{index}}}") for index in (1, 2, 0)),
    ]
    gateway = await start(model((await upstream_of(scripted(*choices, reason="tool_calls"))).replica()))
    whole = await gateway.openai.chat.completions.create(**HELLO, tools=TOOLS)
    calls = whole.choices[0].message.tool_calls or []
    told = [(each.id, each.function.name, each.function.arguments) for each in calls if each.type == "function"]
    assert told == [(f"call-{index}", name, f'{{"x": {index}}}') for index, name in enumerate(names)]
    joined: dict[int, list[str]] = {}
    stream = await gateway.openai.chat.completions.create(**HELLO, tools=TOOLS, stream=True)
    async for chunk in stream:
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.function is not None
            parts = joined.setdefault(delta.index, ["", "", ""])
            for at, new in enumerate((delta.id, delta.function.name, delta.function.arguments)):
                parts[at] += new or ""
    assert [tuple(joined[index]) for index in sorted(joined)] == told


@pytest.mark.replay("G21")
async def test_g21_tools_that_no_engine_here_can_call_are_refused_with_the_engine_and_the_field(
    start: Start, upstream_of: UpstreamOf
) -> None:
    """litellm#35711, #17246: they were sent to engines that answered with text."""
    gateway = await start(fake_model())
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.openai.chat.completions.create(**HELLO, tools=TOOLS)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tools")
    assert "'fake'" in refused.value.message
    upstream = await upstream_of(scripted(say("ok")))
    gateway = await start(model(fake(), upstream.replica()))
    for _ in range(3):
        assert (await gateway.openai.chat.completions.create(**HELLO, tools=TOOLS)).choices[0].message.content == "ok"
    assert upstream.num_generations == 3


# ------------------------------ what is sent


@pytest.mark.replay("G22")
async def test_g22_what_a_client_leaves_null_is_not_sent(start: Start, upstream_of: UpstreamOf) -> None:
    """litellm, February 2026: `encoding_format: null` reached vLLM, which refused it."""
    vector = {"object": "embedding", "index": 0, "embedding": [1.0]}

    async def play(reply: Reply) -> None:
        if reply.request.path == "/v1/embeddings":
            body = {"object": "list", "data": [vector], "model": "served", "usage": {"prompt_tokens": 1}}
            await reply.status(200, json.dumps(body).encode())
        else:
            await scripted(say("ok"))(reply)

    chats, embeds = await upstream_of(play), await upstream_of(play)
    gateway = await start(model(chats.replica()), model(embeds.replica(embeddings=True), name="e"))
    nulls = dict.fromkeys(
        ["temperature", "stop", "tools", "tool_choice", "response_format", "logit_bias", "stream_options", "n", "seed"]
    )
    for fields in ({}, nulls):
        assert (await gateway.chat(**fields))[0] == 200
    for fields in ({}, {"encoding_format": None, "dimensions": None, "user": None}):
        status, _, _ = await gateway.post("/v1/embeddings", {"model": "e", "input": "a", **fields})
        assert status == 200
    for upstream in (chats, embeds):
        without, with_nulls = (request.body for request in upstream.requests)
        assert without == with_nulls
        assert b"null" not in without


# ------------------------------ ends


@pytest.mark.replay("G26")
@pytest.mark.parametrize("reason", ["eos_token", "stop_sequence", "max_tokens", "tool_use", "refusal", "end", "odd"])
async def test_g26_a_finish_reason_is_always_one_of_openais(start: Start, upstream_of: UpstreamOf, reason: str) -> None:
    """dynamo#14403, #8549, #12442: clients with strict enums broke."""
    gateway = await start(model((await upstream_of(scripted(say("a"), reason=reason))).replica()))
    whole = await gateway.openai.chat.completions.create(**HELLO)
    assert whole.choices[0].finish_reason in OPENAIS_REASONS
    stream = await gateway.openai.chat.completions.create(**HELLO, stream=True)
    reasons = {chunk.choices[0].finish_reason async for chunk in stream}
    assert reasons == {None, whole.choices[0].finish_reason}


@pytest.mark.replay("G26")
@pytest.mark.parametrize("reason", ["abort", "error", "timeout", "cancelled"])
async def test_g26_an_engine_that_gives_up_amid_the_answer_is_an_error_and_no_finish_reason(
    start: Start, upstream_of: UpstreamOf, reason: str
) -> None:
    gateway = await start(model((await upstream_of(scripted(say("a"), reason=reason))).replica()))
    stream = await gateway.openai.chat.completions.create(**HELLO, stream=True)
    seen: list[Any] = []
    with pytest.raises(openai.APIError) as failed:
        await _read_into(seen, stream)
    assert "".join(choice.delta.content or "" for choice in seen) == "a"
    assert [choice.finish_reason for choice in seen if choice.finish_reason] == []
    assert (failed.value.code, failed.value.type) == ("engine_failed", "engine_error")
    with pytest.raises(openai.InternalServerError) as whole_failed:
        await gateway.openai.chat.completions.create(**HELLO)
    assert whole_failed.value.status_code == 502


@pytest.mark.replay("G26")
@pytest.mark.parametrize(
    "told",
    [
        {"message": "queue is full", "type": "ServiceUnavailableError", "code": 503},
        {"message": "CUDA error: out of memory", "type": "InternalServerError", "code": 500},
        {"message": "bad request", "type": "BadRequestError", "code": 400},
    ],
)
async def test_g26_an_error_amid_the_answer_is_the_engines_and_never_the_clients(
    start: Start, upstream_of: UpstreamOf, told: dict[str, Any]
) -> None:
    """production-stack#952: what the engine had begun to answer cannot have been a bad request."""

    async def play(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("a")
        await reply.event(json.dumps({"error": told}).encode())
        await reply.done()

    gateway = await start(model((await upstream_of(play)).replica()))
    error = json.loads((await gateway.events())[-1])["error"]
    assert (error["type"], error["code"]) == ("engine_error", "engine_failed")
    assert set(error) == {"message", "type", "param", "code"}


async def _read_into(seen: list[Any], stream: Any) -> None:
    async for chunk in stream:
        seen += chunk.choices
