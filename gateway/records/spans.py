"""OpenTelemetry, as an option: each ended request becomes a server span, and each of its attempts a client span.

    exporter = SpanExporter(endpoint, headers, fleet, metrics)      # needs the extra `otel`
    exporter.start()
    exporter(trace)                     # a sink: puts it on a queue, and never waits
    exporter.close()                    # sends what is left, for a bounded time

Attributes are those of OpenTelemetry's GenAI conventions (semantic-conventions-genai 0.1.0) and of its HTTP conventions
(1.44), with a few of our own under `goodgate.`. There is no prompt, no answer and no engine's wording among them.

A thread of its own turns traces into spans and sends them in batches. Where the collector is down, spans are lost: that
is counted (`goodgate_spans_total`) and told once, and requests do not notice.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from adapters.errors import GoodgateError
from gateway.records import logs
from gateway.records.metrics import Metrics
from gateway.records.trace import CANCELLED, LOST, Attempt, Trace
from gateway.records.trace_context import TraceContext
from gateway.replicas.directory import Directory
from gateway.replicas.replica import Replica

MAX_WAITING = 4096  # ended requests that wait to be exported; about 2 KB each
MAX_BATCH = 256  # requests in one export
INTERVAL_S = 2.0  # how long a span may wait for others
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0

RESULTS = ("sent", "failed", "dropped")
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_PATH = "/v1/traces"
_log = logs.logger("spans")


class ExtraMissing(GoodgateError):
    code = "extra_missing"


class Span(Struct, frozen=True, kw_only=True):
    """One span, without OpenTelemetry's classes. Times are nanoseconds since 1970; `error` is its `error.type`."""

    name: str
    is_server: bool
    context: TraceContext
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool]
    error: str = ""
    first_token_ns: int | None = None


def spans_of(trace: Trace, addresses: Mapping[tuple[str, str], tuple[str, int]]) -> Iterator[Span]:
    """The spans of an ended request: its own, then one for each attempt. `addresses` are hosts and ports of replicas
    by model and name, as far as they have one."""
    context = trace.context
    assert context is not None  # only requests with a recorded context are given
    clock = _Clock(trace)
    yield Span(
        name=f"{trace.method} {trace.route}",
        is_server=True,
        context=context,
        span_id=trace.span_id,
        parent_id=context.parent_id,
        start_ns=clock.ns(trace.started),
        end_ns=clock.ns(trace.ended),
        attributes=_known(_of_request(trace)),
        error=trace.code if trace.status >= 500 or trace.status < 400 else "",  # a caller's mistake is none of ours
    )
    operation = OPERATIONS.get(trace.route, "chat")
    for attempt in trace.attempts:
        yield Span(
            name=f"{operation} {attempt.model}",
            is_server=False,
            context=context,
            span_id=attempt.span_id,
            parent_id=trace.span_id,
            start_ns=clock.ns(attempt.started),
            end_ns=clock.ns(attempt.ended),
            attributes=_known(_of_attempt(attempt, operation, trace, addresses)),
            error=_failure_of(attempt),
            first_token_ns=None if attempt.first_token is None else clock.ns(attempt.first_token),
        )


class _Clock:
    """Turns a request's monotonic times into the wall's."""

    def __init__(self, trace: Trace) -> None:
        self._offset_s = trace.received - trace.started
        self._end = trace.started if trace.ended is None else trace.ended

    def ns(self, moment: float | None) -> int:
        return int(((self._end if moment is None else moment) + self._offset_s) * 1e9)


def _of_request(trace: Trace) -> dict[str, Any]:
    return {
        "http.request.method": trace.method,
        "http.route": trace.route,
        "http.response.status_code": trace.status,
        "error.type": trace.code,
        "gen_ai.request.model": trace.model,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.completion_tokens,
        "goodgate.request_id": trace.request_id,
        "goodgate.tenant": None if trace.caller is None else trace.caller.tenant,
        "goodgate.attempts": len(trace.attempts),
    }


def _of_attempt(
    attempt: Attempt, operation: str, trace: Trace, addresses: Mapping[tuple[str, str], tuple[str, int]]
) -> dict[str, Any]:
    usage = attempt.usage
    host, port = addresses.get((attempt.model, attempt.replica), (None, None))
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": attempt.engine,
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": attempt.model,
        "gen_ai.request.choice.count": attempt.num_choices if attempt.num_choices > 1 else None,
        "gen_ai.response.time_to_first_chunk": (
            None if attempt.first_token is None else round(attempt.first_token - attempt.started, 6)
        ),
        "gen_ai.usage.input_tokens": None if usage is None else usage.prompt_tokens,
        "gen_ai.usage.output_tokens": None if usage is None else usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": None if usage is None else usage.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": None if usage is None else usage.reasoning_tokens,
        "server.address": host,
        "server.port": port,
        "error.type": _failure_of(attempt),
        "goodgate.replica": attempt.replica,
        "goodgate.outcome": attempt.outcome,
    }


def _failure_of(attempt: Attempt) -> str:
    """The code of what failed. That a client leaves is no failure."""
    return "" if attempt.outcome in ("ok", CANCELLED, LOST) else attempt.outcome


def _known(attributes: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    return {name: value for name, value in attributes.items() if value not in (None, "")}


# ------------------------------------------------------------------------------------------------------------ sending


class SpanExporter:
    """Sends the spans of recorded requests to an OTLP endpoint over HTTP. Raises `ExtraMissing` when it is made."""

    def __init__(self, endpoint: str, headers: Mapping[str, str], fleet: Directory, metrics: Metrics) -> None:
        self._url = endpoint.rstrip("/").removesuffix(_PATH) + _PATH
        self._wire = _Wire(self._url, headers)
        self._fleet = fleet
        self._metrics = metrics
        self._waiting: queue.Queue[Trace | None] = queue.Queue(MAX_WAITING)
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="exports spans", daemon=True)
        for result in RESULTS:
            metrics.add("goodgate_spans", result, by=0)

    def start(self) -> None:
        self._thread.start()

    def __call__(self, trace: Trace) -> None:
        if not trace.span_id:
            return
        try:
            self._waiting.put_nowait(trace)
        except queue.Full:
            self._metrics.add("goodgate_spans", "dropped", by=1 + len(trace.attempts))

    def close(self) -> None:
        """Send what is waiting, but for no longer than `CLOSE_TIMEOUT_S`. Blocks for that time."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        with suppress(queue.Full):  # the thread hangs at a collector that does not answer; what waits is lost
            self._waiting.put(None, timeout=CLOSE_TIMEOUT_S)
        self._thread.join(max(deadline - time.monotonic(), 0))
        self._wire.close()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch, is_open = self._next_batch()
            if batch:
                self._send(batch)

    def _next_batch(self) -> tuple[list[Trace], bool]:
        """What has ended within `INTERVAL_S` of the first, and whether more may come."""
        first = self._waiting.get()
        if first is None:
            return [], False
        batch = [first]
        deadline = time.monotonic() + INTERVAL_S
        while len(batch) < MAX_BATCH:
            try:
                trace = self._waiting.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                break
            if trace is None:
                return batch, False
            batch.append(trace)
        return batch, True

    def _send(self, batch: Sequence[Trace]) -> None:
        addresses = {(each.model, each.name): found for each in self._fleet.replicas if (found := address_of(each))}
        spans = [span for trace in batch for span in spans_of(trace, addresses)]
        reason = self._wire.send(spans)
        self._metrics.add("goodgate_spans", "failed" if reason else "sent", by=len(spans))
        if reason and not self._is_failing:
            logs.warning(_log, "spans cannot be exported", endpoint=self._url, reason=reason)
        elif self._is_failing and not reason:
            logs.info(_log, "spans are exported again", endpoint=self._url)
        self._is_failing = bool(reason)


def address_of(replica: Replica) -> tuple[str, int] | None:
    """Host and port of a replica that is reached over HTTP."""
    url = replica.config.options.get("url") if replica.process is None else replica.process.url
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.hostname is None:
        return None
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


class _Wire:
    """OpenTelemetry's own classes and exporter, imported when spans are wanted and not before."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        try:
            from opentelemetry import trace as api
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk import trace as sdk
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import SpanExportResult
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise ExtraMissing(
                "`tracing:` needs packages that are not installed; run: pip install 'goodgate[otel]'."
            ) from error
        self._api, self._sdk, self._success = api, sdk, SpanExportResult.SUCCESS
        self._resource = Resource({"service.name": "goodgate", "service.version": version("goodgate")})
        self._scope = InstrumentationScope("goodgate", version("goodgate"))
        self._exporter = OTLPSpanExporter(endpoint=url, headers=dict(headers), timeout=EXPORT_TIMEOUT_S)

    def send(self, spans: Sequence[Span]) -> str:
        """Empty when they have arrived; otherwise the reason why not, in the exporter's words."""
        with _heard("opentelemetry.exporter") as words:
            result = self._exporter.export([self._readable(span) for span in spans])
        return "" if result is self._success else next(iter(words), "the exporter gave no reason")

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, span: Span) -> Any:
        api, sdk, context = self._api, self._sdk, span.context
        parent = self._span_context(context, span.parent_id, is_remote=span.is_server) if span.parent_id else None
        events = [] if span.first_token_ns is None else [sdk.Event("first token", timestamp=span.first_token_ns)]
        status = api.Status(api.StatusCode.ERROR, span.error) if span.error else api.Status(api.StatusCode.UNSET)
        return sdk.ReadableSpan(
            name=span.name,
            context=self._span_context(context, span.span_id, is_remote=False),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=events,
            kind=api.SpanKind.SERVER if span.is_server else api.SpanKind.CLIENT,
            status=status,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    def _span_context(self, context: TraceContext, span_id: str, *, is_remote: bool) -> Any:
        api = self._api
        return api.SpanContext(
            int(context.trace_id, 16),
            int(span_id, 16),
            is_remote,
            api.TraceFlags(context.flags),
            api.TraceState.from_header([context.state]) if context.state else api.TraceState(),
        )


@contextmanager
def _heard(name: str) -> Iterator[list[str]]:
    """What a library logs meanwhile. Its own lines on stderr would not have our form, and come with each batch."""
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(name)
    log.addHandler(handler)
    log.propagate = False
    try:
        yield words
    finally:
        log.removeHandler(handler)
        log.propagate = True
