"""TGI alone, byte by byte. How it does beside TGI's own clients is in test_tgi_clients.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import (
    EngineFailed,
    GoodgateError,
    InvalidRequest,
    Overloaded,
    UnsupportedParameter,
)
from tests.contract import tgi_transcripts
from tests.contract.conftest import (
    CHAT,
    COMPLETIONS,
    chat,
    collect,
    completion,
)
from tests.contract.replay import CHAT_FIELDS, HELLO, delta, engine, flat, reasons_of, text_of
from tests.contract.twin import Reply, event, events


async def tgi_body(text_model: Path, route: str, **fields: Any) -> dict[str, Any]:
    async with engine("tgi", route=route, chat_template=str(text_model)) as (adapter, twin):
        twin.reply(CHAT, Reply.stream(tgi_transcripts.CHAT))
        twin.reply("/generate_stream", Reply.stream(tgi_transcripts.NATIVE))
        await collect(adapter, chat(**fields))
        return flat(twin.bodies[-1])


@pytest.mark.replay("W06")
@pytest.mark.parametrize("route", ["generate", "openai"])
async def test_top_p_of_one_and_temperature_zero_are_never_sent_to_tgi(route: str, text_model: Path) -> None:
    greedy = await tgi_body(text_model, route, top_p=1, temperature=0, seed=3)
    assert not {"top_p", "seed"} & set(greedy)
    assert greedy.get("do_sample") is False if route == "generate" else greedy["temperature"] == 0
    assert ("temperature" in greedy) == (route == "openai")  # its OpenAI route reads 0 as greedy
    sampled = await tgi_body(text_model, route, top_p=0.9, temperature=0.7, seed=-1)
    assert (sampled["top_p"], sampled["temperature"], sampled["seed"]) == (0.9, 0.7, 2**64 - 1)
    assert "top_p" not in await tgi_body(text_model, route, temperature=0, top_p=0.5)  # it would sample again


async def test_tgi_samples_unless_it_is_asked_not_to(text_model: Path) -> None:
    assert (await tgi_body(text_model, "generate"))["do_sample"] is True
    assert "top_k" not in await tgi_body(text_model, "generate", top_k=-1)


@pytest.mark.replay("W27")
@pytest.mark.parametrize("route", ["generate", "openai"])
async def test_a_presence_penalty_never_reaches_tgi(route: str, text_model: Path) -> None:
    with pytest.raises(UnsupportedParameter, match=r"tgi.*presence_penalty"):
        await tgi_body(text_model, route, presence_penalty=0.5)
    assert "presence_penalty" not in await tgi_body(text_model, route, presence_penalty=0)


async def test_tgis_openai_route_gets_a_list_of_stops_and_never_our_models_name(text_model: Path) -> None:
    body = await tgi_body(text_model, "openai", stop="END")
    assert (body["stop"], body["model"]) == (["END"], "tgi")
    async with engine("tgi", model="small", adapter_id="poems") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(tgi_transcripts.CHAT))
        await collect(adapter, chat())
        assert twin.bodies[-1]["model"] == "poems"


async def test_tgi_is_asked_on_its_own_route_as_soon_as_there_is_a_template(text_model: Path) -> None:
    for options, path in (({}, CHAT), ({"chat_template": str(text_model)}, "/generate_stream")):
        async with engine("tgi", **options) as (adapter, twin):
            twin.reply(CHAT, Reply.stream(tgi_transcripts.CHAT))
            twin.reply("/generate_stream", Reply.stream(tgi_transcripts.NATIVE))
            await collect(adapter, chat())
            assert twin.requests[-1].path == path


@pytest.mark.replay("W05")
async def test_tgis_openai_route_leaks_no_stop_string_and_is_left_when_it_misses_one() -> None:
    async with engine("tgi") as (adapter, twin):
        twin.reply("/chat_tokenize", Reply.plain(200, {"tokenize_response": [{"id": 1}] * 9, "templated_text": "x"}))
        twin.reply(CHAT, Reply.stream(events([delta("see E"), delta("ND x"), delta("on")], done=False), "hold"))
        chunks = await collect(adapter, chat(stop=["END"]))
        await twin.client_left(within_s=1)
        assert (text_of(chunks), reasons_of(chunks)) == ("see ", ["stop"])
        assert chunks[-1].usage is not None
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (9, 2)
        twin.reply(CHAT, Reply.stream(events([delta("see END", "stop_sequence"), *HELLO[2:]])))
        chunks = await collect(adapter, chat(stop=["END"]))
        assert (text_of(chunks), reasons_of(chunks)) == ("see ", ["stop"])
        assert chunks[-1].usage is not None
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 2)


@pytest.mark.replay("W03", "W05")
async def test_a_last_event_without_its_blank_line_is_cut_and_counted_too() -> None:
    async with engine("tgi") as (adapter, twin):
        for last, text in (("D", "see "), ("d", "see ENd")):
            stream = events([HELLO[2], delta("see EN"), delta(last, "stop")], done=False)
            twin.reply(CHAT, Reply.stream(stream[:-1]))
            chunks = await collect(adapter, chat(stop="END"))
            assert (text_of(chunks), reasons_of(chunks)) == (text, ["stop"])
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.prompt_tokens == 3


async def test_the_price_of_a_cut_answer_that_cannot_be_told_does_not_spoil_it(text_model: Path) -> None:
    async with engine("tgi", chat_template=str(text_model)) as (adapter, twin):
        twin.reply("/generate_stream", Reply.stream(event(tgi_transcripts.token("aENDb")), "hold"))
        twin.reply("/tokenize", Reply.plain(500, b""))
        chunks = await collect(adapter, chat(stop="END"))
        assert text_of(chunks) == "a"
        assert chunks[-1].usage is not None
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (0, 1)


@pytest.mark.replay("W04")
async def test_the_raw_reasons_of_tgis_completions_are_mapped() -> None:
    async with engine("tgi") as (adapter, twin):
        for reason in ("eos_token", "stop_sequence"):
            last = {"choices": [{"index": 0, "text": " world", "finish_reason": reason}], "usage": HELLO[2]["usage"]}
            first = {"choices": [{"index": 0, "text": "Hello", "finish_reason": ""}], "usage": None}
            twin.reply(COMPLETIONS, Reply.stream(events([first, last])))
            chunks = await collect(adapter, completion())
            assert (text_of(chunks), reasons_of(chunks)) == ("Hello world", ["stop"])
        assert adapter.unknown_finish_reasons == 0


async def test_special_tokens_of_tgi_are_no_text(text_model: Path) -> None:
    async with engine("tgi", chat_template=str(text_model)) as (adapter, twin):
        end = tgi_transcripts.token("</s>", 2, special=True, details=tgi_transcripts.details("eos_token"))
        twin.reply("/generate_stream", Reply.stream(events([tgi_transcripts.token("Hello"), end], done=False)))
        chunks = await collect(adapter, chat())
        assert (text_of(chunks), reasons_of(chunks)) == ("Hello", ["stop"])


@pytest.mark.replay("W15")
async def test_tgis_log_probabilities_take_the_shape_of_the_route(text_model: Path) -> None:
    other = {"id": 8, "text": "Hi", "logprob": -1.5, "special": False}
    stream = [
        tgi_transcripts.token("Hello", 1, top_tokens=[other]),
        tgi_transcripts.token(" é", 2, top_tokens=[], details=tgi_transcripts.details("length")),
    ]
    async with engine("tgi", chat_template=str(text_model)) as (adapter, twin):
        twin.reply("/generate_stream", Reply.stream(events(stream, done=False)))
        in_chat = await collect(adapter, chat(logprobs=True, top_logprobs=1))
        assert json.loads(bytes(in_chat[0].logprobs or b"")) == {
            "content": [
                {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello"), "top_logprobs": [
                    {"token": "Hi", "logprob": -1.5, "bytes": list(b"Hi")}
                ]}
            ]
        }  # fmt: skip
        in_completion = await collect(adapter, completion(logprobs=1))
        assert json.loads(bytes(in_completion[1].logprobs or b"")) == {
            "tokens": [" é"], "token_logprobs": [-0.5], "top_logprobs": [{}], "text_offset": [5],
        }  # fmt: skip
        assert [body["parameters"]["top_n_tokens"] for body in twin.bodies] == [1, 1]
        unasked = await collect(adapter, chat())
        assert [chunk.logprobs for chunk in unasked] == [None] * len(unasked)
        with pytest.raises(InvalidRequest, match="at most 5"):
            await collect(adapter, chat(logprobs=True, top_logprobs=6))


async def test_tgi_is_given_a_schema_and_refuses_what_is_none(text_model: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    body = await tgi_body(text_model, "generate", response_format=schema)
    assert body["grammar"] == {"type": "json", "value": {"type": "integer"}}
    with pytest.raises(UnsupportedParameter, match="response_format"):
        await tgi_body(text_model, "generate", response_format={"type": "json_object"})


async def test_tgi_tells_its_model_and_context() -> None:
    async with engine("tgi") as (adapter, twin):
        twin.reply("/info", Reply.plain(200, {"model_id": "org/small", "max_total_tokens": 2048, "version": "3.3.7"}))
        assert [(model.id, model.max_model_len) for model in await adapter.models()] == [("org/small", 2048)]


async def test_a_tool_call_of_tgi_has_one_head_and_the_reason_that_it_never_gives() -> None:
    def call(name: str | None, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        calls = [{"index": 0, "id": "0", "type": "function", "function": function}]
        return {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None, "tool_calls": calls}}]}

    async with engine("tgi") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(events([call("f", '{"x'), call(None, '": 1}'), delta("", "stop")])))
        chunks = await collect(adapter, chat(tools=CHAT_FIELDS["tools"]))
        first, second = (json.loads(bytes(chunk.tool_calls)) for chunk in chunks if chunk.tool_calls is not None)
        assert first[0]["function"]["name"] == "f"
        assert second == [{"index": 0, "function": {"arguments": '": 1}'}}]
        assert reasons_of(chunks) == ["tool_calls"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Model is overloaded", Overloaded),
        ("Request failed during generation: Server error: CUDA out of memory", EngineFailed),
        ("Incomplete generation stream", EngineFailed),
        ("Input validation error: `top_p` must be > 0.0 and < 1.0", InvalidRequest),
    ],
)
async def test_an_overloaded_tgi_is_told_from_a_bad_request_though_both_say_422(
    words: str, kind: type[GoodgateError]
) -> None:
    async with engine("tgi", route="openai") as (adapter, twin):
        twin.reply(
            CHAT, Reply.stream(event({"error": {"message": words, "http_status_code": 422}}), b"data: [DONE]\n\n")
        )
        with pytest.raises(GoodgateError) as caught:
            await collect(adapter, chat())
    assert type(caught.value) is kind
