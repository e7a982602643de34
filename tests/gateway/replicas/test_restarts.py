"""Engines that the gateway has launched: they crash, come back or are given up, and no request is lost over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.base import Load
from adapters.errors import EngineUnavailable
from adapters.fake import Adapter as FakeAdapter
from adapters.goodgate_peer import Adapter as Peer
from adapters.launching.launch import LaunchSpec
from adapters.launching.restart import Policy
from adapters.launching.supervise import descendants
from adapters.models.model_store import Model
from gateway.records.trace import Attempt
from gateway.replicas.health import probe
from gateway.replicas.replica import Replica, State
from tests.gateway.rig import Gateway, Start, fake, model, until

ROOT = Path(__file__).parents[3]
PATIENCE_S = 30
LATER = Policy(first_delay_s=600, last_delay_s=600)

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")


class Mortal(FakeAdapter):
    """The fake engine, whose launches end at once with a complaint."""

    engine = "mortal"

    @classmethod
    def launch_spec(cls, *, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
        spec = super().launch_spec(home=home, model=model, port=port, options=options)
        return msgspec.structs.replace(spec, argv=("/bin/sh", "-c", "echo error: out of luck; exit 3"))


class Slow(FakeAdapter):
    """The fake engine, whose launches load for ever."""

    engine = "slow"

    @classmethod
    def launch_spec(cls, *, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
        spec = super().launch_spec(home=home, model=model, port=port, options=options)
        return msgspec.structs.replace(spec, argv=("/bin/sleep", "600"))


ENGINES = {"mortal": Mortal, "slow": Slow}


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, Policy(first_delay_s=0.05, last_delay_s=0.05))


def patience(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    monkeypatch.setattr("gateway.replicas.lives.RESTARTS", policy)


def launched(name: str = "launched", engine: str = "fake", **options: Any) -> dict[str, Any]:
    dials = {"ttft_ms": 1, "itl_ms": 0, "tokens": 3, **options}
    return {"engine": engine, "name": name, "launch": True, "model": "tiny", "options": dials}


def absent(name: str = "absent") -> dict[str, Any]:
    return {"engine": "native", "name": name, "launch": True, "model": "absent"}


async def become(replica: Replica, state: State) -> None:
    await until(lambda: replica.state is state, PATIENCE_S)


def engine_of(replica: Replica) -> int:
    assert replica.process is not None
    assert replica.process.pid is not None
    return descendants(replica.process.pid)[0]


def kill_engine(replica: Replica) -> None:
    os.kill(engine_of(replica), signal.SIGKILL)


async def metrics(gateway: Gateway) -> str:
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        return await response.text()


@linux
async def test_a_launched_engine_that_is_killed_serves_again_on_the_same_port(start: Start) -> None:
    gateway = await start(model(launched()), is_ready=False)
    (replica,) = gateway.fleet.replicas
    await become(replica, State.READY)
    assert (await gateway.chat())[0] == 200
    assert replica.process is not None
    port = replica.process.spec.port
    kill_engine(replica)
    await become(replica, State.UNHEALTHY)
    assert "It is started again in 0.05 s: fake was killed by SIGKILL" in replica.reason
    assert str(replica.process.log_path) in replica.details
    await become(replica, State.READY)
    status, body, headers = await gateway.chat()
    assert (status, headers["x-goodgate-replica"]) == (200, "launched")
    assert body["usage"]["completion_tokens"] == 3
    assert replica.process.spec.port == port
    assert 'goodgate_replica_restarts_total{engine="fake",model="m",replica="launched"} 1.0' in await metrics(gateway)
    assert (await gateway.get("/admin/status"))[1]["models"][0]["replicas"][0]["restarts"] == 1


@linux
async def test_an_engine_whose_port_is_taken_while_it_is_down_serves_again_on_another(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, Policy(first_delay_s=0.5))
    gateway = await start(model(launched()), is_ready=False)
    (replica,) = gateway.fleet.replicas
    await become(replica, State.READY)
    assert replica.process is not None
    port = replica.process.spec.port
    kill_engine(replica)
    await become(replica, State.UNHEALTHY)
    with socket.create_server(("127.0.0.1", port)):
        await become(replica, State.READY)
        assert replica.process.spec.port != port
        assert (await gateway.chat())[0] == 200


@linux
async def test_while_it_is_down_its_reason_is_kept_and_nobody_connects_to_its_port(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, LATER)
    gateway = await start(model(launched()), health={"interval_s": 0.02}, is_ready=False)
    (replica,) = gateway.fleet.replicas
    await become(replica, State.READY)
    kill_engine(replica)
    await until(lambda: "started again in 600 s" in replica.reason)
    assert replica.process is not None
    connected = asyncio.Event()
    listener = await asyncio.start_server(lambda _, __: connected.set(), "127.0.0.1", replica.process.spec.port)
    async with listener:
        status, body, headers = await gateway.chat()
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        assert headers["retry-after"]
        late = Attempt(model="m", engine=replica.engine, replica=replica.name, outcome="engine_unavailable")
        gateway.fleet.note_attempt(replica, late, EngineUnavailable("It has failed only now."))
        await asyncio.sleep(0.1)  # several probes
        assert not connected.is_set()
    assert "started again in 600 s" in (await gateway.get("/ready"))[1]["waiting_for"]["m"]["launched"]


async def test_what_an_engine_said_before_its_end_is_no_news_after_it(start: Start) -> None:
    """A probe may be under way when the engine ends."""

    class Ending(FakeAdapter):
        async def load(self) -> Load:
            replica.has_started = False  # as its end is noted
            replica.state, replica.load = State.UNHEALTHY, Load()
            return Load(running=7)

    gateway = await start(model(fake()), health={"interval_s": 600})
    (replica,) = gateway.fleet.replicas
    assert replica.adapter is not None
    replica.adapter = Ending(replica.adapter.options)
    await replica.adapter.start()
    await probe(gateway.fleet, replica, timeout_s=1)
    assert (replica.state, replica.load) == (State.UNHEALTHY, Load())


@linux
async def test_requests_that_are_open_when_it_crashes_fail_at_once_or_are_answered_elsewhere(start: Start) -> None:
    alone, shared = launched(itl_ms=200, tokens=100), launched("other", itl_ms=200, tokens=100)
    gateway = await start(model(alone), model(shared, fake("good"), name="n"), is_ready=False)
    first, other, good = gateway.fleet.replicas
    for replica in (first, other, good):
        await become(replica, State.READY)
    stream = asyncio.create_task(gateway.events())
    whole = asyncio.create_task(gateway.chat(model="n"))
    await until(lambda: first.in_flight == 1 and other.in_flight == 1)
    await asyncio.sleep(0.5)  # the first tokens are out
    kill_engine(first)
    kill_engine(other)
    async with asyncio.timeout(2):
        events = await stream
        assert json.loads(events[-1])["error"]["code"] == "stream_interrupted"
        status, _, headers = await whole
        assert (status, headers["x-goodgate-replica"]) == (200, "good")
    await become(first, State.READY)
    assert (first.in_flight, other.in_flight) == (0, 0)


@linux
async def test_connections_to_a_former_life_are_dropped_and_not_waited_for(start: Start) -> None:
    told: list[str] = []

    class Noting(Peer):
        async def start(self) -> None:
            told.append("start")
            await super().start()

        async def close(self) -> None:
            told.append("close")
            await super().close()

    gateway = await start(model(launched()), engines={"goodgate_peer": Noting}, is_ready=False)
    (replica,) = gateway.fleet.replicas
    await become(replica, State.READY)
    kill_engine(replica)
    await until(lambda: replica.num_restarts == 1)
    await become(replica, State.READY)
    assert told == ["start", "close", "start"]


@linux
async def test_beside_an_engine_that_crashes_all_the_time_every_request_is_answered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, Policy(first_delay_s=0, last_delay_s=0, max_quick=1000))
    gateway = await start(model(launched("bad"), fake("good"), routing="round_robin"), is_ready=False)
    bad, _ = gateway.fleet.replicas
    await become(bad, State.READY)

    async def crash() -> None:
        while True:
            await become(bad, State.READY)
            await asyncio.sleep(0.05)
            kill_engine(bad)
            await become(bad, State.UNHEALTHY)

    answers: list[tuple[int, str]] = []

    async def ask() -> None:
        while bad.num_restarts < 5:
            status, _, headers = await gateway.chat()
            answers.append((status, headers["x-goodgate-replica"]))

    crashing = asyncio.create_task(crash())
    await asyncio.gather(*(ask() for _ in range(4)))
    crashing.cancel()
    await asyncio.gather(crashing, return_exceptions=True)
    assert {status for status, _ in answers} == {200}
    assert {name for _, name in answers} == {"bad", "good"}


async def test_an_engine_that_goes_on_crashing_is_given_up_and_says_why(start: Start) -> None:
    models = model(launched(engine="mortal")), model(fake(), name="n")
    gateway = await start(*models, is_ready=False, engines=ENGINES)
    mortal = gateway.fleet.replicas[0]
    await become(mortal, State.FAILED)
    assert mortal.num_restarts == 4
    status, body = await gateway.get("/ready")
    assert status == 503
    reason = body["waiting_for"]["m"]["launched"]
    told_to_operators = (await gateway.get("/admin/status"))[1]["models"][0]["replicas"][0]["reason"]
    for part in ("after 5 quick crashes in a row", "exit code 3"):
        assert part in reason
        assert part in told_to_operators
    for part in ("error: out of luck", "logs/mortal.log"):
        assert part in told_to_operators
        assert part not in reason, "everybody reads /ready, and an engine's log may quote prompts"
    assert (await gateway.chat())[0] == 503
    assert (await gateway.chat(model="n"))[0] == 200
    assert mortal.reason == reason
    assert gateway.fleet.fatal is not None
    assert not gateway.fleet.fatal.done()


async def test_a_missing_model_stops_its_replica_and_not_the_gateway(start: Start) -> None:
    gateway = await start(model(absent(), fake("good")), is_ready=False)
    missing, good = gateway.fleet.replicas
    await become(missing, State.FAILED)
    await become(good, State.READY)
    assert (await gateway.chat())[0] == 200
    assert (await gateway.get("/ready"))[0] == 200
    assert "goodgate models" in (await gateway.get("/admin/status"))[1]["models"][0]["replicas"][0]["reason"]
    assert gateway.fleet.fatal is not None
    assert not gateway.fleet.fatal.done()


async def test_a_model_that_may_still_come_up_keeps_the_gateway_running(start: Start) -> None:
    elsewhere = {"engine": "vllm", "options": {"url": "http://127.0.0.1:9", "model": "x"}}
    gateway = await start(model(absent()), model(elsewhere, name="n"), is_ready=False)
    await become(gateway.fleet.replicas[0], State.FAILED)
    await become(gateway.fleet.replicas[1], State.UNHEALTHY)
    assert gateway.fleet.fatal is not None
    assert not gateway.fleet.fatal.done()


async def test_when_nothing_can_ever_serve_every_reason_is_told(start: Start) -> None:
    not_here = {**launched("vllm", engine="vllm"), "options": {}}
    gateway = await start(model(absent("a"), not_here), is_ready=False)
    assert gateway.fleet.fatal is not None
    error = await asyncio.wait_for(gateway.fleet.fatal, PATIENCE_S)
    assert error.message.startswith("None of the 2 replicas can serve:\n  a of m: Model 'absent' is not in ")
    assert "\n  vllm of m: The engine 'vllm' is not installed here: run `goodgate engines install" in error.message


async def test_a_fleet_that_has_served_is_not_ended_by_its_last_failure(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(monkeypatch, Policy(max_quick=1))
    gateway = await start(model(launched()), is_ready=False)
    (replica,) = gateway.fleet.replicas
    await become(replica, State.READY)
    kill_engine(replica)
    await become(replica, State.FAILED)
    assert gateway.fleet.fatal is not None
    assert not gateway.fleet.fatal.done()


@pytest.mark.parametrize(
    ("engine", "state"), [("mortal", State.UNHEALTHY), ("slow", State.STARTING)], ids=["between starts", "loading"]
)
async def test_closing_does_not_wait_for_an_engine_that_is_not_up(
    start: Start, monkeypatch: pytest.MonkeyPatch, engine: str, state: State
) -> None:
    patience(monkeypatch, LATER)
    gateway = await start(model(launched(engine=engine)), is_ready=False, engines=ENGINES)
    (replica,) = gateway.fleet.replicas
    await become(replica, state)
    await until(lambda: replica.process is not None and replica.process.pid is not None, PATIENCE_S)
    began = time.monotonic()
    await gateway.fleet.close()
    assert time.monotonic() - began < 5
    assert replica.process is not None
    assert not replica.process.is_running


@linux
def test_a_gateway_that_is_killed_takes_its_engine_along(tmp_path: Path) -> None:
    config = tmp_path / "goodgate.yaml"
    config.write_text(json.dumps({"server": {"port": 0}, "models": [model(launched())]}))
    command = [sys.executable, "-m", "goodgate", "serve", "--config", str(config)]
    env = {**os.environ, "GOODGATE_HOME": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "replica ready" in line)
        first = descendants(process.pid)
        assert len(first) == 2  # the supervisor and the engine
        os.kill(first[-1], signal.SIGKILL)
        next(line for line in process.stderr if "an engine has ended" in line)
        next(line for line in process.stderr if "replica ready" in line)
        second = descendants(process.pid)
        assert len(second) == 2
        process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in (*first, *second)))


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
