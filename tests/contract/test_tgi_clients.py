"""TGI's twin under the clients that are written for the real one, and our adapter beside them: all read the same.

`huggingface_hub` comes with transformers. `text-generation` is TGI's own client; its last release wants an older
huggingface_hub than we have, of which it only builds headers, so it is installed without its dependencies into a
folder of its own, and these tests are skipped where no package index can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import huggingface_hub
import huggingface_hub.errors
import msgspec
import pytest

from adapters.base import Load
from adapters.errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    EngineFailed,
    GoodgateError,
    InvalidRequest,
    Overloaded,
)
from adapters.registry import adapter_class
from adapters.types import Chunk, Usage
from tests.contract.conftest import chat, collect, completion
from tests.contract.tgi_twin import MAX_TOTAL, MODEL_ID, TGITwin

T = TypeVar("T")
PROMPT = "Once upon a time"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello world"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ARGUMENTS = {"city": "alpha", "days": 7}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}


@pytest.fixture
async def tgi() -> AsyncIterator[TGITwin]:
    async with TGITwin() as twin:
        yield twin


@contextlib.asynccontextmanager
async def adapter_of(tgi: TGITwin, text_model: Path | None = None, **options: Any) -> AsyncIterator[Any]:
    """Our adapter, on TGI's own route where it has a template."""
    cls = adapter_class("tgi")
    template = {} if text_model is None else {"chat_template": str(text_model)}
    adapter = cls(msgspec.convert({"url": tgi.url, **template, **options}, cls.Options))
    await adapter.start()
    try:
        yield adapter
    finally:
        await adapter.close()


async def ask_hub(tgi: TGITwin, question: Callable[[huggingface_hub.InferenceClient], T]) -> T:
    """What huggingface_hub's client answers, which blocks its thread."""

    def ask() -> T:
        with huggingface_hub.InferenceClient(model=tgi.url, token="none") as client:
            return question(client)

    return await asyncio.to_thread(ask)


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def end_of(chunks: list[Chunk]) -> tuple[str, Usage]:
    (reason,) = (chunk.finish_reason for chunk in chunks if chunk.finish_reason)
    assert chunks[-1].usage is not None
    return reason, chunks[-1].usage


# ------------------------------------------------------------------------------------------- huggingface_hub, generate


async def test_hub_generates_whole_and_streamed_the_same(tgi: TGITwin) -> None:
    whole = await ask_hub(tgi, lambda client: client.text_generation(PROMPT, max_new_tokens=5))
    pieces = await ask_hub(tgi, lambda client: list(client.text_generation(PROMPT, max_new_tokens=5, stream=True)))
    assert "".join(pieces) == whole
    assert len(pieces) == 5


async def test_hub_reads_the_details_of_each_token(tgi: TGITwin) -> None:
    answer = await ask_hub(
        tgi,
        lambda client: client.text_generation(
            PROMPT, details=True, decoder_input_details=True, max_new_tokens=3, top_n_tokens=2, do_sample=True, seed=7
        ),
    )
    assert answer.details is not None
    assert (answer.details.finish_reason, answer.details.generated_tokens, answer.details.seed) == ("length", 3, 7)
    assert [token.text for token in answer.details.prefill] == ["", "Once", " upon", " a", " time"]
    assert "".join(token.text for token in answer.details.tokens) == answer.generated_text
    assert answer.details.top_tokens is not None
    assert [len(each) for each in answer.details.top_tokens] == [2, 2, 2]


async def test_hub_sees_the_end_in_the_last_event_and_a_special_token_that_is_no_text(tgi: TGITwin) -> None:
    events = await ask_hub(tgi, lambda client: list(client.text_generation(PROMPT, details=True, stream=True)))
    *rest, last = events
    assert all(event.details is None and event.generated_text is None for event in rest)
    assert last.details is not None
    assert (last.token.text, last.token.special, last.details.finish_reason) == ("</s>", True, "eos_token")
    assert last.generated_text == "".join(event.token.text for event in rest)
    assert last.details.input_length == 5


async def test_hub_gets_two_answers_of_which_one_is_the_best(tgi: TGITwin) -> None:
    answer = await ask_hub(
        tgi, lambda client: client.text_generation(PROMPT, best_of=2, do_sample=True, details=True, max_new_tokens=6)
    )
    assert answer.details is not None
    assert answer.details.best_of_sequences is not None
    (other,) = answer.details.best_of_sequences
    assert other.generated_text != answer.generated_text


async def test_hub_gets_the_prompt_back_when_it_asks_for_the_full_text(tgi: TGITwin) -> None:
    ask = {"max_new_tokens": 2}
    full = await ask_hub(tgi, lambda client: client.text_generation(PROMPT, return_full_text=True, **ask))
    assert full == PROMPT + await ask_hub(tgi, lambda client: client.text_generation(PROMPT, **ask))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"temperature": 0.0}, "`temperature` must be strictly positive"),
        ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"best_of": 2, "seed": 1, "do_sample": True}, "`seed` must not be set when `best_of` > 1"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5"),
        ({"max_new_tokens": 4000}, "`inputs` tokens + `max_new_tokens` must be <= 2048"),
        ({"grammar": {"type": "json", "value": {"type": "integer"}}}, "must have a 'properties' field"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_hub_raises_what_tgi_refuses_before_and_inside_a_stream(
    tgi: TGITwin, parameters: dict[str, Any], message: str, stream: bool
) -> None:
    if stream and "best_of" in parameters:
        message = "`best_of` != 1 is not supported when streaming tokens"

    def ask(client: huggingface_hub.InferenceClient) -> Any:
        answer = client.text_generation(PROMPT, stream=stream, **parameters)
        return list(answer) if stream else answer

    with pytest.raises(huggingface_hub.errors.ValidationError) as caught:
        await ask_hub(tgi, ask)
    assert message in str(caught.value)
    assert tgi.failures == {"validation": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_hub_tells_a_full_engine_from_one_that_fails(tgi: TGITwin, stream: bool) -> None:
    def ask(client: huggingface_hub.InferenceClient) -> Any:
        answer = client.text_generation(PROMPT, stream=stream)
        return list(answer) if stream else answer

    tgi.fails_after = 2
    with pytest.raises(huggingface_hub.errors.GenerationError, match="CUDA out of memory"):
        await ask_hub(tgi, ask)
    tgi.fails_after, tgi.max_concurrent_requests = None, 0
    with pytest.raises(huggingface_hub.errors.OverloadedError, match="overloaded"):
        await ask_hub(tgi, ask)
    assert (tgi.failures, tgi.num_running) == ({"generation": 1, "overloaded": 1}, 0)


async def test_hub_reads_a_stream_through_pings(tgi: TGITwin) -> None:
    tgi.token_s, tgi.ping_s = 0.02, 0.005
    pieces = await ask_hub(tgi, lambda client: list(client.text_generation(PROMPT, max_new_tokens=4, stream=True)))
    assert len(pieces) == 4


async def test_hub_gets_json_that_fits_its_grammar(tgi: TGITwin) -> None:
    text = await ask_hub(tgi, lambda client: client.text_generation(PROMPT, grammar={"type": "json", "value": SCHEMA}))
    assert json.loads(text) == {"name": "alpha", "age": 7}


# ----------------------------------------------------------------------------------------------- huggingface_hub, chat


async def test_hub_chats_whole_and_streamed_the_same(tgi: TGITwin) -> None:
    whole = await ask_hub(tgi, lambda client: client.chat_completion(MESSAGES, max_tokens=6, temperature=0))
    events = await ask_hub(
        tgi,
        lambda client: list(
            client.chat_completion(
                MESSAGES, max_tokens=6, temperature=0, stream=True, stream_options={"include_usage": True}
            )
        ),
    )
    *rest, last = events
    assert "".join(event.choices[0].delta.content or "" for event in rest) == whole.choices[0].message.content
    assert rest[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert last.choices == []
    assert dict(last.usage or {}) == dict(whole.usage)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (15, 6)


async def test_hub_reads_logprobs_of_a_chat(tgi: TGITwin) -> None:
    answer = await ask_hub(
        tgi, lambda client: client.chat_completion(MESSAGES, max_tokens=2, logprobs=True, top_logprobs=2)
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [len(each.top_logprobs) for each in logprobs.content] == [2, 2]


async def test_hub_calls_a_tool_whole_and_streamed(tgi: TGITwin) -> None:
    whole = await ask_hub(
        tgi, lambda client: client.chat_completion(MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=99)
    )
    calls = whole.choices[0].message.tool_calls
    assert calls is not None
    assert json.loads(calls[0].function.arguments) == ARGUMENTS
    assert whole.choices[0].finish_reason == "stop"
    events = await ask_hub(
        tgi,
        lambda client: list(
            client.chat_completion(MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=99, stream=True)
        ),
    )
    functions = [event.choices[0].delta.tool_calls[0].function for event in events]
    assert [function.name for function in functions] == ["weather"] + [None] * (len(functions) - 1)
    assert json.loads("".join(function.arguments for function in functions)) == ARGUMENTS
    assert {event.choices[0].finish_reason for event in events} == {None}


async def test_hub_constrains_a_chat_to_a_schema(tgi: TGITwin) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    answer = await ask_hub(tgi, lambda client: client.chat_completion(MESSAGES, response_format=wanted))
    assert json.loads(answer.choices[0].message.content or "") == {"name": "alpha", "age": 7}
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="mutually exclusive"):
        await ask_hub(tgi, lambda client: client.chat_completion(MESSAGES, response_format=wanted, tools=[WEATHER]))


async def test_hub_raises_what_a_chat_is_refused_for(tgi: TGITwin) -> None:
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="`top_p` must be") as caught:
        await ask_hub(tgi, lambda client: client.chat_completion(MESSAGES, top_p=1.0))
    assert caught.value.response.status_code == 422
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="Failed to deserialize") as caught:
        await ask_hub(tgi, lambda client: client.chat_completion(MESSAGES, stop="END"))  # type: ignore[arg-type]
    assert caught.value.response.headers["content-type"].startswith("text/plain")
    big = [{"role": "user", "content": "x" * (3 << 20)}]
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError) as caught:
        await ask_hub(tgi, lambda client: client.chat_completion(big))
    assert caught.value.response.status_code == 413


async def test_hub_is_refused_without_the_key() -> None:
    async with TGITwin(api_key="sk-1") as tgi:
        with pytest.raises(huggingface_hub.errors.HfHubHTTPError) as caught:
            await ask_hub(tgi, lambda client: client.text_generation(PROMPT))
        assert (caught.value.response.status_code, caught.value.response.content) == (401, b"")
        async with adapter_of(tgi, api_key="sk-1") as adapter:
            assert text_of(await collect(adapter, chat()))


# ------------------------------------------------------------------------------------------------- TGI's own client


@pytest.fixture(scope="session")
def text_generation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("text-generation")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*command, "text-generation==0.7.0"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the client `text-generation` cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    sys.path.append(str(folder))
    yield importlib.import_module("text_generation")
    sys.path.remove(str(folder))


# It was written for pydantic 1, whose names pydantic 2 still has.
old_pydantic = pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")


@old_pydantic
async def test_tgis_own_client_generates_whole_and_streamed_the_same(tgi: TGITwin, text_generation: ModuleType) -> None:
    client = text_generation.Client(tgi.url)
    ask = {"max_new_tokens": 6, "do_sample": True, "seed": 3, "temperature": 0.5}
    whole = await asyncio.to_thread(client.generate, PROMPT, **ask)
    events = await asyncio.to_thread(lambda: list(client.generate_stream(PROMPT, **ask)))
    assert "".join(event.token.text for event in events) == whole.generated_text == events[-1].generated_text
    assert whole.details.finish_reason == events[-1].details.finish_reason == "length"
    assert (whole.details.generated_tokens, whole.details.seed) == (6, 3)


@old_pydantic
async def test_tgis_own_client_without_threads_reads_the_same(tgi: TGITwin, text_generation: ModuleType) -> None:
    client = text_generation.AsyncClient(tgi.url)
    whole = await client.generate(PROMPT, max_new_tokens=50)
    events = [event async for event in client.generate_stream(PROMPT, max_new_tokens=50)]
    assert events[-1].generated_text == whole.generated_text
    assert (events[-1].details.finish_reason, events[-1].token.special) == ("eos_token", True)


@old_pydantic
async def test_tgis_own_client_chats_and_calls_a_tool(tgi: TGITwin, text_generation: ModuleType) -> None:
    client = text_generation.Client(tgi.url)
    hello = [text_generation.types.Message(**message) for message in MESSAGES]
    answer = await asyncio.to_thread(client.chat, hello, temperature=0.5, seed=1, max_tokens=4)
    assert len((answer.choices[0].message.content or "").split()) == 4
    called = await asyncio.to_thread(client.chat, hello, tools=[WEATHER], tool_choice="required", max_tokens=99)
    assert json.loads(called.choices[0].message.tool_calls[0]["function"]["arguments"]) == ARGUMENTS


@old_pydantic
async def test_tgis_own_client_raises_its_own_errors(tgi: TGITwin, text_generation: ModuleType) -> None:
    client = text_generation.Client(tgi.url)
    with pytest.raises(text_generation.errors.ValidationError, match="must be <= 2048"):
        await asyncio.to_thread(client.generate, PROMPT, max_new_tokens=4000)
    with pytest.raises(text_generation.errors.ValidationError, match="must be <= 2048"):
        await asyncio.to_thread(lambda: list(client.generate_stream(PROMPT, max_new_tokens=4000)))
    tgi.fails_after = 1
    with pytest.raises(text_generation.errors.GenerationError, match="CUDA out of memory"):
        await asyncio.to_thread(client.generate, PROMPT)
    tgi.max_concurrent_requests = 0
    with pytest.raises(text_generation.errors.OverloadedError):
        await asyncio.to_thread(client.generate, PROMPT)


# ---------------------------------------------------------------------------------------------- our adapter beside them


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.7, "seed": 11, "top_p": 0.9, "top_k": 5}])
@pytest.mark.parametrize("limit", [4, 100])
async def test_our_adapter_and_hub_read_the_same_generation(
    tgi: TGITwin, text_model: Path, fields: dict[str, Any], limit: int
) -> None:
    own = {"do_sample": True, **fields} if fields["temperature"] else {}
    theirs = await ask_hub(
        tgi, lambda client: client.text_generation(PROMPT, details=True, max_new_tokens=limit, **own)
    )
    assert theirs.details is not None
    async with adapter_of(tgi, text_model) as adapter:
        ours = await collect(adapter, completion(prompt=PROMPT, max_tokens=limit, **fields))
    reason, usage = end_of(ours)
    assert text_of(ours) == theirs.generated_text
    assert reason == {"length": "length", "eos_token": "stop"}[theirs.details.finish_reason]
    assert usage == Usage(5, theirs.details.generated_tokens)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.7, "seed": 11, "top_p": 0.9}])
async def test_our_adapter_and_hub_read_the_same_chat_on_both_routes(
    tgi: TGITwin, text_model: Path, fields: dict[str, Any], is_native: bool
) -> None:
    theirs = await ask_hub(tgi, lambda client: client.chat_completion(MESSAGES, max_tokens=7, **fields))
    async with adapter_of(tgi, text_model if is_native else None) as adapter:
        ours = await collect(adapter, chat(messages=MESSAGES, max_tokens=7, top_logprobs=2, logprobs=True, **fields))
    assert tgi.requests[-1][0] == ("/generate_stream" if is_native else "/v1/chat/completions")
    assert text_of(ours) == theirs.choices[0].message.content
    assert end_of(ours) == ("length", Usage(theirs.usage.prompt_tokens, theirs.usage.completion_tokens))
    assert all(chunk.logprobs is not None for chunk in ours[:7])


async def test_our_adapters_completion_on_openais_route_says_the_same_as_on_tgis_own(
    tgi: TGITwin, text_model: Path
) -> None:
    answers = []
    for template in (text_model, None):
        async with adapter_of(tgi, template) as adapter:
            answers.append(await collect(adapter, completion(prompt=PROMPT, max_tokens=50, temperature=0)))
    native, openai = answers
    assert text_of(openai).removesuffix("</s>") == text_of(native)
    assert end_of(openai) == end_of(native)


@pytest.mark.replay("W05")
@pytest.mark.parametrize("is_native", [True, False])
async def test_a_stop_string_that_tgi_leaves_in_or_does_not_see_never_leaves_our_adapter(
    tgi: TGITwin, text_model: Path, is_native: bool
) -> None:
    async with adapter_of(tgi, text_model if is_native else None) as adapter:
        whole = text_of(await collect(adapter, chat(temperature=0)))
        second, third = whole.split()[1:3]
        for stop in (f" {second}", second[1:3], f"{second[-2:]} {third[:2]}"):
            chunks = await collect(adapter, chat(temperature=0, stop=stop))
            assert text_of(chunks) == whole[: whole.index(stop)]
            assert end_of(chunks)[0] == "stop"


async def test_our_adapter_calls_a_tool_and_says_why_it_ended(tgi: TGITwin) -> None:
    request = chat(messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=99)
    async with adapter_of(tgi) as adapter:
        chunks = await collect(adapter, request)
        cut = [await collect(adapter, msgspec.structs.replace(request, max_tokens=limit)) for limit in (5, 20)]
    calls = [json.loads(bytes(chunk.tool_calls)) for chunk in chunks if chunk.tool_calls is not None]
    assert json.loads("".join(call[0]["function"]["arguments"] for call in calls)) == ARGUMENTS
    assert [call[0]["function"].get("name") for call in calls] == ["weather"] + [None] * (len(calls) - 1)
    assert end_of(chunks)[0] == "tool_calls"
    assert [end_of(each)[0] for each in cut] == ["length", "length"]


@pytest.mark.replay("W06")
async def test_our_adapter_sends_nothing_that_tgi_refuses(tgi: TGITwin, text_model: Path) -> None:
    fields = {
        "top_p": 1, "temperature": 0.5, "frequency_penalty": 0.5, "seed": -1, "n": 2, "stop": "END", "max_tokens": 3,
        "presence_penalty": 0, "logit_bias": {}, "min_p": 0, "user": "u",
    }  # fmt: skip
    for template in (text_model, None):
        async with adapter_of(tgi, template) as adapter:
            assert {chunk.index for chunk in await collect(adapter, chat(**fields))} == {0, 1}
            await collect(adapter, chat(temperature=0, top_p=1, seed=5, max_tokens=3))
    assert not tgi.failures


@pytest.mark.replay("W07")
@pytest.mark.parametrize("is_native", [True, False])
async def test_our_adapter_tells_tgis_faults_apart(tgi: TGITwin, text_model: Path, is_native: bool) -> None:
    async def fault(**fields: Any) -> GoodgateError:
        with pytest.raises(GoodgateError) as caught:
            await collect(adapter, chat(**fields))
        return caught.value

    async with adapter_of(tgi, text_model if is_native else None) as adapter:
        assert type(await fault(max_tokens=4000)) is ContextLengthExceeded
        assert type(await fault(stop=list("abcde"))) is InvalidRequest
        assert type(await fault(messages=[{"role": "user", "content": "x" * (3 << 20)}])) is BodyTooLarge
        tgi.fails_after = 2
        assert type(await fault()) is EngineFailed
        tgi.max_concurrent_requests = 0
        assert type(await fault()) is Overloaded  # OpenAI's route says 422 inside a stream, and only its words tell
    assert tgi.num_running == 0


@pytest.mark.replay("W14")
async def test_tgi_notices_at_the_next_token_that_our_adapter_has_left(tgi: TGITwin, text_model: Path) -> None:
    tgi.token_s = 0.02
    async with adapter_of(tgi, text_model) as adapter:
        async with contextlib.aclosing(adapter.generate(chat(), request_id="r")) as chunks:
            await anext(chunks)
            assert await adapter.load() == Load(running=1, waiting=0, kv_usage=256 / 4096)
        async with asyncio.timeout(1):
            while tgi.num_running:  # noqa: ASYNC110 - the twin announces nothing, as TGI does not
                await asyncio.sleep(0.005)
        assert await adapter.load() == Load(running=0, waiting=0, kv_usage=0)


async def test_our_adapter_asks_tgi_for_everything_else_too(tgi: TGITwin) -> None:
    async with adapter_of(tgi) as adapter:
        assert [(model.id, model.max_model_len) for model in await adapter.models()] == [(MODEL_ID, MAX_TOTAL)]
        assert (await adapter.health()).ready
        tgi.is_healthy = False
        health = await adapter.health()
        assert not health.ready
        assert "HTTP 503" in health.reason
