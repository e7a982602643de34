"""Every way in which engines say that something went wrong, and the one error that each becomes."""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import Any

import pytest

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
    StreamInterrupted,
)
from adapters.types import Chunk
from tests.contract.conftest import (
    CHAT,
    GenerateSubject,
    HTTPSubject,
    chat,
    collect,
)
from tests.contract.replay import engine, failure, reasons_of, text_of
from tests.contract.twin import Reply, event

# ------------------------------ engines that speak OpenAI


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest), (401, EngineKeyRefused), (403, EngineKeyRefused), (404, ModelNotFound),
        (408, EngineTimeout), (413, BodyTooLarge), (422, InvalidRequest), (424, EngineFailed), (429, Overloaded),
        (500, EngineFailed), (501, InvalidRequest), (502, EngineFailed), (503, Overloaded), (504, EngineTimeout),
        (529, Overloaded),
        (302, EngineProtocolError), (405, EngineProtocolError), (415, EngineProtocolError), (599, EngineFailed),
    ],
)  # fmt: skip
async def test_each_http_status_becomes_its_error(
    http_subject: HTTPSubject, status: int, kind: type[GoodgateError]
) -> None:
    body = {"error": {"message": "no", "type": "t", "param": "top_p", "code": status}}
    error = await failure(http_subject, Reply.plain(status, body))
    assert type(error) is kind
    assert error.param == "top_p"


@pytest.mark.replay("W09")
@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"object": "error", "message": "bad top_p", "type": "BadRequest", "code": 400}', "bad top_p"),
        (400, b'{"error": {"message": "bad top_p", "code": 400}}', "bad top_p"),
        (401, b'{"error": "Unauthorized"}', "refused the key"),
        (401, b"", "refused the key"),
        (422, b'{"error": "bad top_p", "error_type": "validation"}', "bad top_p"),
        (422, b'{"detail": [{"loc": ["body", "top_p"], "msg": "bad"}]}', '"msg":"bad"'),
        (422, b"Failed to deserialize: top_p", "Failed to deserialize"),
        (502, b"<html><h1>502 Bad Gateway</h1></html>", "HTTP 502 without saying why"),
        (500, b"", "HTTP 500 without saying why"),
        (500, b"\xff\xfe", "\ufffd"),
        (500, b'"just a text"', "just a text"),
        (500, b"[1, 2]", "HTTP 500 without saying why"),
    ],
)
async def test_error_bodies_of_every_shape_give_one_message(
    http_subject: HTTPSubject, status: int, body: bytes, message: str
) -> None:
    error = await failure(http_subject, Reply.plain(status, body))
    assert message in error.message
    assert "<" not in error.message
    assert error.status == {401: 502, 422: 400, 500: 502}.get(status, status)


@pytest.mark.replay("W09")
@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "This model's maximum context length is 2048 tokens.", "code": 400}},
        {"error": {"message": "Input length (9000) exceeds the limit", "type": "BadRequestError", "code": 400}},
        {"error": {"message": "request (9000) too long", "type": "exceed_context_size_error", "n_ctx": 2048}},
        {"error": {"message": "too long", "code": "context_length_exceeded"}},
    ],
)
async def test_overflow_is_recognised_in_each_engines_words(http_subject: HTTPSubject, body: dict[str, Any]) -> None:
    assert type(await failure(http_subject, Reply.plain(400, body))) is ContextLengthExceeded


@pytest.mark.replay("W07")
async def test_an_error_under_status_200_is_an_error(http_subject: HTTPSubject) -> None:
    in_stream = Reply.stream(event({"error": {"message": "top_p is out of range", "http_status_code": 422}}))
    in_json = Reply.plain(200, {"error": {"message": "top_p is out of range", "code": 422}})
    for reply in (in_stream, in_json):
        error = await failure(http_subject, reply)
        assert (type(error), error.message) == (InvalidRequest, "top_p is out of range")


@pytest.mark.parametrize(
    ("code", "kind"),
    [("context_length_exceeded", ContextLengthExceeded), ("overloaded", Overloaded), ("engine_failed", EngineFailed),
     ("unsupported_parameter", InvalidRequest), (9999, EngineFailed), ("\u00b2\u00b2\u00b2", EngineFailed)],
)  # fmt: skip
async def test_an_error_event_before_any_text_is_told_apart_by_its_code(
    http_subject: HTTPSubject, code: str | int, kind: type[GoodgateError]
) -> None:
    body = {"error": {"message": "no", "type": "t", "param": None, "code": code}}
    assert type(await failure(http_subject, Reply.stream(event(body)))) is kind


async def test_an_answer_that_is_no_stream_is_a_clean_error(http_subject: HTTPSubject) -> None:
    for reply in (Reply.plain(200, {"choices": []}), Reply.plain(200, b"<html>", "text/html")):
        assert type(await failure(http_subject, reply)) is EngineProtocolError


@pytest.mark.replay("G29")
@pytest.mark.parametrize(("header", "wait_s"), [("7", 7), ("9999", 120), ("soon", None), ("-3", None), ("nan", None)])
async def test_a_full_engines_retry_after_is_kept_within_what_clients_accept(header: str, wait_s: float | None) -> None:
    async with engine("vllm", model="small") as (adapter, twin):
        twin.reply(CHAT, Reply.plain(503, {"error": {"message": "queue is full"}}, Retry_After=header))
        with pytest.raises(Overloaded) as caught:
            await collect(adapter, chat())
        assert caught.value.retry_after_s == wait_s


@pytest.mark.replay("G29")
@pytest.mark.parametrize(("in_s", "least", "most"), [(30, 25, 30), (9999, 120, 120), (-60, None, None)])
async def test_a_full_engine_may_say_by_a_date_when_to_come_back(
    in_s: float, least: float | None, most: float | None
) -> None:
    async with engine("vllm", model="small") as (adapter, twin):
        date = formatdate(time.time() + in_s, usegmt=True)
        twin.reply(CHAT, Reply.plain(503, {"error": {"message": "queue is full"}}, Retry_After=date))
        with pytest.raises(Overloaded) as caught:
            await collect(adapter, chat())
        told = caught.value.retry_after_s
        assert told == least if least is None or most is None else least <= (told or 0) <= most


async def test_an_engine_that_still_loads_is_unavailable_not_full(http_subject: HTTPSubject) -> None:
    body = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    assert type(await failure(http_subject, Reply.plain(503, body))) is EngineUnavailable


# ------------------------------ engines with a text route of their own


@pytest.mark.replay("W07")
async def test_an_error_under_status_200_keeps_its_meaning(generate_subject: GenerateSubject) -> None:
    for word, kind in (("validation", InvalidRequest), ("overloaded", Overloaded), ("generation", EngineFailed)):
        body = {"error": "Input validation error: `best_of` is bad", "error_type": word}
        assert type(await failure(generate_subject, Reply.stream(event(body)))) is kind


@pytest.mark.replay("W08")
@pytest.mark.parametrize("end", ["event", "nested", "reset", "close"])
async def test_an_error_after_the_first_tokens_is_seen_after_them_on_text_routes(
    generate_subject: GenerateSubject, end: str
) -> None:
    steps: dict[str, list[Any]] = {
        "event": [event({"error": "CUDA out of memory", "error_type": "validation"})],
        "nested": [event({"error": {"message": "CUDA out of memory", "code": 400, "retryable": False}})],
        "reset": [0.02, "reset"],
        "close": ["end"],
    }
    generate_subject.says(generate_subject.stream("Hello", reason=None), *steps[end])
    seen: list[Chunk] = []

    async def read() -> None:
        async for chunk in generate_subject.adapter.generate(chat(), request_id="r"):
            seen.append(chunk)

    with pytest.raises(StreamInterrupted if end in {"reset", "close"} else EngineFailed):
        await read()
    assert text_of(seen) == "Hello"
    assert reasons_of(seen) == []


@pytest.mark.replay("W09")
@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"object": "error", "message": "bad top_p", "type": "BadRequest", "code": 400}', "bad top_p"),
        (400, b'{"error": "bad top_p"}', "bad top_p"),
        (401, b"", "refused the key"),
        (422, b'{"error": "bad top_p", "error_type": "validation"}', "bad top_p"),
        (422, b"Failed to deserialize the JSON body", "Failed to deserialize"),
        (502, b"<html><h1>502 Bad Gateway</h1></html>", "HTTP 502 without saying why"),
    ],
)
async def test_error_bodies_of_every_shape_give_one_message_on_text_routes(
    generate_subject: GenerateSubject, status: int, body: bytes, message: str
) -> None:
    error = await failure(generate_subject, Reply.plain(status, body))
    assert message in error.message
    assert error.status == {401: 502, 422: 400}.get(status, status)


@pytest.mark.parametrize("reason", ["abort", "timeout", "cancelled"])
async def test_a_reason_that_means_failure_is_an_error(generate_subject: GenerateSubject, reason: str) -> None:
    if generate_subject.is_ensemble:
        pytest.skip("it tells no reason")
    error = await failure(generate_subject, Reply.stream(generate_subject.stream("a", "b", reason=reason)))
    assert type(error) is EngineFailed
