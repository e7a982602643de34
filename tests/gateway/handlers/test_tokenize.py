"""Token ids and their text through the gateway, in vLLM's shapes, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, fake_model, model

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
TURNS = [{"role": "user", "content": "the river"}]


async def tokenize(gateway: Gateway, **fields: Any) -> Any:
    status, body, _ = await gateway.post("/tokenize", fields)
    assert status == 200, body
    return body


async def refusal(gateway: Gateway, path: str = "/tokenize", **fields: Any) -> Any:
    status, body, _ = await gateway.post(path, fields)
    assert status in (400, 404), body
    return body["error"]


async def test_a_text_becomes_ids_and_ids_become_the_text(start: Start) -> None:
    gateway = await start(fake_model(max_model_len=512))
    told = await tokenize(gateway, model="m", prompt="the river follows one road")
    assert told["count"] == len(told["tokens"]) == 5
    assert told["max_model_len"] == 512
    status, body, headers = await gateway.post("/detokenize", {"model": "m", "tokens": told["tokens"]})
    assert (status, body) == (200, {"prompt": "the river follows one road"})
    assert headers["x-goodgate-replica"] == "fake-0"


async def test_messages_are_counted_as_a_chat_counts_them(start: Start) -> None:
    gateway = await start(fake_model())
    told = await tokenize(gateway, model="m", messages=TURNS)
    _, chat, _ = await gateway.chat(messages=TURNS)
    assert told["count"] == chat["usage"]["prompt_tokens"] > 0


async def test_the_name_may_be_left_out_where_one_model_is_served(start: Start) -> None:
    gateway = await start({**fake_model(), "aliases": ["default"]})
    told = await tokenize(gateway, prompt="the river")
    assert told == await tokenize(gateway, model="default", prompt="the river")
    assert told == await tokenize(gateway, model=None, prompt="the river", messages=None, add_special_tokens=None)
    status, body, _ = await gateway.post("/detokenize", {"tokens": told["tokens"]})
    assert (status, body) == (200, {"prompt": "the river"})


async def test_of_several_models_one_has_to_be_named(start: Start) -> None:
    gateway = await start(fake_model(), {**fake_model(), "name": "other"})
    for path, fields in (("/tokenize", {"prompt": "the"}), ("/detokenize", {"tokens": [1]})):
        error = await refusal(gateway, path, **fields)
        assert error["param"] == "model"
        assert "m, other" in error["message"]
    assert (await tokenize(gateway, model="other", prompt="the"))["count"] == 1


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "the", "messages": TURNS}, "prompt"),
        ("/tokenize", {"prompt": ["the"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "root", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": "the", "add_special_tokens": "no"}, "add_special_tokens"),
        ("/tokenize", {"prompt": "the", "chat_template": "{{ 7 }}"}, "chat_template"),
        ("/tokenize", {"prompt": "the", "model": "n"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "the"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "n"}, "model"),
    ],
)
async def test_bad_questions_are_refused_by_name(
    start: Start, path: str, fields: dict[str, Any], param: str | None
) -> None:
    assert (await refusal(await start(fake_model()), path, **fields))["param"] == param


async def test_an_engine_that_does_not_tell_is_named_with_the_operation(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(ids)
    gateway = await start(model(upstream.replica(engine="openai_compatible")))
    for path, fields, operation in (
        ("/tokenize", {"prompt": "the"}, "tokenize"),
        ("/tokenize", {"messages": TURNS}, "tokenize of messages"),
        ("/detokenize", {"tokens": [1]}, "detokenize"),
    ):
        error = await refusal(gateway, path, **fields)
        assert error["code"] == "unsupported_operation"
        assert error["message"] == f"The engine 'openai_compatible' does not offer {operation}."


async def test_a_replica_that_fails_is_followed_by_the_next(start: Start, upstream_of: UpstreamOf) -> None:
    bad, good = await upstream_of(fail), await upstream_of(ids)
    gateway = await start(model(bad.replica("bad"), good.replica("good")))
    told = await tokenize(gateway, prompt="the river", add_special_tokens=False)
    assert told == {"count": 2, "max_model_len": 4096, "tokens": [5, 6]}
    assert (bad.num_generations, good.num_generations) == (1, 1)
    assert json.loads(good.requests[0].body) == {"model": "served", "prompt": "the river", "add_special_tokens": False}


async def test_a_peer_passes_the_questions_on(start: Start) -> None:
    inner = await start(fake_model())
    outer = await start(model({"engine": "goodgate_peer", "options": {"url": inner.url, "model": "m"}}))
    for fields in ({"prompt": "the river"}, {"messages": TURNS}):
        assert await tokenize(outer, **fields) == await tokenize(inner, **fields)
    status, body, _ = await outer.post("/detokenize", {"tokens": [0, 1]})
    assert (status, body) == (200, {"prompt": "the a"})


async def fail(reply: Reply) -> None:
    await reply.status(500, b'{"error": {"message": "broken"}}')


async def ids(reply: Reply) -> None:
    await reply.status(200, b'{"count": 2, "max_model_len": 4096, "tokens": [5, 6]}')
