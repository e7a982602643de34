"""What is well alone, and was not together: gates, retries, hedges and reloads in one another's way."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.priority import TTFT_HEADER
from gateway.app import PARTS
from gateway.config import ConfigError, load_config
from gateway.replicas.replica import State
from tests.gateway.rig import HELLO, Reply, Start, fake, fake_model, free_port, model, until

CHAT = "/v1/chat/completions"


class Held:
    """An engine that answers once it is let."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def script(self, reply: Reply) -> None:
        await self.go.wait()
        await reply.answer("Hi")


async def failing(reply: Reply) -> None:
    await reply.status(500, b"{}")


async def test_a_group_that_is_taken_out_between_two_tries_is_no_internal_error(start: Start, upstream_of: Any) -> None:
    upstream = await upstream_of(failing)
    gateway = await start(model(upstream.replica(), name="a"), groups=[{"name": "g", "models": ["a"]}])
    asked = asyncio.create_task(gateway.chat(model="g"))
    await until(lambda: upstream.num_generations == 1)
    await gateway.reload(model(upstream.replica(), name="b"), groups=[])
    status, body, _ = await asked
    assert (status, body["error"]["code"]) == (502, "engine_failed")


@pytest.mark.parametrize("name", ["m", "g"])
async def test_who_waits_at_the_gate_of_a_model_that_is_taken_out_is_told_so(
    start: Start, upstream_of: Any, name: str
) -> None:
    held = Held()
    upstream = await upstream_of(held.script)
    gate = {"max_running": 1}
    groups = [{"name": "g", "models": ["m"], "admission": gate}]
    gateway = await start(model(upstream.replica(), admission=gate), groups=groups)
    first = asyncio.create_task(gateway.chat(model=name))
    await until(lambda: upstream.num_generations == 1)
    second = asyncio.create_task(gateway.chat(model=name))
    await until(lambda: gateway.app[PARTS].gates.num_waiting() == 1)
    await gateway.reload(model(upstream.replica(), name="n"), groups=[])
    held.go.set()
    assert (await first)[0] == 200
    status, body, _ = await second
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")
    assert body["error"]["message"] == f"Model {name!r} is not configured any more; /v1/models lists what is."


async def test_a_caller_who_would_wait_an_hour_waits_no_longer_than_the_others(start: Start, upstream_of: Any) -> None:
    held = Held()
    upstream = await upstream_of(held.script)
    gateway = await start(model(upstream.replica(), admission={"max_running": 1, "max_wait_s": 0.1}))
    first = asyncio.create_task(gateway.chat())
    await until(lambda: upstream.num_generations == 1)
    async with asyncio.timeout(5):
        status, _, _ = await gateway.post(CHAT, HELLO, **{TTFT_HEADER: "3600000"})
    assert status == 503
    held.go.set()
    assert (await first)[0] == 200


async def test_the_last_replica_is_not_flooded_past_its_gate_when_it_is_ejected(start: Start, upstream_of: Any) -> None:
    num_open, most = 0, 0

    async def fails_slowly(reply: Reply) -> None:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0.01)
        num_open -= 1
        await reply.status(500, b"{}")

    upstream = await upstream_of(fails_slowly)
    gateway = await start(
        model(upstream.replica("a"), fake("b"), admission={"max_running": 2}, max_attempts=1), breaker={"failures": 1}
    )
    a, b = gateway.fleet.replicas
    while not a.standing.breaker.is_open:
        await gateway.chat()
    gateway.fleet.mark(b, State.UNHEALTHY, "It is down.")
    b.has_started = False
    most = 0
    answers = await asyncio.gather(*(gateway.chat() for _ in range(20)))
    assert {status for status, _, _ in answers} == {502}
    assert most == 2


async def test_no_hedge_goes_to_a_replica_that_is_full(start: Start, upstream_of: Any) -> None:
    held = Held()
    upstream = await upstream_of(held.script)
    full = {"max_in_flight": 1}
    gateway = await start(
        model({**upstream.replica("a"), **full}, {**upstream.replica("b"), **full}, hedge={"after": 20, "budget": 1.0})
    )
    asks = [asyncio.create_task(gateway.chat()) for _ in range(2)]
    await until(lambda: upstream.num_generations == 2)
    await asyncio.sleep(0.1)  # five times as long as hedges wait
    assert upstream.num_generations == 2
    held.go.set()
    assert [(await asked)[0] for asked in asks] == [200, 200]


async def test_a_stand_in_goes_with_its_model(start: Start, upstream_of: Any) -> None:
    """It would have gone on for `reload.stand_in_s`: ten minutes of an engine for nobody."""
    other = {**fake_model(), "name": "other"}
    gateway = await start(fake_model(), other)
    dead = {"engine": "vllm", "name": "dead", "options": {"url": f"http://127.0.0.1:{free_port()}", "model": "x"}}
    await gateway.reload(model(dead), other)
    assert (await gateway.chat())[0] == 200  # by the one that stands in
    await gateway.reload(other)
    await until(lambda: not gateway.fleet.departures.replicas)


async def test_a_fault_that_nobody_foresaw_in_one_file_does_not_end_the_watch_over_the_next(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start(fake_model(), reload={"watch": True, "interval_s": 0.01})
    find = gateway.source.find

    def broken(_: str) -> Any:
        raise RuntimeError("Nobody foresaw it.")

    gateway.source.find = broken
    gateway.source.data = {**gateway.source.data, "models": [{**fake_model(), "aliases": ["broken"]}]}
    await until(lambda: any("a reload failed" in record.getMessage() for record in caplog.records))
    gateway.source.find = find
    gateway.source.data = {**gateway.source.data, "models": [{**fake_model(), "aliases": ["good"]}]}
    await until(lambda: "good" in gateway.fleet.models["m"].config.aliases)
    assert (await gateway.chat(model="good"))[0] == 200


async def test_replicas_that_come_and_go_by_reloads_are_never_two_series_of_one_name(start: Start) -> None:
    """Prometheus drops what a scrape has twice, so after a thousand names nobody saw how replicas fare."""
    gateway = await start(fake_model())
    for round_ in range(3):
        await gateway.reload(model(*(fake(f"r{round_}-{number}") for number in range(400))))
        async with gateway.client.get(f"{gateway.url}/metrics") as response:
            text = await response.text()
        series = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
        assert len(series) == len(set(series))
        assert f'goodgate_in_flight{{engine="fake",model="m",replica="r{round_}-399"}} 0.0' in text


async def test_a_pipe_in_the_place_of_a_file_stops_nothing(start: Start, tmp_path: Path) -> None:
    """Opening one waits for a writer: a reload never ended, and for the evidence the whole event loop stood still."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="is a pipe"):
        load_config(pipe)
    gateway = await start({**fake_model(), "routing": "goodput"}, evidence=str(pipe))
    assert (await gateway.chat())[0] == 200
    assert "It is a pipe" in (await gateway.get("/admin/autoscale/m"))[1]["reason"]
