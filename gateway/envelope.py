"""The one shape in which the gateway reports an error: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from adapters.errors import GoodgateError, Overloaded, RequestError

MAX_RETRY_AFTER_S = 120  # official clients do not retry at all after a longer wait
JSON = "application/json"


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


def response(error: GoodgateError) -> web.Response:
    """The error as a response of its own. 503 always says when to come back."""
    answer = web.Response(status=error.status, body=body(error), content_type=JSON)
    if error.retry_after_s is not None or error.status == 503:
        wait_s = min(max(math.ceil(error.retry_after_s or 1), 1), MAX_RETRY_AFTER_S)
        answer.headers["Retry-After"] = str(wait_s)
    if isinstance(error, MethodNotAllowed):
        answer.headers["Allow"] = error.allowed
    if error.status in (408, 413):
        answer.force_close()  # the rest of the body is still on its way, and nobody will read it
    return answer
