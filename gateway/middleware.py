"""Around every handler: the request's trace with its log line and metrics, and the one error envelope."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from adapters.errors import GoodgateError, InvalidRequest
from gateway import envelope, logs
from gateway.dispatch import Dispatcher
from gateway.metrics import Metrics
from gateway.trace import TRACE, Trace, new_request_id

CLIENT_LEFT = 499  # never sent: there is nobody to read it. Known from other gateways' logs
UNMATCHED = "unmatched"

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_log = logs.logger("access")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def recording(metrics: Metrics, *, log_access: bool) -> Middleware:
    """Outermost: gives the request its trace, and writes down how it ended."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        trace = request[TRACE] = Trace(request_id=_request_id(request), route=_route(request))
        status = CLIENT_LEFT
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            elapsed_s = trace.elapsed_s
            metrics.answered(model=trace.model, route=trace.route, status=status, code=trace.code, duration_s=elapsed_s)
            if log_access:
                _log_access(request.method, trace, status, elapsed_s)

    return middleware


def enveloping(dispatcher: Dispatcher) -> Middleware:
    """Every failure becomes the envelope. What we did not foresee is logged whole, and answered with its id only."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except asyncio.CancelledError:
            if not (dispatcher.is_cut_off and _is_connected(request)):
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
        return envelope.response(error, path=request.path, request_id=request[TRACE].request_id)

    return middleware


def headers_of(dispatcher: Dispatcher) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Names the request, and what answered it, on every response. While draining, connections are given up too."""

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        trace = request.get(TRACE)
        if trace is not None:
            response.headers["x-request-id"] = trace.request_id
            response.headers.update(trace.limits)
            if envelope.is_anthropic(request.path):
                response.headers["request-id"] = trace.request_id  # where their clients look
            if trace.replica:
                response.headers["x-goodgate-engine"] = trace.engine
                response.headers["x-goodgate-replica"] = trace.replica
        if dispatcher.is_draining:
            response.force_close()
            response.headers["Connection"] = "close"

    return on_prepare


def _request_id(request: web.Request) -> str:
    """The client's own id if it is a sane one; otherwise a fresh one. Engines never see it: theirs is another."""
    given = request.headers.get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else new_request_id()


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


def _log_access(method: str, trace: Trace, status: int, elapsed_s: float) -> None:
    logs.info(
        _log,
        "request",
        request_id=trace.request_id,
        method=method,
        route=trace.route,
        status=status,
        code=trace.code,
        key=None if trace.caller is None else trace.caller.name,
        tenant=None if trace.caller is None else trace.caller.tenant,
        model=trace.model,
        replica=trace.replica,
        attempts=trace.num_attempts,
        ttft_ms=None if trace.ttft_s is None else round(trace.ttft_s * 1e3, 2),
        duration_ms=round(elapsed_s * 1e3, 2),
        prompt_tokens=trace.prompt_tokens,
        completion_tokens=trace.completion_tokens,
    )
