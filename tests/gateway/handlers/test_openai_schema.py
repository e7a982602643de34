"""Whatever the gateway answers is what OpenAI's published schema says: whole answers, every event, lists and errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway import openai_schema
from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, fake, fake_model, model
from tests.native_engine.tiny_llama import write_tiny_chat_llama

UpstreamOf = Callable[[Script], Awaitable[Upstream]]

pytestmark = pytest.mark.skipif(
    openai_schema.FILE is None, reason="OpenAI's published schema (openai-openapi.yaml) is not here"
)

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
WHOLE = {CHAT: "CreateChatCompletionResponse", COMPLETION: "CreateCompletionResponse"}
EVENT = {CHAT: "CreateChatCompletionStreamResponse", COMPLETION: openai_schema.COMPLETION_EVENT}
WITH_USAGE = {"stream_options": {"include_usage": True}}


async def checked(gateway: Gateway, path: str = CHAT, **fields: Any) -> tuple[Any, list[Any]]:
    """The whole answer and the events of the same request, each as the schema says."""
    prompt = {"messages": None, "prompt": "Hello"} if path == COMPLETION else {}
    whole = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **prompt, **fields}
    status, body, _ = await gateway.post(path, {name: each for name, each in whole.items() if each is not None})
    assert status == 200, body
    openai_schema.check(WHOLE[path], body)
    events: list[Any] = []
    for options in ({}, WITH_USAGE):
        data = await gateway.events(path, **{**prompt, **fields, **options})
        assert data.pop() == "[DONE]"
        events = [json.loads(event) for event in data]
        for event in events:
            openai_schema.check(EVENT[path], event)
        assert all(("usage" in event) == bool(options) for event in events)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == body["usage"]
    return body, events


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"max_tokens": 2}, {"stop": ["the", "a"]}])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_the_answers_of_the_fake_engine(start: Start, path: str, fields: dict[str, Any]) -> None:
    body, _ = await checked(await start(fake_model()), path, **fields)
    assert len(body["choices"]) == fields.get("n", 1)


async def test_the_answers_to_a_list_of_prompts(start: Start) -> None:
    body, _ = await checked(await start(fake_model()), COMPLETION, prompt=["one", "two"])
    assert [choice["index"] for choice in body["choices"]] == [0, 1]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_the_answers_of_the_native_engine(start: Start, path: str, tmp_path: Path) -> None:
    folder = write_tiny_chat_llama(tmp_path / "tiny")
    options = {"model": str(folder), "kv_cache_mib": 8, "num_threads": 1, "home": str(tmp_path)}
    gateway = await start(model({"engine": "native", "options": options}))
    body, _ = await checked(gateway, path, n=2, max_tokens=6, temperature=1, seed=3)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


LOGPROB = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}

# What engines send, each with its own gaps: (the choices of the stream, the account).
SCRIPTS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "reasoning": (
        [
            {"delta": {"reasoning": "hm"}},
            {"delta": {"reasoning_content": "m", "content": None}},
            {"delta": {"content": "a"}},
        ],
        {"prompt_tokens": 3, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 2}},
    ),
    "logprobs without refusal, bytes and alternatives": (
        [
            {"delta": {"content": "a"}, "logprobs": {"content": [LOGPROB]}},
            {"delta": {"content": "b"}, "logprobs": {"content": [{"token": "b", "logprob": -1, "top_logprobs": None}]}},
            {
                "delta": {"content": "c"},
                "logprobs": {"content": [{"token": "c", "logprob": None, "top_logprobs": [{"token": "d", "rank": 1}]}]},
            },
        ],
        {"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
    ),
    "two calls, interleaved": (
        [
            {"delta": {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f"}}]}},
            {"delta": {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": '{"x"'}}]}},
            {"delta": {"tool_calls": [{"index": 0, "id": None, "type": None, "function": {"arguments": "{}"}}]}},
            {"delta": {"tool_calls": [{"index": 1, "function": {"name": None, "arguments": ": 1}"}}]}},
        ],
        {"prompt_tokens": 3, "completion_tokens": 9},
    ),
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter", "eos_token", "no_such_reason"])
@pytest.mark.parametrize("script", SCRIPTS)
async def test_the_answers_of_an_engine_with_its_gaps(
    start: Start, upstream_of: UpstreamOf, script: str, reason: str
) -> None:
    choices, account = SCRIPTS[script]

    async def play(reply: Reply) -> None:
        await reply.begin()
        for choice in choices:
            await reply.event(json.dumps({"choices": [{"index": 0, "finish_reason": None, **choice}]}).encode())
        await reply.finish(reason)
        await reply.event(json.dumps({"choices": [], "usage": account}).encode())
        await reply.done()

    gateway = await start(
        model((await upstream_of(play)).replica()), server={"reasoning_field": "both"} if reason == "stop" else {}
    )
    body, _ = await checked(gateway, logprobs=True, tools=TOOLS)
    assert body["usage"]["completion_tokens"] == account["completion_tokens"]
    for details in ("prompt_tokens_details", "completion_tokens_details"):
        assert body["usage"].get(details) == account.get(details)


async def test_the_log_probabilities_of_completions(start: Start, upstream_of: UpstreamOf) -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "text_offset": [0]}

    async def play(reply: Reply) -> None:
        await reply.begin()
        choice = {"index": 0, "text": "a", "logprobs": logprobs, "finish_reason": "length"}
        await reply.event(json.dumps({"choices": [choice]}).encode())
        await reply.usage(completion_tokens=1)
        await reply.done()

    body, _ = await checked(await start(model((await upstream_of(play)).replica())), COMPLETION, logprobs=1)
    assert body["choices"][0]["logprobs"] == logprobs


async def test_an_engine_that_tells_no_account(start: Start, upstream_of: UpstreamOf) -> None:
    async def play(reply: Reply) -> None:
        await reply.begin()
        await reply.piece("a")
        await reply.finish()
        await reply.done()

    body, _ = await checked(await start(model((await upstream_of(play)).replica())))
    assert body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_embeddings(start: Start, encoding: str) -> None:
    gateway = await start(fake_model())
    _, body, _ = await gateway.post("/v1/embeddings", {"model": "m", "input": ["a", "b"], "encoding_format": encoding})
    if encoding == "base64":  # the schema knows floats only; the official client asks for base64 and unpacks it
        assert all(isinstance(each.pop("embedding"), str) for each in body["data"])
        for each in body["data"]:
            each["embedding"] = []
    openai_schema.check("CreateEmbeddingResponse", body)


async def test_models(start: Start) -> None:
    gateway = await start(fake_model(), model(fake(), name="org/other"))
    openai_schema.check("ListModelsResponse", (await gateway.get("/v1/models"))[1])
    openai_schema.check("Model", (await gateway.get("/v1/models/org/other"))[1])


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, b"{", 400),
        (CHAT, {"model": "m", "messages": []}, 400),
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": "a"}], "no_such_field": 1}, 400),
        (CHAT, {"model": "other", "messages": [{"role": "user", "content": "a"}]}, 404),
        (COMPLETION, {"model": "m", "prompt": "a", "suffix": "b"}, 400),
        ("/v1/embeddings", {"model": "m", "input": []}, 400),
        ("/v1/no/such/route", {}, 404),
    ],
)
async def test_errors(start: Start, path: str, body: Any, status: int) -> None:
    told, answer, _ = await (await start(fake_model())).post(path, body)
    assert told == status
    openai_schema.check("ErrorResponse", answer)


@pytest.mark.replay("G17")
async def test_errors_of_the_engine_before_and_amid_the_answer(start: Start) -> None:
    _, answer, _ = await (await start(fake_model(fail_rate=1))).chat()
    openai_schema.check("ErrorResponse", answer)
    *pieces, last = await (await start(fake_model(fail_rate=1, fail_kinds=["error_event"]))).events()
    for piece in pieces:
        openai_schema.check(EVENT[CHAT], json.loads(piece))
    openai_schema.check("ErrorResponse", json.loads(last))


def test_the_judge_refuses_what_the_schema_refuses() -> None:
    good = {"id": "m", "object": "model", "created": 1, "owned_by": "x"}
    openai_schema.check("Model", good)
    for bad in ({**good, "object": "models"}, {**good, "created": None}, {"id": "m"}):
        with pytest.raises(AssertionError, match="Model: "):
            openai_schema.check("Model", bad)
    with pytest.raises(AssertionError, match="Additional properties"):
        openai_schema.check(
            "ErrorResponse", {"error": {"message": "", "type": "", "param": None, "code": None, "x": 1}}
        )
