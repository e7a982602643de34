"""Spans as a collector receives them: one for each request, one for each attempt, and nothing of what was said."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from gateway.records import spans
from gateway.records.spans import ExtraMissing, SpanExporter
from gateway.records.trace import Trace
from gateway.records.trace_context import TraceContext
from tests.gateway.records.test_metrics import a_fleet, metrics_of, scrape, value
from tests.gateway.records.test_trace_context import PARENT, SPAN_ID, TRACE_ID, whole
from tests.gateway.rig import Reply, Script, Start, Upstream, fake, free_port, model, until

collector_pb2 = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
SECRET = "xyzzy-of-the-prompt"
FLEET = a_fleet()


@dataclass
class Collector:
    """Takes what an OTLP exporter sends."""

    url: str = ""
    status: int = 200
    delay_s: float = 0
    headers: dict[str, str] = field(default_factory=dict)
    resource: dict[str, Any] = field(default_factory=dict)
    spans: list[Any] = field(default_factory=list)
    raw: bytes = b""

    async def take(self, request: web.Request) -> web.Response:
        self.headers = {name.title(): value for name, value in request.headers.items()}
        body = await request.read()
        await asyncio.sleep(self.delay_s)
        if self.status == 200:
            self.raw += body
            export = collector_pb2.ExportTraceServiceRequest.FromString(body)
            for resource in export.resource_spans:
                self.resource = attributes(resource.resource)
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response(status=self.status)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


def attributes(owner: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in owner.attributes}


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    monkeypatch.setattr(spans, "INTERVAL_S", 0.05)
    found = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", found.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    found.url = f"http://127.0.0.1:{port}"
    yield found
    await runner.cleanup()


def tracing(collector: Collector, **fields: Any) -> dict[str, Any]:
    return {"exporter": "otlp", "endpoint": collector.url, **fields}


async def test_a_request_and_its_attempts_are_one_tree_that_ends_in_the_engine(
    start: Start, upstream_of: UpstreamOf, collector: Collector
) -> None:
    async def fails(reply: Reply) -> None:
        await reply.status(500, b'{"error":{"message":"%s"}}' % SECRET.encode())

    bad, good = await upstream_of(fails), await upstream_of(whole)
    gateway = await start(
        model(bad.replica("bad"), good.replica("good"), routing="round_robin"), tracing=tracing(collector)
    )
    status, _, _ = await gateway.post(
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": SECRET}]},
        traceparent=PARENT, tracestate="vendor=1",
    )  # fmt: skip
    assert status == 200
    await until(lambda: len(collector.spans) == 3)
    [request] = collector.named("POST /v1/chat/completions")
    failed, answered = collector.named("chat m")
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert request.parent_span_id.hex() == SPAN_ID
    assert failed.parent_span_id == answered.parent_span_id == request.span_id
    told = [upstream.requests[0].headers["traceparent"].split("-")[2] for upstream in (bad, good)]
    assert told == [failed.span_id.hex(), answered.span_id.hex()]
    assert good.requests[0].headers["tracestate"] == request.trace_state == "vendor=1"

    said = attributes(answered)
    assert (
        said.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": "m",
            "gen_ai.response.model": "m",
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 1,
            "server.address": "127.0.0.1",
            "server.port": good.port,
            "goodgate.replica": "good",
        }.items()
    )
    assert 0 < said["gen_ai.response.time_to_first_chunk"] < 30
    [first_token] = answered.events
    assert answered.start_time_unix_nano <= first_token.time_unix_nano <= answered.end_time_unix_nano
    assert request.start_time_unix_nano <= failed.start_time_unix_nano <= failed.end_time_unix_nano
    assert abs(request.end_time_unix_nano / 1e9 - time.time()) < 60

    assert attributes(failed)["error.type"] == failed.status.message == "engine_failed"
    assert (failed.status.code, request.status.code, answered.status.code) == (2, 0, 0)
    assert attributes(request)["http.response.status_code"] == 200
    assert collector.resource["service.name"] == "goodgate"
    assert SECRET.encode() not in collector.raw


async def test_an_embedding_and_a_request_that_reaches_no_engine_have_spans_too(
    start: Start, upstream_of: UpstreamOf, collector: Collector
) -> None:
    engine = await upstream_of(whole)
    gateway = await start(model(engine.replica(embeddings=True)), tracing=tracing(collector))
    await gateway.post("/v1/embeddings", {"model": "m", "input": SECRET})
    await gateway.chat(model="nobody's")
    await until(lambda: len(collector.spans) == 3)
    [embedding] = collector.named("embeddings m")
    assert attributes(embedding)["gen_ai.operation.name"] == "embeddings"
    [refused] = collector.named("POST /v1/chat/completions")
    assert refused.status.code == 0  # the caller's mistake, not ours
    assert attributes(refused)["error.type"] == "model_not_found"
    assert not refused.parent_span_id
    assert len({span.trace_id for span in collector.spans}) == 2


async def test_a_client_that_leaves_is_no_error(start: Start, collector: Collector) -> None:
    gateway = await start(model(fake(ttft_ms=10_000)), tracing=tracing(collector))
    request = asyncio.create_task(gateway.chat())
    await until(lambda: gateway.open_requests.in_flight == 1)
    request.cancel()
    await until(lambda: len(collector.spans) == 2)
    assert [span.status.code for span in collector.spans] == [0, 0]
    [attempt] = collector.named("chat m")
    assert attributes(attempt)["goodgate.outcome"] == "cancelled"
    assert "error.type" not in attributes(attempt)


async def test_what_the_caller_does_not_sample_is_not_exported(start: Start, collector: Collector) -> None:
    gateway = await start(model(fake()), tracing=tracing(collector))
    await gateway.post("/v1/chat/completions", {"model": "m", "messages": []}, traceparent=PARENT[:-1] + "0")
    await gateway.chat()
    await until(lambda: bool(collector.spans))
    assert TRACE_ID not in {span.trace_id.hex() for span in collector.spans}


async def test_headers_for_the_collector_come_from_the_environment(
    start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLECTOR", "authorization=Basic%20abc,x-scope=us")
    gateway = await start(model(fake()), tracing=tracing(collector, headers_env="COLLECTOR"))
    await gateway.chat()
    await until(lambda: bool(collector.spans))
    assert (collector.headers["Authorization"], collector.headers["X-Scope"]) == ("Basic abc", "us")


async def test_a_collector_that_is_down_is_told_once_and_requests_go_on(
    start: Start, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "goodgate.spans")
    collector.status = 400
    gateway = await start(model(fake()), tracing=tracing(collector))
    for count in (2, 4):
        assert (await gateway.chat())[0] == 200
        async with asyncio.timeout(10):
            while value(await scrape(gateway), 'goodgate_spans_total{result="failed"}') < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    collector.status = 200
    await gateway.chat()
    await until(lambda: bool(collector.spans))

    def told() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "goodgate.spans"]

    await until(lambda: len(told()) == 2)
    assert [record.message for record in told()] == ["spans cannot be exported", "spans are exported again"]
    assert "400" in vars(told()[0])["fields"]["reason"]


def recorded(number: int = 1) -> Trace:
    context = TraceContext(f"{number:032x}", flags=1, is_recorded=True)
    trace = Trace(
        request_id="r", route="/v1/models", method="GET", status=200, context=context, span_id=f"{number:016x}"
    )
    trace.ended = trace.started + 1
    return trace


def test_a_queue_that_is_full_drops_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_WAITING", 2)
    metrics = metrics_of()
    exporter = SpanExporter("http://127.0.0.1:9", {}, FLEET, metrics)  # not started
    for number in range(1, 6):
        exporter(recorded(number))
    assert value(metrics.render().decode(), 'goodgate_spans_total{result="dropped"}') == 3


async def test_the_end_waits_for_a_dead_collector_only_so_long(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "CLOSE_TIMEOUT_S", 0.2)
    collector.delay_s = 3
    metrics = metrics_of()
    exporter = SpanExporter(collector.url, {}, FLEET, metrics)
    exporter.start()
    exporter(recorded())
    began = time.monotonic()
    await asyncio.to_thread(exporter.close)
    assert time.monotonic() - began < 2.5
    collector.delay_s = 0


async def test_what_waits_at_the_end_is_still_sent(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "INTERVAL_S", 30)
    metrics = metrics_of()
    exporter = SpanExporter(f"{collector.url}/v1/traces", {}, FLEET, metrics)  # the whole address does as well
    exporter.start()
    for number in range(1, 6):
        exporter(recorded(number))
    exporter(replace(recorded(), span_id=""))  # one that is not recorded
    await asyncio.to_thread(exporter.close)
    assert len(collector.spans) == 5


async def test_without_the_extra_the_start_says_what_to_install(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ExtraMissing, match=r"pip install 'goodgate\[otel\]'"):
        await start(model(fake()), tracing={"exporter": "otlp"})
