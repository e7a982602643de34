"""What operators see: readiness, metrics, status, logs, draining, and engines that the gateway starts itself."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from adapters.errors import EngineUnavailable
from adapters.fake import Adapter as FakeAdapter
from gateway.records.logs import JSONLines, TextLines
from tests.gateway.rig import HELLO, Reply, Script, Start, Upstream, fake, fake_model, model, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
ROOT = Path(__file__).parents[2]


@pytest.mark.replay("G38")
async def test_metrics_have_labels_from_the_configuration_only(start: Start) -> None:
    gateway = await start(fake_model(tokens=4))
    await gateway.chat()
    for number in range(50):  # g38: what clients invent must not become series
        await gateway.chat(model=f"invented-{number}")
        await gateway.get(f"/invented/{number}")
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        assert response.content_type == "text/plain"
        text = await response.text()
    assert "invented" not in text
    assert 'goodgate_requests_total{model="m",route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'goodgate_requests_total{model="other",route="/v1/chat/completions",status="404"} 50.0' in text
    assert 'goodgate_errors_total{code="model_not_found",model="other"} 50.0' in text
    assert 'goodgate_attempts_total{engine="fake",model="m",outcome="ok",replica="fake-0"} 1.0' in text
    assert 'goodgate_completion_tokens_total{engine="fake",model="m",replica="fake-0"} 4.0' in text
    assert 'goodgate_time_to_first_token_seconds_count{engine="fake",model="m",replica="fake-0"} 1.0' in text
    assert 'goodgate_in_flight{engine="fake",model="m",replica="fake-0"} 0.0' in text
    assert 'goodgate_replica_ready{engine="fake",model="m",replica="fake-0"} 1.0' in text


async def test_readiness_waits_for_every_model(start: Start, upstream_of: UpstreamOf) -> None:
    dead = {"engine": "vllm", "options": {"url": "http://127.0.0.1:9", "model": "x"}}
    gateway = await start(fake_model(), model(dead, name="other"), is_ready=False)
    await until(lambda: gateway.fleet.models["m"].is_ready)
    status, body = await gateway.get("/ready")
    assert status == 503
    assert set(body["waiting_for"]) == {"other"}
    status, body = await gateway.get("/admin/status")
    assert status == 200
    assert [each["ready"] for each in body["models"]] == [True, False]
    assert body["models"][0]["replicas"][0]["state"] == "ready"
    assert (await gateway.chat())[0] == 200  # one model's trouble is not another's


async def test_every_response_names_its_request_and_who_answered(start: Start) -> None:
    gateway = await start(fake_model())
    for path, body in (("/v1/chat/completions", HELLO), ("/v1/chat/completions", {**HELLO, "stream": True})):
        async with gateway.client.post(gateway.url + path, json=body) as response:
            assert response.headers["x-request-id"]
            assert response.headers["x-goodgate-engine"] == "fake"
            assert response.headers["x-goodgate-replica"] == "fake-0"
    async with gateway.client.get(f"{gateway.url}/nowhere") as response:
        assert response.headers["x-request-id"]
        assert "x-goodgate-engine" not in response.headers


async def test_round_robin_and_least_load_spread_requests(start: Start) -> None:
    for policy in ("round_robin", "least_load"):
        gateway = await start(model(*(fake(f"r{n}") for n in range(3)), routing=policy))
        names = [(await gateway.chat())[2]["x-goodgate-replica"] for _ in range(6)]
        assert names == ["r0", "r1", "r2"] * 2


async def test_least_load_avoids_the_busy_replica(start: Start) -> None:
    gateway = await start(model(fake("busy", ttft_ms=1000), fake("free")))
    waiting = asyncio.create_task(gateway.chat())
    await until(lambda: gateway.fleet.replicas[0].in_flight == 1)
    for _ in range(4):
        assert (await gateway.chat())[2]["x-goodgate-replica"] == "free"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def formatted(formatter: logging.Formatter, event: str, **fields: object) -> str:
    sink = io.StringIO()
    handler = logging.StreamHandler(sink)
    handler.setFormatter(formatter)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.info(event, extra={"fields": fields})
    return sink.getvalue()


@pytest.mark.replay("A43")
@pytest.mark.parametrize("formatter", [JSONLines(), TextLines()])
def test_a43_text_from_outside_cannot_forge_a_log_line(formatter: logging.Formatter) -> None:
    hostile = 'x\n2026 ERROR forged\r\x1b[31m %(x)s "${jndi:}" \u202e'
    line = formatted(formatter, "request", model=hostile, ttft_ms=1.5)
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert "\r" not in line


def test_a_json_log_line_can_be_read_back() -> None:
    line = json.loads(formatted(JSONLines(), "request", status=200, model="m"))
    assert (line["event"], line["status"], line["model"], line["level"]) == ("request", 200, "m", "info")


async def test_the_log_never_holds_the_prompt_or_the_answer(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    gateway = await start(fake_model())
    _, body, _ = await gateway.chat(messages=[{"role": "user", "content": "xyzzy-prompt"}])
    written = "".join(f"{record.getMessage()}{getattr(record, 'fields', '')}" for record in caplog.records)
    assert "/v1/chat/completions" in written
    assert "xyzzy" not in written
    assert body["choices"][0]["message"]["content"] not in written


@pytest.mark.replay("F19")
async def test_f19_draining_refuses_new_requests_and_lets_open_streams_finish(start: Start) -> None:
    gateway = await start(fake_model(ttft_ms=0, itl_ms=20, tokens=20))
    streams = [asyncio.create_task(gateway.events()) for _ in range(5)]
    await until(lambda: gateway.open_requests.in_flight == 5)
    drain = asyncio.create_task(gateway.open_requests.drain(5))
    await until(lambda: gateway.open_requests.is_draining)
    status, body, headers = await gateway.chat()
    assert (status, body["error"]["code"]) == (503, "overloaded")
    assert int(headers["Retry-After"]) >= 1
    assert headers["Connection"] == "close"
    assert (await gateway.get("/ready"))[0] == 503
    assert (await gateway.get("/health"))[0] == 200
    assert all(events[-1] == "[DONE]" for events in await asyncio.gather(*streams))
    await drain


@pytest.mark.replay("F19")
async def test_f19_what_does_not_finish_in_time_is_told_so(start: Start, upstream_of: UpstreamOf) -> None:
    async def endless(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("a")
        await reply.until_left()

    upstream = await upstream_of(endless)
    gateway = await start(model(upstream.replica()))
    stream, whole = asyncio.create_task(gateway.events()), asyncio.create_task(gateway.chat())
    await until(lambda: upstream.num_generations == 2)
    await asyncio.sleep(0.05)
    await gateway.open_requests.drain(0.1)
    events = await stream
    assert json.loads(events[-1])["error"]["code"] == "overloaded"
    assert "[DONE]" not in events
    status, body, _ = await whole
    assert (status, body["error"]["code"]) == (503, "overloaded")
    await until(lambda: upstream.num_closed == 2)


async def test_a_stream_cut_off_by_draining_is_followed_by_nothing(start: Start, upstream_of: UpstreamOf) -> None:
    async def endless(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("a")
        await reply.until_left()

    gateway = await start(model((await upstream_of(endless)).replica()))
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = json.dumps({**HELLO, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    received = await reader.readuntil(b'"a"')
    await gateway.open_requests.drain(0.1)
    async with asyncio.timeout(0.5):
        received += await reader.readuntil(b"0\r\n\r\n")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            received += await reader.read()
    writer.close()
    assert received.count(b"HTTP/1.1 ") == 1
    assert received.endswith(b"0\r\n\r\n")
    assert b'"overloaded"' in received


async def test_an_adapter_whose_probe_fails_does_not_end_the_probing_of_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start(model(fake("broken"), fake("sound")), health={"interval_s": 0.05})
    broken, sound = gateway.fleet.replicas
    probes = 0

    async def fail() -> None:
        nonlocal probes
        probes += 1
        raise KeyError("x")

    monkeypatch.setattr(broken.adapter, "health", fail)
    await until(lambda: probes >= 3)
    assert not broken.is_ready
    assert sound.is_ready


class Unable(FakeAdapter):
    async def start(self) -> None:
        raise EngineUnavailable("It needs torch.")


async def test_an_engine_that_cannot_start_goes_on_saying_why(start: Start) -> None:
    engines = {"unable": Unable}
    gateway = await start(model({"engine": "unable"}), engines=engines, is_ready=False, health={"interval_s": 0.02})
    await until(lambda: gateway.fleet.replicas[0].reason == "It needs torch.")
    status, body, _ = await gateway.chat()
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")
    await asyncio.sleep(0.1)  # several probes
    assert (await gateway.get("/ready"))[1]["waiting_for"] == {"m": {"unable-0": "It needs torch."}}


def test_importing_the_gateway_loads_no_heavy_library() -> None:
    script = (
        "import sys, gateway.app, gateway.commands.cli, gateway.web.server\n"
        "heavy = {'torch', 'gevent', 'locust', 'litellm', 'duckdb', 'transformers', 'native_engine', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


async def test_a_client_session_survives_many_requests_on_one_connection(start: Start) -> None:
    gateway = await start(fake_model())
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as client:
        for number in range(20):
            body = {**HELLO, "stream": bool(number % 2)}
            async with client.post(f"{gateway.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200
                await response.read()
