"""Embeddings through the gateway, over real sockets: the official client, every form of input, refusals, failures."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, fake, fake_model, model, until

PATH = "/v1/embeddings"
UpstreamOf = Callable[[Script], Awaitable[Upstream]]


async def embed(gateway: Gateway, **fields: Any) -> tuple[int, Any, Any]:
    return await gateway.post(PATH, {"model": "m", "input": "the river", **fields})


async def vectors(gateway: Gateway, **fields: Any) -> list[list[float]]:
    status, body, _ = await embed(gateway, **fields)
    assert status == 200, body
    assert [each["index"] for each in body["data"]] == list(range(len(body["data"])))
    return [each["embedding"] for each in body["data"]]


async def refusal(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    status, body, _ = await embed(gateway, **fields)
    assert status == 400, body
    error: dict[str, Any] = body["error"]
    return error


# ---------------------------------------------------------------------------------------------------------- answers


async def test_the_official_client_gets_its_vectors_in_order(start: Start) -> None:
    """It asks for base64 without being told to."""
    gateway = await start(fake_model(dimensions=8))
    answer = await gateway.openai.embeddings.create(model="m", input=["the river", "a city", "the river"])
    first, second, third = (each.embedding for each in answer.data)
    assert len(first) == 8
    assert first == third != second
    assert sum(number * number for number in first) == pytest.approx(1, abs=1e-6)
    assert (answer.object, answer.model) == ("list", "m")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (6, 6)


async def test_base64_is_little_endian_float32_and_says_the_same_as_floats(start: Start) -> None:
    gateway = await start(fake_model(dimensions=4))
    (floats,) = await vectors(gateway, encoding_format="float")
    status, body, _ = await embed(gateway, encoding_format="base64")
    assert status == 200
    packed = base64.b64decode(body["data"][0]["embedding"])
    assert struct.unpack("<4f", packed) == pytest.approx(floats, abs=1e-6)


async def test_floats_are_what_comes_unless_base64_is_asked_for(start: Start) -> None:
    gateway = await start(fake_model(dimensions=4))
    for fields in ({}, {"encoding_format": None}, {"encoding_format": "float"}):
        assert len((await vectors(gateway, **fields))[0]) == 4


async def test_every_form_of_input_is_taken(start: Start) -> None:
    gateway = await start(fake_model())
    (text,) = await vectors(gateway, input="the a")
    assert await vectors(gateway, input=["the a"]) == [text]
    assert await vectors(gateway, input=[0, 1]) == [text]  # the ids of the two words
    assert await vectors(gateway, input=[[0, 1], [5]]) == [text, *await vectors(gateway, input="quiet")]


async def test_as_many_inputs_as_openai_takes_are_one_request(start: Start) -> None:
    gateway = await start(fake_model(dimensions=2))
    assert len(await vectors(gateway, input=["the"] * 2048)) == 2048


async def test_the_caller_may_choose_how_many_dimensions(start: Start) -> None:
    gateway = await start(fake_model(dimensions=8))
    assert len((await vectors(gateway, dimensions=3))[0]) == 3
    assert (await refusal(gateway, dimensions=10**6))["param"] == "dimensions"


async def test_nulls_and_a_user_are_taken(start: Start) -> None:
    gateway = await start(fake_model())
    assert await vectors(gateway, dimensions=None, encoding_format=None, user="u") == await vectors(gateway)


async def test_it_is_answered_counted_and_logged_as_a_generation_is(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start({**fake_model(), "aliases": ["default"]}, logs={"access": True})
    with caplog.at_level("INFO", "goodgate.access"):
        status, body, headers = await gateway.post(
            PATH, {"model": "default", "input": "the river"}, **{"x-request-id": "mine-1"}
        )
    assert (status, body["model"]) == (200, "m")
    assert headers["x-request-id"] == "mine-1"
    assert (headers["x-goodgate-engine"], headers["x-goodgate-replica"]) == ("fake", "fake-0")
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        counted = await response.text()
    assert 'goodgate_requests_total{model="m",route="/v1/embeddings",status="200"} 1.0' in counted
    assert 'goodgate_attempts_total{engine="fake",model="m",outcome="ok",replica="fake-0"} 1.0' in counted
    assert 'goodgate_prompt_tokens_total{engine="fake",model="m",replica="fake-0"} 2.0' in counted
    assert any("mine-1" in str(record.__dict__) for record in caplog.records)
    assert gateway.open_requests.in_flight == 0


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["the", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": None}, "input"),
        ({"input": ["the", 5]}, "input"),
        ({"input": ["the", [5]]}, "input"),
        ({"input": [[5], 5]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": {"text": "the"}}, "input"),
        ({"input": ["the"] * 2049}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "8"}, "dimensions"),
        ({"model": ""}, "model"),
        ({"truncate": True}, "truncate"),
    ],
)
async def test_bad_input_is_refused_by_name(start: Start, fields: dict[str, Any], param: str) -> None:
    gateway = await start(fake_model())
    assert (await refusal(gateway, **fields))["param"] == param


async def test_an_unknown_model_is_404_with_the_nearest_name(start: Start) -> None:
    gateway = await start(model(fake(), name="small"))
    with pytest.raises(openai.NotFoundError, match="did you mean 'small'"):
        await gateway.openai.embeddings.create(model="smal", input="the")


async def test_an_engine_without_embeddings_is_named(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(fail)
    gateway = await start(model(upstream.replica(engine="openvino")))
    error = await refusal(gateway)
    assert error["code"] == "unsupported_operation"
    assert "'openvino' does not offer embeddings" in error["message"]


async def test_ids_are_refused_for_an_engine_that_takes_text_only(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(answer_with([[1.0]]))
    gateway = await start(model(upstream.replica(engine="openai_compatible", embeddings=True)))
    error = await refusal(gateway, input=[5, 6])
    assert (error["code"], error["param"]) == ("unsupported_parameter", "input")
    assert await vectors(gateway, input="the") == [[1.0]]


# ------------------------------------------------------------------------------------------------ routing and failure


def answer_with(embeddings: list[list[float]]) -> Script:
    body = {"data": [{"index": index, "embedding": each} for index, each in enumerate(embeddings)]}

    async def script(reply: Reply) -> None:
        await reply.status(200, json.dumps(body).encode())

    return script


async def fail(reply: Reply) -> None:
    await reply.status(500, b'{"error": {"message": "broken"}}')


async def test_a_replica_that_fails_is_followed_by_the_next(start: Start, upstream_of: UpstreamOf) -> None:
    bad, good = await upstream_of(fail), await upstream_of(answer_with([[0.5, 0.25]]))
    gateway = await start(model(bad.replica("bad", embeddings=True), good.replica("good", embeddings=True)))
    for _ in range(2):
        assert await vectors(gateway) == [[0.5, 0.25]]
    assert (bad.num_generations, good.num_generations) == (1, 2)
    sent = json.loads(good.requests[0].body)
    assert sent == {"model": "served", "input": ["the river"], "encoding_format": "base64"}


async def test_only_replicas_that_embed_are_asked(start: Start, upstream_of: UpstreamOf) -> None:
    """One replica generates, the other embeds: each gets what it can do."""
    chats, embeds = await upstream_of(lambda reply: reply.answer("Hi")), await upstream_of(answer_with([[1.0]]))
    gateway = await start(model(chats.replica("chats"), embeds.replica("embeds", embeddings=True)))
    for _ in range(2):
        assert await vectors(gateway) == [[1.0]]
        assert (await gateway.chat())[0] == 200
    assert (chats.num_generations, embeds.num_generations) == (2, 2)


async def test_a_fallback_model_is_never_asked_for_vectors(start: Start, upstream_of: UpstreamOf) -> None:
    """They would be vectors of another space, and nobody could tell."""
    bad, other = await upstream_of(fail), await upstream_of(answer_with([[1.0]]))
    gateway = await start(
        model(bad.replica("bad", embeddings=True), fallbacks=["other"]),
        model(other.replica("good", embeddings=True), name="other"),
    )
    status, body, _ = await embed(gateway)
    assert (status, body["error"]["code"]) == (502, "engine_failed")
    assert other.num_generations == 0


async def test_faults_of_the_fake_are_retried_and_told(start: Start) -> None:
    gateway = await start(model(fake("bad", fail_rate=1), fake("good"), max_attempts=2))
    assert [(await embed(gateway))[0] for _ in range(4)] == [200] * 4
    gateway = await start(fake_model(fail_rate=1, fail_kinds=["overloaded"]))
    status, body, headers = await embed(gateway)
    assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "overloaded", "1")


async def test_an_answer_that_is_none_is_the_engines_fault(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(answer_with([[1.0], [2.0]]))
    gateway = await start(model(upstream.replica(embeddings=True)))
    status, body, _ = await embed(gateway)
    assert (status, body["error"]["code"]) == (502, "engine_protocol_error")
    assert "'vllm'" in body["error"]["message"]


async def test_a_client_that_leaves_stops_the_engine(start: Start, upstream_of: UpstreamOf) -> None:
    async def never(reply: Reply) -> None:
        await reply.until_left()

    upstream = await upstream_of(never)
    gateway = await start(model(upstream.replica(embeddings=True)))
    task = asyncio.create_task(embed(gateway))
    await until(lambda: upstream.num_generations == 1)
    assert gateway.open_requests.in_flight == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: upstream.num_closed == 1, timeout_s=1)
    await until(lambda: gateway.open_requests.in_flight == 0, timeout_s=1)


async def test_a_full_gateway_refuses_at_once(start: Start) -> None:
    gateway = await start(fake_model(ttft_ms=60_000), server={"max_in_flight": 1})
    waiting = asyncio.create_task(embed(gateway))
    await until(lambda: gateway.open_requests.in_flight == 1)
    status, body, _ = await embed(gateway)
    assert (status, body["error"]["code"]) == (503, "overloaded")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_peer_passes_embeddings_on(start: Start) -> None:
    inner = await start(fake_model(dimensions=4))
    outer = await start(model({"engine": "goodgate_peer", "options": {"url": inner.url, "model": "m"}}))
    assert await vectors(outer, input=["the", "a"]) == await vectors(inner, input=["the", "a"])
    assert len((await vectors(outer, dimensions=2))[0]) == 2
