"""Around every handler: the request's trace with its log line and metrics, and the one error envelope."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from aiohttp import web
from aiohttp.typedefs import Middleware

from adapters.errors import GoodgateError, InvalidRequest
from gateway.admission.open_requests import OpenRequests
from gateway.records import logs
from gateway.records.trace import TRACE, Trace, new_request_id
from gateway.records.trace_context import Sampling, begin, new_span_id
from gateway.web import envelope
from gateway.web.protocol import Connection

CLIENT_LEFT = 499  # never sent: there is nobody to read it. Known from other gateways' logs
UNMATCHED = "unmatched"

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_log = logs.logger("access")

Sink: TypeAlias = Callable[[Trace], None]  # told of each request once, when it has ended
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def recording(sinks: Sequence[Sink], sampling: Sampling) -> Middleware:
    """Outermost: gives the request its trace, and tells everyone who keeps something of it once it has ended."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        trace = Trace(request_id=_request_id(request), route=_route(request), method=request.method, status=CLIENT_LEFT)
        trace.context = begin(request.headers, sampling)
        if trace.context is not None and trace.context.is_recorded:
            trace.span_id = new_span_id()
        request[TRACE] = trace
        connection = request.protocol
        paused_s = connection.paused_s if isinstance(connection, Connection) else 0.0
        try:
            response = await handler(request)
            trace.status = response.status
            return response
        finally:
            if isinstance(connection, Connection):
                trace.client_s = connection.paused_s - paused_s
            trace.ended = time.perf_counter()
            for sink in sinks:
                sink(trace)

    return middleware


def enveloping(open_requests: OpenRequests) -> Middleware:
    """Every failure becomes the envelope. What we did not foresee is logged whole, and answered with its id only."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except asyncio.CancelledError:
            if not (open_requests.is_cut_off and _is_connected(request)):
                raise  # the client left
            error: GoodgateError = envelope.shutting_down()
        except GoodgateError as failure:
            error = failure
        except web.HTTPException as refusal:
            error = _from_http(refusal, request)
        except Exception as fault:
            trace = request[TRACE]
            logs.error(_log, "unexpected failure", error=fault, request_id=trace.request_id, route=trace.route)
            error = envelope.InternalError(trace.request_id)
        request[TRACE].code = error.code or error.type
        return envelope.response(error, request=request, request_id=request[TRACE].request_id)

    return middleware


def headers_of(open_requests: OpenRequests) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Names the request, and what answered it, on every response. While draining, connections are given up too."""

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        trace = request.get(TRACE)
        if trace is not None:
            headers = response.headers
            headers["x-request-id"] = trace.request_id
            headers.update(trace.limits)
            if envelope.is_anthropic(request):
                headers["request-id"] = trace.request_id  # where their clients look
            if (last := trace.last_attempt) is not None:
                headers["x-goodgate-engine"] = last.engine
                headers["x-goodgate-replica"] = last.replica
        if open_requests.is_draining:
            response.force_close()
            response.headers["Connection"] = "close"

    return on_prepare


def _request_id(request: web.Request) -> str:
    """The client's own id if it is a sane one; otherwise a fresh one. Engines never see it: theirs is another."""
    given = request.headers.get("x-request-id")
    return given if given and _SANE_ID.fullmatch(given) else new_request_id()


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else UNMATCHED


def _is_connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _from_http(refusal: web.HTTPException, request: web.Request) -> GoodgateError:
    if isinstance(refusal, web.HTTPNotFound):
        return envelope.RouteNotFound("There is no such route; see /v1/models for what is served.")
    if isinstance(refusal, web.HTTPMethodNotAllowed):
        return envelope.MethodNotAllowed(request.method, refusal.allowed_methods)
    return InvalidRequest(f"The request was refused: {refusal.reason}.")


def log_access(trace: Trace) -> None:
    """One line a request."""
    last = trace.last_attempt
    logs.info(
        _log,
        "request",
        request_id=trace.request_id,
        trace_id=trace.trace_id,
        method=trace.method,
        route=trace.route,
        status=trace.status,
        code=trace.code,
        key=None if trace.caller is None else trace.caller.name,
        tenant=None if trace.caller is None else trace.caller.tenant,
        model=trace.model,
        replica="" if last is None else last.replica,
        attempts=len(trace.attempts),
        ttft_ms=None if trace.ttft_s is None else round(trace.ttft_s * 1e3, 2),
        waited_ms=round(trace.waited_s * 1e3, 2) if trace.waited_s else None,
        duration_ms=round(trace.elapsed_s * 1e3, 2),
        prompt_tokens=trace.prompt_tokens,
        completion_tokens=trace.completion_tokens,
    )
