"""A broken engine behind the gateway: one clean error for the client, and every counter right afterwards."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from adapters.errors import EngineTimeout, StreamInterrupted
from tests.contract import transcripts
from tests.contract.bad_answers import BAD_ANSWERS, LEAK, BadAnswer
from tests.contract.twin import Reply, Twin, event, events
from tests.gateway.rig import Gateway, Start, model, until

CHAT = "/v1/chat/completions"
FIRST = event({"choices": [{"index": 0, "delta": {"content": "xxx"}, "finish_reason": None}]})


@pytest.fixture
async def twin() -> AsyncIterator[Twin]:
    async with Twin() as engine:
        engine.reply("/health", Reply.plain(200))
        yield engine


IMPATIENT = {"first_token_timeout_s": 0.25, "token_timeout_s": 0.25}


async def gateway_before(twin: Twin, start: Start, bad: BadAnswer | None = None, **options: Any) -> Gateway:
    """Its patience is short where it is to run out; elsewhere a busy machine has all the time that it needs."""
    patience = IMPATIENT if bad is not None and bad.kind is EngineTimeout else {}
    options = {"url": twin.url, "model": "served", **patience, **options}
    return await start(model({"engine": "vllm", "options": options}, max_attempts=1))  # each answer is met once


async def counted(gateway: Gateway, series: str) -> dict[str, float]:
    """The samples of a series that are not zero, by their labels as they stand."""
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        text = await response.text()
    found = re.findall(rf"^{series}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found if float(value)}


async def check_counters(gateway: Gateway, code: str, status: int, route: str = CHAT) -> None:
    await until(lambda: gateway.open_requests.in_flight == 0, timeout_s=1)
    assert await counted(gateway, "goodgate_in_flight") == {}
    assert await counted(gateway, "goodgate_errors_total") == {f'code="{code}",model="m"': 1.0}
    replica = 'engine="vllm",model="m"'
    assert await counted(gateway, "goodgate_attempts_total") == {f'{replica},outcome="{code}",replica="vllm-0"': 1.0}
    requests = await counted(gateway, "goodgate_requests_total")
    assert {labels: n for labels, n in requests.items() if route in labels} == {
        f'model="m",route="{route}",status="{status}"': 1.0
    }
    assert await counted(gateway, "goodgate_completion_tokens_total") == {}


@pytest.mark.replay("A34")
@pytest.mark.parametrize("name", BAD_ANSWERS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_bad_answer_is_one_clean_error_and_is_counted_once(
    start: Start, twin: Twin, name: str, stream: bool
) -> None:
    bad = BAD_ANSWERS[name]
    gateway = await gateway_before(twin, start, bad)
    reply = bad.reply(FIRST)
    twin.reply(CHAT, reply)
    code = str(bad.kind.code)
    if stream and bad.has_begun:
        *_, last = await gateway.events()
        status, error = 200, json.loads(last)["error"]
    else:
        status, body, _ = await gateway.chat(**({"stream": True} if stream else {}))
        error = body["error"]
        assert status == bad.kind.status
    assert error["code"] == code
    assert "'vllm'" in error["message"]
    assert LEAK not in json.dumps(error)
    # A pooled connection that drops a request may have been closing already, so a fresh one is tried in silence. One
    # that has begun to answer was not.
    assert len(twin.bodies) == (2 if name == "a closed connection" else 1)
    if "hold" in reply.steps:
        await twin.client_left(within_s=1)
    await check_counters(gateway, code, status)


# What an answer in one piece is for a stream that has broken off, or does not end: it is no JSON, or no answer.
INSTEAD_OF_JSON = {"engine_protocol_error", "stream_interrupted", "engine_timeout"}


@pytest.mark.replay("A34")
@pytest.mark.parametrize("name", BAD_ANSWERS)
@pytest.mark.parametrize(
    ("route", "asked"), [("/v1/embeddings", {"input": "Hello"}), ("/tokenize", {"prompt": "Hello"})]
)
async def test_a_bad_answer_to_a_question_is_told_and_counted_once_too(
    start: Start, twin: Twin, name: str, route: str, asked: dict[str, Any]
) -> None:
    bad = BAD_ANSWERS[name]
    gateway = await gateway_before(twin, start, embeddings=route == "/v1/embeddings", **IMPATIENT)
    twin.reply(route, bad.reply(FIRST))
    status, body, _ = await gateway.post(route, {"model": "m", **asked})
    error = body["error"]
    assert error["code"] == bad.kind.code or {error["code"], str(bad.kind.code)} <= INSTEAD_OF_JSON
    assert status in {502, 503, 504}
    assert "'vllm'" in error["message"]
    assert LEAK not in json.dumps(error)
    await check_counters(gateway, error["code"], status, route)


async def test_after_every_bad_answer_the_same_gateway_serves_the_next_request(start: Start, twin: Twin) -> None:
    gateway = await gateway_before(twin, start, **IMPATIENT)
    for bad in BAD_ANSWERS.values():
        twin.reply(CHAT, bad.reply(FIRST))
        assert (await gateway.chat())[0] == bad.kind.status
        twin.reply(CHAT, Reply.stream(transcripts.VLLM_CHAT))
        status, body, _ = await gateway.chat()
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello world")
    assert await counted(gateway, "goodgate_in_flight") == {}


async def test_an_engine_that_calls_itself_by_another_name_answers_under_ours(start: Start, twin: Twin) -> None:
    """Engines tell the path of their weights here; whoever asked for a model is answered by that model."""
    gateway = await gateway_before(twin, start)
    weights = f"/mnt/{LEAK}/weights"
    chunks = [
        {"id": f"chatcmpl-{LEAK}", "model": weights, "system_fingerprint": LEAK, "choices": [choice]}
        for choice in (
            {"index": 0, "delta": {"role": "assistant", "content": "Hi"}, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": "stop"},
        )
    ]
    twin.reply(CHAT, Reply.stream(events(chunks)))
    status, body, headers = await gateway.chat()
    told = await gateway.events()
    assert (status, body["model"]) == (200, "m")
    assert {json.loads(each)["model"] for each in told[:-1]} == {"m"}
    assert LEAK not in json.dumps([body, told, dict(headers)])


ODD: dict[str, list[dict[str, Any]]] = {
    "a second finish reason": [
        {"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "delta": {"content": LEAK}, "finish_reason": "length"}]},
    ],
    "a usage that cannot be true": [
        {"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": 10**30, "total_tokens": LEAK}},
    ],
    "logprobs that are none": [
        {"choices": [{"index": 0, "delta": {"content": "Hi"}, "logprobs": {"content": LEAK}, "finish_reason": "stop"}]},
    ],
    "keys that nobody knows": [
        {"x": LEAK, "choices": [{"index": 0, "delta": {"content": "Hi", "y": LEAK}, "finish_reason": "stop", "z": 1}]},
    ],
}


@pytest.mark.replay("A34")
@pytest.mark.parametrize("name", ODD)
async def test_what_is_odd_but_harmless_does_not_spoil_the_answer(start: Start, twin: Twin, name: str) -> None:
    gateway = await gateway_before(twin, start)
    twin.reply(CHAT, Reply.stream(events(ODD[name])))
    status, body, _ = await gateway.chat()
    told = await gateway.events(stream_options={"include_usage": True})
    assert (status, body["choices"][0]["message"]["content"]) == (200, "Hi")
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] >= 0
    finishes = [choice["finish_reason"] for each in told[:-1] for choice in json.loads(each)["choices"]]
    assert [reason for reason in finishes if reason] == ["stop"]
    assert await counted(gateway, "goodgate_errors_total") == {}


@pytest.mark.parametrize("index", [-1, 1, 2**40])
async def test_a_choice_that_was_not_asked_for_is_the_engines_fault(start: Start, twin: Twin, index: int) -> None:
    gateway = await gateway_before(twin, start)
    twin.reply(CHAT, Reply.stream(event({"choices": [{"index": index, "delta": {"content": LEAK}}]}), "hold"))
    status, body, _ = await gateway.chat()
    assert (status, body["error"]["code"]) == (502, "engine_protocol_error")
    assert LEAK not in json.dumps(body)
    await check_counters(gateway, "engine_protocol_error", 502)


async def test_an_answer_far_beyond_its_limit_is_cut_off_while_it_is_being_read(start: Start, twin: Twin) -> None:
    gateway = await gateway_before(twin, start)
    twin.reply(CHAT, Reply.stream(*[FIRST] * 500, "hold"))
    *_, last = await gateway.events(max_tokens=5)
    assert json.loads(last)["error"]["code"] == "engine_protocol_error"
    await twin.client_left(within_s=1)
    await check_counters(gateway, "engine_protocol_error", 200)


async def test_two_clients_of_one_broken_engine_do_not_share_its_fault(start: Start, twin: Twin) -> None:
    gateway = await gateway_before(twin, start)
    whole = Reply.stream(transcripts.VLLM_CHAT.partition(b" world")[0].rpartition(b"data:")[0], 0.1, events([]))
    twin.reply(CHAT, whole, Reply.stream(transcripts.VLLM_CHAT))
    broken, served = await asyncio.gather(gateway.chat(), gateway.chat())
    assert sorted([broken[0], served[0]]) == [200, StreamInterrupted.status]
