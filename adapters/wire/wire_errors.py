"""What an engine says when it refuses or fails, turned into our own errors. One table for every engine.

Bodies come as `{"error": {...}}`, flat, as a string, as HTML from a proxy, or empty; all are read, none is required.
Statuses keep their meaning: a fault of the request stays one (and is never retried), a full engine is `Overloaded`, and
whatever else goes wrong is the engine's. An engine's own words are passed on when they are a plain message, because
they name the field; markup is not.
"""

from __future__ import annotations

import re
import time
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec
from msgspec import Struct

from adapters.errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    EngineFailed,
    EngineKeyRefused,
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    GoodgateError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    UnsupportedParameter,
)

MAX_MESSAGE = 500
MAX_RETRY_AFTER_S = 120.0  # official clients give up at once when asked to wait longer

_BY_STATUS: dict[int, type[GoodgateError]] = {
    400: InvalidRequest,
    401: EngineKeyRefused,  # the key is ours, so the caller's own 401 would send the wrong person looking
    403: EngineKeyRefused,
    404: ModelNotFound,
    408: EngineTimeout,
    413: BodyTooLarge,
    422: InvalidRequest,
    424: EngineFailed,  # TGI: the generation failed
    429: Overloaded,
    500: EngineFailed,
    501: InvalidRequest,  # vLLM and llama.cpp: asked for something that they do not do
    502: EngineFailed,
    503: Overloaded,
    504: EngineTimeout,
    529: Overloaded,
}

# Our own codes, as another Goodgate and the OpenVINO server write them.
_STATUS_OF_CODE = {
    kind.code: kind.status
    for kind in (InvalidRequest, UnsupportedParameter, ContextLengthExceeded, ModelNotFound, Overloaded, EngineTimeout)
    if kind.code
}

# TGI's words for what went wrong, which it writes into streams whose status has long been 200.
_STATUS_OF_TYPE = {
    "validation": 422,
    "template_error": 422,
    "tool_error": 422,
    "missing_template_variable": 422,
    "overloaded": 429,
    "generation": 424,
}

# How engines say that prompt and answer do not fit: llama.cpp by type, OpenAI by code, vLLM, TGI and others in words.
_OVERFLOW_MARKS = frozenset({"exceed_context_size_error", "context_length_exceeded"})
_OVERFLOW_WORDS = re.compile(
    r"context (length|size|window)|maximum (model|input|sequence) length|max_model_len|max_total_tokens"
    r"|input length .{0,80}exceed|prompt .{0,80}(too long|exceed)"
    r"|inputs?`? (tokens .{0,40}must|must have less than)",
    re.IGNORECASE,
)
# TensorRT-LLM behind Triton, where an error of the model has no better status than 500; a text to embed in llama.cpp.
_PROMPT_TOO_LONG = re.compile(
    r"prompt length.{0,160}exceed|input \(\d+ tokens\) is (too large|larger than)", re.IGNORECASE
)
# TGI's OpenAI route says 422 of every error in a stream; its words are the only sign of what it was (router/src/infer).
_WORDS_BEHIND_422: dict[str, type[GoodgateError]] = {
    "Model is overloaded": Overloaded,
    "Request failed during generation": EngineFailed,
    "Incomplete generation": EngineFailed,
}
_LOADING = re.compile(r"loading|starting|warming|not ready", re.IGNORECASE)


class Complaint(Struct, frozen=True):
    """An engine's error, whatever its shape was."""

    message: str = ""
    type: str = ""
    code: str = ""
    param: str | None = None


def error_from_response(engine: str, status: int, body: bytes, retry_after: str | None = None) -> GoodgateError:
    """The error for an HTTP answer that is not a success."""
    complaint = read_complaint(body)
    kind = _kind(status, complaint)
    message = _in_words(engine, status, complaint, kind)
    wait_s = _seconds(retry_after) if kind in (Overloaded, EngineUnavailable) else None
    error = kind(message, param=complaint.param, retry_after_s=wait_s)
    return in_its_words(engine, error, status) if complaint.message else error


def in_its_words(engine: str, error: GoodgateError, status: int | None = None) -> GoodgateError:
    """The same error, marked as one whose message has words of the engine's, which may quote the prompt."""
    how = "refused or failed" if status is None else f"answered HTTP {status}"
    error.for_records = f"The engine {engine!r} {how}; its words may quote the prompt, so only the caller has them."
    return error


def error_from_event(engine: str, data: bytes) -> GoodgateError:
    """The error for an error event in a stream; the status it would have had is in its code, where there is one."""
    complaint = read_complaint(data)
    return error_from_response(engine, _status_of(complaint), data)


def stream_error(engine: str, data: bytes, *, has_begun: bool) -> GoodgateError:
    """The error for an error event. Once text has left, no status can follow: then it is the engine's failure."""
    error = error_from_event(engine, data)
    return as_failure(engine, error) if has_begun else error


def as_failure(engine: str, error: GoodgateError) -> EngineFailed:
    if isinstance(error, EngineFailed):
        return error
    failure = EngineFailed(failed(engine, error.message))
    failure.for_records = failed(engine, error.for_records)
    return failure


def failed(engine: str, reason: str) -> str:
    return f"The engine {engine!r} failed: {reason}"


def knows_no_route(body: bytes) -> bool:
    """Does a 404 mean the path, not the model? In the words of FastAPI, of llama.cpp, of aiohttp, and in our own."""
    complaint = read_complaint(body)
    return complaint.code == "not_found" or complaint.message in {"Not Found", "File Not Found", "404: Not Found"}


def _status_of(complaint: Complaint) -> int:
    """The status that a complaint would have had, had it not come inside a stream."""
    code = complaint.code
    if code.isdecimal() and len(code) == 3 and 400 <= int(code) < 600:
        return int(code)
    told = _STATUS_OF_CODE.get(code) or _STATUS_OF_TYPE.get(complaint.type)
    return told or (400 if _is_overflow(complaint) else 500)


def read_complaint(body: bytes) -> Complaint:
    """Read an error body of any shape."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Complaint(_plain_text(body))
    if isinstance(decoded, str):
        return Complaint(decoded[:MAX_MESSAGE])
    return _from_object(decoded) if isinstance(decoded, dict) else Complaint()


def tells_error(body: bytes) -> bool:
    """Is this an error, whatever the status says? Only JSON that calls itself one; any other text may be an answer."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(decoded, dict) and bool(decoded.get("error") or decoded.get("object") == "error")


def _from_object(body: dict[str, Any]) -> Complaint:
    inner = body.get("error")
    if isinstance(inner, dict):
        return _from_fields(inner)
    if isinstance(inner, str):
        return Complaint(inner[:MAX_MESSAGE], type=str(body.get("error_type") or ""))
    return _from_fields(body)


def _from_fields(fields: dict[str, Any]) -> Complaint:
    message = fields.get("message") or fields.get("detail") or ""
    if not isinstance(message, str):
        message = msgspec.json.encode(message).decode()
    code = fields.get("code", fields.get("http_status_code"))
    param = fields.get("param")
    return Complaint(
        message=message[:MAX_MESSAGE],
        type=str(fields.get("type") or ""),
        code="" if code is None else str(code),
        param=param.removeprefix("body.") if isinstance(param, str) and param else None,
    )


def _plain_text(body: bytes) -> str:
    text = body[: 4 * MAX_MESSAGE].decode("utf-8", "replace").strip()
    return "" if text.startswith("<") else text[:MAX_MESSAGE]


def _kind(status: int, complaint: Complaint) -> type[GoodgateError]:
    if (status in (400, 413, 422) and _is_overflow(complaint)) or _PROMPT_TOO_LONG.search(complaint.message):
        return ContextLengthExceeded
    if status == 422 and (kind := _kind_behind_422(complaint.message)) is not None:
        return kind
    if status == 503 and _LOADING.search(complaint.message):
        return EngineUnavailable
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return EngineFailed if status >= 500 else EngineProtocolError


def _kind_behind_422(message: str) -> type[GoodgateError] | None:
    return next((kind for words, kind in _WORDS_BEHIND_422.items() if message.startswith(words)), None)


def _is_overflow(complaint: Complaint) -> bool:
    marked = complaint.type in _OVERFLOW_MARKS or complaint.code in _OVERFLOW_MARKS
    return marked or bool(_OVERFLOW_WORDS.search(complaint.message))


def _in_words(engine: str, status: int, complaint: Complaint, kind: type[GoodgateError]) -> str:
    if kind is EngineKeyRefused:
        return f"The engine {engine!r} refused the key it was given (HTTP {status}); check the replica's `api_key_env`."
    if complaint.message and kind is EngineFailed:
        return failed(engine, complaint.message)
    if complaint.message:
        return complaint.message
    advice = "; check the replica's `url`" if status == 404 or 300 <= status < 400 else ""  # somebody else is there
    return f"The engine {engine!r} answered HTTP {status} without saying why{advice}."


def _seconds(retry_after: str | None) -> float | None:
    """`Retry-After` in seconds, from either of its forms: a number of them, or a date."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        seconds = _seconds_until(retry_after or "")
    return min(seconds, MAX_RETRY_AFTER_S) if seconds >= 0 else None


def _seconds_until(date: str) -> float:
    """Negative for a date that is past, or none."""
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except (ValueError, OverflowError):
        return -1.0
