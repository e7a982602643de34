"""What goes out to an engine: under names it knows, nothing that was not asked for, nothing that it would ignore."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.errors import (
    EngineUnavailable,
    GoodgateError,
    UnsupportedParameter,
)
from adapters.registry import adapter_class
from adapters.types import INFORMATIONAL
from tests.contract.conftest import (
    COMPLETIONS,
    FANS_OUT,
    GenerateSubject,
    HTTPSubject,
    chat,
    collect,
    completion,
)
from tests.contract.replay import CHAT_FIELDS, engine, flat

# ------------------------------ engines that speak OpenAI


# What may be on the wire, by each engine's own documentation. The adapters' lists are checked against it, not copied.
COMMON = {
    "model", "messages", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop",
    "presence_penalty", "frequency_penalty", "ignore_eos",
}  # fmt: skip


TOOLS = {"tools", "tool_choice", "parallel_tool_calls", "response_format"}


DETAILS = {"logit_bias", "logprobs", "top_logprobs"}


KNOWN = {
    "vllm": COMMON
    | TOOLS
    | DETAILS
    | {"max_completion_tokens", "min_tokens", "repetition_penalty", "reasoning_effort"},
    "llama_cpp": COMMON | TOOLS | DETAILS | {"max_tokens", "repeat_penalty", "repeat_last_n"},
    "openvino": COMMON
    | {"max_tokens", "min_tokens", "repetition_penalty"}
    | {"tools", "tool_choice", "parallel_tool_calls"},
    "goodgate_peer": (
        COMMON | TOOLS | DETAILS | {"max_tokens", "min_tokens", "repetition_penalty", "reasoning_effort", "bad_words"}
    ),
    "sglang": COMMON
    | TOOLS
    | DETAILS
    | {"max_completion_tokens", "min_tokens", "repetition_penalty", "reasoning_effort", "rid"},
    "tgi": {
        "model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop",
        "frequency_penalty", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format",
    },
    "tensorrt_llm": COMMON
    | DETAILS
    | {"max_completion_tokens", "min_tokens", "repetition_penalty", "reasoning_effort", "tools", "tool_choice"},
    "openai_compatible": {
        "model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "n", "stop",
        "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice",
        "parallel_tool_calls", "response_format", "reasoning_effort",
    },
}  # fmt: skip


OWN_LIMIT = dict.fromkeys(("vllm", "sglang", "tensorrt_llm"), "max_completion_tokens")


@pytest.mark.replay("W19")
@pytest.mark.parametrize("field", CHAT_FIELDS)
async def test_every_field_reaches_the_engine_under_a_name_it_knows_or_is_refused(
    http_subject: HTTPSubject, field: str
) -> None:
    fields = {field: CHAT_FIELDS[field]}
    if field in {"tool_choice", "parallel_tool_calls"}:
        fields["tools"] = CHAT_FIELDS["tools"]
    if field == "n":
        http_subject.answers(num_choices=2)
    request = chat(**fields)
    if field in http_subject.adapter.capabilities.parameters | INFORMATIONAL:
        await collect(http_subject.adapter, request)
        body, *others = http_subject.twin.bodies
        assert set(body) <= KNOWN[http_subject.engine]
        if field == "n" and http_subject.engine in FANS_OUT:
            assert len(others) == 1
        else:
            assert others == []
            assert field in INFORMATIONAL or _says(body, CHAT_FIELDS[field])
    else:
        with pytest.raises(UnsupportedParameter) as caught:
            await collect(http_subject.adapter, request)
        assert caught.value.param in fields
        assert http_subject.twin.bodies == []


def _says(body: dict[str, Any], value: Any) -> bool:
    """The value is in the body, under whatever name."""
    return any(sent == value and type(sent) is type(value) for sent in body.values())


async def test_what_was_not_asked_for_stays_absent(http_subject: HTTPSubject) -> None:
    await collect(http_subject.adapter, chat())
    defaults = (
        {"temperature", "top_p", "top_k", "min_p", "repeat_penalty"} if http_subject.engine == "llama_cpp" else set()
    )
    own = {"rid"} if http_subject.engine == "sglang" else set()
    assert set(http_subject.twin.bodies[-1]) == {"model", "messages", "stream", "stream_options"} | defaults | own


@pytest.mark.replay("W20")
@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": None}, None),
    ],
)
async def test_either_name_of_the_limit_arrives_under_the_engines_own(
    http_subject: HTTPSubject, fields: dict[str, Any], limit: int | None
) -> None:
    await collect(http_subject.adapter, chat(**fields))
    body = http_subject.twin.bodies[-1]
    own = OWN_LIMIT.get(http_subject.engine, "max_tokens")
    assert body.get(own) == limit
    assert ({"max_tokens", "max_completion_tokens"} & set(body)) == ({own} if limit else set())


async def test_a_completion_asks_for_16_tokens_unless_told_otherwise(http_subject: HTTPSubject) -> None:
    await collect(http_subject.adapter, completion())
    await collect(http_subject.adapter, completion(max_tokens=3))
    assert [body["max_tokens"] for body in http_subject.twin.bodies] == [16, 3]
    assert http_subject.twin.requests[-1].path == COMPLETIONS


@pytest.mark.replay("W11")
async def test_tool_arguments_given_as_an_object_go_out_as_a_string(http_subject: HTTPSubject) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    await collect(http_subject.adapter, chat(messages=[{"role": "assistant", "tool_calls": [call]}]))
    sent = http_subject.twin.bodies[-1]["messages"][0]["tool_calls"][0]["function"]
    assert sent == {"name": "f", "arguments": '{"x":1}'}


async def test_empty_tools_are_not_sent_and_a_choice_among_none_is_refused(http_subject: HTTPSubject) -> None:
    await collect(http_subject.adapter, chat(tools=[], tool_choice="auto", parallel_tool_calls=True))
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(http_subject.twin.bodies[-1])
    with pytest.raises(GoodgateError) as caught:
        await collect(http_subject.adapter, chat(tool_choice="required"))
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


def test_vllm_gets_a_seed_that_never_means_random() -> None:
    cls = adapter_class("vllm")
    adapter = cls(cls.Options(url="http://127.0.0.1:1"))
    assert [adapter.body(chat(seed=seed), "m")["seed"] for seed in (-1, 0, -2)] == [2**63 - 1, 0, -2]  # type: ignore[attr-defined]


# ------------------------------ engines with a text route of their own


def generations(subject: GenerateSubject) -> list[dict[str, Any]]:
    """The bodies of generations; farewells go elsewhere."""
    return [json.loads(each.body) for each in subject.twin.requests if each.path == subject.path]


KNOWN_ON_TEXT_ROUTES = {
    "sglang-native": {
        "text", "sampling_params", "stream", "rid", "max_new_tokens", "min_new_tokens", "temperature", "top_p",
        "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop", "n", "json_schema",
        "ignore_eos", "logit_bias", "sampling_seed",
    },
    "tgi-generate": {
        "inputs", "parameters", "temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p",
        "do_sample", "max_new_tokens", "stop", "details", "seed", "top_n_tokens", "grammar",
    },
    "triton-llmapi": {
        "text_input", "streaming", "return_finish_reason",
        *(
            f"sampling_param_{name}"
            for name in (
                "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "stop", "seed",
                "exclude_input_from_output",
            )
        ),
    },
    "triton-ensemble": {
        "text_input", "max_tokens", "stop_words", "temperature", "top_k", "top_p", "repetition_penalty", "min_tokens",
        "presence_penalty", "frequency_penalty", "seed", "exclude_input_in_output", "stream",
        "return_num_input_tokens", "return_num_output_tokens",
    },
}  # fmt: skip


@pytest.mark.replay("W19")
@pytest.mark.parametrize("field", CHAT_FIELDS)
async def test_every_field_reaches_a_text_route_under_a_name_it_knows_or_is_refused(
    generate_subject: GenerateSubject, field: str, request: pytest.FixtureRequest
) -> None:
    value = CHAT_FIELDS[field]
    if field == "response_format":
        value = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    fields = {"logprobs": True} if field == "top_logprobs" else {}
    fields[field] = value
    if field == "parallel_tool_calls":
        fields["tools"] = CHAT_FIELDS["tools"]
    if field == "n":
        generate_subject.answers(num_choices=2)
    if field in generate_subject.adapter.capabilities.parameters | INFORMATIONAL:
        await collect(generate_subject.adapter, chat(**fields))
        body, *others = (flat(each) for each in generations(generate_subject))
        name = request.node.callspec.params["generate_subject"]
        assert set(body) <= KNOWN_ON_TEXT_ROUTES[name]
        fans_out = field == "n" and name != "sglang-native"
        assert len(others) == fans_out
        changes_form = field in {"response_format", "logprobs", "top_logprobs", "n"} | INFORMATIONAL
        assert changes_form or any(sent == value and type(sent) is type(value) for sent in body.values())
    else:
        with pytest.raises(UnsupportedParameter) as caught:
            await collect(generate_subject.adapter, chat(**fields))
        assert caught.value.param in fields
        assert generate_subject.twin.bodies == []


@pytest.mark.replay("W20")
@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6), ({"max_tokens": 5, "max_completion_tokens": 6}, 6)],
)
async def test_either_name_of_the_limit_arrives_under_a_text_routes_own(
    generate_subject: GenerateSubject, fields: dict[str, Any], limit: int
) -> None:
    await collect(generate_subject.adapter, chat(**fields))
    body = flat(generations(generate_subject)[-1])
    names = {"max_tokens", "max_new_tokens", "sampling_param_max_tokens"} & set(body)
    assert [body[name] for name in names] == [limit]


async def test_without_a_limit_the_engines_own_short_default_never_applies(generate_subject: GenerateSubject) -> None:
    await collect(generate_subject.adapter, chat())
    body = flat(generations(generate_subject)[-1])
    if generate_subject.engine == "triton_server":
        assert 1024 in {body.get("max_tokens"), body.get("sampling_param_max_tokens")}
    else:
        assert body["max_new_tokens"] is None  # not absent: both read null as "until the context ends"


@pytest.mark.replay("W10", "W11", "W12")
async def test_messages_become_the_models_own_prompt(generate_subject: GenerateSubject) -> None:
    """Parts are joined, absent content is empty, tool arguments are an object to the template."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": 2}}}]},
        {"role": "assistant", "content": []},
    ]
    await collect(generate_subject.adapter, chat(messages=messages))
    body = generations(generate_subject)[-1]
    prompt = body.get("text") or body.get("inputs") or body.get("text_input")
    # Engines put the beginning-of-sequence token in front themselves, so the template's is left out.
    assert prompt == ('[system]Be brief.[user]Hi there[assistant]{"x": 1}[assistant]{"x": 2}[assistant][assistant]')


async def test_a_text_route_without_a_template_refuses_chats_and_serves_completions() -> None:
    for name, options in (("tgi", {"route": "generate"}), ("sglang", {"route": "native"}), ("triton_server", {})):
        async with engine(name, model="small", **options) as (adapter, twin):
            with pytest.raises(UnsupportedParameter, match="messages"):
                await collect(adapter, chat())
            assert twin.bodies == []
            assert not adapter.capabilities.chat


async def test_choices_that_are_generations_of_their_own_get_seeds_of_their_own(
    generate_subject: GenerateSubject,
) -> None:
    generate_subject.answers(num_choices=2)
    await collect(generate_subject.adapter, chat(n=2, seed=7, max_tokens=2))
    bodies = [flat(body) for body in generations(generate_subject)]
    seeds = [body.get("seed", body.get("sampling_param_seed", body.get("sampling_seed"))) for body in bodies]
    assert sorted(seeds) == ([7] if generate_subject.engine == "sglang" else [7, 8])


async def test_a_template_that_is_not_there_is_told_at_the_start() -> None:
    for name in ("tgi", "triton_server"):
        with pytest.raises(EngineUnavailable, match=r"no chat template at /nowhere/x\.jinja"):
            async with engine(name, chat_template="/nowhere/x.jinja"):
                pass
