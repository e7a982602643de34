"""Budgets: exact under many callers, for keys and for tenants, over restarts and crashes, and in plain words."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records.trace import Attempt, Trace
from gateway.tenants import accounts, budgets, cost, quotas_file
from gateway.tenants.accounts import Account, Claim, InsufficientQuota, Now, State
from gateway.tenants.budgets import NO_BUDGET, Amount, Budget, Exhausted, Period, Spending
from gateway.tenants.keys import Key, KeyStore, NewKey
from gateway.tenants.limits import Limits, RateLimited
from gateway.tenants.quotas import Quotas, QuotasUnavailable
from gateway.tenants.quotas_file import FileStore
from tests.gateway.commands.test_commands import await_ready, goodgate, running, write_config
from tests.gateway.rig import HELLO, Gateway, Reply, Start, fake_model, model, until
from tests.gateway.test_cancellation import UpstreamOf

CHAT = "/v1/chat/completions"


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


NOON = at("2026-11-30T12:00:00")


def key_in(home: Path, name: str = "a", tenant: str = "", **budget: Any) -> dict[str, str]:
    secret = KeyStore(home).create(NewKey(name=name, tenant=tenant, budget=Budget(**budget)))
    return {"Authorization": f"Bearer {secret}"}


async def ask(gateway: Gateway, headers: dict[str, str], **fields: Any) -> tuple[int, Any, Any]:
    return await gateway.post(CHAT, {**HELLO, **fields}, **headers)


async def is_let_in(gateway: Gateway, headers: dict[str, str]) -> bool:
    return (await ask(gateway, headers, max_tokens=200))[0] == 200


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110 - another process or a watch is waited for; neither announces it
            await asyncio.sleep(0.05)


async def spending(gateway: Gateway, account: Account) -> Spending:
    return (await gateway.quotas.store.states([account])).states[0].spending


# The rules


@pytest.mark.parametrize(
    ("per", "now", "begin", "end"),
    [
        ("day", "2026-11-30T23:59:59.999999", "2026-11-30", "2026-12-01"),
        ("day", "2026-12-01T00:00:00", "2026-12-01", "2026-12-02"),
        ("month", "2026-11-30T23:59:59.999999", "2026-11-01", "2026-12-01"),
        ("month", "2026-12-31T23:59:59", "2026-12-01", "2027-01-01"),
        ("month", "2028-02-29T00:00:00", "2028-02-01", "2028-03-01"),
        ("month", "2027-01-01T00:00:00", "2027-01-01", "2027-02-01"),
    ],
)
def test_days_and_months_begin_and_end_at_midnight_utc(per: Period, now: str, begin: str, end: str) -> None:
    assert (budgets.begin_of(per, at(now)), budgets.end_of(per, at(now))) == (at(begin), at(end))


def test_a_life_has_no_end() -> None:
    assert (budgets.begin_of("life", NOON), budgets.end_of("life", NOON)) == (0, None)


def test_a_budget_begins_anew_with_its_period_and_not_when_a_clock_goes_back() -> None:
    budget = Budget(tokens=100, per="day")
    spent = budgets.settle(budget, Spending(), NOON, held=Amount(0, 0), spent=Amount(100, 5))
    assert isinstance(budgets.reserve(budget, spent, at("2026-11-30T23:59:59"), wanted=Amount(1, 0)), Exhausted)
    assert isinstance(budgets.reserve(budget, spent, at("2026-11-28T12:00:00"), wanted=Amount(1, 0)), Exhausted)
    tomorrow = budgets.reserve(budget, spent, at("2026-12-01T00:00:00"), wanted=Amount(100, 0))
    assert tomorrow == Spending(int(at("2026-12-01T00:00:00")), 0, 0, 100, 0)


def test_a_request_over_midnight_holds_its_share_and_is_charged_to_the_day_it_ends_in() -> None:
    budget = Budget(tokens=100, per="day")
    held = budgets.reserve(budget, Spending(), at("2026-11-30T23:59:59"), wanted=Amount(60, 0))
    assert isinstance(held, Spending)
    after = at("2026-12-01T00:00:01")
    assert isinstance(budgets.reserve(budget, held, after, wanted=Amount(41, 0)), Exhausted)
    ended = budgets.settle(budget, held, after, held=Amount(60, 0), spent=Amount(70, 0))
    assert (ended.period, ended.tokens, ended.tokens_held) == (at("2026-12-01"), 70, 0)


def test_what_was_not_foreseen_can_overspend_and_then_nothing_comes_in() -> None:
    budget = Budget(tokens=100, gpu_seconds=10)
    held = budgets.reserve(budget, Spending(), NOON, wanted=Amount(100, 1))
    assert isinstance(held, Spending)
    over = budgets.settle(budget, held, NOON, held=Amount(100, 1), spent=Amount(130, 10_000_000))
    assert (over.tokens, over.gpu_us) == (130, 10_000_000)
    for each in (budget, Budget(gpu_seconds=10)):
        assert isinstance(budgets.reserve(each, over, NOON, wanted=Amount(0, 0)), Exhausted)


bounds = st.none() | st.integers(1, 200)
periods: st.SearchStrategy[Period] = st.sampled_from(("day", "month", "life"))
some_budgets = st.builds(Budget, tokens=bounds, gpu_seconds=bounds, per=periods)
amounts = st.builds(Amount, st.integers(0, 100), st.integers(0, 100_000_000))
seen_requests = st.lists(st.tuples(st.floats(0, 20_000), amounts, amounts, st.booleans()), max_size=40)


@given(st.tuples(some_budgets, some_budgets), seen_requests)
def test_whatever_comes_nothing_is_negative_and_only_the_unforeseen_overspends(
    both: tuple[Budget, Budget], seen: Any
) -> None:
    pair = [
        Account(kind=kind, id=1, name="a", budget=budget) for kind, budget in zip(("key", "tenant"), both, strict=True)
    ]
    states, open_claims, unforeseen, wall = [State(), State()], [], [Amount(0, 0)], NOON
    for wait_s, wanted, spent, ends in seen:
        wall += wait_s
        outcome = accounts.reserve(pair, states, Now(0.0, wall), Claim(1, wanted))
        if isinstance(outcome, list):
            states = outcome
            open_claims.append((wanted, spent))
            for budget, state in zip(both, states, strict=True):
                gone = state.spending.tokens + state.spending.tokens_held
                gone_us = state.spending.gpu_us + state.spending.gpu_us_held
                assert budget.tokens is None or gone <= budget.tokens
                assert budget.gpu_seconds is None or gone_us <= budget.gpu_seconds * budgets.US
        if ends and open_claims:
            held, cost_of = open_claims.pop(0)
            unforeseen.append(Amount(max(cost_of.tokens - held.tokens, 0), max(cost_of.gpu_us - held.gpu_us, 0)))
            states = accounts.settle(pair, states, Now(0.0, wall), Claim(1, held), cost_of)
        for budget, state in zip(both, states, strict=True):
            assert min(state.spending.tokens_held, state.spending.gpu_us_held, state.spending.tokens) >= 0
            over = sum(each.tokens for each in unforeseen)
            assert budget.tokens is None or state.spending.tokens <= budget.tokens + over
    for held, cost_of in open_claims:
        states = accounts.settle(pair, states, Now(0.0, wall), Claim(1, held), cost_of)
    assert [(state.spending.tokens_held, state.spending.gpu_us_held) for state in states] == [(0, 0), (0, 0)]


@given(some_budgets, amounts, amounts)
def test_a_request_that_cost_nothing_leaves_a_budget_as_it_was(budget: Budget, spent: Amount, wanted: Amount) -> None:
    before = budgets.settle(budget, Spending(), NOON, held=Amount(0, 0), spent=spent)
    held = budgets.reserve(budget, before, NOON, wanted=wanted)
    if isinstance(held, Spending):
        assert budgets.settle(budget, held, NOON, held=wanted, spent=Amount(0, 0)) == before


def test_both_bounds_hold_or_nothing_is_held() -> None:
    own = Account(kind="key", id=1, name="a", budget=Budget(tokens=100))
    pool = Account(kind="tenant", id=1, name="t", limits=Limits(concurrent=1))
    now = Now(0.0, NOON)
    first = accounts.reserve([own, pool], [State(), State()], now, Claim(1, Amount(10, 0)))
    assert isinstance(first, list)
    refusal = accounts.reserve([own, pool], first, now, Claim(1, Amount(10, 0)))
    assert isinstance(refusal, RateLimited)
    assert refusal.message == "The tenant 't' may use 1 requests at once; try again in 1.0 s."


@pytest.mark.parametrize(
    ("budget", "spent", "held", "said"),
    [
        (
            Budget(tokens=1_000),
            Amount(990, 0),
            Amount(0, 0),
            "This key has 10 of 1,000 tokens a month left, and this request may take 30; the budget begins anew on "
            "2026-12-01 at 00:00 UTC.",
        ),
        (
            Budget(gpu_seconds=60, per="life"),
            Amount(0, 59_500_000),
            Amount(0, 0),
            "This key has 0.5 of 60 GPU-seconds in all left, and this request may take 1.0; the budget does not begin "
            "anew, so ask for a larger one.",
        ),
        (
            Budget(tokens=1_000, per="day"),
            Amount(900, 0),
            Amount(90, 0),
            "This key has 10 of 1,000 tokens a day left, and this request may take 30; open requests hold the rest, so "
            "try again shortly.",
        ),
    ],
)
def test_a_refusal_says_what_is_left_and_when_there_is_more(
    budget: Budget, spent: Amount, held: Amount, said: str
) -> None:
    account = Account(kind="key", id=1, name="a", budget=budget)
    spending = Spending(budgets.begin_of(budget.per, NOON), *spent, *held)
    refusal = accounts.reserve([account], [State(spending=spending)], Now(0.0, NOON), Claim(1, Amount(30, 1_000_000)))
    assert isinstance(refusal, InsufficientQuota)
    assert (refusal.message, refusal.is_final) == (said, "try again" not in said)


def test_headers_show_the_bound_that_the_caller_meets_first() -> None:
    own = Account(kind="key", id=1, name="a", limits=Limits(requests_per_min=10), budget=Budget(tokens=100, per="life"))
    pool = Account(
        kind="tenant", id=1, name="t", limits=Limits(requests_per_min=30), budget=Budget(tokens=90, gpu_seconds=5)
    )
    state = State(spending=Spending(0, 50, 2_400_000, 0, 100_000))
    assert accounts.headers([own, pool], [state, state], Now(0.0, at("2026-11-30T23:00:00"))) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "10",
        "x-ratelimit-reset-requests": "0.000s",
        "x-ratelimit-limit-budget-tokens": "90",
        "x-ratelimit-remaining-budget-tokens": "40",
        "x-ratelimit-reset-budget-tokens": "3600s",
        "x-ratelimit-limit-budget-gpu-seconds": "5",
        "x-ratelimit-remaining-budget-gpu-seconds": "2",
        "x-ratelimit-reset-budget-gpu-seconds": "3600s",
    }


def test_engine_seconds_are_those_of_attempts_that_did_work() -> None:
    def attempt(outcome: str, first_token: float | None, engine_s: float) -> Attempt:
        return Attempt(model="m", engine="e", replica="r", outcome=outcome, first_token=first_token, engine_s=engine_s)

    attempts = [
        attempt("engine_unavailable", None, 100.0),
        attempt("stream_interrupted", 1.0, 2.0),
        attempt("cancelled", None, 0.5),
        attempt("ok", None, 0.25),
    ]
    assert cost.engine_s(Trace(request_id="r", route="/", attempts=attempts)) == 2.75


def test_the_estimate_of_a_models_engine_time_follows_what_it_takes() -> None:
    seconds = cost.EngineSeconds()
    assert seconds.expected("m") == cost.FIRST_ENGINE_S
    for _ in range(60):
        seconds.learn("m", 0.2)
    assert seconds.expected("m") == pytest.approx(0.2, abs=0.01)
    assert seconds.expected("other") == cost.FIRST_ENGINE_S


# Over real sockets


async def test_200_callers_at_once_get_exactly_what_the_budget_says(start: Start, tmp_path: Path) -> None:
    headers = key_in(tmp_path, tokens=1_000, per="life")
    gateway = await start(fake_model(ttft_ms=1_000, tokens=3))
    answers = await asyncio.gather(*(ask(gateway, headers, max_tokens=98) for _ in range(200)))  # 100 with the prompt
    assert Counter(status for status, _, _ in answers) == {200: 10, 429: 190}
    spent = sum(body["usage"]["total_tokens"] for status, body, _ in answers if status == 200)
    [key] = KeyStore(tmp_path).all()
    seen = await spending(gateway, key.own)
    assert (seen.tokens, seen.tokens_held, seen.gpu_us_held) == (spent, 0, 0)
    refused = [(body["error"], shown) for status, body, shown in answers if status == 429]
    assert {(error["code"], error["type"]) for error, _ in refused} == {("insufficient_quota", "insufficient_quota")}
    assert {shown["Retry-After"] for _, shown in refused} == {"1"}  # the open ones may give enough back
    assert "x-should-retry" not in refused[0][1]


async def test_official_clients_do_not_try_again_what_no_budget_holds(start: Start, tmp_path: Path) -> None:
    headers = key_in(tmp_path, tokens=100)
    gateway = await start(fake_model())
    calls = 0

    async def count(request: Any) -> None:
        nonlocal calls
        calls += 1

    secret = headers["Authorization"].removeprefix("Bearer ")
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=secret, max_retries=3) as client:
        client._client.event_hooks["request"].append(count)
        with pytest.raises(openai.RateLimitError, match="100 of 100 tokens a month left") as caught:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    assert (calls, caught.value.code) == (1, "insufficient_quota")
    assert int(caught.value.response.headers["Retry-After"]) <= 120


async def test_a_tenants_keys_share_its_budget_and_each_keeps_its_own(start: Start, tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    store.bound("t", Limits(), Budget(tokens=500))
    first, second = key_in(tmp_path, "a", "t", tokens=10_000), key_in(tmp_path, "b", "t")
    stranger = key_in(tmp_path, "c", "other")
    gateway = await start(fake_model(tokens=200))
    for headers, status in ((first, 200), (second, 200), (first, 429), (second, 429), (stranger, 200)):
        answered, body, _ = await ask(gateway, headers, max_tokens=200)
        assert answered == status, body
    store.bound("t", Limits(), NO_BUDGET)
    await eventually(lambda: is_let_in(gateway, second))


async def test_gpu_seconds_are_a_share_of_the_time_that_the_engine_was_open(start: Start, tmp_path: Path) -> None:
    headers = key_in(tmp_path, gpu_seconds=1_000)
    gateway = await start(fake_model(ttft_ms=400))
    started = asyncio.get_running_loop().time()
    await asyncio.gather(*(ask(gateway, headers) for _ in range(10)))
    elapsed_s = asyncio.get_running_loop().time() - started
    [key] = KeyStore(tmp_path).all()
    seen = await spending(gateway, key.own)
    assert 0.4 <= seen.gpu_us / budgets.US <= elapsed_s  # ten at once, and yet no more than the engine's own time
    assert seen.gpu_us_held == 0


async def test_what_failed_before_its_first_token_costs_no_budget(
    start: Start, tmp_path: Path, upstream_of: UpstreamOf
) -> None:
    async def script(reply: Reply) -> None:
        await reply.status(500, b'{"error": {"message": "x"}}')

    headers = key_in(tmp_path, tokens=1_000, gpu_seconds=5)
    gateway = await start(model((await upstream_of(script)).replica()))
    for _ in range(3):
        assert (await ask(gateway, headers, max_tokens=900))[0] == 502
    [key] = KeyStore(tmp_path).all()
    seen = await spending(gateway, key.own)
    assert (seen.tokens, seen.gpu_us, seen.tokens_held, seen.gpu_us_held) == (0, 0, 0, 0)


@pytest.mark.replay("A42")
async def test_a42_clients_that_leave_at_any_moment_leave_nothing_held(start: Start, tmp_path: Path) -> None:
    headers = key_in(tmp_path, tokens=10**9, gpu_seconds=10**6)
    gateway = await start(fake_model(ttft_ms=5, itl_ms=2, tokens=20))

    async def leave(after_s: float) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(after_s):
                await ask(gateway, headers, stream=True)

    for _ in range(10):
        await asyncio.gather(*(leave(0.0005 * n) for n in range(1, 101)), return_exceptions=True)
    await until(lambda: gateway.open_requests.in_flight == 0)
    [key] = KeyStore(tmp_path).all()
    state = (await gateway.quotas.store.states([key.own])).states[0]
    assert (state.used.in_flight, state.spending.tokens_held, state.spending.gpu_us_held) == (0, 0, 0)


# Over restarts, crashes and several processes


@asynccontextmanager
async def opened(home: Path, wall: float = NOON) -> AsyncIterator[Quotas]:
    quotas = Quotas(FileStore(home, clock=lambda: Now(1_000.0, wall)))
    try:
        yield quotas
    finally:
        await quotas.store.close()


KEY = Key(
    id=3,
    name="a",
    limits=Limits(requests_per_min=10, concurrent=10),
    budget=Budget(tokens=1_000, per="day"),
    pool=Account(kind="tenant", id=70, name="t", budget=Budget(gpu_seconds=100)),
)


async def test_what_was_spent_is_kept_over_a_restart_and_limits_begin_anew(tmp_path: Path) -> None:
    async with opened(tmp_path) as quotas:
        async with quotas.reserved(KEY, Claim(1, Amount(700, 5))) as reservation:
            reservation.spent = Amount(650, 9_000_000)
        [own, _] = (await quotas.store.states(KEY.accounts)).states
        assert (own.used.requests, own.spending.tokens) == (1, 650)
    async with opened(tmp_path) as quotas:
        [own, pool] = (await quotas.store.states(KEY.accounts)).states
        assert (own.used.requests, own.used.in_flight) == (0, 0)
        assert (own.spending.tokens, pool.spending.gpu_us) == (650, 9_000_000)
        with pytest.raises(InsufficientQuota, match="350 of 1,000 tokens a day left"):
            await hold(quotas, 400)
    async with opened(tmp_path, at("2026-12-01T00:00:00")) as quotas:
        await hold(quotas, 1_000)


async def hold(quotas: Quotas, tokens: int) -> None:
    async with quotas.reserved(KEY, Claim(1, Amount(tokens, 0))):
        pass


HOLDS_FOREVER = """
import asyncio, sys
from pathlib import Path
from gateway.tenants.accounts import Claim
from gateway.tenants.budgets import Amount
from gateway.tenants.quotas import Quotas
from gateway.tenants.quotas_file import FileStore
from tests.gateway.tenants.test_budgets import KEY

async def main():
    quotas = Quotas(FileStore(Path(sys.argv[1])))
    async with quotas.reserved(KEY, Claim(4, Amount(600, 1))):
        print("held", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@asynccontextmanager
async def one_that_holds(home: Path) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A process that holds a share. What it gives kills it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDS_FOREVER, str(home), stdout=asyncio.subprocess.PIPE
    )

    async def kill() -> None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"held\n"
        yield kill
    finally:
        await kill()


@pytest.mark.replay("F20")
async def test_what_a_killed_process_held_comes_back_to_those_that_live(tmp_path: Path) -> None:
    async with opened(tmp_path) as quotas:
        await hold(quotas, 1)
        async with one_that_holds(tmp_path) as kill:
            [own, _] = (await quotas.store.states(KEY.accounts)).states
            assert (own.used.in_flight, own.spending.tokens_held) == (4, 600)
            with pytest.raises(InsufficientQuota, match="open requests hold the rest"):
                await hold(quotas, 500)
            await kill()
            tending = asyncio.create_task(quotas.store.tend())
            await eventually(lambda: has_none_open(quotas))
            tending.cancel()
            await hold(quotas, 500)


async def has_none_open(quotas: Quotas) -> bool:
    return (await quotas.store.states(KEY.accounts)).states[0].used.in_flight == 0


async def test_the_first_to_open_the_file_finds_nothing_held(tmp_path: Path) -> None:
    async with one_that_holds(tmp_path) as kill:
        await kill()
    async with opened(tmp_path) as quotas:
        [own, _] = (await quotas.store.states(KEY.accounts)).states
        assert (own.used.in_flight, own.used.requests, own.spending.tokens_held) == (0, 0, 0)


async def test_two_gateways_with_one_home_keep_one_budget(start: Start, tmp_path: Path) -> None:
    headers = key_in(tmp_path, tokens=1_000, per="life")
    both = [await start(fake_model(ttft_ms=1_000)), await start(fake_model(ttft_ms=1_000))]
    answers = await asyncio.gather(*(ask(both[n % 2], headers, max_tokens=98) for n in range(100)))
    assert Counter(status for status, _, _ in answers) == {200: 10, 429: 90}


@pytest.mark.parametrize("content", [b"x" * 10_000, b"a short note of somebody's"])
def test_a_file_of_another_version_is_refused_by_name_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "state" / "quotas"
    folder.mkdir(parents=True)
    (folder / "accounts").write_bytes(content)

    async def look() -> None:
        await FileStore(tmp_path).states(KEY.accounts)

    with pytest.raises(QuotasUnavailable, match="was not written by this version; move it away"):
        asyncio.run(look())
    with pytest.raises(QuotasUnavailable, match="was not written by this version; move it away"):
        quotas_file.spending(tmp_path, KEY.accounts)
    assert (folder / "accounts").read_bytes() == content


def test_a_disk_that_takes_only_a_part_of_the_file_refuses_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.pwrite, [1000]

    def pwrite(file: int, data: bytes, at: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(file, data[: room[0]], at)
        room[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", pwrite)

    async def use() -> None:
        store = FileStore(tmp_path)
        for _ in range(2):
            with pytest.raises(QuotasUnavailable, match="No space left on device"):
                await store.reserve(KEY.accounts, Claim(1, Amount(1, 1)))
        room[0] = 10**9
        assert (await store.reserve(KEY.accounts, Claim(1, Amount(1, 1)))).refusal is None
        await store.close()

    asyncio.run(use())


async def test_a_home_that_cannot_be_written_refuses_bounded_keys_and_serves_others(
    start: Start, tmp_path: Path
) -> None:
    bounded, free = key_in(tmp_path, tokens=1_000), key_in(tmp_path, "b")
    (tmp_path / "state" / "quotas").write_bytes(b"in the way")
    gateway = await start(fake_model())
    status, body, shown = await ask(gateway, bounded)
    assert (status, body["error"]["code"]) == (503, "quotas_unavailable")
    assert "Retry-After" in shown
    assert (await ask(gateway, free))[0] == 200


# Keys and their file


def test_an_older_file_of_keys_is_taken_over(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    store.path.parent.mkdir()
    with closing(sqlite3.connect(store.path)) as connection:
        connection.executescript(
            """CREATE TABLE keys (
                id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, tenant TEXT NOT NULL,
                role TEXT NOT NULL CHECK (role IN ('user', 'admin')), digest BLOB NOT NULL UNIQUE, models TEXT NOT NULL,
                requests_per_min INTEGER, tokens_per_min INTEGER, concurrent INTEGER, created REAL NOT NULL,
                expires REAL, revoked REAL);
            CREATE UNIQUE INDEX one_live_key_a_name ON keys (name) WHERE revoked IS NULL;
            INSERT INTO keys VALUES (1, 'a', 'a', 'user', x'00', '["*"]', 60, NULL, NULL, 1.0, NULL, NULL);
            PRAGMA user_version = 1;"""
        )
    [key] = store.all()
    assert (key.name, key.limits, key.budget, key.pool) == ("a", Limits(requests_per_min=60), NO_BUDGET, None)
    store.create(NewKey(name="b", budget=Budget(tokens=5, per="life")))
    assert [key.budget.tokens for key in store.all()] == [None, 5]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget-tokens", "1T"), "'1T' is no amount; write 3600, 500k, 1M or 2G."),
        (("--budget-tokens", "0"), "'0' is no amount"),
        (("--budget-gpu-seconds", "2000G"), "A budget is between 1 and 1,000,000,000,000"),
        (("--budget-per", "week"), "'week' is not one of"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_by_name(tmp_path: Path, arguments: Any, said: str) -> None:
    result = goodgate("keys", "create", "a", *arguments, home=tmp_path)
    assert result.returncode != 0
    assert said in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.slow
async def test_budgets_and_what_is_spent_of_them_are_listed(tmp_path: Path) -> None:
    made = goodgate(
        "keys", "create", "a", "--tenant", "acme", "--budget-tokens", "1M", "--budget-per", "life", home=tmp_path
    )
    secret = made.stdout.strip()
    goodgate("keys", "tenant", "acme", "--budget-gpu-seconds", "2k", "--concurrent", "9", home=tmp_path)
    shown = goodgate("keys", "list", home=tmp_path).stdout
    assert "? of 1,000,000 in all" in shown  # no gateway has counted yet
    config = write_config(tmp_path, fake_model(tokens=5), server={"port": 0})
    with running(config, home=tmp_path) as (_, url):
        await asyncio.to_thread(await_ready, url)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=secret) as client:
            answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    assert answer.usage is not None
    shown = goodgate("keys", "list", home=tmp_path).stdout
    assert f"{answer.usage.total_tokens:,} of 1,000,000 in all" in shown
    assert "acme    -             -           9        -       0 of 2,000 a month" in shown


async def test_a_larger_budget_lets_a_key_in_again_and_what_it_has_spent_goes_on_counting(
    start: Start, tmp_path: Path
) -> None:
    headers = key_in(tmp_path, tokens=250, per="life")
    gateway = await start(fake_model(tokens=200))
    assert (await ask(gateway, headers, max_tokens=200))[0] == 200
    assert (await ask(gateway, headers, max_tokens=200))[0] == 429
    result = await asyncio.to_thread(
        goodgate, "keys", "limit", "a", "--budget-tokens", "1k", "--budget-per", "life", home=tmp_path
    )
    assert (result.returncode, result.stdout) == (0, "")
    await eventually(lambda: is_let_in(gateway, headers))
    [key] = KeyStore(tmp_path).all()
    assert (key.budget.tokens, (await spending(gateway, key.own)).tokens > 400) == (1_000, True)
    result = await asyncio.to_thread(goodgate, "keys", "limit", "nobody", home=tmp_path)
    assert "There is no key 'nobody'" in result.stderr


def test_who_only_looks_sees_nothing_where_nothing_was_counted(tmp_path: Path) -> None:
    assert quotas_file.spending(tmp_path, KEY.accounts) is None
