"""Clients that leave at random points, by the hundred: what is counted, held, charged and recorded adds up afterwards.

The phases one by one are in test_cancellation.py.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from adapters.base import Load
from gateway.records.ledger_files import FOLDER
from gateway.records.ledger_reader import LedgerReader, Span
from gateway.records.record import CLIENT_LEFT, Record, detail_of
from gateway.records.trace import CANCELLED
from gateway.records.trace_context import Sampling, TraceContext, begin
from gateway.replicas.replica import State
from gateway.tenants.budgets import Budget, microseconds
from gateway.tenants.keys import Key, KeyStore, NewKey
from gateway.tenants.limits import Limits
from gateway.web.stream import EventStream
from tests.gateway.rig import HELLO, Reply, Start, fake, model, until
from tests.gateway.tenants.test_limits import at_one_moment
from tests.gateway.test_cancellation import DIALECTS, NOTICED_WITHIN_S, UpstreamOf, at_rest, leave, num_sockets

PLENTY = 10**9
WHOLE = (20, 16, 5, 2)  # tokens of the answers here, and of a completion without `max_tokens`
OTHERS: dict[str, dict[str, object]] = {
    "/v1/embeddings": {"model": "m", "input": "Hello"},
    "/tokenize": {"model": "m", "prompt": "a"},
}


def bounded_key(home: Path) -> tuple[Key, dict[str, str]]:
    """Bounded in every way, so that everything is held and counted, by what a test never comes to."""
    limits = Limits(requests_per_min=PLENTY, tokens_per_min=PLENTY, concurrent=PLENTY)
    new = NewKey(name="a", limits=limits, budget=Budget(tokens=PLENTY, gpu_seconds=PLENTY))
    secret = KeyStore(home).create(new)
    [key] = KeyStore(home).all()
    return key, {"Authorization": f"Bearer {secret}"}


def records_in(home: Path) -> list[Record]:
    return LedgerReader(home / FOLDER).slowest(100_000, Span())


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of requests that have come as far as the gateway's own code, in a list of the test's."""
    ids: list[str] = []

    def begin_and_note(headers: Mapping[str, str], sampling: Sampling) -> TraceContext | None:
        ids.append(headers["x-request-id"])
        return begin(headers, sampling)

    monkeypatch.setattr("gateway.web.middleware.begin", begin_and_note)
    return ids


def check(record: Record) -> None:
    """Outcome and usage tell the same story."""
    outcomes = [attempt.outcome for attempt in detail_of(record).attempts]
    if CANCELLED in outcomes:
        assert record.has_left
        assert record.prompt_tokens > 0
        assert record.is_estimated or record.completion_tokens in WHOLE  # all was counted, and then the client left
        return
    assert not record.is_estimated
    assert record.code != "internal_error"
    if not record.has_left:
        assert record.has_failed == (outcomes[-1] != "ok")


@pytest.mark.replay("F14")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_f14_a_thousand_aborts_at_random_points_leave_everything_at_its_baseline(
    start: Start, tmp_path: Path, begun: list[str], seed: int
) -> None:
    key, headers = bounded_key(tmp_path)
    engine = fake(ttft_ms=10, itl_ms=3, tokens=20, max_concurrent=40)
    gateway = await start(
        model(engine, fake("broken", fail_rate=0.5), admission={"max_running": 60}), server={"max_in_flight": 300}
    )
    store = at_one_moment(gateway, tmp_path)
    num_tasks, num_open, dice = len(asyncio.all_tasks()), num_sockets(), random.Random(seed)

    async def abort(number: int) -> None:
        path = dice.choice([*DIALECTS, *OTHERS])
        body = {**DIALECTS[path], "stream": dice.random() < 0.6} if path in DIALECTS else OTHERS[path]
        named = {**headers, "x-request-id": f"abort-{number}"}
        await leave(gateway, path, body, dice.expovariate(20), is_reset=dice.random() < 0.5, **named)

    for first in range(0, 1000, 100):
        await asyncio.gather(*(abort(number) for number in range(first, first + 100)))
    await until(lambda: at_rest(gateway))
    for replica in gateway.fleet.replicas:
        assert await replica.started_adapter.load() == Load(running=0, waiting=0)
    await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
    await until(lambda: num_sockets() <= num_open)
    await until(lambda: len(records_in(tmp_path)) >= len(begun))
    records = records_in(tmp_path)
    assert sorted(record.request_id for record in records) == sorted(begun)
    assert len(begun) > 700  # a reset within the first milliseconds takes the request with it
    for record in records:
        check(record)
    [state] = (await store.states(key.accounts)).states
    spent = sum(record.prompt_tokens + record.completion_tokens for record in records)
    assert (state.used.in_flight, state.spending.tokens_held, state.spending.gpu_us_held) == (0, 0, 0)
    assert (state.used.tokens, state.spending.tokens) == (spent, spent)
    assert state.used.requests == sum(bool(record.model) for record in records)
    assert state.spending.gpu_us == sum(microseconds(record.engine_s) for record in records)
    named = {**headers, "x-request-id": "after"}
    statuses = [(await gateway.post("/v1/chat/completions", HELLO, **named))[0] for _ in range(10)]
    assert 200 in statuses


@pytest.mark.replay("F14")
async def test_f14_clients_that_leave_while_the_gateway_connects_end_that(start: Start) -> None:
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # its backlog is full: whoever connects hears nothing
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        options = {"url": f"http://127.0.0.1:{listener.getsockname()[1]}", "model": "served", "connect_timeout_s": 30}
        gateway = await start(model({"engine": "vllm", "options": options}), is_ready=False)
        gateway.fleet.replicas[0].state = State.READY
        num_tasks, num_open, dice = len(asyncio.all_tasks()), num_sockets(), random.Random(1)

        async def abort(path: str) -> None:
            await leave(gateway, path, DIALECTS[path], dice.uniform(0.02, 0.2), is_reset=dice.random() < 0.5)

        leaving = asyncio.gather(*(abort(path) for path in DIALECTS for _ in range(15)))
        await until(lambda: gateway.fleet.replicas[0].in_flight > 20)
        await leaving
        await until(lambda: at_rest(gateway), timeout_s=NOTICED_WITHIN_S)
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
        await until(lambda: num_sockets() <= num_open)


@pytest.mark.replay("F14")
@pytest.mark.parametrize("num_last", [0, 1, 2, 3])
async def test_f14_clients_that_leave_at_the_very_end_are_counted_out_once(
    start: Start, upstream_of: UpstreamOf, tmp_path: Path, num_last: int
) -> None:
    """The engine stops before its finish reason, its usage, its [DONE] or the end of its body."""

    async def nearly_all(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("a")
        lasts = (reply.finish, reply.usage, lambda: reply.event(b"[DONE]"))
        for last in lasts[:num_last]:
            await last()
        await reply.until_left()

    key, headers = bounded_key(tmp_path)
    upstream = await upstream_of(nearly_all)
    gateway = await start(model(upstream.replica()))
    store, dice = at_one_moment(gateway, tmp_path), random.Random(num_last)
    delays = [dice.uniform(0.02, 0.2) for _ in range(20)]
    body = {**HELLO, "stream": True}
    path = "/v1/chat/completions"
    await asyncio.gather(*(leave(gateway, path, body, each, is_reset=each < 0.1, **headers) for each in delays))
    await until(lambda: at_rest(gateway), timeout_s=NOTICED_WITHIN_S)
    await until(lambda: upstream.num_closed == upstream.num_generations)
    await until(lambda: len(records_in(tmp_path)) >= upstream.num_generations)
    records = records_in(tmp_path)
    spent = sum(record.prompt_tokens + record.completion_tokens for record in records)
    [state] = (await store.states(key.accounts)).states
    assert (state.used.in_flight, state.used.tokens, state.spending.tokens_held) == (0, spent, 0)
    for record in records:
        check(record)
        assert record.has_left or record.completion_tokens == 2  # what the engine has counted


@pytest.mark.replay("F14")
@pytest.mark.parametrize("path", DIALECTS)
async def test_f14_a_client_that_leaves_in_the_moment_its_stream_begins_is_no_failure_of_the_gateway(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    begin_stream = EventStream.open

    async def gone_before(stream: EventStream, headers: Mapping[str, str] | None = None) -> None:
        transport = stream._request.transport
        assert transport is not None
        transport.abort()
        await begin_stream(stream, headers)

    monkeypatch.setattr(EventStream, "open", gone_before)
    gateway = await start(model(fake()))
    await leave(gateway, path, {**DIALECTS[path], "stream": True}, 0.1, is_reset=False)
    await until(lambda: at_rest(gateway) and bool(records_in(tmp_path)))
    [record] = records_in(tmp_path)
    assert (record.status, record.code) == (CLIENT_LEFT, "")
    assert [attempt.outcome for attempt in detail_of(record).attempts] == [CANCELLED]
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
