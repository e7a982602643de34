"""What is asked beside generation, of every engine: it answers as it declares, or refuses by operation and name."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from adapters.base import EngineAdapter, Load
from adapters.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    StreamInterrupted,
    UnsupportedOperation,
    UnsupportedParameter,
)
from adapters.registry import adapter_class
from adapters.types import EmbeddingRequest, TokenizeRequest, Tokens
from adapters.wire import engine_client
from tests.contract.sides import EMBEDDINGS, LLAMA_TOO_LONG, MODEL, OWN_TEXT, SIDES, TURNS, VLLM_TOKENS, Side
from tests.contract.twin import Reply, Twin

EMBEDDERS = [name for name, side in SIDES.items() if side.embeds]
ASKS_FOR_BASE64 = {"vllm", "llama_cpp", "goodgate_peer"}


@dataclass
class Asked:
    side: Side
    adapter: EngineAdapter[Any]
    twin: Twin

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return self.twin.bodies


Ask = Callable[..., Awaitable[Asked]]


@pytest.fixture
async def ask(request: pytest.FixtureRequest) -> AsyncIterator[Ask]:
    async with AsyncExitStack() as stack:

        async def ask_side(name: str, *, is_started: bool = True, **options: Any) -> Asked:
            side = SIDES[name]
            twin = await stack.enter_async_context(Twin())
            for path, body in side.replies.items():
                twin.reply(path, Reply.plain(200, body))
            cls = adapter_class(side.engine)
            template = {"chat_template": str(request.getfixturevalue("text_model"))} if side.has_template else {}
            given = {"url": twin.url, "model": "small", **side.options, **template, **options}
            adapter = cls(msgspec.convert(given, cls.Options))
            stack.push_async_callback(adapter.close)
            if is_started:
                await adapter.start()
            return Asked(side, adapter, twin)

        yield ask_side


def embedding(*inputs: str | list[int], **fields: Any) -> EmbeddingRequest:
    return msgspec.convert({"model": "small", "input": list(inputs or ("Hello", "world")), **fields}, EmbeddingRequest)


def text(prompt: str = "Hello world", **fields: Any) -> TokenizeRequest:
    return msgspec.convert({"model": "small", "prompt": prompt, **fields}, TokenizeRequest)


def turns() -> TokenizeRequest:
    return msgspec.convert({"model": "small", "messages": TURNS}, TokenizeRequest)


def vectors(*embeddings: Any, usage: Any = None, **more: Any) -> Reply:
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(embeddings)]
    told = {} if usage is None else {"usage": usage}
    return Reply.plain(200, {"object": "list", "model": "small", "data": data, **told, **more})


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def refused(operation: str, side: Side) -> Any:
    return pytest.raises(UnsupportedOperation, match=f"'{side.engine}' does not offer {operation}\\.")


# ------------------------------------------------------------------------------------- what is declared is what happens


@pytest.mark.parametrize("name", SIDES)
async def test_embeddings_are_answered_in_order_or_refused(ask: Ask, name: str) -> None:
    asked = await ask(name)
    assert asked.adapter.capabilities.embeddings == asked.side.embeds
    if not asked.side.embeds:
        with refused("embeddings", asked.side):
            await asked.adapter.embed(embedding())
        assert asked.bodies == []
        return
    asked.twin.reply(EMBEDDINGS, vectors([0.5, -1], [1, 0], usage={"prompt_tokens": 7, "total_tokens": 7}))
    told = await asked.adapter.embed(embedding("Hello", "world"))
    assert (told.vectors, told.prompt_tokens) == ([[0.5, -1.0], [1.0, 0.0]], 7)
    encoding = "base64" if asked.side.engine in ASKS_FOR_BASE64 else "float"
    assert asked.bodies == [{**MODEL, "input": ["Hello", "world"], "encoding_format": encoding}]


@pytest.mark.parametrize("name", SIDES)
async def test_a_text_becomes_ids_or_is_refused(ask: Ask, name: str) -> None:
    asked = await ask(name)
    side = asked.side
    assert asked.adapter.capabilities.tokenize == (side.text_sent is not None or side.local)
    if side.local:
        assert (await asked.adapter.tokenize(text())).ids == [1, 2, 3]
        assert (await asked.adapter.tokenize(text(add_special_tokens=False))).ids == [2, 3]
        assert asked.bodies == []
    elif side.text_sent is None:
        with refused("tokenize", side):
            await asked.adapter.tokenize(text())
    else:
        assert await asked.adapter.tokenize(text()) == Tokens([5, 6], 4096)
        assert asked.bodies == side.text_sent


@pytest.mark.parametrize("name", [name for name, side in SIDES.items() if side.text_sent])
async def test_special_tokens_are_left_out_or_that_is_refused(ask: Ask, name: str) -> None:
    asked = await ask(name)
    if asked.side.engine == "tgi":
        with pytest.raises(UnsupportedParameter, match=r"'tgi'.*'add_special_tokens'"):
            await asked.adapter.tokenize(text(add_special_tokens=False))
        return
    await asked.adapter.tokenize(text(add_special_tokens=False))
    field = "add_special" if asked.side.engine == "llama_cpp" else "add_special_tokens"
    assert asked.bodies[-1][field] is False


@pytest.mark.parametrize("name", SIDES)
async def test_messages_become_the_ids_of_their_prompt_or_are_refused(ask: Ask, name: str) -> None:
    asked = await ask(name)
    side = asked.side
    assert asked.adapter.capabilities.tokenize_chat == (side.chat_sent is not None or side.local)
    if side.local:
        told = await asked.adapter.tokenize(turns())
        assert told.ids == (await asked.adapter.tokenize(text(OWN_TEXT))).ids
    elif side.chat_sent is None:
        with refused("tokenize of messages", side):
            await asked.adapter.tokenize(turns())
    else:
        assert await asked.adapter.tokenize(turns()) == Tokens([5, 6], 4096)
        assert [_without_defaults(body) for body in asked.bodies] == side.chat_sent


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
COUNTS_TOOLS = {"vllm", "llama_cpp", "llama_cpp for embeddings"}


@pytest.mark.parametrize("name", [name for name, side in SIDES.items() if side.chat_sent is not None or side.local])
async def test_tools_are_tokenised_with_the_messages_or_refused_by_name(ask: Ask, name: str) -> None:
    asked = await ask(name)
    wanted = TokenizeRequest(model="m", messages=turns().messages, tools=[WEATHER])
    if name in COUNTS_TOOLS:
        assert (await asked.adapter.tokenize(wanted)).ids == [5, 6]
        assert asked.bodies[0]["tools"] == [WEATHER]
    else:
        with pytest.raises(UnsupportedParameter, match="'tools'"):
            await asked.adapter.tokenize(wanted)
        assert asked.bodies == []


def _without_defaults(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in {"temperature", "top_p", "top_k", "min_p"}}


@pytest.mark.parametrize("name", SIDES)
async def test_ids_become_text_or_that_is_refused(ask: Ask, name: str) -> None:
    asked = await ask(name)
    assert asked.adapter.capabilities.detokenize == asked.side.detokenizes
    if not asked.side.detokenizes:
        with refused("detokenize", asked.side):
            await asked.adapter.detokenize([5, 6])
    elif asked.side.local:
        assert "Hello" in await asked.adapter.detokenize([2, 3])
        assert "<s>" in await asked.adapter.detokenize([1, 2])
        with pytest.raises(InvalidRequest, match="no token 99") as caught:
            await asked.adapter.detokenize([99])
        assert caught.value.param == "tokens"
    else:
        assert await asked.adapter.detokenize([5, 6]) == "Hello world"
        assert asked.bodies == [asked.side.ids_sent]


@pytest.mark.parametrize("name", SIDES)
async def test_the_version_is_the_engines_own(ask: Ask, name: str) -> None:
    asked = await ask(name)
    assert await asked.adapter.version() == asked.side.version


@pytest.mark.parametrize("name", [name for name, side in SIDES.items() if side.options.get("embeddings")])
async def test_a_process_that_can_only_embed_is_not_asked_to_generate(ask: Ask, name: str) -> None:
    asked = await ask(name)
    generates = asked.side.engine in {"llama_cpp", "openai_compatible"}  # a server that does both; one of many models
    assert (asked.adapter.capabilities.chat, asked.adapter.capabilities.completions) == (generates, generates)


def test_how_an_engine_was_launched_is_how_its_adapter_answers() -> None:
    """A launch's own options, and those of another engine's adapter, say nothing to it."""
    url, vllm, peer = "http://127.0.0.1:1", adapter_class("vllm"), adapter_class("goodgate_peer")
    told = engine_client.launched_options(vllm.Options, url, {"embeddings": True, "threads": 2})
    assert told == {"url": url, "embeddings": True}
    assert vllm(msgspec.convert(told, vllm.Options)).capabilities.embeddings
    assert engine_client.launched_options(peer.Options, url, {"embeddings": True, "model": "x"}) == {"url": url}


@pytest.mark.parametrize("name", EMBEDDERS)
async def test_dimensions_are_sent_and_checked_or_refused(ask: Ask, name: str) -> None:
    asked = await ask(name)
    assert asked.adapter.capabilities.dimensions == asked.side.takes_dimensions
    asked.twin.reply(EMBEDDINGS, vectors([0.5, 1]))
    if not asked.side.takes_dimensions:
        with pytest.raises(UnsupportedParameter, match=f"'{asked.side.engine}'.*'dimensions'"):
            await asked.adapter.embed(embedding("Hello", dimensions=2))
        return
    assert (await asked.adapter.embed(embedding("Hello", dimensions=2))).vectors == [[0.5, 1.0]]
    assert asked.bodies[-1]["dimensions"] == 2
    with pytest.raises(EngineProtocolError, match="length asked for"):
        await asked.adapter.embed(embedding("Hello", dimensions=3))


@pytest.mark.parametrize("name", EMBEDDERS)
async def test_ids_are_embedded_where_ids_are_taken(ask: Ask, name: str) -> None:
    asked = await ask(name)
    asked.twin.reply(EMBEDDINGS, vectors([0.5], [1]))
    if asked.adapter.capabilities.token_prompts:
        assert len((await asked.adapter.embed(embedding([5, 6], [7]))).vectors) == 2
        assert asked.bodies[-1]["input"] == [[5, 6], [7]]
    else:
        with pytest.raises(UnsupportedParameter, match=f"'{asked.side.engine}'.*'input'"):
            await asked.adapter.embed(embedding([5, 6], [7]))


# -------------------------------------------------------------------------------------------------- answers of any kind


@pytest.mark.parametrize(
    "reply",
    [
        Reply.plain(200, {"data": [{"index": 1, "embedding": [2, 3]}, {"index": 0, "embedding": [0, 1]}]}),
        Reply.plain(200, {"data": [{"embedding": [0, 1]}, {"embedding": packed(2, 3)}], "usage": None}),
        vectors(packed(0, 1), packed(2, 3), usage={"prompt_tokens": None}),
        vectors([0, 1], [2, 3], usage={"total_tokens": 4}, id="embd-1", created=1),
        vectors([0, 1], [2, 3], usage="two"),
    ],
)
async def test_order_encoding_and_a_missing_account_do_not_matter(ask: Ask, reply: Reply) -> None:
    asked = await ask("vllm for embeddings")
    asked.twin.reply(EMBEDDINGS, reply)
    told = await asked.adapter.embed(embedding("a", "b"))
    assert (told.vectors, told.prompt_tokens) == ([[0.0, 1.0], [2.0, 3.0]], 0)


@pytest.mark.parametrize(
    "reply",
    [
        vectors([0, 1]),
        vectors([0, 1], [2, 3], [4, 5]),
        vectors([0, 1], [2]),
        vectors([], []),
        vectors([0, None], [1, 2]),
        vectors("!!", "!!"),
        vectors(packed(0, 1)[:-4], packed(2, 3)),
        vectors(packed(0, float("nan")), packed(2, 3)),
        vectors(packed(0, float("inf")), packed(2, 3)),
        Reply.plain(200, {"data": [{"index": 0, "embedding": [1]}, {"index": 0, "embedding": [1]}]}),
        Reply.plain(200, {"data": [{"index": 0, "embedding": [1]}, {"index": 2, "embedding": [1]}]}),
        Reply.plain(200, {"data": [{"index": 0, "embedding": [1]}, {"embedding": [1]}]}),
        Reply.plain(200, {"data": None}),
        Reply.plain(200, [[1.0], [2.0]]),
        Reply.plain(200, b"<html>hello</html>", "text/html"),
        Reply.plain(200, b"\xff\xfe"),
        Reply.plain(200, b""),
    ],
)
async def test_vectors_of_another_shape_are_the_engines_fault(ask: Ask, reply: Reply) -> None:
    asked = await ask("vllm for embeddings")
    asked.twin.reply(EMBEDDINGS, reply)
    with pytest.raises(EngineProtocolError, match="'vllm'"):
        await asked.adapter.embed(embedding("a", "b"))


@pytest.mark.parametrize(
    "body", [{}, {"tokens": None}, {"tokens": ["a"]}, {"tokens": [-1]}, {"tokens": [[1, 2]]}, [5, 6], b"5 6"]
)
async def test_ids_of_another_shape_are_the_engines_fault(ask: Ask, body: Any) -> None:
    asked = await ask("vllm")
    asked.twin.reply("/tokenize", Reply.plain(200, body))
    with pytest.raises(EngineProtocolError, match="'vllm'"):
        await asked.adapter.tokenize(text())


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": ["a"]}, {"text": "a"}, "a", b""])
async def test_a_text_of_another_shape_is_the_engines_fault(ask: Ask, body: Any) -> None:
    asked = await ask("vllm")
    asked.twin.reply("/detokenize", Reply.plain(200, body))
    with pytest.raises(EngineProtocolError, match="'vllm'"):
        await asked.adapter.detokenize([5])


@pytest.mark.parametrize("length", [None, -1, 0, 10**30, "long", 1.5])
async def test_a_context_length_that_is_none_is_not_told(ask: Ask, length: Any) -> None:
    """SGLang passes on what a tokenizer without a limit calls its own: a number with thirty digits."""
    asked = await ask("sglang")
    asked.twin.reply("/v1/tokenize", Reply.plain(200, {**VLLM_TOKENS, "max_model_len": length}))
    assert await asked.adapter.tokenize(text()) == Tokens([5, 6], None)


async def test_a_large_answer_in_pieces_is_read_whole(ask: Ask) -> None:
    asked = await ask("vllm for embeddings")
    whole = vectors(*([0.25] * 512 for _ in range(2048)))
    (body,) = whole.steps
    assert isinstance(body, bytes)
    assert len(body) > engine_client.MAX_PLAIN_BYTES
    pieces = [body[start : start + 500_000] for start in range(0, len(body), 500_000)]
    asked.twin.reply(EMBEDDINGS, Reply.stream(*pieces, content_type="application/json"))
    told = await asked.adapter.embed(embedding(*["a"] * 2048))
    assert (len(told.vectors), set(map(len, told.vectors))) == (2048, {512})


async def test_an_answer_beyond_the_cap_is_refused_with_advice(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "MAX_ANSWER_BYTES", 1 << 20)
    asked = await ask("vllm for embeddings")
    asked.twin.reply(EMBEDDINGS, Reply.stream(*[b" " * 100_000] * 20, "hold", content_type="application/json"))
    with pytest.raises(InvalidRequest, match=r"'vllm' is larger than 1 MiB; ask for less"):
        await asked.adapter.embed(embedding())
    await asked.twin.client_left(within_s=1)


# ------------------------------------------------------------------------------------------------------------- failure

QUESTIONS: dict[str, tuple[str, Callable[[EngineAdapter[Any]], Awaitable[object]]]] = {
    "embed": (EMBEDDINGS, lambda adapter: adapter.embed(embedding())),
    "tokenize": ("/tokenize", lambda adapter: adapter.tokenize(text())),
    "detokenize": ("/detokenize", lambda adapter: adapter.detokenize([5, 6])),
}
question = pytest.mark.parametrize(("path", "put"), QUESTIONS.values(), ids=list(QUESTIONS))
Put = Callable[[EngineAdapter[Any]], Awaitable[object]]


@question
@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply.plain(400, {"error": {"message": "`input` is odd", "param": "input"}}), InvalidRequest),
        (Reply.plain(400, {"error": {"message": "maximum context length is 8 tokens"}}), ContextLengthExceeded),
        (Reply.plain(500, {"error": {"message": LLAMA_TOO_LONG, "type": "server_error"}}), ContextLengthExceeded),
        (Reply.plain(404, {"error": {"message": "no model 'small'"}}), ModelNotFound),
        (Reply.plain(429, {"error": "queue full"}), Overloaded),
        (Reply.plain(500, {"error": {"message": "broken"}}), EngineFailed),
        (Reply.plain(501, {"error": {"message": "Start it with `--embeddings`"}}), InvalidRequest),
        (Reply.plain(503, {"error": {"message": "Loading model"}}), EngineUnavailable),
        (Reply.plain(503, b""), Overloaded),
        (Reply.plain(200, {"error": {"message": "broken", "code": 500}}), EngineFailed),
        (Reply.plain(302, b"", location="http://elsewhere"), EngineProtocolError),
        (Reply.dropped(), EngineUnavailable),
        (Reply.stream(b'{"da', "reset", content_type="application/json"), StreamInterrupted),
    ],
)
async def test_refusals_and_failures_are_what_they_are_for_a_generation(
    ask: Ask, path: str, put: Put, reply: Reply, kind: type[Exception]
) -> None:
    asked = await ask("goodgate_peer")
    asked.twin.reply(path, reply)
    with pytest.raises(kind) as caught:
        await put(asked.adapter)
    assert type(caught.value) is kind


@question
@pytest.mark.parametrize(
    "body",
    [
        {"detail": "Not Found"},
        {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}},
        {"error": {"message": "There is no such route.", "type": "invalid_request_error", "code": "not_found"}},
        b"404: Not Found",
    ],
)
async def test_an_engine_that_was_not_started_for_it_has_no_such_route(
    ask: Ask, path: str, put: Put, body: Any
) -> None:
    """vLLM has `/v1/embeddings` only as a pooling server: its 404 is not about the model."""
    asked = await ask("goodgate_peer")
    asked.twin.reply(path, Reply.plain(404, body))
    with pytest.raises(UnsupportedOperation, match=f"'goodgate_peer' does not offer the route {path}"):
        await put(asked.adapter)


@question
async def test_whoever_leaves_early_stops_the_engine_within_a_second(ask: Ask, path: str, put: Put) -> None:
    asked = await ask("goodgate_peer")
    asked.twin.reply(path, Reply.silent())
    task = asyncio.ensure_future(put(asked.adapter))
    await asked.twin.asked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asked.twin.client_left(within_s=1)


@question
async def test_an_engine_that_stays_silent_is_given_up_and_its_socket_closed(ask: Ask, path: str, put: Put) -> None:
    asked = await ask("goodgate_peer", first_token_timeout_s=0.1)
    asked.twin.reply(path, Reply.silent())
    with pytest.raises(EngineTimeout, match="goodgate_peer"):
        await put(asked.adapter)
    await asked.twin.client_left(within_s=1)


@question
async def test_a_slow_answer_is_waited_for_as_a_first_token_is(
    ask: Ask, path: str, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for as long as a health probe: an embedding of many texts takes its time."""
    monkeypatch.setattr(engine_client, "PROBE_TIMEOUT_S", 0.2)
    asked = await ask("goodgate_peer")
    ready = vectors([1], [2]) if path == EMBEDDINGS else Reply.plain(200, asked.side.replies[path])
    asked.twin.reply(path, Reply(ready.status, ready.headers, (0.5, *ready.steps), is_chunked=False))
    assert await put(asked.adapter)


@question
async def test_connections_are_used_again(ask: Ask, path: str, put: Put) -> None:
    asked = await ask("goodgate_peer")
    asked.twin.reply(EMBEDDINGS, vectors([1], [2]))
    for _ in range(3):
        await put(asked.adapter)
    assert asked.twin.num_connections == 1


@pytest.mark.parametrize("name", SIDES)
async def test_an_adapter_that_is_not_started_says_so(ask: Ask, name: str) -> None:
    asked = await ask(name, is_started=False)
    can = asked.adapter.capabilities
    for declared, put in (
        (can.embeddings, lambda: asked.adapter.embed(embedding())),
        (can.tokenize, lambda: asked.adapter.tokenize(text())),
        (can.tokenize_chat, lambda: asked.adapter.tokenize(turns())),
        (can.detokenize, lambda: asked.adapter.detokenize([5])),
    ):
        with pytest.raises(EngineUnavailable if declared else UnsupportedOperation):
            await put()


async def test_a_template_without_a_tokenizer_tells_no_ids(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What can be known only once its files are read is declared then."""
    file = tmp_path_factory.mktemp("bare") / "chat.jinja"
    file.write_text("{{ messages[0].content }}")
    for name in ("tensorrt_llm", "triton"):
        asked = await ask(name, chat_template=str(file))
        for put in (asked.adapter.tokenize(text()), asked.adapter.tokenize(turns()), asked.adapter.detokenize([5])):
            with pytest.raises(UnsupportedOperation, match=asked.side.engine):
                await put


async def test_an_engine_that_serves_another_model_now_is_asked_for_its_name_again(ask: Ask) -> None:
    asked = await ask("goodgate_peer", model="")
    asked.twin.reply("/v1/models", *(Reply.plain(200, {"data": [{"id": name}]}) for name in ("old", "new")))
    asked.twin.reply("/tokenize", Reply.plain(404, {"error": {"message": "gone"}}), Reply.plain(200, VLLM_TOKENS))
    with pytest.raises(ModelNotFound):
        await asked.adapter.tokenize(text())
    await asked.adapter.tokenize(text())
    assert [body["model"] for body in asked.bodies] == ["old", "new"]


# ------------------------------------------------------------------------------------------ engines without a wire


@pytest.mark.parametrize("name", ["fake", "native"])
async def test_our_own_engines_do_what_they_declare(name: str, request: pytest.FixtureRequest) -> None:
    cls = adapter_class(name)
    native = {"kv_cache_mib": 16, "num_threads": 1}
    if name == "native":
        native |= {
            "model": str(request.getfixturevalue("tiny_model")),
            "home": str(request.getfixturevalue("native_home")),
        }
    adapter = cls(msgspec.convert(native if name == "native" else {}, cls.Options))
    can = adapter.capabilities
    assert (can.tokenize, can.tokenize_chat, can.detokenize) == (True, True, True)
    for put in (lambda: adapter.tokenize(text()), lambda: adapter.tokenize(turns()), lambda: adapter.detokenize([5])):
        with pytest.raises(EngineUnavailable, match="not started"):
            await put()
    await adapter.start()
    try:
        plain = await adapter.tokenize(text("the a"))
        assert plain.max_model_len == (await adapter.models())[0].max_model_len
        assert await adapter.detokenize(plain.ids) == "the a"
        assert len((await adapter.tokenize(turns())).ids) > 0
        assert await adapter.version()
        load = await adapter.load()
        fields = Load.__struct_fields__
        assert {field for field in fields if getattr(load, field) is not None} <= can.load <= set(fields)
        if can.embeddings:
            told = await adapter.embed(embedding("the a", "a the", "river"))
            assert told.vectors[0] == told.vectors[1] != told.vectors[2]
            assert told.prompt_tokens == 5
        else:
            with pytest.raises(UnsupportedOperation, match=f"{name}.*embeddings"):
                await adapter.embed(embedding())
    finally:
        await adapter.close()


async def test_the_native_engine_spells_special_tokens_and_refuses_what_is_no_token(
    request: pytest.FixtureRequest,
) -> None:
    cls = adapter_class("native")
    options = {"model": str(request.getfixturevalue("tiny_model")), "home": str(request.getfixturevalue("native_home"))}
    adapter = cls(msgspec.convert({**options, "kv_cache_mib": 16, "num_threads": 1}, cls.Options))
    await adapter.start()
    try:
        ids = (await adapter.tokenize(turns())).ids
        assert "Hi" in await adapter.detokenize(ids)
        with pytest.raises(InvalidRequest, match="no token 1000000") as caught:
            await adapter.detokenize([1_000_000])
        assert caught.value.param == "tokens"
    finally:
        await adapter.close()
