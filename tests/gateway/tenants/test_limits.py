"""Limits are exact: under many callers at once, over several processes, and when clients leave."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.types import ChatRequest, CompletionRequest, Message, Usage
from gateway.records.trace import Attempt, Trace
from gateway.tenants import cost, limits
from gateway.tenants.accounts import Claim, Now
from gateway.tenants.budgets import Amount
from gateway.tenants.keys import Key, KeyStore, NewKey
from gateway.tenants.limits import Limits, RateLimited, Refused, Used
from gateway.tenants.quotas import Quotas, Store
from gateway.tenants.quotas_file import FileStore
from tests.gateway.commands.test_commands import await_ready, running, write_config
from tests.gateway.rig import HELLO, Gateway, Reply, Start, fake, fake_model, free_port, model, until
from tests.gateway.test_cancellation import UpstreamOf

CHAT = "/v1/chat/completions"


def key_in(home: Path, name: str = "a", **bounds: int) -> dict[str, str]:
    secret = KeyStore(home).create(NewKey(name=name, limits=Limits(**bounds)))
    return {"Authorization": f"Bearer {secret}"}


async def ask(gateway: Gateway, headers: dict[str, str], **fields: Any) -> tuple[int, Any, Any]:
    return await gateway.post(CHAT, {**HELLO, **fields}, **headers)


def at_one_moment(gateway: Gateway, home: Path) -> FileStore:
    """The gateway's quotas, for which no time passes, so that every figure is exact."""
    store = gateway.quotas.store = FileStore(home, clock=lambda: Now(1_000.0, 1_000.0))
    return store


async def used(store: Store, key: Key) -> Used:
    return (await store.states(key.accounts)).states[0].used


# The rules


def test_a_minute_is_used_at_once_and_comes_back_evenly() -> None:
    bound, used = Limits(requests_per_min=60), Used()
    for _ in range(60):
        outcome = limits.reserve(bound, used, 100.0, requests=1, tokens=0)
        assert isinstance(outcome, Used)
        used = outcome
    refused = limits.reserve(bound, used, 100.0, requests=1, tokens=0)
    assert refused == Refused("60 requests a minute", 1.0)
    assert isinstance(limits.reserve(bound, used, 100.99, requests=1, tokens=0), Refused)
    assert isinstance(limits.reserve(bound, used, 101.0, requests=1, tokens=0), Used)
    assert limits.drained(bound, used, 160.0).requests == 0


def test_what_was_reserved_and_not_spent_comes_back_and_what_was_overspent_is_owed() -> None:
    bound = Limits(tokens_per_min=600)
    used = limits.reserve(bound, Used(), 0.0, requests=1, tokens=500)
    assert isinstance(used, Used)
    assert limits.settle(bound, used, 0.0, requests=1, reserved=500, spent=20).tokens == 20
    owing = limits.settle(bound, used, 0.0, requests=1, reserved=500, spent=1_200)
    assert owing.tokens == 1_200
    outcome = limits.reserve(bound, owing, 0.0, requests=1, tokens=0)
    assert outcome == Refused("600 tokens a minute", 60.0)


def test_a_request_for_more_than_a_minute_waits_for_an_empty_bucket_and_not_for_ever() -> None:
    bound = Limits(tokens_per_min=100)
    used = limits.reserve(bound, Used(), 0.0, requests=1, tokens=5_000)
    assert isinstance(used, Used)
    assert isinstance(limits.reserve(bound, used, 59.0, requests=1, tokens=5_000), Refused)
    assert limits.settle(bound, used, 0.0, requests=1, reserved=5_000, spent=40).tokens == 40


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    bound, used = Limits(requests_per_min=1), Used(at=100.0, requests=1.0)
    assert isinstance(limits.reserve(bound, used, 40.0, requests=1, tokens=0), Refused)
    assert limits.drained(bound, used, 40.0) == used


bounds = st.none() | st.integers(1, 50)
requests_seen = st.lists(
    st.tuples(st.floats(0, 30), st.integers(1, 3), st.integers(0, 80), st.integers(0, 80), st.booleans()), max_size=40
)


@given(st.builds(Limits, requests_per_min=bounds, tokens_per_min=bounds, concurrent=bounds), requests_seen)
def test_whatever_comes_no_limit_is_passed_and_nothing_is_left_at_the_end(bound: Limits, seen: Any) -> None:
    used, now, let_in, open_requests = Used(), 0.0, 0, []
    for wait_s, num_requests, expected, spent, ends in seen:
        now += wait_s
        outcome = limits.reserve(bound, used, now, requests=num_requests, tokens=expected)
        if isinstance(outcome, Refused):
            assert outcome.retry_after_s > 0
        else:
            used, let_in = outcome, let_in + num_requests
            open_requests.append((num_requests, expected, spent))
            assert bound.concurrent is None or used.in_flight <= bound.concurrent
            assert bound.tokens_per_min is None or used.tokens <= bound.tokens_per_min + 1e-6
            if bound.requests_per_min is not None:
                assert let_in <= bound.requests_per_min * (1 + now / 60) + 1e-6
        if ends and open_requests:
            number, reserved, cost_of = open_requests.pop()
            used = limits.settle(bound, used, now, requests=number, reserved=reserved, spent=cost_of)
    for number, reserved, cost_of in open_requests:
        used = limits.settle(bound, used, now, requests=number, reserved=reserved, spent=cost_of)
    assert used.in_flight == 0
    assert min(used.requests, used.tokens) >= 0


def test_headers_tell_limit_rest_and_reset() -> None:
    shown = limits.headers(limits.left(Limits(requests_per_min=60, tokens_per_min=600), Used(requests=1.5, tokens=900)))
    assert shown == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "58",
        "x-ratelimit-reset-requests": "1.500s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "90.000s",
    }
    assert limits.headers(limits.left(Limits(concurrent=3), Used())) == {}


def user(text: str) -> Message:
    return Message(role="user", content=text)


def test_what_a_request_may_cost() -> None:
    chat = ChatRequest(model="m", messages=[user("x" * 40), user("y")], max_tokens=10, n=3)
    assert cost.of_generation(chat) == (12, 30)
    unbounded = ChatRequest(model="m", messages=[user("x")])
    assert cost.of_generation(unbounded).completion_tokens == cost.DEFAULT_COMPLETION_TOKENS
    assert cost.of_generation(CompletionRequest(model="m", prompt=[1, 2, 3])) == (3, 16)


@pytest.mark.parametrize(
    ("outcome", "has_begun", "usage", "pieces", "spent"),
    [
        ("ok", True, Usage(20, 10), 9, (20, 10, False)),  # the engine counted
        ("cancelled", True, Usage(20, 10), 9, (20, 10, False)),  # it did, and then the client left
        ("ok", True, None, 9, (100, 9, True)),  # it did not
        ("ok", True, Usage(0, 9), 9, (100, 9, True)),  # it did not count the prompt
        ("cancelled", False, None, 0, (100, 0, True)),  # the client left while the prompt was read
        ("cancelled", True, None, 7, (100, 7, True)),
        ("engine_failed", False, None, 0, (0, 0, False)),  # nothing was done for it
        ("stream_interrupted", True, None, 7, (100, 7, True)),  # a stream that broke off
        ("ok", True, Usage(2**53, 1), 1, (cost.MAX_TOKENS, 1, False)),  # an engine that is out of its mind
    ],
)
def test_what_a_request_has_cost(
    outcome: str, has_begun: bool, usage: Usage | None, pieces: int, spent: tuple[int, int, bool]
) -> None:
    attempt = Attempt(model="m", engine="e", replica="r", outcome=outcome, usage=usage)
    attempt.first_token = 1.0 if has_begun else None
    trace = Trace(request_id="r", route="/", attempts=[attempt], num_pieces=pieces, expected_prompt_tokens=100)
    trace.prompt_tokens, trace.completion_tokens = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
    assert cost.spent(trace) == spent


def test_a_request_that_no_engine_has_begun_costs_nothing() -> None:
    assert cost.spent(Trace(request_id="r", route="/", expected_prompt_tokens=100)).tokens == 0


# Over real sockets


async def test_200_callers_at_once_get_exactly_what_the_limit_says(start: Start, tmp_path: Path) -> None:
    gateway = await start(fake_model())
    headers = key_in(tmp_path, requests_per_min=10)
    other = key_in(tmp_path, "b", requests_per_min=7)
    await becomes_known(gateway, other)
    answers = await asyncio.gather(*(ask(gateway, headers) for _ in range(200)))
    assert Counter(status for status, _, _ in answers) == {200: 10, 429: 190}
    for status, body, shown in answers:
        assert shown["x-ratelimit-limit-requests"] == "10"
        if status == 429:
            assert body["error"]["code"] == "rate_limit_exceeded"
            assert body["error"]["type"] == "rate_limit_error"
            assert "10 requests a minute" in body["error"]["message"]
            assert 1 <= int(shown["Retry-After"]) <= 7
            assert shown["x-ratelimit-remaining-requests"] == "0"
    remaining = sorted(int(shown["x-ratelimit-remaining-requests"]) for status, _, shown in answers if status == 200)
    assert remaining == list(range(10))
    assert (await ask(gateway, other))[0] == 200  # a neighbour has his own


async def becomes_known(gateway: Gateway, headers: dict[str, str]) -> None:
    async with asyncio.timeout(2):
        while True:
            async with gateway.client.get(f"{gateway.url}/v1/models", headers=headers) as response:
                if response.status == 200 and (await gateway.get("/v1/models"))[0] == 401:
                    return
            await asyncio.sleep(0.02)


async def test_200_callers_at_once_never_have_more_open_than_allowed(start: Start, tmp_path: Path) -> None:
    headers = key_in(tmp_path, concurrent=5)
    gateway = await start(fake_model(ttft_ms=300))
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, gateway.open_requests.in_flight)
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    answers = await asyncio.gather(*(ask(gateway, headers) for _ in range(200)))
    watcher.cancel()
    assert most <= 5
    assert Counter(status for status, _, _ in answers)[200] >= 5
    assert {status for status, _, _ in answers} == {200, 429}
    await until(lambda: gateway.open_requests.in_flight == 0)
    assert (await ask(gateway, headers))[0] == 200


@pytest.mark.replay("G04")
async def test_g04_clients_that_leave_and_answers_that_end_free_their_places_at_once(
    start: Start, tmp_path: Path, upstream_of: UpstreamOf
) -> None:
    async def script(reply: Reply) -> None:
        if b"wait" in reply.request.body:
            await reply.begin()
            await reply.piece("a")
            await reply.until_left()
        else:
            await reply.answer("a", "b")

    headers = key_in(tmp_path, concurrent=2)
    gateway = await start(model((await upstream_of(script)).replica()))
    waiting = [{"role": "user", "content": "wait"}]
    for is_stream in (True, False, True):
        held = [asyncio.create_task(ask(gateway, headers, messages=waiting, stream=is_stream)) for _ in range(2)]
        await until(lambda: gateway.open_requests.in_flight == 2)
        assert (await ask(gateway, headers))[0] == 429
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await until(lambda: gateway.open_requests.in_flight == 0, timeout_s=1)
        for _ in range(3):  # and completed ones do not pile up
            assert (await ask(gateway, headers))[0] == 200


async def test_tokens_are_reserved_then_charged_as_the_engine_counted_them(start: Start, tmp_path: Path) -> None:
    headers = key_in(tmp_path, tokens_per_min=1_000)
    gateway = await start(fake_model(tokens=5))
    store, spent = at_one_moment(gateway, tmp_path), 0
    for is_stream in (False, True, False):
        body = {**HELLO, "max_tokens": 400, "stream": is_stream, "stream_options": {"include_usage": True}}
        if not is_stream:
            del body["stream_options"]
        async with gateway.client.post(gateway.url + CHAT, json=body, headers=headers) as response:
            assert response.status == 200
            text = await response.text()
            rest = int(response.headers["x-ratelimit-remaining-tokens"])
        assert rest == 1_000 - spent - 402  # what it may cost is held while it is open
        data = text if not is_stream else text.split("data: ")[-2]
        spent += json.loads(data)["usage"]["total_tokens"]
    [key] = KeyStore(tmp_path).all()
    assert (await used(store, key)).tokens == spent > 0


@pytest.mark.replay("G40")
async def test_a_minute_of_tokens_refuses_what_does_not_fit_and_says_when_it_will(start: Start, tmp_path: Path) -> None:
    headers = key_in(tmp_path, tokens_per_min=600)
    gateway = await start(fake_model(tokens=5, ttft_ms=500))
    first = asyncio.create_task(ask(gateway, headers, max_tokens=500))
    await until(lambda: gateway.open_requests.in_flight == 1)
    status, body, shown = await ask(gateway, headers, max_tokens=200)
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "600 tokens a minute" in body["error"]["message"]
    assert 9 <= int(shown["Retry-After"]) <= 11
    assert (await first)[0] == 200
    assert (await ask(gateway, headers, max_tokens=200))[0] == 200  # the first has spent less than it held


async def test_a_failed_request_and_a_refused_one_cost_no_tokens(
    start: Start, tmp_path: Path, upstream_of: UpstreamOf
) -> None:
    async def script(reply: Reply) -> None:
        await reply.status(500, b'{"error": {"message": "x"}}')

    headers = key_in(tmp_path, tokens_per_min=1_000, requests_per_min=100)
    gateway = await start(model((await upstream_of(script)).replica()))
    store = at_one_moment(gateway, tmp_path)
    for _ in range(3):
        assert (await ask(gateway, headers, max_tokens=900))[0] == 502
    for fields in ({"model": "n"}, {"temperature": 9}):
        assert (await ask(gateway, headers, **fields))[0] in (400, 404)
    [key] = KeyStore(tmp_path).all()
    seen = await used(store, key)
    assert (seen.tokens, seen.in_flight, seen.requests) == (0, 0, 3)  # the engine's failures were requests


@pytest.mark.replay("A42")
async def test_a42_a_client_that_leaves_before_the_end_pays_for_what_it_got(start: Start, tmp_path: Path) -> None:
    headers = key_in(tmp_path, tokens_per_min=100_000)
    gateway = await start(fake_model(tokens=500, itl_ms=5))
    store, [key] = at_one_moment(gateway, tmp_path), KeyStore(tmp_path).all()
    async with gateway.client.post(gateway.url + CHAT, json={**HELLO, "stream": True}, headers=headers) as response:
        for _ in range(20):
            await response.content.readuntil(b"\n\n")
    await until(lambda: gateway.open_requests.in_flight == 0)
    for_the_stream = (await used(store, key)).tokens
    assert 20 <= for_the_stream < 200
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(gateway, headers), 0.4)
    await until(lambda: gateway.open_requests.in_flight == 0)
    assert 10 <= (await used(store, key)).tokens - for_the_stream < 200


async def test_every_prompt_of_a_list_counts_and_more_than_the_limit_can_never_be(start: Start, tmp_path: Path) -> None:
    headers = key_in(tmp_path, concurrent=3, requests_per_min=8)
    gateway = await start(fake_model())
    for num_prompts, status in ((3, 200), (4, 400), (3, 200), (3, 429), (2, 200)):
        body = {"model": "m", "prompt": ["x"] * num_prompts}
        assert (await gateway.post("/v1/completions", body, **headers))[0] == status


async def test_embeddings_hold_and_cost_the_tokens_of_their_texts(start: Start, tmp_path: Path) -> None:
    headers = key_in(tmp_path, tokens_per_min=1_000)
    gateway = await start(fake_model())
    store, [key] = at_one_moment(gateway, tmp_path), KeyStore(tmp_path).all()
    body = {"model": "m", "input": ["x " * 200]}
    status, answer, shown = await gateway.post("/v1/embeddings", body, **headers)
    assert (status, shown["x-ratelimit-remaining-tokens"]) == (200, str(1_000 - 101)), answer
    assert (await used(store, key)).tokens == answer["usage"]["prompt_tokens"] > 0


async def test_questions_count_as_requests_and_an_alias_is_no_second_purse(start: Start, tmp_path: Path) -> None:
    headers = key_in(tmp_path, requests_per_min=3)
    gateway = await start(model(fake(), aliases=["alias"]))
    assert (await gateway.post("/tokenize", {"model": "m", "prompt": "x"}, **headers))[0] == 200
    assert (await ask(gateway, headers, model="alias"))[0] == 200
    assert (await ask(gateway, {"x-api-key": headers["Authorization"].split()[1]}))[0] == 200
    assert (await gateway.post("/tokenize", {"model": "m", "prompt": "x"}, **headers))[0] == 429


async def test_anthropics_route_has_the_same_keys_models_and_limits_in_its_own_words(
    start: Start, tmp_path: Path
) -> None:
    limited = NewKey(name="a", models=("m",), limits=Limits(requests_per_min=1))
    headers = {"x-api-key": KeyStore(tmp_path).create(limited)}
    gateway = await start(fake_model(), model(fake(), name="other"))
    body = {**HELLO, "max_tokens": 5}
    for sent, shown, status, kind in (
        (body, {}, 401, "authentication_error"),
        ({**body, "model": "other"}, headers, 404, "not_found_error"),
        (body, headers, 200, None),
        (body, headers, 429, "rate_limit_error"),
    ):
        answered, answer, told = await gateway.post("/v1/messages", sent, **shown)
        assert (answered, answer.get("error", {}).get("type")) == (status, kind), answer
        if status in (200, 429):
            assert told["x-ratelimit-remaining-requests"] == "0"
        if status == 429:
            assert int(told["Retry-After"]) >= 55


async def test_rotating_a_key_gives_no_new_minute(start: Start, tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    headers = key_in(tmp_path, requests_per_min=2)
    gateway = await start(fake_model())
    assert [(await ask(gateway, headers))[0] for _ in range(3)] == [200, 200, 429]
    renewed = {"x-api-key": store.rotate("a")}
    await becomes_known(gateway, renewed)
    assert (await ask(gateway, renewed))[0] == 429


# Over several processes


ONE = Claim(1, Amount(0, 0))


def in_each_of(num_processes: int, work: Any, *arguments: Any) -> list[int]:
    """What each process has let in."""
    context = multiprocessing.get_context("spawn")
    results, all_there = context.Queue(), context.Barrier(num_processes)
    workers = [context.Process(target=work, args=(*arguments, all_there, results)) for _ in range(num_processes)]
    for worker in workers:
        worker.start()
    counts = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * num_processes
    return counts


def count_up_and_down(home: Path, key: Key, all_there: Any, results: Any) -> None:
    async def work() -> None:
        quotas = Quotas(FileStore(home))
        await quotas.store.states(key.accounts)
        all_there.wait(60)
        for _ in range(10_000):
            async with quotas.reserved(key, ONE):
                pass
        all_there.wait(60)
        results.put((await used(quotas.store, key)).in_flight)

    asyncio.run(work())


@pytest.mark.slow
def test_processes_that_change_one_record_at_once_lose_no_change(tmp_path: Path) -> None:
    key = Key(id=7, name="a", limits=Limits(concurrent=1_000_000))
    assert in_each_of(3, count_up_and_down, tmp_path, key) == [0, 0, 0]


def hammer(home: Path, key: Key, all_there: Any, results: Any) -> None:
    async def work() -> None:
        quotas, num_let_in = Quotas(FileStore(home)), 0
        await quotas.store.states(key.accounts)  # the first one to open the file empties the buckets
        all_there.wait(60)
        for _ in range(2_000):
            try:
                async with quotas.reserved(key, ONE) as reservation:
                    reservation.spent = Amount(2, 0)
                    num_let_in += 1
            except RateLimited:
                pass
        all_there.wait(60)
        results.put(num_let_in)

    asyncio.run(work())


@pytest.mark.slow
def test_processes_that_share_a_file_lose_no_request_and_let_none_in_twice(tmp_path: Path) -> None:
    key = Key(id=7, name="a", limits=Limits(requests_per_min=1_000))
    started = time.monotonic()
    num_let_in = sum(in_each_of(4, hammer, tmp_path, key))
    assert 1_000 <= num_let_in <= 1_000 * (1 + (time.monotonic() - started) / 60) + 1


@pytest.mark.replay("G34")
@pytest.mark.slow
async def test_g34_four_workers_let_in_what_one_would(tmp_path: Path) -> None:
    slow = {"engine": "fake", "options": {"ttft_ms": 3_000, "itl_ms": 0, "tokens": 2}}
    quick = {"engine": "fake", "options": {"ttft_ms": 0, "itl_ms": 0, "tokens": 2}}
    config = write_config(
        tmp_path, model(slow, name="slow"), model(quick, name="m"), server={"port": free_port()}, logs={"access": False}
    )
    a_minute, at_once = key_in(tmp_path, "a", requests_per_min=10), key_in(tmp_path, "b", concurrent=10)
    with running(config, "--workers", "4", home=tmp_path) as (_, url):
        await asyncio.to_thread(await_ready, url)

        async def status(headers: dict[str, str], name: str) -> int:
            async with (
                aiohttp.ClientSession() as client,  # a connection of its own: the kernel spreads them over the workers
                client.post(url + CHAT, json={**HELLO, "model": name}, headers=headers) as response,
            ):
                await response.read()
                return response.status

        counts = Counter(await asyncio.gather(*(status(a_minute, "m") for _ in range(100))))
        assert counts == {200: 10, 429: 90}
        counts = Counter(await asyncio.gather(*(status(at_once, "slow") for _ in range(100))))
        assert counts == {200: 10, 429: 90}
        counts = Counter(await asyncio.gather(*(status(at_once, "m") for _ in range(5))))
        assert counts == {200: 5}
