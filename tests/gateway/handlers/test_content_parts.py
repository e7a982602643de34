"""What a message may hold: parts, roles, names, thoughts and results of calls, and what each engine is sent of it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.config import ConfigError
from tests.gateway.rig import Reply, Script, Start, Upstream, fake, fake_model, model

UpstreamOf = Callable[[Script], Awaitable[Upstream]]

TEXT = {"type": "text", "text": "Hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


async def ok(reply: Reply) -> None:
    await reply.answer("ok")


def sent(upstream: Upstream, at: int = -1) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(upstream.requests[at].body)["messages"]
    return messages


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": list(content)}]


@pytest.mark.parametrize(
    "part", [{"type": "video_url", "video_url": {}}, {"type": "file", "file": {"file_id": "f"}}, {"type": "imag_url"}]
)
async def test_an_unknown_part_is_refused_with_its_place_and_its_type(start: Start, part: dict[str, Any]) -> None:
    status, body, _ = await (await start(fake_model())).chat(messages=user(TEXT, part))
    assert (status, body["error"]["param"]) == (400, "messages")
    assert f"'{part['type']}'" in body["error"]["message"]
    assert "messages[1].content[1]" in body["error"]["message"]


@pytest.mark.parametrize("part", [IMAGE, SOUND])
async def test_a_part_that_the_engine_does_not_take_is_refused_by_name(start: Start, part: dict[str, Any]) -> None:
    gateway = await start(fake_model())
    status, body, _ = await gateway.chat(messages=user(TEXT, part))
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_parameter", "messages")
    assert body["error"]["message"] == f"The engine 'fake' takes no '{part['type']}' (messages[1].content[1])."
    status, body, _ = await gateway.post("/tokenize", {"messages": user(TEXT, part)})
    assert (status, body["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama_cpp", "openai_compatible"])
async def test_an_image_goes_to_the_replica_that_takes_images_as_it_came(
    start: Start, upstream_of: UpstreamOf, engine: str
) -> None:
    upstream = await upstream_of(ok)
    gateway = await start(model(fake(), upstream.replica(engine=engine, content_parts=["image_url"])))
    assert (await gateway.chat(messages=user(TEXT, IMAGE)))[0] == 200
    assert sent(upstream)[1]["content"] == [TEXT, IMAGE]
    assert (await gateway.chat(messages=user(TEXT, SOUND)))[0] == 400
    assert [request.path for request in upstream.requests].count("/v1/chat/completions") == 1


async def test_text_parts_are_one_text_to_an_engine_that_takes_images_too(
    start: Start, upstream_of: UpstreamOf
) -> None:
    upstream = await upstream_of(ok)
    gateway = await start(model(upstream.replica(content_parts=["image_url", "input_audio"])))
    assert (await gateway.chat(messages=user(TEXT, {"type": "refusal", "refusal": "No."})))[0] == 200
    assert sent(upstream)[1]["content"] == "HelloNo."
    assert (await gateway.chat(messages=user(SOUND)))[0] == 200
    assert sent(upstream)[1]["content"] == [SOUND]


async def test_images_are_no_option_of_a_route_that_takes_text(start: Start) -> None:
    options = {"url": "http://127.0.0.1:1", "route": "native", "content_parts": ["image_url"]}
    with pytest.raises(ConfigError, match="content_parts needs the route openai"):
        await start(model({"engine": "sglang", "options": options}))


async def test_roles_names_and_results_without_a_call_pass_through(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(ok)
    gateway = await start(model(upstream.replica()))
    messages = [
        {"role": "developer", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "tool", "content": "sunny", "tool_call_id": "of-no-call"},
    ]
    assert (await gateway.chat(messages=messages))[0] == 200
    assert sent(upstream) == [{**messages[0], "role": "system"}, *messages[1:]]


@pytest.mark.replay("W13", "G19")
@pytest.mark.parametrize("told_as", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize(
    ("engine", "field"),
    [
        ("vllm", "reasoning"),
        ("sglang", "reasoning_content"),
        ("llama_cpp", "reasoning_content"),
        ("goodgate_peer", "reasoning_content"),
        ("openai_compatible", None),
        ("tensorrt_llm", None),
    ],
)
async def test_g19_thoughts_of_earlier_answers_reach_an_engine_under_its_own_name_or_not_at_all(
    start: Start, upstream_of: UpstreamOf, engine: str, field: str | None, told_as: str
) -> None:
    upstream = await upstream_of(ok)
    gateway = await start(model(upstream.replica(engine=engine)))
    history = [
        {"role": "user", "content": "2+2?", told_as: "not mine"},
        {"role": "assistant", "content": "4", told_as: "hm"},
        {"role": "user", "content": "Sure?"},
    ]
    assert (await gateway.chat(messages=history))[0] == 200
    thought = {} if field is None else {field: "hm"}
    assert sent(upstream) == [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", **thought},
        {"role": "user", "content": "Sure?"},
    ]


@pytest.mark.replay("W13")
@pytest.mark.parametrize("told_as", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("shown_as", ["reasoning", "reasoning_content", "both"])
async def test_thoughts_leave_under_the_configured_name_whatever_the_engine_calls_them(
    start: Start, upstream_of: UpstreamOf, told_as: str, shown_as: str
) -> None:
    async def think(reply: Reply) -> None:
        await reply.begin()
        await reply.event(json.dumps({"choices": [{"index": 0, "delta": {told_as: "hm"}}]}).encode())
        await reply.piece("4")
        await reply.finish()
        await reply.done()

    gateway = await start(model((await upstream_of(think)).replica()), server={"reasoning_field": shown_as})
    names = {"reasoning", "reasoning_content"} if shown_as == "both" else {shown_as}
    _, body, _ = await gateway.chat()
    message = body["choices"][0]["message"]
    assert {name: value for name, value in message.items() if "reasoning" in name} == dict.fromkeys(names, "hm")
    deltas = [json.loads(event)["choices"][0]["delta"] for event in (await gateway.events())[:-1]]
    assert [delta for delta in deltas if any("reasoning" in name for name in delta)] == [dict.fromkeys(names, "hm")]
