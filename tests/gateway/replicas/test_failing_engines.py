"""Engines that die, freeze, fail or slow down while requests come: what clients see, and who is asked meanwhile.

The engines are processes of their own where they have to die (the fake engine's server), and scripts elsewhere.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config import HealthConfig
from gateway.replicas.health import Probing, is_due
from gateway.replicas.replica import Replica, State
from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, fake, free_port, model, until

ROOT = Path(__file__).parents[3]
PATIENCE_S = 30
QUICK = {"interval_s": 1, "recheck_s": 0.4, "timeout_s": 1}

UpstreamOf = Callable[[Script], Awaitable[Upstream]]


class Engine:
    """The fake engine's server in a process of its own, always on the same port."""

    def __init__(self, **dials: Any) -> None:
        self.port = free_port()
        self._flags = [f"--{name.replace('_', '-')}={value}" for name, value in dials.items()]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "adapters.servers.fake_server", f"--port={self.port}", *self._flags,
            cwd=ROOT, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            await self._process.stdout.readline()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    def replica(self, name: str, **options: Any) -> dict[str, Any]:
        return {"engine": "vllm", "name": name, "options": {"url": f"http://127.0.0.1:{self.port}", **options}}


@pytest.fixture
async def engine_of() -> AsyncIterator[Callable[..., Awaitable[Engine]]]:
    engines: list[Engine] = []

    async def start_engine(**dials: Any) -> Engine:
        engines.append(engine := Engine(**dials))
        await engine.start()
        return engine

    yield start_engine
    for engine in engines:
        await engine.kill()


EngineOf = Callable[..., Awaitable[Engine]]


def replica_of(gateway: Gateway, name: str) -> Replica:
    return next(each for each in gateway.fleet.replicas if each.name == name)


async def attempts_on(gateway: Gateway, name: str) -> int:
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    ours = [line for line in lines if line.startswith("goodgate_attempts_total") and f'replica="{name}"' in line]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in ours))


async def started_on(gateway: Gateway, name: str) -> int:
    return await attempts_on(gateway, name) + replica_of(gateway, name).in_flight


# ------------------------------------------------------------------------------------------------- engines that die


@pytest.mark.replay("F05")
async def test_f05_an_engine_killed_under_fifty_streams_loses_none_before_the_first_byte_and_cuts_none_in_silence(
    start: Start, engine_of: EngineOf
) -> None:
    dials = {"ttft_ms": 400, "itl_ms": 40, "tokens": 40}
    engines = [await engine_of(**dials) for _ in range(2)]
    gateway = await start(model(*(each.replica(f"e{n}") for n, each in enumerate(engines))), health=QUICK)
    victim = replica_of(gateway, "e0")
    early = [asyncio.create_task(gateway.events()) for _ in range(25)]
    await until(lambda: gateway.open_requests.in_flight == 25, PATIENCE_S)
    await asyncio.sleep(0.8)  # their first bytes are there
    late = [asyncio.create_task(gateway.events()) for _ in range(25)]
    await until(lambda: gateway.open_requests.in_flight == 50, PATIENCE_S)
    assert 15 < victim.in_flight < 35
    await engines[0].kill()
    killed_at = time.perf_counter()
    await until(lambda: not victim.is_ready, PATIENCE_S)
    assert time.perf_counter() - killed_at < 2
    ends = [events[-1] for events in await asyncio.gather(*early, *late)]
    assert all(end == "[DONE]" for end in ends[25:])  # nobody who had seen nothing has lost anything
    broken = [end for end in ends[:25] if end != "[DONE]"]
    assert broken
    assert all("stream_interrupted" in end for end in broken)
    assert gateway.open_requests.in_flight == 0


@pytest.mark.replay("F17")
async def test_f17_with_all_engines_down_clients_are_told_at_once_and_served_soon_after_they_are_back(
    start: Start, engine_of: EngineOf
) -> None:
    engines = [await engine_of(ttft_ms=1, itl_ms=0, tokens=3) for _ in range(2)]
    gateway = await start(model(*(each.replica(f"e{n}") for n, each in enumerate(engines))), health=QUICK)
    for engine in engines:
        await engine.kill()
    took = []
    for _ in range(40):
        began = time.perf_counter()
        status, body, headers = await gateway.chat()
        took.append(time.perf_counter() - began)
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        assert int(headers["Retry-After"]) >= 1
    assert sorted(took)[36] < 0.5
    assert await attempts_on(gateway, "e0") + await attempts_on(gateway, "e1") <= 1.2 * 40
    assert (await gateway.get("/ready"))[0] == 503
    await engines[1].start()
    back_at = time.perf_counter()
    while (await gateway.chat())[0] != 200:
        assert time.perf_counter() - back_at < 10
        await asyncio.sleep(0.02)
    assert time.perf_counter() - back_at < 5
    assert (await gateway.chat())[2]["x-goodgate-replica"] == "e1"


@pytest.mark.replay("S15")
async def test_s15_an_engine_that_was_down_for_a_minute_is_used_again_within_two_seconds() -> None:
    """The rule of probing, over the time that it takes; the sockets are in the tests above."""
    config = HealthConfig(interval_s=5, recheck_s=1)
    replica = Replica(name="r", model="m", engine="fake", config=None)  # type: ignore[arg-type]
    replica.state = State.UNHEALTHY
    probing = Probing(asked_at=0.0)
    asked = []
    for tick in range(1, 62 * 20):
        now = tick / 20
        if is_due(probing, replica, config, now):
            asked.append(now)
            probing.asked_at, probing.num_unwell = now, probing.num_unwell + 1
    assert asked[:3] == [0.25, 0.75, 1.75]  # soon at first: most are back at once
    assert max(later - earlier for earlier, later in pairwise(asked)) <= 1.05
    assert len(asked) < 70


# ------------------------------------------------------------------------------------------------ engines that fail


def answering(statuses: dict[str, str]) -> Script:
    """An engine that answers as `statuses["now"]` says, "200" or a status with perhaps a Retry-After."""

    async def script(reply: Reply) -> None:
        status, _, retry_after = statuses["now"].partition(" ")
        if status == "200":
            await reply.answer("a", "b")
            return
        headers = [f"Retry-After: {retry_after}"] if retry_after else []
        body = b'{"error":{"message":"no","type":"x","code":null}}'
        await reply.status(int(status), body, "Connection: close", *headers)

    return script


async def two(
    start: Start, upstream_of: UpstreamOf, statuses: dict[str, str], **sections: Any
) -> tuple[Gateway, Upstream]:
    bad, good = await upstream_of(answering(statuses)), await upstream_of(answering({"now": "200"}))
    gateway = await start(model(bad.replica("bad"), good.replica("good"), routing="round_robin"), **sections)
    return gateway, bad


@pytest.mark.replay("G28")
async def test_g28_a_replica_that_always_fails_is_asked_five_times_and_then_no_more(
    start: Start, upstream_of: UpstreamOf, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, bad = await two(start, upstream_of, {"now": "500"})
    for _ in range(40):
        assert (await gateway.chat())[0] == 200
    assert bad.num_generations == 5
    assert [record.getMessage() for record in caplog.records].count("replica ejected") == 1
    status, body = await gateway.get("/admin/status")
    standing = body["models"][0]["replicas"][0]["standing"]
    assert (status, standing["breaker"], standing["ejections"]) == (200, "open", 1)
    assert "5 failures in a row" in standing["left_out"]


@pytest.mark.replay("G31")
async def test_g31_an_engine_that_is_well_again_is_used_again_within_its_window(
    start: Start, upstream_of: UpstreamOf
) -> None:
    statuses = {"now": "500"}
    gateway, bad = await two(start, upstream_of, statuses, breaker={"failures": 2, "open_s": 0.2, "probe_s": 0.05})
    for _ in range(10):
        assert (await gateway.chat())[0] == 200
    num_before, statuses["now"] = bad.num_generations, "200"
    assert num_before <= 4
    await asyncio.sleep(0.45)
    names = Counter([(await gateway.chat())[2]["x-goodgate-replica"] for _ in range(20)])
    assert names["bad"] >= 8  # its whole share
    assert replica_of(gateway, "bad").standing.verdict == "good"


@pytest.mark.replay("F15")
@pytest.mark.parametrize(
    ("burst", "num_asked"),
    [("500", 5), ("502", 5), ("503", None), ("529", None), ("429 30", 1), ("503 30", 1), ("529 30", 1)],
)
async def test_f15_a_burst_of_refusals_reaches_no_client_and_ejects_only_what_fails(
    start: Start, upstream_of: UpstreamOf, burst: str, num_asked: int | None
) -> None:
    statuses = {"now": "200"}
    gateway, bad = await two(start, upstream_of, statuses)
    for _ in range(4):
        await gateway.chat()
    num_before, statuses["now"] = bad.num_generations, burst
    assert [(await gateway.chat())[0] for _ in range(20)] == [200] * 20
    if num_asked is not None:
        assert bad.num_generations - num_before == num_asked
    assert (replica_of(gateway, "bad").standing.verdict == "ejected") == (burst in ("500", "502"))


async def test_an_engine_that_is_full_is_asked_again_when_its_time_has_passed(
    start: Start, upstream_of: UpstreamOf
) -> None:
    statuses = {"now": "429 1"}
    gateway, bad = await two(start, upstream_of, statuses)
    began = time.perf_counter()
    while bad.num_generations < 2:
        assert (await gateway.chat())[0] == 200
        await asyncio.sleep(0.02)
        if bad.num_generations:
            statuses["now"] = "200"
    assert 0.9 < time.perf_counter() - began < 5


async def test_the_only_replica_is_asked_however_often_it_fails(start: Start, upstream_of: UpstreamOf) -> None:
    statuses = {"now": "500"}
    bad = await upstream_of(answering(statuses))
    gateway = await start(model(bad.replica()))
    assert [(await gateway.chat())[0] for _ in range(12)] == [502] * 12
    statuses["now"] = "200"
    assert (await gateway.chat())[0] == 200


async def test_when_the_others_go_down_the_ejected_one_serves(start: Start, upstream_of: UpstreamOf) -> None:
    statuses = {"now": "500"}
    gateway, _ = await two(start, upstream_of, statuses)
    for _ in range(12):
        await gateway.chat()
    assert replica_of(gateway, "bad").standing.verdict == "ejected"
    statuses["now"] = "200"
    gateway.fleet.mark(replica_of(gateway, "good"), State.UNHEALTHY, "It is gone.")
    assert [(await gateway.chat())[0] for _ in range(5)] == [200] * 5


@pytest.mark.replay("F28")
async def test_f28_a_name_that_does_not_resolve_is_a_clean_503_and_stops_nobody_else(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def slow_failure(host: str, *args: Any, **kwargs: Any) -> Any:
        if host == "engine.invalid":
            time.sleep(0.3)  # in a thread: the name server is slow too
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow_failure)
    lost = {"engine": "vllm", "options": {"url": "http://engine.invalid:8000", "model": "x"}}
    gateway = await start(model(lost, name="lost"), model(fake()), is_ready=False)
    await until(
        lambda: replica_of(gateway, "fake-0").is_ready and replica_of(gateway, "vllm-0").has_started, PATIENCE_S
    )
    asking = [asyncio.create_task(gateway.chat(model="lost")) for _ in range(10)]
    for _ in range(10):
        began = time.perf_counter()
        assert (await gateway.chat())[0] == 200
        assert time.perf_counter() - began < 0.25
    for status, body, _ in await asyncio.gather(*asking):
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")


# --------------------------------------------------------------------------------------------- engines that are slow


async def test_a_frozen_engine_that_accepts_and_never_answers_loses_its_traffic_before_a_deadline_passes(
    start: Start, engine_of: EngineOf
) -> None:
    engines = [await engine_of(ttft_ms=20, itl_ms=0, tokens=3) for _ in range(2)]
    gateway = await start(
        model(
            *(each.replica(f"e{n}", first_token_timeout_s=PATIENCE_S) for n, each in enumerate(engines)),
            routing="round_robin",
        ),
        health=QUICK,
    )
    for _ in range(6):
        assert (await gateway.chat())[0] == 200
    engines[0].signal(signal.SIGSTOP)
    try:
        victims = [asyncio.create_task(gateway.chat()) for _ in range(2)]  # one of them to each
        await until(lambda: replica_of(gateway, "e0").standing.trust(time.perf_counter()) < 0.1, PATIENCE_S)
        for _ in range(10):
            assert (await gateway.chat())[2]["x-goodgate-replica"] == "e1"
        await until(lambda: not replica_of(gateway, "e0").is_ready, PATIENCE_S)  # its health probe hangs as well
    finally:
        engines[0].signal(signal.SIGCONT)
    assert [status for status, *_ in await asyncio.gather(*victims)] == [200, 200]
    await until(lambda: replica_of(gateway, "e0").is_ready, PATIENCE_S)
    names = [(await gateway.chat())[2]["x-goodgate-replica"] for _ in range(12)]
    assert "e0" in names  # it comes back by itself


@pytest.mark.replay("F18")
async def test_f18_an_engine_ten_times_slower_loses_its_streams_and_the_other_serves_its_share(start: Start) -> None:
    quick = {"ttft_ms": 200, "itl_ms": 10, "tokens": 5}
    gateway = await start(model(fake("slow", **quick), fake("quick", **quick), routing="round_robin"))
    slow = replica_of(gateway, "slow")
    is_over = False

    async def user() -> None:
        while not is_over:
            assert (await gateway.events())[-1] == "[DONE]"

    async def given(seconds: float) -> dict[str, float]:
        """How many streams each replica got a second."""
        before = {name: await started_on(gateway, name) for name in ("slow", "quick")}
        await asyncio.sleep(seconds)
        return {name: (await started_on(gateway, name) - before[name]) / seconds for name in before}

    users = [asyncio.create_task(user()) for _ in range(50)]
    at_first = await given(1)
    slow.adapter.options = msgspec.structs.replace(  # type: ignore[union-attr]
        slow.started_adapter.options, ttft_ms=2000, itl_ms=100
    )
    slow_since = time.perf_counter()
    await until(lambda: slow.standing.trust(time.perf_counter()) < 0.1, PATIENCE_S)
    assert time.perf_counter() - slow_since < 5  # 0.8 s of waiting are enough; the rest is for a busy machine
    await until(lambda: slow.in_flight <= 15, PATIENCE_S)  # users whom it still holds ask nobody else
    afterwards = await given(1)
    is_over = True
    await asyncio.gather(*users)
    assert at_first["slow"] > 0.8 * at_first["quick"]
    assert afterwards["slow"] <= 0.15 * at_first["slow"]
    assert afterwards["quick"] >= 0.8 * at_first["quick"]
