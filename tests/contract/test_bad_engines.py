"""Engines that answer nonsense: one clean error that names the engine, and the connection is closed."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import pytest

from adapters.base import Load
from adapters.errors import EngineError, EngineFailed, EngineProtocolError, EngineTimeout, GoodgateError
from adapters.types import Chunk, EmbeddingRequest, TokenizeRequest
from adapters.wire import engine_client
from tests.contract.bad_answers import BAD_ANSWERS, LEAK
from tests.contract.conftest import GenerateSubject, TwinSubject, chat, collect
from tests.contract.twin import Reply, event

SAYS_MUCH = {
    "sglang": lambda n: {"text": "x" * n, "meta_info": {"finish_reason": None}},
    "tgi": lambda n: {"token": {"text": "x" * n, "special": False}},
    "triton_server": lambda n: {"text_output": "x" * n, "finish_reason": "None"},
}


def much(subject: TwinSubject, num_chars: int) -> bytes:
    if isinstance(subject, GenerateSubject):
        return event(SAYS_MUCH[subject.engine](num_chars))
    return event({"choices": [{"index": 0, "delta": {"content": "x" * num_chars}, "finish_reason": None}]})


async def failure(subject: TwinSubject, reply: Reply) -> GoodgateError:
    subject.twin.reply(subject.path, reply)
    with pytest.raises(GoodgateError) as caught:
        await collect(subject.adapter, chat(max_tokens=4))
    if "hold" in reply.steps:  # an answer that was read to its end leaves a connection that can be used again
        await subject.twin.client_left(within_s=1)
    assert repr(subject.engine) in caught.value.message
    return caught.value


PATIENCE_S = 0.25  # where it is to run out; elsewhere a busy machine has all the time that it needs


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_a_bad_answer_is_one_clean_error_and_the_next_request_is_answered(
    twin_subject: TwinSubject, name: str
) -> None:
    bad, adapter = BAD_ANSWERS[name], twin_subject.adapter
    if isinstance(twin_subject, GenerateSubject) and twin_subject.is_ensemble and name == "an end without a reason":
        pytest.skip("it ends so when it is done")
    if bad.kind is EngineTimeout:
        adapter.options.first_token_timeout_s = adapter.options.token_timeout_s = PATIENCE_S
    reply = bad.reply(much(twin_subject, 3))
    twin_subject.twin.reply(twin_subject.path, reply)
    seen: list[Chunk] = []

    async def read() -> None:
        async for chunk in adapter.generate(chat(max_tokens=4), request_id="r"):
            seen.append(chunk)

    with pytest.raises(GoodgateError) as caught:
        await read()
    assert type(caught.value) is bad.kind
    assert repr(twin_subject.engine) in caught.value.message
    assert LEAK not in caught.value.message
    assert "".join(chunk.text for chunk in seen) in ({"xxx"} if bad.has_begun else {"", "xxx"})
    if "hold" in reply.steps:
        await twin_subject.twin.client_left(within_s=1)
    twin_subject.answers()
    assert "".join(chunk.text for chunk in await collect(adapter, chat(max_tokens=2))) == "Hello world"


async def answers_without_asking(subject: TwinSubject, ask: Callable[[], Awaitable[object]]) -> bool:
    """Some know from their configuration, or their own tokenizer, what others ask the engine for."""
    num_before = len(subject.twin.requests)
    with contextlib.suppress(EngineError):
        await ask()
    return len(subject.twin.requests) == num_before


# A question waits for the end of its answer. Answers that do not end are all one case to it, tested by itself.
ENDING = [name for name, bad in BAD_ANSWERS.items() if "hold" not in bad.reply(b"").steps]


@pytest.mark.parametrize("name", ENDING)
async def test_a_bad_answer_to_a_question_is_one_clean_error_too(twin_subject: TwinSubject, name: str) -> None:
    adapter, can = twin_subject.adapter, twin_subject.adapter.capabilities
    twin_subject.twin.answers_everything_with(BAD_ANSWERS[name].reply(much(twin_subject, 3)))
    questions = {
        "models": (True, lambda: adapter.models()),
        "embeddings": (can.embeddings, lambda: adapter.embed(EmbeddingRequest(model="small", input=["a"]))),
        "tokens": (can.tokenize, lambda: adapter.tokenize(TokenizeRequest(model="small", prompt="a"))),
        "text": (can.detokenize, lambda: adapter.detokenize([5])),
    }
    for offered, ask in questions.values():
        if offered and not await answers_without_asking(twin_subject, ask):
            with pytest.raises(EngineError) as caught:
                await ask()
            assert repr(twin_subject.engine) in caught.value.message
            assert LEAK not in caught.value.message
    assert await adapter.load() == Load()
    health = await adapter.health()
    assert not health.ready or BAD_ANSWERS[name].reply(b"").status == 200
    assert LEAK not in health.reason


async def test_a_question_whose_answer_does_not_end_is_given_up(
    twin_subject: TwinSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "PROBE_TIMEOUT_S", PATIENCE_S)
    twin_subject.twin.answers_everything_with(Reply.stream(b'{"data": [', "hold", content_type="application/json"))
    health = await twin_subject.adapter.health()
    assert (health.ready, repr(twin_subject.engine) in health.reason) == (False, True)
    await twin_subject.twin.client_left(within_s=1)
    assert await twin_subject.adapter.load() == Load()


async def test_a_page_of_html_is_no_answer(twin_subject: TwinSubject) -> None:
    page = b"<html><h1>Welcome to nginx!</h1></html>"
    error = await failure(twin_subject, Reply.plain(200, page, "text/html"))
    assert type(error) is EngineProtocolError
    assert "nginx" not in error.message


async def test_html_inside_a_stream_is_no_answer(twin_subject: TwinSubject) -> None:
    error = await failure(twin_subject, Reply.stream(b"data: <html>502 Bad Gateway</html>\n\n", "hold"))
    assert type(error) is EngineProtocolError
    assert "Gateway" not in error.message


async def test_half_a_json_object_is_no_answer(twin_subject: TwinSubject) -> None:
    half = much(twin_subject, 20)[:30] + b"\n\n"
    assert type(await failure(twin_subject, Reply.stream(half, "hold"))) is EngineProtocolError


async def test_json_where_a_stream_was_asked_for_is_no_answer(twin_subject: TwinSubject) -> None:
    error = await failure(twin_subject, Reply.plain(200, {"text": "Hello"}))
    assert type(error) is EngineProtocolError


async def test_a_failure_with_a_body_is_told_in_the_engines_words(twin_subject: TwinSubject) -> None:
    for body in ({"error": {"message": "CUDA out of memory", "code": 500}}, {"error": "CUDA out of memory"}):
        error = await failure(twin_subject, Reply.plain(500, body))
        assert type(error) is EngineFailed
        assert error.message == f"The engine {twin_subject.engine!r} failed: CUDA out of memory"


async def test_a_failure_without_a_word_is_still_a_failure(twin_subject: TwinSubject) -> None:
    assert type(await failure(twin_subject, Reply.plain(500, b""))) is EngineFailed


@pytest.mark.parametrize("has_text", [True, False], ids=["text", "comments"])
async def test_a_stream_that_does_not_end_is_cut_off(twin_subject: TwinSubject, has_text: bool) -> None:
    if isinstance(twin_subject, GenerateSubject) and twin_subject.engine in {"sglang", "triton_server"}:
        pieces = [twin_subject.event(["x"] * (number + 1)) for number in range(200)]
    else:
        pieces = [much(twin_subject, 1)] * 200
    twin_subject.adapter.options.first_token_timeout_s = 0.2
    steps = pieces if has_text else [b": keep-alive\n\n"] * 20_000
    error = await failure(twin_subject, Reply.stream(*steps, "hold"))
    assert type(error) is (EngineProtocolError if has_text else EngineTimeout)


async def test_an_event_of_16_mib_is_refused(twin_subject: TwinSubject) -> None:
    assert type(await failure(twin_subject, Reply.stream(much(twin_subject, 16 << 20), "hold"))) is EngineProtocolError


async def test_text_before_the_nonsense_is_not_lost(twin_subject: TwinSubject) -> None:
    twin_subject.twin.reply(twin_subject.path, Reply.stream(much(twin_subject, 3) + b"data: {half\n\n", "hold"))
    seen: list[Chunk] = []

    async def read() -> None:
        async for chunk in twin_subject.adapter.generate(chat(), request_id="r"):
            seen.append(chunk)

    with pytest.raises(EngineProtocolError):
        await read()
    assert "".join(chunk.text for chunk in seen) == "xxx"
    await twin_subject.twin.client_left(within_s=1)
