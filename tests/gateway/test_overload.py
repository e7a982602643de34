"""A process that runs out of memory, of descriptors or of turns refuses what is new, and keeps what it has."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gateway.replicas import health
from gateway.web.guard import GUARD
from tests.gateway.reload.test_reload_processes import Serving, serving
from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, fake, fake_model, model, raw, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
POST = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def press(gateway: Gateway, **overload: object) -> None:
    """Have it find itself short of something."""
    status, _ = await gateway.reload(fake_model(), overload={**gateway.source.data["overload"], **overload})
    assert status == 200
    await until(lambda: gateway.app[GUARD].resource is not None)


@pytest.mark.parametrize(("overload", "what"), [({"shed_at": 0.000_1}, "files"), ({"max_loop_lag_ms": 1e-6}, "loop")])
async def test_a_short_process_refuses_requests_before_their_bodies_are_read(
    start: Start, overload: dict[str, object], what: str
) -> None:
    gateway = await start(fake_model())
    await press(gateway, **overload)
    paths = (b"/v1/chat/completions", b"/v1/completions", b"/v1/messages", b"/v1/responses", b"/v1/embeddings")
    heads = (POST % path + b"Content-Length: 1000000\r\n\r\n{" for path in paths)  # the rest never comes
    answers = await asyncio.gather(*(raw(gateway, head) for head in heads))
    for path, answer in zip(paths, answers, strict=True):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503"), path
        assert b"\r\nConnection: close" in head
        assert int(re.search(rb"Retry-After: (\d+)", head)[1]) >= 1  # type: ignore[index]
        assert b"overloaded" in body
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        assert f'goodgate_overload_shed_total{{resource="{what}"}} 5.0' in await response.text()


async def test_health_admin_and_cancel_pass_a_short_process(start: Start) -> None:
    gateway = await start(fake_model())
    await press(gateway, shed_at=0.000_1)
    assert (await gateway.chat())[0] == 503
    for path in ("/health", "/ready", "/admin/status", "/v1/models"):
        assert (await gateway.get(path))[0] == 200, path
    status, body, _ = await gateway.post("/v1/responses/resp_none/cancel", b"")
    assert (status, body["error"]["type"]) == (404, "invalid_request_error")
    await gateway.reload(fake_model(), overload={**gateway.source.data["overload"], "shed_at": 1})
    await until(lambda: gateway.app[GUARD].resource is None)
    assert (await gateway.chat())[0] == 200


async def test_memory_that_runs_out_is_seen(start: Start) -> None:
    gateway = await start(fake_model())
    await press(gateway, memory_mib=64)  # less than an interpreter with all that is loaded here
    status, body, _ = await gateway.chat()
    assert status == 503
    assert "memory" in body["error"]["message"]


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.replay("F25")
async def test_f25_no_descriptor_for_an_engine_is_503_and_no_fault_of_the_engine(
    start: Start, upstream_of: UpstreamOf
) -> None:
    async def script(reply: Reply) -> None:
        await reply.answer("ok")

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()), breaker={"failures": 1})
    replica = gateway.fleet.replicas[0]
    gateway.app[GUARD].close()  # it would see it, and refuse before
    assert (await gateway.get("/health"))[0] == 200  # the client has its connection
    with no_descriptor_left():
        for _ in range(3):
            status, body, headers = await gateway.chat()
            assert (status, body["error"]["code"]) == (503, "overloaded")
            assert int(headers["Retry-After"]) >= 1
        assert await health.probe(gateway.fleet, replica, 1) is None
    assert replica.is_ready
    assert replica.standing.verdict == "good"
    assert (await gateway.chat())[0] == 200
    assert upstream.num_generations == 1


@pytest.mark.replay("F25", "G13")
async def test_g13_more_connections_than_descriptors_end_neither_the_gateway_nor_its_streams(tmp_path: Path) -> None:
    async with serving(tmp_path, model(fake(itl_ms=50, tokens=60), name="long"), fake_model()) as gateway:
        streams = [asyncio.create_task(gateway.events(model="long")) for _ in range(5)]
        await asyncio.sleep(0.2)
        limit = gateway.num_files() + 100
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        await asyncio.sleep(0.5)  # it looks four times a second
        address = ("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        with ExitStack() as stack:
            idle = [stack.enter_context(socket.create_connection(address)) for _ in range(300)]
            await until_chat_is(gateway, 503)
            assert gateway.num_files() < limit  # the rest is kept for what is open
            assert idle[-1].recv(100).startswith(b"HTTP/1.1 503")
        await until_chat_is(gateway, 200)
        answers = await asyncio.gather(*streams)
        assert {answer[-1] for answer in answers} == {"[DONE]"}
        assert gateway.process.returncode is None
        assert "Traceback" not in gateway.log.read_text()


@pytest.mark.replay("F27")
async def test_f27_a_loop_that_stood_still_is_seen_and_no_stream_is_timed_out_for_it(
    tmp_path: Path, upstream_of: UpstreamOf
) -> None:
    """The process is stopped and goes on, so that its own loop is what it stands still with: uvloop."""

    async def steady(reply: Reply) -> None:
        await reply.begin()
        for number in range(40):
            await reply.piece(f"{number} ")
            await asyncio.sleep(0.1)
        await reply.finish()
        await reply.done()

    upstream = await upstream_of(steady)
    impatient = upstream.replica(token_timeout_s=1, first_token_timeout_s=1)
    server = {"body_timeout_s": 1, "header_timeout_s": 1, "write_timeout_s": 1}
    async with serving(
        tmp_path, model(impatient), server=server, health={"timeout_s": 1, "interval_s": 0.1}
    ) as gateway:
        streams = [asyncio.create_task(gateway.events()) for _ in range(20)]
        await until(lambda: upstream.num_generations == 20)
        await asyncio.sleep(0.5)
        os.kill(gateway.process.pid, signal.SIGSTOP)
        late = [asyncio.create_task(gateway.chat()) for _ in range(10)]
        await asyncio.sleep(2)
        os.kill(gateway.process.pid, signal.SIGCONT)
        assert set(await asyncio.gather(*late)) == {503}
        assert upstream.num_generations == 20
        answers = await asyncio.gather(*streams)
        assert {answer[-1] for answer in answers} == {"[DONE]"}
        texts = {text_of(answer) for answer in answers}
        assert texts == {"".join(f"{number} " for number in range(40))}
        assert (await gateway.get("/ready"))[0] == 200
        async with gateway.client.get(f"{gateway.url}/metrics") as response:
            text = await response.text()
        assert num_looks(text, within="+Inf") > num_looks(text, within="1.0")


async def until_chat_is(gateway: Serving, status: int) -> None:
    async with asyncio.timeout(10):
        while await gateway.chat() != status:  # noqa: ASYNC110 - another process is watched
            await asyncio.sleep(0.05)


def text_of(events: list[str]) -> str:
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def num_looks(metrics: str, *, within: str) -> float:
    """At the event loop that were no later than so many seconds."""
    found = re.search(rf'goodgate_loop_lag_seconds_bucket{{le="{re.escape(within)}"}} (\S+)', metrics)
    assert found is not None
    return float(found[1])
