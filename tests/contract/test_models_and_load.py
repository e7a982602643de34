"""What an engine tells of itself, and how it is found: its model, its context, its load."""

from __future__ import annotations

import json

import pytest

from adapters.base import Load
from adapters.errors import (
    EngineUnavailable,
    ModelNotFound,
)
from adapters.registry import adapter_class
from tests.contract import sglang_transcripts, tensorrt_transcripts, tgi_transcripts
from tests.contract.conftest import (
    CHAT,
    HTTPSubject,
    chat,
    collect,
)
from tests.contract.replay import HELLO, engine, failure, listing, text_of
from tests.contract.transcripts import METRICS
from tests.contract.twin import Reply, Twin, events

# ------------------------------ the key, the url, the model


async def test_our_id_and_the_key_go_along(http_subject: HTTPSubject) -> None:
    async with engine(http_subject.engine, model="small", api_key="sk-1") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(events(HELLO)))
        await collect(adapter, chat(), "our-id")
        headers = twin.requests[-1].headers
        assert headers["x-request-id"] == "our-id"
        assert headers["authorization"] == "Bearer sk-1"


async def test_a_key_named_by_a_variable_is_read_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineUnavailable, match="ENGINE_KEY is not set"):
        async with engine("vllm", model="small", api_key_env="ENGINE_KEY"):
            pass
    monkeypatch.setenv("ENGINE_KEY", "sk-2")
    async with engine("vllm", model="small", api_key_env="ENGINE_KEY") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(events(HELLO)))
        await collect(adapter, chat())
        assert twin.requests[-1].headers["authorization"] == "Bearer sk-2"


async def test_the_only_model_of_an_engine_needs_no_name_and_a_change_behind_the_url_is_noticed() -> None:
    async with engine("vllm", model="") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(events(HELLO)), Reply.plain(404, b""), Reply.stream(events(HELLO)))
        twin.reply("/v1/models", listing("a"), listing("b"))
        await collect(adapter, chat())
        with pytest.raises(ModelNotFound):
            await collect(adapter, chat())
        await collect(adapter, chat())
        assert [body["model"] for body in twin.bodies] == ["a", "a", "b"]


async def test_several_models_need_a_name() -> None:
    async with engine("vllm", model="") as (adapter, twin):
        twin.reply("/v1/models", listing("a", "b"))
        with pytest.raises(EngineUnavailable, match=r"set options.model to one of: a, b"):
            await collect(adapter, chat())


async def test_an_engine_that_lists_no_models_is_no_unknown_model_of_the_caller() -> None:
    async with engine("vllm", model="") as (adapter, twin):
        twin.answers_everything_with(Reply.plain(404, {"detail": "Not Found"}))
        with pytest.raises(EngineUnavailable, match=r"lists no models; set options\.model"):
            await collect(adapter, chat())
        assert (await adapter.health()).reason == "The engine 'vllm' does not offer the route /health."


async def test_a_url_with_v1_at_its_end_is_the_same_engine() -> None:
    async with Twin() as twin:
        twin.reply(CHAT, Reply.stream(events(HELLO)))
        cls = adapter_class("vllm")
        adapter = cls(cls.Options(url=f"{twin.url}/v1/", model="small"))
        await adapter.start()
        assert text_of(await collect(adapter, chat())) == "Hello world"
        await adapter.close()


# ------------------------------ load and models


async def test_load_is_read_from_the_engines_own_metrics(http_subject: HTTPSubject) -> None:
    others = {
        "sglang": sglang_transcripts.METRICS,
        "tgi": tgi_transcripts.METRICS,
        "tensorrt_llm": tensorrt_transcripts.METRICS,
    }
    text = (METRICS | others).get(http_subject.engine, "")
    path = "/prometheus/metrics" if http_subject.engine == "tensorrt_llm" else "/metrics"
    http_subject.twin.reply(path, Reply.plain(200, text.encode(), "text/plain"))
    told = {
        "vllm": Load(3, 1, 0.25, 0.25),
        "llama_cpp": Load(3, 1),
        "openvino": Load(3, 1, 0.25),
        "goodgate_peer": Load(),
        "openai_compatible": Load(),
        "sglang": Load(3, 1, 0.25, 0.25),
        "tgi": Load(3, 1, 0.25),
        "tensorrt_llm": Load(3, 1, 0.25, 0.25),
    }
    load = await http_subject.adapter.load()
    assert load == told[http_subject.engine]
    declared = http_subject.adapter.capabilities.load
    assert declared == {field for field in load.__struct_fields__ if getattr(load, field) is not None}


async def test_load_is_unknown_where_the_engine_does_not_tell_or_tells_nonsense(http_subject: HTTPSubject) -> None:
    assert await http_subject.adapter.load() == Load()
    http_subject.twin.reply("/metrics", Reply.plain(200, b"vllm:num_requests_running{a=\n\xff\n nan\n", "text/plain"))
    assert await http_subject.adapter.load() == Load()


def in_two_pieces(status: int, body: bytes, content_type: str = "application/json") -> Reply:
    """A plain answer whose second half comes a moment later, as from any busy server."""
    headers = (("Content-Type", content_type), ("Content-Length", str(len(body))))
    return Reply(status, headers, (body[: len(body) // 2], 0.05, body[len(body) // 2 :]), is_chunked=False)


async def test_an_answer_in_two_pieces_is_read_whole(http_subject: HTTPSubject) -> None:
    listing = {"data": [{"id": "small", "max_model_len": 4096}]}
    http_subject.twin.reply("/v1/models", in_two_pieces(200, json.dumps(listing).encode()))
    http_subject.twin.reply("/info", in_two_pieces(200, b'{"model_id": "small", "max_total_tokens": 4096}'))
    http_subject.twin.reply("/props", Reply.plain(200, {"default_generation_settings": {"n_ctx": 4096}}))
    assert [model.id for model in await http_subject.adapter.models()] == ["small"]
    error = await failure(http_subject, in_two_pieces(400, b'{"error": {"message": "bad top_p", "param": "top_p"}}'))
    assert (error.message, error.param) == ("bad top_p", "top_p")


async def test_models_tell_their_context() -> None:
    for name, context in (("vllm", 4096), ("llama_cpp", 1024)):
        async with engine(name) as (adapter, twin):
            twin.reply("/v1/models", listing("small"))
            twin.reply("/props", Reply.plain(200, {"default_generation_settings": {"n_ctx": 1024, "x": 1}}))
            assert [(model.id, model.max_model_len) for model in await adapter.models()] == [("small", context)]
