"""Quotas of several hosts, over a real Redis or Valkey: exact, and whole again after every kind of break."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from gateway.app import PARTS
from gateway.config import ConfigError, parse_config
from gateway.tenants import quotas_redis
from gateway.tenants.accounts import Account, Claim, InsufficientQuota, State
from gateway.tenants.budgets import Amount, Budget
from gateway.tenants.keys import Key, KeyStore, NewKey
from gateway.tenants.limits import Limits, RateLimited
from gateway.tenants.quotas import Quotas, QuotasUnavailable
from gateway.tenants.quotas_redis import Record, RedisStore, Row
from tests.gateway.rig import HELLO, Gateway, Start, fake_model, free_port, until

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(
    SERVER is None, reason="there is no valkey-server and no redis-server here; on Debian: apt-get install redis-server"
)
CHAT = "/v1/chat/completions"
POOL = Account(kind="tenant", id=9, name="t", budget=Budget(gpu_seconds=1_000, per="life"))
KEY = Key(id=3, name="a", limits=Limits(concurrent=10), budget=Budget(tokens=1_000, per="life"), pool=POOL)
ONE = Claim(1, Amount(100, 1_000))
SPENT = Amount(10, 20)


class Server:
    """A server of its own, which can be killed and started again with what it had kept."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        assert SERVER is not None
        options = {
            "port": str(self.port), "bind": "127.0.0.1", "dir": str(self._folder), "save": "",
            "appendonly": "yes", "appendfsync": "always", "requirepass": "secret",
        }  # fmt: skip
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._process = await asyncio.create_subprocess_exec(SERVER, *arguments, stdout=asyncio.subprocess.DEVNULL)
        async with redis.asyncio.Redis.from_url(self.url, password="secret") as client, asyncio.timeout(20):
            while not await answers(client):  # noqa: ASYNC110 - it announces nothing
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        async with redis.asyncio.Redis.from_url(self.url, password="secret") as client:
            yield client

    @property
    def section(self) -> dict[str, Any]:
        return {"store": self.url, "password_env": "QUOTAS_PASSWORD", "timeout_s": 2}


async def answers(client: Any) -> bool:
    try:
        return bool(await client.ping())
    except (redis.exceptions.RedisError, OSError):
        return False


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setenv("QUOTAS_PASSWORD", "secret")
    server = Server(tmp_path)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


@asynccontextmanager
async def one_host(server: Server, **options: Any) -> AsyncIterator[Quotas]:
    store = RedisStore(server.url, password="secret", **{"timeout_s": 2.0, **options})
    tending = asyncio.create_task(store.tend())
    try:
        yield Quotas(store)
    finally:
        tending.cancel()
        await asyncio.gather(tending, return_exceptions=True)
        await store.close()


async def states(quotas: Quotas) -> Sequence[State]:
    """Those of the key and of its tenant. Old connections to a server that was started again fail once each."""
    async with asyncio.timeout(20):
        while True:
            try:
                return (await quotas.store.states(KEY.accounts)).states
            except QuotasUnavailable:
                await asyncio.sleep(0.05)


async def state(quotas: Quotas) -> State:
    return (await states(quotas))[0]


async def is_idle(quotas: Quotas) -> bool:
    """Nothing is held."""
    held = [
        (each.used.in_flight, each.spending.tokens_held, each.spending.gpu_us_held) for each in await states(quotas)
    ]
    return held == [(0, 0, 0), (0, 0, 0)]


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110 - the server is asked; it announces nothing
            await asyncio.sleep(0.05)


async def use(quotas: Quotas, claim: Claim = ONE, spent: Amount = SPENT, for_s: float = 0.0) -> str:
    try:
        async with quotas.reserved(KEY, claim) as reservation:
            await asyncio.sleep(for_s)
            reservation.spent = spent
    except (RateLimited, InsufficientQuota, QuotasUnavailable) as refusal:
        return str(refusal.code)
    return "ok"


# The records


def test_a_record_is_what_was_written_and_rows_of_the_dead_count_for_nothing() -> None:
    before = Record(rows={"dead": Row(5, 50, 500, 1), "other": Row(2, 20, 200, 7)})
    seen = before.state({"other", "me"})
    assert (seen.used.in_flight, seen.spending.tokens_held, seen.spending.gpu_us_held) == (2, 20, 200)
    after = quotas_redis.accounts.reserve([KEY.own], [seen], quotas_redis.Now(5.0, 5.0), ONE)
    assert isinstance(after, list)
    new = before.changed({"other", "me"}, "me", 8, seen, after[0])
    assert new.rows == {"other": Row(2, 20, 200, 7), "me": Row(1, 100, 1_000, 8)}
    assert quotas_redis._decoded(quotas_redis.msgspec.json.encode(new)) == new


# Two hosts and a real server


@needs_server
async def test_two_gateways_on_two_hosts_let_in_what_one_would(start: Start, server: Server, tmp_path: Path) -> None:
    secret = KeyStore(tmp_path).create(NewKey(name="a", budget=Budget(tokens=1_000, per="life")))
    other = KeyStore(tmp_path).create(NewKey(name="b", limits=Limits(requests_per_min=10)))
    both = [await start(fake_model(ttft_ms=2_000), quotas=server.section) for _ in range(2)]
    for name, key, code in (("budget", secret, "insufficient_quota"), ("limit", other, "rate_limit_exceeded")):
        answers = await asyncio.gather(*(ask(both[n % 2], key) for n in range(200)))
        counts = Counter(200 if status == 200 else body["error"]["code"] for status, body, _ in answers)
        assert counts == {200: 10, code: 190}, name
    async with server.client() as client:
        [record] = [await client.get(name) for name in await client.keys("*:key:a")]
    spent = quotas_redis._decoded(record)
    assert spent.tokens_spent > 0
    assert {(row.in_flight, row.tokens, row.gpu_us) for row in spent.rows.values()} == {(0, 0, 0)}


async def ask(gateway: Gateway, secret: str) -> tuple[int, Any, Any]:
    return await gateway.post(CHAT, {**HELLO, "max_tokens": 98}, Authorization=f"Bearer {secret}")


@needs_server
async def test_200_callers_of_two_hosts_lose_no_charge_and_make_none_twice(server: Server) -> None:
    async with one_host(server) as first, one_host(server) as second:
        codes = await asyncio.gather(
            *(use((first, second)[n % 2], Claim(1, Amount(1, 1)), Amount(2, 3), 0.001 * (n % 7)) for n in range(200))
        )
        num_let_in = Counter(codes)["ok"]
        assert num_let_in >= 10
        seen = await state(first)
        assert (seen.spending.tokens, seen.spending.gpu_us) == (2 * num_let_in, 3 * num_let_in)
        assert (await states(first))[1].spending.gpu_us == 3 * num_let_in
        assert await is_idle(second)


@needs_server
async def test_never_more_are_open_than_allowed_on_both_hosts_together(server: Server) -> None:
    num_open = most = 0

    async def hold(quotas: Quotas) -> str:
        nonlocal num_open, most
        try:
            async with quotas.reserved(KEY, Claim(1, Amount(0, 0))):
                num_open += 1
                most = max(most, num_open)
                await asyncio.sleep(0.02)
                num_open -= 1
        except RateLimited:
            return "full"
        return "ok"

    async with one_host(server) as first, one_host(server) as second:
        codes = Counter(await asyncio.gather(*(hold((first, second)[n % 2]) for n in range(200))))
        assert most == KEY.limits.concurrent
        assert codes["full"] > 0
        assert await is_idle(first)


@pytest.mark.replay("G04", "A42")
@needs_server
async def test_g04_a42_a_thousand_callers_that_leave_at_any_point_leave_nothing_held(server: Server) -> None:
    rng = random.Random(4)
    async with one_host(server) as quotas:

        async def leave() -> None:
            task = asyncio.create_task(use(quotas, Claim(1, Amount(1, 1)), Amount(0, 0), rng.random() * 0.004))
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            await asyncio.sleep(rng.choice((0, 0, rng.random() * 0.01)))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for _ in range(20):
            await asyncio.gather(*(leave() for _ in range(50)))
        await eventually(lambda: is_idle(quotas))


@needs_server
async def test_what_a_host_held_that_died_comes_back_when_its_lease_ends(server: Server) -> None:
    async with one_host(server) as lives:
        dying = Quotas(RedisStore(server.url, password="secret", timeout_s=2, lease_s=1))
        held = await dying.store.reserve(KEY.accounts, Claim(10, Amount(900, 5)))
        assert held.refusal is None
        assert await use(lives) == "rate_limit_exceeded"  # all ten places are taken
        await dying.store._redis.aclose()  # type: ignore[attr-defined]  # it dies: no goodbye, no more heartbeats
        await eventually(lambda: is_idle(lives))
        assert await use(lives) == "ok"


@needs_server
async def test_a_long_request_of_a_host_that_lives_keeps_its_place_beyond_the_lease(server: Server) -> None:
    async with one_host(server, lease_s=1) as quotas, one_host(server) as other:
        async with quotas.reserved(KEY, Claim(10, Amount(0, 0))):
            await asyncio.sleep(2.5)
            assert await use(other) == "rate_limit_exceeded"
        assert await use(other) == "ok"


async def hammer(url: str, seed: int) -> int:
    rng = random.Random(seed)
    quotas = Quotas(RedisStore(url, password="secret", timeout_s=10))

    async def some() -> list[str]:
        return [await use(quotas, Claim(1, Amount(1, 1)), Amount(1, 1), rng.random() * 0.002) for _ in range(60)]

    codes = [code for each in await asyncio.gather(*(some() for _ in range(5))) for code in each]
    await quotas.store.close()
    return codes.count("ok")


def hammered(url: str, seed: int, results: Any) -> None:
    results.put(asyncio.run(hammer(url, seed)))


@needs_server
@pytest.mark.slow
async def test_processes_that_come_between_each_other_all_the_time_lose_no_charge(server: Server) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=hammered, args=(server.url, seed, results)) for seed in range(3)]
    for worker in workers:
        worker.start()
    counts = [await asyncio.to_thread(results.get, timeout=60) for _ in workers]
    for worker in workers:
        await asyncio.to_thread(worker.join)
    async with one_host(server) as quotas:
        assert min(counts) > 0
        assert (await state(quotas)).spending.tokens == sum(counts)
        assert (await states(quotas))[1].spending.gpu_us == sum(counts)
        assert await is_idle(quotas)


# A server that goes and comes back


@needs_server
async def test_while_the_server_is_down_bounded_keys_are_refused_and_then_all_is_as_it_was(
    start: Start, server: Server, tmp_path: Path
) -> None:
    bounded = KeyStore(tmp_path).create(NewKey(name="a", budget=Budget(tokens=1_000, per="life")))
    free = KeyStore(tmp_path).create(NewKey(name="b"))
    gateway = await start(fake_model(), quotas=server.section)
    assert (await ask(gateway, bounded))[0] == 200
    await server.kill()
    for _ in range(3):
        status, body, shown = await ask(gateway, bounded)
        assert (status, body["error"]["code"], shown["Retry-After"]) == (503, "quotas_unavailable", "1")
        assert "try again shortly" in body["error"]["message"]
    assert (await ask(gateway, free))[0] == 200  # without bounds nobody has to be asked
    assert 'goodgate_unmetered_requests_total{decision="refused"} 3.0' in gateway.app[PARTS].metrics.render().decode()
    await server.start()
    await eventually(lambda: is_let_in(gateway, bounded))
    store = gateway.quotas.store
    [key] = [key for key in KeyStore(tmp_path).all() if key.name == "a"]
    seen = (await store.states([key.own])).states[0]
    assert seen.spending.tokens > 0
    assert seen.spending.tokens_held == 0


async def is_let_in(gateway: Gateway, secret: str) -> bool:
    return (await ask(gateway, secret))[0] == 200


@needs_server
async def test_requests_that_are_open_while_the_server_goes_are_charged_once_when_it_is_back(server: Server) -> None:
    async with one_host(server) as quotas:
        open_ones = [asyncio.create_task(use(quotas, ONE, Amount(7, 1), 0.3)) for _ in range(5)]
        await eventually(lambda: has_open(quotas, 5))
        await server.kill()
        assert await asyncio.gather(*open_ones) == ["ok"] * 5  # nobody waits for the charge
        assert await use(quotas) == "quotas_unavailable"
        await server.start()
        await eventually(lambda: is_idle(quotas))
        assert (await state(quotas)).spending.tokens == 35


async def has_open(quotas: Quotas, number: int) -> bool:
    return (await state(quotas)).used.in_flight == number


@needs_server
async def test_with_allow_requests_come_in_unmeasured_and_are_charged_later(server: Server) -> None:
    async with one_host(server, allow=True) as quotas:
        assert await use(quotas) == "ok"
        await server.kill()
        told: dict[str, str] = {}
        for _ in range(50):
            async with quotas.reserved(KEY, ONE, tell=told.update) as reservation:
                reservation.spent = Amount(1, 2)
        assert (quotas.unmetered, told) == ({"refused": 0, "allowed": 50}, {})
        assert sum(map(len, quotas.store._waiting.values())) <= 1  # type: ignore[attr-defined]  # they add up
        await server.start()
        await eventually(lambda: has_spent(quotas, 60))
        assert await is_idle(quotas)


async def has_spent(quotas: Quotas, tokens: int) -> bool:
    return (await state(quotas)).spending.tokens == tokens


@needs_server
async def test_a_swap_whose_answer_was_lost_is_not_made_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks after the server has done what it was told, each second time."""
    real, num_swaps = RedisStore._swap, 0

    async def lossy(self: RedisStore, names: Any, old: Any, new: Any) -> bool:
        nonlocal num_swaps
        is_made = await real(self, names, old, new)
        num_swaps += bool(names)
        if names and num_swaps % 2:
            raise redis.exceptions.ConnectionError("lost")
        return is_made

    monkeypatch.setattr(RedisStore, "_swap", lossy)
    async with one_host(server) as quotas:
        codes = Counter([await use(quotas, ONE, Amount(3, 1)) for _ in range(20)])
        assert codes["quotas_unavailable"] > 0  # who could not wait for the second look
        await eventually(lambda: is_idle(quotas))
        assert (await state(quotas)).spending.tokens == 3 * codes["ok"]


@needs_server
async def test_a_server_that_hangs_holds_a_request_no_longer_than_its_deadline(server: Server) -> None:
    async with one_host(server, timeout_s=0.2) as quotas, server.client() as client:
        assert await use(quotas) == "ok"
        await client.execute_command("CLIENT", "PAUSE", "1500", "ALL")
        async with asyncio.timeout(1.2):
            assert await use(quotas) == "quotas_unavailable"
            assert await use(quotas) == "quotas_unavailable"
        await eventually(lambda: works(quotas))


async def works(quotas: Quotas) -> bool:
    return await use(quotas) == "ok" and await is_idle(quotas)


@needs_server
async def test_stopping_in_the_middle_of_a_heartbeat_does_not_hang(server: Server) -> None:
    async with asyncio.timeout(30):
        for num_turns in range(60):
            async with one_host(server):
                for _ in range(num_turns % 20):
                    await asyncio.sleep(0)


@needs_server
async def test_a_record_of_somebody_else_is_refused_and_left_alone(server: Server) -> None:
    async with one_host(server) as quotas, server.client() as client:
        await client.set("goodgate:quota:key:a", "mine")
        assert await use(quotas) == "quotas_unavailable"
        assert await client.get("goodgate:quota:key:a") == b"mine"


# Configuration


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"store": "redis://:secret@127.0.0.1/0"}, "Do not write a secret in the file"),
        ({"store": "postgres://x"}, "quotas.store"),
        ({"store": "file", "password_env": "X"}, "`store: file` takes no user and no password"),
        ({"store": "redis://127.0.0.1", "password_env": "NOT_THERE"}, "'NOT_THERE' named by `password_env` is not set"),
        ({"store": "redis://127.0.0.1", "password_file": "/not/there"}, "Cannot read the file '/not/there'"),
        ({"store": "redis://127.0.0.1", "when_down": "pray"}, "when_down"),
    ],
)
def test_a_store_that_makes_no_sense_is_refused_by_name(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"models": [fake_model()], "quotas": section})
    assert said in caught.value.message


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "redis"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "gateway.tenants.quotas_redis")


@pytest.mark.usefixtures("without_library")
async def test_a_missing_library_is_named_with_what_installs_it(start: Start) -> None:
    with pytest.raises(QuotasUnavailable, match=r"pip install 'goodgate\[redis\]'"):
        await start(fake_model(), quotas={"store": "redis://127.0.0.1:1/0"})


async def test_a_server_that_was_never_there_stops_no_start(start: Start, tmp_path: Path) -> None:
    secret = KeyStore(tmp_path).create(NewKey(name="a", limits=Limits(concurrent=1)))
    gateway = await start(fake_model(), quotas={"store": f"redis://127.0.0.1:{free_port()}/0"})
    await until(lambda: gateway.quotas.store._is_down)  # type: ignore[attr-defined]
    status, body, _ = await ask(gateway, secret)
    assert (status, body["error"]["code"]) == (503, "quotas_unavailable")
