"""Before the first byte a failed attempt is repeated elsewhere; which failures, how often, and what the client sees."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.gateway.rig import HELLO, Reply, Script, Start, Upstream, fake, free_port, model, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]


def refusing(status: int, body: bytes = b'{"error":{"message":"no","type":"x","code":null}}', *headers: str) -> Script:
    async def script(reply: Reply) -> None:
        await reply.status(status, body, "Connection: close", *headers)

    return script


async def whole(reply: Reply) -> None:
    await reply.answer("a", "b")


async def rst_at_once(reply: Reply) -> None:
    reply.reset()


async def headers_then_rst(reply: Reply) -> None:
    await reply.begin()
    await asyncio.sleep(0.02)
    reply.reset()


async def error_as_first_event(reply: Reply) -> None:
    await reply.begin()
    await reply.event(b'{"error":{"message":"full","type":"overloaded","code":503}}')
    await reply.end()


async def silent(reply: Reply) -> None:
    await reply.until_left()


def pair(first: dict[str, Any], second: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Two replicas, tried in this order by the first request."""
    return model({**first, "name": "first"}, {**second, "name": "second"}, routing="round_robin", **fields)


@pytest.mark.replay("G24")
@pytest.mark.parametrize(
    "script",
    [refusing(500), refusing(503), refusing(502, b"<html>"), rst_at_once, headers_then_rst, error_as_first_event],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_g24_a_failure_before_the_first_byte_is_answered_by_the_other_replica(
    start: Start, upstream_of: UpstreamOf, script: Script, is_stream: bool
) -> None:
    bad, good = await upstream_of(script), await upstream_of(whole)
    gateway = await start(pair(bad.replica(), good.replica()))
    if is_stream:
        events = await gateway.events()
        assert events[-1] == "[DONE]"
    else:
        status, body, headers = await gateway.chat()
        assert status == 200
        assert body["choices"][0]["message"]["content"] == "ab"
        assert headers["x-goodgate-replica"] == "second"
    assert (bad.num_generations, good.num_generations) == (1, 1)


@pytest.mark.replay("F03", "G24")
async def test_f03_a_silent_engine_is_given_up_at_its_deadline_and_closed(
    start: Start, upstream_of: UpstreamOf
) -> None:
    bad, good = await upstream_of(silent), await upstream_of(whole)
    gateway = await start(pair(bad.replica(first_token_timeout_s=0.2), good.replica()))
    status, _, headers = await gateway.chat()
    assert (status, headers["x-goodgate-replica"]) == (200, "second")
    await until(lambda: bad.num_closed == 1)


@pytest.mark.replay("G25")
async def test_a_whole_answer_that_breaks_half_way_is_made_anew_because_nobody_has_seen_it(
    start: Start, upstream_of: UpstreamOf
) -> None:
    async def half(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("half")
        await asyncio.sleep(0.02)
        reply.reset()

    bad, good = await upstream_of(half), await upstream_of(whole)
    gateway = await start(pair(bad.replica(), good.replica()))
    status, body, _ = await gateway.chat()
    assert status == 200
    assert body["choices"][0]["message"]["content"] == "ab"  # g25: nothing joined, nothing doubled


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (400, b'{"error":{"message":"bad temperature","type":"BadRequestError","code":400}}', None),
        (
            400,
            b'{"error":{"message":"maximum context length is 8","code":"context_length_exceeded"}}',
            "context_length_exceeded",
        ),
    ],
)
async def test_the_callers_own_mistake_is_not_tried_again(
    start: Start, upstream_of: UpstreamOf, status: int, body: bytes, code: str | None
) -> None:
    bad, good = await upstream_of(refusing(status, body)), await upstream_of(whole)
    gateway = await start(pair(bad.replica(), good.replica()))
    answered, envelope, _ = await gateway.chat()
    assert answered == 400
    assert code is None or envelope["error"]["code"] == code
    assert good.num_generations == 0
    assert gateway.fleet.replicas[0].is_ready  # g30: a 4xx says nothing about the replica


async def test_fallback_models_come_after_the_models_own_replicas(start: Start, upstream_of: UpstreamOf) -> None:
    bad = await upstream_of(refusing(500))
    gateway = await start(
        model(bad.replica("a"), bad.replica("b"), fallbacks=["spare"]), model(fake("spare-0"), name="spare")
    )
    status, body, headers = await gateway.chat()
    assert status == 200
    assert body["model"] == "spare"  # s16: what answered is named
    assert headers["x-goodgate-replica"] == "spare-0"
    assert bad.num_generations == 2


async def test_attempts_are_bounded(start: Start, upstream_of: UpstreamOf) -> None:
    bad = await upstream_of(refusing(500))
    gateway = await start(model(*(bad.replica(f"r{n}") for n in range(6)), max_attempts=3))
    status, body, _ = await gateway.chat()
    assert status == 502
    assert body["error"]["code"] == "engine_failed"
    assert bad.num_generations == 3


@pytest.mark.replay("F01")
async def test_f01_a_replica_that_refuses_connections_is_left_out_until_it_answers_a_probe(
    start: Start, upstream_of: UpstreamOf
) -> None:
    good = await upstream_of(whole)
    dead = await upstream_of(whole)
    gateway = await start(pair(dead.replica(), good.replica()), health={"interval_s": 0.2})
    port, dead.port = dead.port, free_port()
    adapter = gateway.fleet.replicas[0].adapter
    adapter.client.url = f"http://127.0.0.1:{dead.port}"  # type: ignore[union-attr]  # the engine has moved away
    for _ in range(4):
        assert (await gateway.chat())[0] == 200
    assert not gateway.fleet.replicas[0].is_ready
    adapter.client.url = f"http://127.0.0.1:{port}"  # type: ignore[union-attr]
    await until(lambda: gateway.fleet.replicas[0].is_ready)


@pytest.mark.replay("G27")
async def test_g27_nothing_to_route_to_is_503_with_retry_after(start: Start) -> None:
    replica = {"engine": "vllm", "options": {"url": f"http://127.0.0.1:{free_port()}", "model": "served"}}
    gateway = await start(model(replica), is_ready=False)
    await until(lambda: gateway.fleet.replicas[0].reason != "It has not answered yet.")
    status, body, headers = await gateway.chat()
    assert status == 503
    assert body["error"]["code"] == "engine_unavailable"
    assert int(headers["Retry-After"]) >= 1
    assert (await gateway.get("/ready"))[0] == 503
    assert (await gateway.get("/health"))[0] == 200


@pytest.mark.replay("W09", "G27")
@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"inner","type":"x","param":null,"code":"c"}}',
        b'{"object":"error","message":"flat","type":"x","param":null,"code":500}',
        b'{"error":"text"}',
        b"<html>502</html>",
        b"",
    ],
)
async def test_g27_an_engines_error_is_wrapped_once_whatever_its_shape(
    start: Start, upstream_of: UpstreamOf, body: bytes
) -> None:
    gateway = await start(model((await upstream_of(refusing(500, body))).replica()))
    status, envelope, _ = await gateway.chat()
    assert status == 502
    assert set(envelope) == {"error"}
    assert set(envelope["error"]) == {"message", "type", "param", "code"}
    assert isinstance(envelope["error"]["message"], str)
    assert "{" not in envelope["error"]["message"]


@pytest.mark.replay("G32")
async def test_g32_every_attempt_sends_the_same_whole_body(start: Start, upstream_of: UpstreamOf) -> None:
    bad, good = await upstream_of(refusing(500)), await upstream_of(whole)
    gateway = await start(pair(bad.replica(), good.replica()))
    for size in (1, 1 << 20, 8 << 20):
        text = "x" * size
        status, _, _ = await gateway.chat(messages=[{"role": "user", "content": text}])
        assert status == 200
        sent = [json.loads(each.requests[-1].body)["messages"][0]["content"] for each in (bad, good)]
        assert [len(each) for each in sent] == [size, size]
        assert hashlib.sha256(bad.requests[-1].body).digest() == hashlib.sha256(good.requests[-1].body).digest()
        await until(lambda: all(replica.is_ready for replica in gateway.fleet.replicas))
        gateway.fleet.models["m"].turn = 0


async def test_a_request_goes_only_where_its_fields_are_honoured(start: Start, upstream_of: UpstreamOf) -> None:
    good = await upstream_of(whole)
    gateway = await start(pair(fake(), good.replica()))
    status, _, headers = await gateway.chat(logit_bias={"5": 1})
    assert (status, headers["x-goodgate-replica"]) == (200, "second")
    gateway = await start(model(fake()))
    status, body, _ = await gateway.chat(logit_bias={"5": 1})
    assert (status, body["error"]["param"]) == (400, "logit_bias")
    assert "fake" in body["error"]["message"]


@pytest.mark.replay("A53")
async def test_ids_the_client_sees_its_own_and_each_engine_a_fresh_one(start: Start, upstream_of: UpstreamOf) -> None:
    good = await upstream_of(whole)
    gateway = await start(model(good.replica()))
    for given, is_echoed in (("abc-1", True), ("y" * 200, False), ("a b", False)):
        _, _, headers = await gateway.post("/v1/chat/completions", HELLO, **{"x-request-id": given})
        assert (headers["x-request-id"] == given) is is_echoed
    sent = [request.headers["x-request-id"] for request in good.requests]
    assert len(set(sent)) == 3
    assert "abc-1" not in sent
