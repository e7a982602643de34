"""The official client, sync and async, against the fake engine over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import openai
import pytest

from adapters.types import ChatRequest, CompletionRequest
from tests.gateway.rig import HELLO, Start, fake_model, until


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
async def test_a_client_that_sends_null_for_every_optional_field_is_answered(
    start: Start, kind: type[ChatRequest] | type[CompletionRequest]
) -> None:
    gateway = await start(fake_model(tokens=3))
    nulls = dict.fromkeys(kind.__struct_fields__)
    for field in ("cache_salt", "continuation"):  # no fields of clients: refused in a body, whatever they hold
        del nulls[field]
    turn = {"role": "user", "content": "Hi", "name": None, "tool_calls": None, "tool_call_id": None, "refusal": None}
    if kind is ChatRequest:
        status, body, _ = await gateway.post("/v1/chat/completions", {**nulls, "model": "m", "messages": [turn]})
    else:
        status, body, _ = await gateway.post("/v1/completions", {**nulls, "model": "m", "prompt": "Hi"})
    assert status == 200, body
    assert body["usage"]["completion_tokens"] == 3


async def test_stream_options_of_the_reference_are_taken_null_too(start: Start) -> None:
    gateway = await start(fake_model(tokens=2))
    for options in ({"include_usage": None}, {"include_obfuscation": False}, {"include_usage": False}):
        assert not any("usage" in event for event in await gateway.events(stream_options=options))


async def test_fields_of_openais_that_ask_for_something_else_are_refused_by_name(start: Start) -> None:
    gateway = await start(fake_model())
    for field, value in {
        "audio": {"voice": "alloy"},
        "modalities": ["text", "audio"],
        "functions": [{"name": "f"}],
        "prediction": {"type": "content", "content": "x"},
    }.items():
        status, body, _ = await gateway.chat(**{field: value})
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_parameter", field)
    assert (await gateway.chat(modalities=["text"], functions=[]))[0] == 200


async def test_a_chat_answer_is_what_the_client_expects(start: Start) -> None:
    gateway = await start(fake_model(tokens=4))
    answer = await gateway.openai.chat.completions.create(**HELLO)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "m"
    assert answer.choices[0].message.role == "assistant"
    assert len((answer.choices[0].message.content or "").split()) == 4
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4


async def test_a_chat_stream_says_the_same_as_the_whole_answer(start: Start) -> None:
    gateway = await start(fake_model(tokens=6))
    whole = await gateway.openai.chat.completions.create(**HELLO)
    stream = await gateway.openai.chat.completions.create(**HELLO, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content


async def test_a_stream_has_exactly_the_shape_of_the_reference(start: Start) -> None:
    gateway = await start(fake_model(tokens=2))
    *events, done = await gateway.events()
    first, *pieces, last = [json.loads(event) for event in events]
    assert done == "[DONE]"
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert [set(piece["choices"][0]["delta"]) for piece in pieces] == [{"content"}] * 2
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert len({event["id"] for event in (first, *pieces, last)}) == 1
    assert not any("usage" in event for event in (first, *pieces, last))


@pytest.mark.replay("G14")
async def test_g14_usage_comes_last_without_choices_and_is_null_before(start: Start) -> None:
    gateway = await start(fake_model(tokens=2))
    *events, done = await gateway.events(stream_options={"include_usage": True})
    *before, last = [json.loads(event) for event in events]
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert last["object"] == "chat.completion.chunk"
    assert all(event["usage"] is None for event in before)


async def test_completions_stream_and_whole_agree(start: Start) -> None:
    gateway = await start(fake_model(tokens=5))
    whole = await gateway.openai.completions.create(model="m", prompt="Once", max_tokens=3)
    stream = await gateway.openai.completions.create(model="m", prompt="Once", max_tokens=3, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.object == chunks[0].object == "text_completion"
    assert whole.id.startswith("cmpl-")
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"


async def test_n_choices_are_all_there_in_order(start: Start) -> None:
    gateway = await start(fake_model(tokens=3))
    answer = await gateway.openai.chat.completions.create(**HELLO, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    stream = await gateway.openai.chat.completions.create(**HELLO, n=3, stream=True)
    texts = {0: "", 1: "", 2: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [texts[choice.index] for choice in answer.choices] == [choice.message.content for choice in answer.choices]


@pytest.mark.parametrize("prompts", [["a b", "c", "d e f"], [[1, 2], [3], [4, 5, 6]]])
async def test_lists_of_prompts_come_back_as_prompt_times_n_plus_k(start: Start, prompts: list[object]) -> None:
    gateway = await start(fake_model(tokens=3))
    together = await gateway.openai.completions.create(model="m", prompt=prompts, n=2)  # type: ignore[arg-type]
    assert [choice.index for choice in together.choices] == list(range(6))
    for number, prompt in enumerate(prompts):
        alone = await gateway.openai.completions.create(model="m", prompt=prompt, n=2)  # type: ignore[arg-type]
        assert [choice.text for choice in alone.choices] == [
            choice.text for choice in together.choices[2 * number : 2 * number + 2]
        ]
    assert together.usage is not None
    assert together.usage.prompt_tokens == 6
    assert together.usage.completion_tokens == 18


async def test_a_list_of_token_ids_is_one_prompt(start: Start) -> None:
    gateway = await start(fake_model())
    answer = await gateway.openai.completions.create(model="m", prompt=[1, 2, 3])
    assert len(answer.choices) == 1
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


async def test_a_streamed_list_of_prompts_sums_its_usage_in_one_last_event(start: Start) -> None:
    gateway = await start(fake_model(tokens=2))
    *events, done = await gateway.events(
        "/v1/completions", prompt=["a", "b c"], messages=None, stream_options={"include_usage": True}
    )
    decoded = [json.loads(event) for event in events]
    assert done == "[DONE]"
    assert decoded[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    finished = [e["choices"][0]["index"] for e in decoded[:-1] if e["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1]
    await until(lambda: gateway.open_requests.in_flight == 0)


async def test_the_synchronous_client_works_too(start: Start) -> None:
    gateway = await start(fake_model(tokens=3))

    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(**HELLO)
            stream = client.chat.completions.create(**HELLO, stream=True)
            return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed != ""


async def test_models_are_listed_and_found_also_with_a_slash_in_the_name(start: Start) -> None:
    slashed = {**fake_model(), "name": "org/model", "aliases": ["default"]}
    gateway = await start(fake_model(), slashed)
    listed = await gateway.openai.models.list()
    assert [each.id for each in listed.data] == ["m", "org/model"]
    assert (await gateway.openai.models.retrieve("org/model")).id == "org/model"
    assert (await gateway.openai.models.retrieve("default")).id == "org/model"
    with pytest.raises(openai.NotFoundError, match="did you mean 'org/model'"):
        await gateway.openai.models.retrieve("org/modell")


async def test_an_alias_is_answered_under_the_models_own_name(start: Start) -> None:
    gateway = await start({**fake_model(), "aliases": ["default"]})
    status, body, headers = await gateway.chat(model="default")
    assert status == 200
    assert body["model"] == "m"
    assert headers["x-goodgate-engine"] == "fake"
    assert headers["x-goodgate-replica"] == "fake-0"


async def test_the_clients_errors_have_their_class_and_code(start: Start) -> None:
    gateway = await start(fake_model())
    with pytest.raises(openai.NotFoundError) as unknown:
        await gateway.openai.chat.completions.create(model="n", messages=HELLO["messages"])  # type: ignore[arg-type]
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.openai.chat.completions.create(**HELLO, temperature=9)
    assert refused.value.param == "temperature"


async def test_the_client_of_hugging_face_chats_whole_streamed_and_refused(start: Start) -> None:
    gateway = await start(fake_model(tokens=4))

    def ask() -> tuple[Any, list[Any]]:
        with huggingface_hub.InferenceClient(base_url=f"{gateway.url}/v1", api_key="none") as client:
            whole = client.chat_completion(HELLO["messages"], model="m", max_tokens=3)
            stream = client.chat_completion(
                HELLO["messages"], model="m", max_tokens=3, stream=True, stream_options={"include_usage": True}
            )
            streamed = list(stream)
            with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="temperature") as refused:
                client.chat_completion(HELLO["messages"], model="m", temperature=9)
            assert refused.value.response.status_code == 400
            return whole, streamed

    whole, streamed = await asyncio.to_thread(ask)
    assert whole.choices[0].finish_reason == streamed[-2].choices[0].finish_reason == "length"
    assert whole.choices[0].message.content == "".join(e.choices[0].delta.content or "" for e in streamed[:-1])
    assert dict(streamed[-1].usage) == {key: whole.usage[key] for key in streamed[-1].usage}
    assert whole.usage.completion_tokens == 3
