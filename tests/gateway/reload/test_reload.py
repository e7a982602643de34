"""A configuration that changes while requests are served: who is served by what, and that nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.app import PARTS
from gateway.replicas.replica import State
from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, fake, fake_model, free_port, model, raw, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]


def names(gateway: Gateway) -> list[str]:
    return [replica.name for replica in gateway.fleet.replicas]


def answering(text: str) -> Script:
    async def script(reply: Reply) -> None:
        await reply.answer(text)

    return script


async def text_of(gateway: Gateway, **fields: Any) -> str:
    status, body, _ = await gateway.chat(**fields)
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


async def test_names_limits_and_groups_hold_at_once(start: Start) -> None:
    gateway = await start(fake_model())
    assert (await gateway.chat(model="other"))[0] == 404
    status, body = await gateway.reload(
        {**fake_model(), "aliases": ["other"], "limits": {"max_tokens": 3}},
        groups=[{"name": "all", "models": ["m"]}],
        server={**gateway.source.data["server"], "body_timeout_s": 0.2},
    )
    assert (status, body["outcome"]) == (200, "applied")
    assert body["changed"] == [
        "server.body_timeout_s",
        "models.m.limits.max_tokens",
        "models.m.aliases",
        "groups.all (added)",
    ]
    assert (await gateway.chat(model="other", max_tokens=3))[0] == 200
    assert (await gateway.chat(model="all"))[0] == 200
    assert (await gateway.chat(max_tokens=4))[0] == 400
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    )
    assert (await raw(gateway, head)).startswith(b"HTTP/1.1 408")


async def test_how_much_is_tried_again_follows_at_once(start: Start, upstream_of: UpstreamOf) -> None:
    async def failing(reply: Reply) -> None:
        await reply.status(500, b"{}", "Connection: close")

    upstream = await upstream_of(failing)
    served = model(upstream.replica("a"), upstream.replica("b"), max_attempts=2)
    gateway = await start(served, retries={"budget": 0, "floor": 0})
    assert (await gateway.chat())[0] == 502
    assert upstream.num_generations == 1
    _, body = await gateway.reload(served, retries={"budget": 0, "floor": 5})
    assert body["changed"] == ["retries.floor"]
    assert (await gateway.chat())[0] == 502
    assert upstream.num_generations == 3


async def test_what_needs_a_restart_is_named_and_the_rest_holds(start: Start) -> None:
    gateway = await start(fake_model())
    status, body = await gateway.reload(
        {**fake_model(), "aliases": ["other"]},
        server={**gateway.source.data["server"], "port": 9},
        ledger={"keep_days": 1},
    )
    assert (status, body["changed"]) == (200, ["models.m.aliases"])
    assert body["needs_restart"] == ["server.port", "ledger.keep_days"]
    again = await gateway.reload(*gateway.source.data["models"])
    assert again[1]["outcome"] == "unchanged"
    assert again[1]["needs_restart"] == ["server.port", "ledger.keep_days"]  # for as long as it waits for one


async def test_a_bad_configuration_is_refused_whole_and_the_old_one_holds(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start(fake_model())
    (before,) = gateway.fleet.replicas
    bad = {"name": "m", "aliases": ["other"], "replicas": [{"engine": "absent"}]}
    for models, reason in (([bad], "absent"), ([], "models"), ([{"name": "m"}], "replicas")):
        status, body = await gateway.reload(*models)
        assert (status, body["error"]["code"]) == (422, "config_error"), body
        assert reason in body["error"]["message"]
    assert gateway.fleet.replicas == [before]
    assert (await gateway.chat(model="other"))[0] == 404
    assert (await gateway.chat())[0] == 200
    refused = [record for record in caplog.records if record.getMessage().startswith("configuration refused")]
    assert len(refused) == 3
    status, body = await gateway.get("/admin/status")
    assert body["config"]["last_reload"]["outcome"] == "refused"
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        assert 'goodgate_config_reloads_total{verdict="refused"} 3.0' in await response.text()


async def test_replicas_that_stay_keep_their_adapter_and_what_is_known_of_them(start: Start) -> None:
    gateway = await start(model(fake("a"), fake("b")))
    a, b = gateway.fleet.replicas
    adapters = a.adapter, b.adapter
    a.num_restarts = 3
    await gateway.reload(model(fake("b"), fake("c"), fake("a"), routing="round_robin"))
    await gateway.ready()
    after = gateway.fleet.replicas
    assert names(gateway) == ["b", "c", "a"]
    assert (after[0], after[2]) == (b, a)
    assert (a.adapter, b.adapter, a.num_restarts) == (*adapters, 3)


async def test_a_changed_url_moves_the_traffic_and_open_streams_finish_where_they_began(
    start: Start, upstream_of: UpstreamOf
) -> None:
    go_on = asyncio.Event()

    async def slow(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("old")
        await go_on.wait()
        await reply.piece("old")
        await reply.finish()
        await reply.done()

    old, new = await upstream_of(slow), await upstream_of(answering("new"))
    gateway = await start(model(old.replica("r")))
    stream = asyncio.create_task(gateway.events())
    await until(lambda: old.num_generations == 1)
    await gateway.reload(model(new.replica("r")))
    await until(lambda: len(gateway.fleet.replicas) == 1 and gateway.fleet.replicas[0].is_ready)
    assert await text_of(gateway) == "new"
    _, body = await gateway.get("/admin/status")
    assert [(each["name"], each["in_flight"]) for each in body["leaving"]] == [("r", 1)]
    go_on.set()
    events = await stream
    assert events[-1] == "[DONE]"
    assert sum('"old"' in event for event in events) == 2
    await until(lambda: not gateway.fleet.departures.replicas)
    assert old.num_generations == 1


async def test_the_old_replica_serves_until_the_new_one_is_ready(start: Start, upstream_of: UpstreamOf) -> None:
    old, port = await upstream_of(answering("old")), free_port()
    gateway = await start(model(old.replica("r")), health={"interval_s": 0.05})
    absent = {"engine": "vllm", "name": "r", "options": {"url": f"http://127.0.0.1:{port}", "model": "x"}}
    await gateway.reload(model(absent))
    for _ in range(3):
        assert await text_of(gateway) == "old"
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        text = await response.text()
    assert text.count('goodgate_replica_ready{engine="vllm",model="m",replica="r"}') == 1
    new = await upstream_of(answering("new"))
    await gateway.reload(model(new.replica("r")))
    await until(lambda: all(not replica.is_leaving for replica in gateway.fleet.serving))
    assert await text_of(gateway) == "new"
    await until(lambda: not gateway.fleet.departures.replicas)


async def test_a_stand_in_goes_when_its_time_is_over(start: Start, upstream_of: UpstreamOf) -> None:
    old = await upstream_of(answering("old"))
    gateway = await start(model(old.replica("r")), reload={"stand_in_s": 0.1})
    await gateway.reload(model({"engine": "vllm", "name": "r", "options": {"url": "http://127.0.0.1:9", "model": "x"}}))
    await until(lambda: not gateway.fleet.departures.replicas)
    status, body, _ = await gateway.chat()
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")


async def test_going_back_takes_the_old_replica_back(start: Start, upstream_of: UpstreamOf) -> None:
    good = model((await upstream_of(answering("old"))).replica("r"))
    gateway = await start(good)
    (before,) = gateway.fleet.replicas
    await gateway.reload(model({"engine": "vllm", "name": "r", "options": {"url": "http://127.0.0.1:9", "model": "x"}}))
    assert before.is_leaving
    await gateway.reload(good)
    assert gateway.fleet.replicas == [before]
    assert not before.is_leaving
    assert await text_of(gateway) == "old"
    await until(lambda: not gateway.fleet.departures.replicas)
    assert before.is_ready


async def test_a_removed_model_is_unknown_and_its_open_stream_finishes(start: Start) -> None:
    other = model(fake(), name="other")
    gateway = await start(fake_model(itl_ms=20, tokens=15), other)
    (replica,) = gateway.fleet.models["m"].replicas
    stream = asyncio.create_task(gateway.events())
    await until(lambda: replica.in_flight == 1)
    await gateway.reload(other)
    status, body, _ = await gateway.chat()
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert (await stream)[-1] == "[DONE]"
    await until(lambda: replica.state is State.UNLOADED)


async def test_what_does_not_end_in_time_on_a_replica_that_left_is_told_so(
    start: Start, upstream_of: UpstreamOf
) -> None:
    async def endless(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("a")
        await reply.until_left()

    old = await upstream_of(endless)
    gateway = await start(model(old.replica("r")), reload={"drain_timeout_s": 0.1})
    stream = asyncio.create_task(gateway.events())
    await until(lambda: old.num_generations == 1)
    await asyncio.sleep(0.05)
    await gateway.reload(fake_model())
    events = await stream
    assert "error" in json.loads(events[-1])
    assert "[DONE]" not in events


async def test_a_rotated_key_is_read_again(start: Start, upstream_of: UpstreamOf, tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("first-key")
    upstream = await upstream_of(answering("x"))
    served = model(upstream.replica("r", api_key_file=str(secret)))
    gateway = await start(served)
    await gateway.chat()
    secret.write_text("second-key")
    _, body = await gateway.reload(served)
    assert body["changed"] == ["models.m.replicas.r (secret)"]
    await until(lambda: all(not each.is_leaving for each in gateway.fleet.serving))
    await gateway.chat()
    keys = [request.headers["authorization"] for request in upstream.requests]
    assert keys == ["Bearer first-key", "Bearer second-key"]


async def test_a_pipe_in_the_place_of_a_key_is_refused_and_holds_up_nothing(
    start: Start, upstream_of: UpstreamOf, tmp_path: Path
) -> None:
    pipe = tmp_path / "key"
    os.mkfifo(pipe)
    upstream = await upstream_of(answering("Hello"))
    gateway = await start(model(upstream.replica("r")))
    async with asyncio.timeout(5):
        status, body = await gateway.reload(model(upstream.replica("r", api_key_file=str(pipe))))
    assert (status, "it is not a regular file" in body["error"]["message"]) == (422, True)
    assert (await gateway.chat())[0] == 200


async def test_another_order_of_replicas_is_a_change(start: Start) -> None:
    first, second = fake("a"), fake("b")
    gateway = await start(model(first, second))
    status, body = await gateway.reload(model(second, first))
    assert (status, body["changed"]) == (200, ["models.m.replicas (order)"])
    assert names(gateway) == ["b", "a"]


async def test_a_request_that_waits_for_an_engine_to_load_gets_it_as_it_is_configured_by_then(start: Start) -> None:
    def on_demand(**dials: Any) -> dict[str, Any]:
        return model(
            {"engine": "fake", "name": "f", "launch": True, "model": "tiny", "options": dials}, load="on_demand"
        )

    gateway = await start(on_demand(tokens=2), is_ready=False)
    waiting = asyncio.create_task(gateway.chat())
    await until(lambda: gateway.fleet.replicas[0].state is State.STARTING)
    await gateway.reload(on_demand(tokens=3))
    status, body, _ = await waiting
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    loaded = gateway.fleet.replicas[0]
    await gateway.reload({**on_demand(tokens=3), "aliases": ["n"]})
    assert gateway.fleet.replicas == [loaded]
    assert loaded.is_ready
    await gateway.reload(fake_model())
    await until(lambda: loaded.state is State.UNLOADED)
    await gateway.ready()
    assert (await gateway.chat())[1]["usage"]["completion_tokens"] == 5


@pytest.mark.replay("G37")
async def test_g37_reloads_leave_no_task_and_no_socket_behind(start: Start, upstream_of: UpstreamOf) -> None:
    upstreams = [await upstream_of(answering(name)) for name in "ab"]
    variants = [model(upstream.replica(f"r{n}")) for n, upstream in enumerate(upstreams)]
    gateway = await start(variants[0], health={"interval_s": 0.02})

    async def settle() -> tuple[int, int]:
        await until(lambda: len(gateway.fleet.replicas) == 1 and not gateway.fleet.departures.replicas)
        await gateway.ready()
        assert (await gateway.chat())[0] == 200
        await asyncio.sleep(0.1)
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

    for variant in variants:
        await gateway.reload(variant)
        before = await settle()
    for _, variant in zip(range(50), itertools.cycle(variants)):
        assert (await gateway.reload(variant))[0] == 200
    await gateway.reload(variants[1])
    after = await settle()
    assert after[0] <= before[0] + 1
    assert after[1] <= before[1] + 4
    assert sum(task.get_name() == "health probes" for task in asyncio.all_tasks()) == 1


async def test_a_model_gets_a_gate_and_loses_it_and_who_waits_there_has_his_turn(start: Start) -> None:
    slow = fake_model(ttft_ms=100, tokens=1)
    gateway = await start(slow)
    gated = {**slow, "admission": {"max_running": 1, "max_wait_s": 30}}
    _, body = await gateway.reload(gated)
    assert body["changed"] == ["models.m.admission"]
    asked = [asyncio.create_task(gateway.chat()) for _ in range(4)]
    await until(lambda: gateway.app[PARTS].gates.num_waiting("m") == 3)
    await gateway.reload({**gated, "admission": {"max_running": 2, "max_wait_s": 30}})
    assert gateway.app[PARTS].gates.num_waiting("m") == 2
    await gateway.reload(slow)
    assert (await gateway.chat())[0] == 200
    assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 4
