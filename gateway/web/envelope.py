"""How the gateway reports an error: in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, and on
Anthropic's routes in theirs, `{"type": "error", "error": {"type", "message"}, "request_id"}`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from adapters.errors import ContextLengthExceeded, GoodgateError, InvalidRequest, Overloaded, RequestError
from gateway.admission.pressure import Pressed

MAX_RETRY_AFTER_S = 120  # official clients do not retry at all after a longer wait
JSON = "application/json"
MESSAGES = "/v1/messages"
MODELS = "/v1/models"  # the one path of both dialects


class RouteNotFound(RequestError):
    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join(sorted(allowed))
        super().__init__(f"This route takes {self.allowed}, not {method[:16]}.")


class UnsupportedMediaType(RequestError):
    status = 415
    code = "unsupported_media_type"


class BrokenBody(InvalidRequest):
    """Where the next request would begin is not known."""

    def __init__(self) -> None:
        super().__init__("The body was cut short or is not encoded as its headers say.")


class ExpectationFailed(RequestError):
    status = 417
    code = "expectation_failed"


class ThreadsUnsupported(RequestError):
    """Anthropic's clients that would keep a conversation on the server send all of it once they read this code."""

    code = "thread_unsupported_request"

    def __init__(self) -> None:
        super().__init__(
            "This gateway keeps no conversations: leave out `thread` and send all messages.", param="thread"
        )


class InternalError(GoodgateError):
    """A fault of ours. What happened stands in the log under the request's id, not in the answer."""

    code = "internal_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"The gateway failed on this request; its log has the reason under {request_id}.")


def shutting_down() -> Overloaded:
    return Overloaded("The gateway is shutting down and could not finish this answer.", retry_after_s=1)


def body(error: GoodgateError) -> bytes:
    details: dict[str, Any] = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code or error.type,
    }
    return msgspec.json.encode({"error": details})


def anthropic_body(error: GoodgateError, request_id: str) -> bytes:
    """Types are those of Anthropic's own errors, by status; their clients raise by status and show the message."""
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        message = f"prompt is too long: {message}"  # the words by which agents know that they have to shorten it
    details: dict[str, Any] = {"type": _anthropic_type(error.status), "message": message}
    if isinstance(error, ThreadsUnsupported):
        details["details"] = {"error_code": error.code, "unsupported": [error.param]}
    return msgspec.json.encode({"type": "error", "error": details, "request_id": request_id})


def _anthropic_type(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(request: web.BaseRequest) -> bool:
    """Their routes, and the one that they share with OpenAI's where the request says whose it is."""
    if _is_at(request.path, MODELS):
        return "anthropic-version" in request.headers
    return _is_at(request.path, MESSAGES)


def _is_at(path: str, route: str) -> bool:
    return path == route or path.startswith(f"{route}/")


def response(error: GoodgateError, *, request: web.BaseRequest | None = None, request_id: str = "") -> web.Response:
    """The error as a response of its own, in the shape of the route. 503 always says when to come back."""
    is_theirs = request is not None and is_anthropic(request)
    told = anthropic_body(error, request_id) if is_theirs else body(error)
    answer = web.Response(status=error.status, body=told, content_type=JSON)
    if error.retry_after_s is not None or error.status == 503:
        wait_s = min(max(math.ceil(error.retry_after_s or 1), 1), MAX_RETRY_AFTER_S)
        answer.headers["Retry-After"] = str(wait_s)
    if error.status == 401:
        answer.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        answer.headers["Allow"] = error.allowed
    if error.status in (408, 413, 417) or isinstance(error, BrokenBody | Pressed):
        answer.force_close()  # the rest of the body may still be on its way, and nobody will read it
    return answer
