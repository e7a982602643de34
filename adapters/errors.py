"""Every way a request can fail, as one tree. Each leaf knows its HTTP status and whether another try is safe.

    GoodgateError
    |-- RequestError                    the caller's fault; never retried, never counts against a replica
    |   |-- InvalidRequest              400  malformed or out-of-range field
    |   |-- UnsupportedParameter        400  the engine cannot honour this field
    |   |-- UnsupportedOperation        400  the engine has no such route (embeddings, tokenize, ...)
    |   |-- ContextLengthExceeded       400  prompt + max_tokens do not fit the model
    |   |-- Unauthorized                401
    |   |-- ModelNotFound               404
    |   |-- BodyTooLarge                413
    |   `-- RequestTimeout              408  the caller took too long to send its body
    |-- Overloaded                      503  no capacity now; carries Retry-After; retry elsewhere is safe
    |   `-- HostExhausted               503  the gateway's own host is short of something; no engine is to blame
    `-- EngineError                     the engine's fault
        |-- EngineUnavailable           503  nothing was started: refused, unreachable, still loading; retry is safe
        |-- EngineTimeout               504  a deadline passed (connect, first token, between tokens)
        |-- DeadlineExceeded            504  the time for the whole answer has passed; there is none for another try
        |-- EngineProtocolError         502  the engine answered something we cannot read
        |-- EngineKeyRefused            502  the engine refused our own key: nothing the caller could mend
        |-- EngineFailed                502  the engine reported a failure of its own
        |-- ToolCallInvalid             502  the model called a strict tool with arguments that do not fit its schema
        `-- StreamInterrupted           502  the stream broke after it had begun

A retry is only ever made before the first byte has reached the client; `retryable` says whether another replica may be
asked then, and `repeatable` whether the same one may do better the next time. A client that goes away is control flow
(`asyncio.CancelledError`), not an error: no leaf here.
"""

from __future__ import annotations

MAX_MESSAGE, MAX_PARAM = 1000, 256  # characters of what callers wrote that go back to them


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


class GoodgateError(Exception):
    """Base of the tree. `message` is one sentence for a person; ours never hold prompts or keys. One that has an
    engine's words in it may quote the caller's prompt back to him, so logs and records get `for_records` instead.
    """

    status = 500
    type = "internal_error"
    code: str | None = None
    retryable = False
    repeatable = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.for_records = message
        self.param = param
        self.retry_after_s = retry_after_s

    def rename(self, param: str) -> None:
        """Call the field at fault, which the message has in quotes, as the client wrote it."""
        self.message = self.message.replace(f"'{self.param}'", f"'{param}'")
        self.param = param


class RequestError(GoodgateError):
    """Its words may hold a caller's own, of which a megabyte helps nobody: they are cut."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        param = None if param is None else _cut(param, MAX_PARAM)
        super().__init__(_cut(message, MAX_MESSAGE), param=param, retry_after_s=retry_after_s)


class InvalidRequest(RequestError):
    code = "invalid_value"


class UnsupportedParameter(RequestError):
    code = "unsupported_parameter"

    def __init__(self, field: str, engine: str) -> None:
        super().__init__(f"The engine {engine!r} cannot honour the parameter {field!r}.", param=field)
        self.engine = engine


class UnsupportedContent(UnsupportedParameter):
    def __init__(self, kind: str, place: str, engine: str) -> None:
        RequestError.__init__(self, f"The engine {engine!r} takes no {kind!r} ({place}).", param="messages")


class UnsupportedOperation(RequestError):
    code = "unsupported_operation"

    def __init__(self, operation: str, engine: str) -> None:
        super().__init__(f"The engine {engine!r} does not offer {operation}.")


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class Unauthorized(RequestError):
    status = 401
    code = "invalid_api_key"


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class RequestTimeout(RequestError):
    status = 408
    code = "request_timeout"


class Overloaded(GoodgateError):
    status = 503
    type = "overloaded_error"
    code = "overloaded"
    retryable = True
    repeatable = True


class HostExhausted(Overloaded):
    """Another replica would fare no better."""

    retryable = False
    repeatable = False


class EngineError(GoodgateError):
    status = 502
    type = "engine_error"


class EngineUnavailable(EngineError):
    status = 503
    code = "engine_unavailable"
    retryable = True
    repeatable = True


class EngineTimeout(EngineError):
    status = 504
    code = "engine_timeout"
    retryable = True


class DeadlineExceeded(EngineError):
    status = 504
    code = "deadline_exceeded"


class EngineProtocolError(EngineError):
    code = "engine_protocol_error"
    retryable = True


class EngineKeyRefused(EngineError):
    code = "engine_key_refused"
    retryable = True


class EngineFailed(EngineError):
    code = "engine_failed"
    retryable = True
    repeatable = True


class ToolCallInvalid(EngineError):
    code = "tool_call_invalid"
    retryable = True


class StreamInterrupted(EngineError):
    code = "stream_interrupted"
    retryable = True
    repeatable = True
