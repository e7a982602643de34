"""What is tried again, when and how often; over real sockets, with engines whose every answer is in the test."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from email.utils import formatdate

import pytest

from tests.gateway.rig import HELLO, Gateway, Reply, Script, Start, Upstream, fake, model, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]

FULL = b'{"error":{"message":"full","type":"overloaded","code":null}}'


async def whole(reply: Reply) -> None:
    await reply.answer("a", "b")


def first(status: int, *headers: str, body: bytes = FULL, times: int = 1) -> tuple[Script, list[float]]:
    """An engine that refuses so many times and then answers; and when it was asked."""
    asked: list[float] = []

    async def script(reply: Reply) -> None:
        asked.append(time.monotonic())
        if len(asked) <= times:
            await reply.status(status, body, "Connection: close", *headers)
        else:
            await reply.answer("a", "b")

    return script, asked


async def counted(gateway: Gateway, series: str) -> float:
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        text = await response.text()
    return sum(float(value) for value in re.findall(rf"^{series}\{{.*\}} (\S+)$", text, re.MULTILINE))


@pytest.mark.replay("G29", "S01", "F15")
@pytest.mark.parametrize("form", ["seconds", "date"])
@pytest.mark.parametrize("status", [429, 503])
async def test_g29_s01_an_engine_that_says_when_to_come_back_is_asked_then_and_not_before(
    start: Start, upstream_of: UpstreamOf, form: str, status: int
) -> None:
    if form == "date" and status == 503:
        pytest.skip("a date is read the same way under both statuses")
    named = "2" if form == "seconds" else formatdate(math.ceil(time.time()) + 2, usegmt=True)
    script, asked = first(status, f"Retry-After: {named}")
    gateway = await start(model((await upstream_of(script)).replica()))
    code, body, _ = await gateway.chat()
    assert (code, body["choices"][0]["message"]["content"]) == (200, "ab")
    assert 2 <= asked[1] - asked[0] <= 3 + (form == "date")
    assert await counted(gateway, "goodgate_retries_total") == 1


@pytest.mark.replay("R34")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_that_needs_three_tries_is_one_request_and_three_attempts(
    start: Start, upstream_of: UpstreamOf, stream: bool
) -> None:
    replicas = [(await upstream_of(first(500)[0])).replica() for _ in range(2)]
    gateway = await start(model(*replicas, (await upstream_of(whole)).replica()))
    async with gateway.client.post(f"{gateway.url}/v1/chat/completions", json={**HELLO, "stream": stream}) as response:
        assert response.status == 200
        await response.read()
    await until(lambda: gateway.open_requests.in_flight == 0, timeout_s=1)
    assert await counted(gateway, "goodgate_requests_total") == 1
    assert await counted(gateway, "goodgate_attempts_total") == 3
    assert await counted(gateway, "goodgate_retries_total") == 2
    assert await counted(gateway, "goodgate_time_to_first_token_seconds_count") == 1


@pytest.mark.replay("F15")
async def test_nobody_asks_a_replica_that_rests_and_the_client_is_told_how_long_where_that_is_too_long(
    start: Start, upstream_of: UpstreamOf
) -> None:
    script, asked = first(429, "Retry-After: 40", times=9)
    gateway = await start(model((await upstream_of(script)).replica()))
    for _ in range(3):
        began = time.monotonic()
        status, body, headers = await gateway.chat()
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert 38 <= int(headers["Retry-After"]) <= 40
        assert time.monotonic() - began < 2
    assert len(asked) == 1


async def test_while_one_replica_rests_the_other_answers_at_once(start: Start, upstream_of: UpstreamOf) -> None:
    script, asked = first(429, "Retry-After: 30", times=9)
    good = await upstream_of(whole)
    gateway = await start(
        model((await upstream_of(script)).replica("a"), good.replica("b"), routing="round_robin"),
    )
    for _ in range(4):
        assert (await gateway.chat())[0] == 200
    assert (len(asked), good.num_generations) == (1, 4)


@pytest.mark.replay("S02")
@pytest.mark.parametrize("status", [429, 503])
async def test_s02_a_lasting_refusal_is_met_by_few_tries_and_told(
    start: Start, upstream_of: UpstreamOf, status: int
) -> None:
    script, asked = first(status, times=99)
    gateway = await start(model((await upstream_of(script)).replica()))
    code, body, headers = await gateway.chat()
    assert (code, body["error"]["code"]) == (503, "overloaded")
    assert int(headers["Retry-After"]) >= 1
    assert len(asked) == 3
    assert asked[1] - asked[0] >= 0.25
    assert asked[2] - asked[1] >= 0.5


@pytest.mark.replay("S04")
async def test_s04_where_a_model_stays_full_its_fallback_answers(start: Start, upstream_of: UpstreamOf) -> None:
    script, asked = first(503, times=99)
    gateway = await start(
        model((await upstream_of(script)).replica(), fallbacks=["spare"]), model(fake(), name="spare")
    )
    status, body, _ = await gateway.chat()
    assert (status, body["model"], len(asked)) == (200, "spare", 1)


@pytest.mark.replay("S03")
async def test_s03_one_500_of_the_only_replica_reaches_no_client(start: Start, upstream_of: UpstreamOf) -> None:
    script, asked = first(500)
    gateway = await start(model((await upstream_of(script)).replica()))
    status, body, _ = await gateway.chat()
    assert (status, body["choices"][0]["message"]["content"]) == (200, "ab")
    assert 0.05 <= asked[1] - asked[0] <= 2


@pytest.mark.replay("S05")
async def test_s05_a_reset_before_the_headers_reaches_no_client(start: Start, upstream_of: UpstreamOf) -> None:
    async def script(reply: Reply) -> None:
        if reply.number == 1:
            reply.reset()
        else:
            await reply.answer("a", "b")

    gateway = await start(model((await upstream_of(script)).replica()))
    assert (await gateway.events())[-1] == "[DONE]"


@pytest.mark.replay("S07", "F04")
async def test_s07_a_first_token_that_is_late_is_not_waited_for_and_the_same_replica_is_not_asked_again(
    start: Start, upstream_of: UpstreamOf
) -> None:
    async def late(reply: Reply) -> None:
        await reply.begin()
        await reply.until_left()

    slow = await upstream_of(late)
    gateway = await start(model(slow.replica(first_token_timeout_s=0.2)))
    status, body, _ = await gateway.chat(stream=True)
    assert (status, body["error"]["code"]) == (504, "engine_timeout")
    assert slow.num_generations == 1
    await until(lambda: slow.num_closed == 1)
    replica = slow.replica(first_token_timeout_s=0.2)
    gateway = await start(model(replica, fallbacks=["spare"]), model(fake(), name="spare"))
    status, body, _ = await gateway.chat()
    assert (status, body["model"]) == (200, "spare")
    await until(lambda: slow.num_closed == 2)


@pytest.mark.replay("S12")
async def test_s12_a_prompt_that_is_too_long_goes_to_the_model_for_long_ones_and_not_to_the_same_again(
    start: Start, upstream_of: UpstreamOf
) -> None:
    refusal = b'{"error":{"message":"maximum context length is 8","code":"context_length_exceeded"}}'
    script, asked = first(400, body=refusal, times=9)
    upstream = await upstream_of(script)
    gateway = await start(
        model(upstream.replica("a"), upstream.replica("b"), context_fallbacks=["long"]),
        model(fake("long-0"), name="long"),
    )
    status, body, _ = await gateway.chat()
    assert (status, body["model"], len(asked)) == (200, "long", 1)


@pytest.mark.replay("S13")
@pytest.mark.parametrize("form", ["answer", "refusal"])
async def test_s13_what_a_content_filter_stops_is_not_tried_again(
    start: Start, upstream_of: UpstreamOf, form: str
) -> None:
    async def script(reply: Reply) -> None:
        if form == "refusal":
            await reply.status(400, b'{"error":{"message":"filtered","code":"content_filter"}}', "Connection: close")
        else:
            await reply.begin()
            await reply.piece("a")
            await reply.finish("content_filter")
            await reply.done()

    upstream = await upstream_of(script)
    gateway = await start(
        model(upstream.replica("a"), upstream.replica("b"), fallbacks=["spare"]), model(fake(), name="spare")
    )
    status, body, _ = await gateway.chat()
    if form == "answer":
        assert (status, body["choices"][0]["finish_reason"]) == (200, "content_filter")
    else:
        assert status == 400
    assert upstream.num_generations == 1


@pytest.mark.replay("S16")
async def test_s16_the_account_names_the_model_that_answered(start: Start, upstream_of: UpstreamOf) -> None:
    script, _ = first(500, times=9)
    gateway = await start(
        model((await upstream_of(script)).replica(), fallbacks=["spare"]), model(fake("spare-0"), name="spare")
    )
    _, body, headers = await gateway.chat()
    assert (body["model"], headers["x-goodgate-replica"]) == ("spare", "spare-0")
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        text = await response.text()
    tokens = re.findall(r'^goodgate_completion_tokens_total\{.*model="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    assert {name: float(value) for name, value in tokens if float(value)} == {"spare": 5.0}


@pytest.mark.replay("F17", "F15")
async def test_f17_where_every_replica_fails_engines_see_at_most_a_fifth_more_attempts(
    start: Start, upstream_of: UpstreamOf
) -> None:
    is_well = False

    async def failing(reply: Reply) -> None:
        if is_well:
            await reply.answer("a", "b")
        else:
            await reply.status(500, FULL, "Connection: close")

    bad = await upstream_of(failing)
    gateway = await start(model(bad.replica("a"), bad.replica("b")))
    answers = await asyncio.gather(*(gateway.chat() for _ in range(60)))
    assert {status for status, _, _ in answers} == {502}
    assert 60 < bad.num_generations <= 72
    assert await counted(gateway, "goodgate_retries_total") == bad.num_generations - 60
    assert await counted(gateway, "goodgate_retries_refused_total") >= 48
    is_well = True
    assert (await gateway.chat())[0] == 200


@pytest.mark.replay("F05")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_f05_when_one_of_two_engines_dies_before_the_first_byte_no_request_is_lost(
    start: Start, upstream_of: UpstreamOf, is_stream: bool
) -> None:
    """Half of 60 requests wait on the engine that dies, more than the budget has places: they go over in turns."""
    dies = asyncio.Event()

    async def dying(reply: Reply) -> None:
        await reply.begin()
        await dies.wait()
        reply.reset()

    doomed, good = await upstream_of(dying), await upstream_of(whole)
    gateway = await start(model(doomed.replica("a"), good.replica("b"), routing="round_robin"))
    requests = [asyncio.ensure_future(gateway.events() if is_stream else gateway.chat()) for _ in range(60)]
    await until(lambda: doomed.num_generations == 30)
    dies.set()
    for answer in await asyncio.gather(*requests):
        assert answer[-1] == "[DONE]" if is_stream else answer[0] == 200
    assert (doomed.num_generations, good.num_generations) == (30, 60)


@pytest.mark.replay("F02")
async def test_f02_an_engine_that_takes_no_connection_is_given_up_at_the_connect_deadline(
    start: Start, upstream_of: UpstreamOf
) -> None:
    """A queue of connections that is full drops what comes, as a dead host does."""
    swallowed, good = await upstream_of(whole), await upstream_of(whole)
    patience = {"connect_timeout_s": 0.2}
    gateway = await start(
        model(swallowed.replica("a", **patience), good.replica("b", **patience), routing="round_robin")
    )
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        with ExitStack() as fill:
            for _ in range(4):
                waiting = fill.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(deaf.getsockname())
            adapter = gateway.fleet.replicas[0].adapter
            adapter.client.url = f"http://127.0.0.1:{deaf.getsockname()[1]}"  # type: ignore[union-attr]
            began = time.monotonic()
            status, _, headers = await gateway.chat()
            assert (status, headers["x-goodgate-replica"]) == (200, "b")
            assert 0.2 <= time.monotonic() - began < 2


@pytest.mark.replay("G33")
async def test_g33_the_whole_answer_has_a_deadline_of_its_own(start: Start, upstream_of: UpstreamOf) -> None:
    """Neither the first token nor a gap between two is late here, but the whole is."""

    async def endless(reply: Reply) -> None:
        await reply.begin()
        while True:
            await reply.piece("word ")
            await asyncio.sleep(0.02)

    upstream = await upstream_of(endless)
    gateway = await start(model(upstream.replica(), total_timeout_s=0.3))
    status, body, _ = await gateway.chat()
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert upstream.num_generations == 1
    await until(lambda: upstream.num_closed == 1)
    *texts, last = await gateway.events()
    assert len(texts) > 1
    assert '"deadline_exceeded"' in last
    await until(lambda: upstream.num_closed == 2)
    await until(lambda: gateway.open_requests.in_flight == 0)
