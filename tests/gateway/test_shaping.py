"""Defaults, limits and allowed parameters of a model, in every dialect and with the client's own words."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import InvalidRequest
from adapters.types import ChatRequest, CompletionRequest, GenerateRequest, Message
from gateway.config import ConfigError, parse_config
from gateway.shaping import Limits, Rules, shape_of, shaped
from tests.gateway.rig import HELLO, Reply, Script, Start, Upstream, fake_model, model

UpstreamOf = Callable[[Script], Awaitable[Upstream]]

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    COMPLETIONS: {"model": "m", "prompt": "Hello"},
    MESSAGES: {**HELLO, "max_tokens": 5},
    RESPONSES: {"model": "m", "input": "Hello"},
}


async def whole(reply: Reply) -> None:
    if reply.request.path == COMPLETIONS:
        await reply.begin()
        await reply.event(b'{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}')
        await reply.usage()
        await reply.done()
    else:
        await reply.answer("a")


async def sent(start: Start, upstream_of: UpstreamOf, path: str, body: dict[str, Any], **rules: Any) -> dict[str, Any]:
    upstream = await upstream_of(whole)
    gateway = await start(model(upstream.replica(), **rules))
    status, answer, _ = await gateway.post(path, {**BODIES[path], **body})
    assert status == 200, answer
    told: dict[str, Any] = json.loads(upstream.requests[-1].body)
    return told


# ------------------------------------------------------------------------------------------------------------ defaults


@pytest.mark.parametrize("path", BODIES)
async def test_a_default_stands_where_the_client_says_nothing(start: Start, upstream_of: UpstreamOf, path: str) -> None:
    body = await sent(start, upstream_of, path, {}, defaults={"temperature": 0.25, "top_p": 0.5, "stop": ["END"]})
    assert (body["temperature"], body["top_p"], body["stop"]) == (0.25, 0.5, ["END"])


@pytest.mark.parametrize("path", BODIES)
async def test_what_the_client_says_stands(start: Start, upstream_of: UpstreamOf, path: str) -> None:
    body = await sent(
        start, upstream_of, path, {"temperature": 0, "top_p": None}, defaults={"temperature": 1, "top_p": 0.5}
    )
    assert (body["temperature"], body["top_p"]) == (0, 0.5)  # null is nothing said


@pytest.mark.parametrize(
    ("path", "body", "name", "length"),
    [
        (CHAT, {}, "max_completion_tokens", 40),
        (CHAT, {"max_tokens": 7}, "max_completion_tokens", 7),
        (CHAT, {"max_completion_tokens": 7}, "max_completion_tokens", 7),
        (COMPLETIONS, {}, "max_tokens", 40),
        (COMPLETIONS, {"max_tokens": 7}, "max_tokens", 7),
        (MESSAGES, {"max_tokens": 7}, "max_completion_tokens", 7),
        (RESPONSES, {}, "max_completion_tokens", 40),
        (RESPONSES, {"max_output_tokens": 7}, "max_completion_tokens", 7),
    ],
)
async def test_a_default_length_is_one_for_both_of_its_names(
    start: Start, upstream_of: UpstreamOf, path: str, body: dict[str, Any], name: str, length: int
) -> None:
    told = await sent(start, upstream_of, path, body, defaults={"max_tokens": 40}, limits={"max_tokens": 50})
    assert told[name] == length
    assert ("max_tokens" in told) == (name == "max_tokens")


async def test_a_default_goes_to_the_routes_that_have_such_a_field(start: Start, upstream_of: UpstreamOf) -> None:
    defaults = {"logprobs": 2, "reasoning_effort": "low"}
    assert (await sent(start, upstream_of, CHAT, {}, defaults=defaults))["reasoning_effort"] == "low"
    body = await sent(start, upstream_of, COMPLETIONS, {}, defaults=defaults)
    assert body["logprobs"] == 2
    assert "reasoning_effort" not in body


async def test_defaults_of_the_model_that_was_asked_for_hold_for_its_fallback(
    start: Start, upstream_of: UpstreamOf
) -> None:
    async def broken(reply: Reply) -> None:
        await reply.status(500, b"{}", "Connection: close")

    bad, good = await upstream_of(broken), await upstream_of(whole)
    gateway = await start(
        model(bad.replica(), fallbacks=["n"], defaults={"temperature": 0.25}),
        model(good.replica(), name="n", defaults={"temperature": 0.75, "seed": 1}),
    )
    assert (await gateway.chat())[0] == 200
    body = json.loads(good.requests[-1].body)
    assert body["temperature"] == 0.25
    assert "seed" not in body


async def test_a_default_that_no_engine_honours_is_refused_like_any_other_wish(start: Start) -> None:
    gateway = await start(fake_model() | {"defaults": {"response_format": {"type": "json_object"}}})
    status, body, _ = await gateway.chat()
    assert (status, body["error"]["param"]) == (400, "response_format")


async def test_a_group_has_rules_of_its_own(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(whole)
    group = {"name": "g", "models": ["m"], "defaults": {"temperature": 0.5}}
    gateway = await start(model(upstream.replica(), defaults={"seed": 1}), groups=[group])
    await gateway.chat(model="g")
    body = json.loads(upstream.requests[-1].body)
    assert body["temperature"] == 0.5
    assert "seed" not in body


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"max_tokens": 51}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 51}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 5, "max_tokens": 51}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 51}, "max_tokens"),
        (MESSAGES, {"max_tokens": 51}, "max_tokens"),
        (RESPONSES, {"max_output_tokens": 51}, "max_output_tokens"),
        (CHAT, {"top_k": 5}, "top_k"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (MESSAGES, {"stop_sequences": ["END"]}, "stop_sequences"),
        (MESSAGES, {"top_k": 5}, "top_k"),
        (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_refusal_names_the_field_as_the_client_wrote_it(
    start: Start, path: str, body: dict[str, Any], field: str, is_stream: bool
) -> None:
    gateway = await start(
        fake_model() | {"limits": {"max_tokens": 50}, "allowed_parameters": ["temperature", "top_p", "n"]}
    )
    status, answer, _ = await gateway.post(path, {**BODIES[path], **body, "stream": is_stream})
    assert status == 400
    assert f"'{field}'" in answer["error"]["message"]
    assert "'m'" in answer["error"]["message"]
    if path != MESSAGES:
        assert answer["error"]["param"] == field
        assert answer["error"]["code"] == ("invalid_value" if "max" in field else "parameter_not_allowed")
    assert gateway.fleet.models["m"].turn == 0  # nothing was routed


@pytest.mark.parametrize("path", BODIES)
async def test_a_limit_is_what_an_open_end_gets(start: Start, upstream_of: UpstreamOf, path: str) -> None:
    body = await sent(start, upstream_of, path, {}, limits={"max_tokens": 9})
    told = body.get("max_completion_tokens", body.get("max_tokens"))
    assert told == (5 if path == MESSAGES else 9)


async def test_values_that_ask_for_nothing_need_no_permission(start: Start, upstream_of: UpstreamOf) -> None:
    habits = {"n": 1, "top_p": 1, "presence_penalty": 0, "logprobs": False, "user": "u", "metadata": {}}
    await sent(start, upstream_of, CHAT, habits, allowed_parameters=["temperature"])


async def test_a_default_that_is_refused_to_clients_is_a_fixed_value(start: Start, upstream_of: UpstreamOf) -> None:
    rules: dict[str, Any] = {"defaults": {"temperature": 0.5}, "refused_parameters": ["temperature"]}
    assert (await sent(start, upstream_of, CHAT, {}, **rules))["temperature"] == 0.5
    gateway = await start(fake_model() | rules)
    assert (await gateway.chat(temperature=0.1))[1]["error"]["param"] == "temperature"


async def test_every_prompt_of_a_list_is_shaped(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(whole)
    gateway = await start(model(upstream.replica(), defaults={"max_tokens": 3}))
    assert (await gateway.post(COMPLETIONS, {"model": "m", "prompt": ["a", "b"]}))[0] == 200
    assert [json.loads(each.body)["max_tokens"] for each in upstream.requests] == [3, 3]


# ------------------------------------------------------------------------------------------------------------ by itself


def test_without_rules_the_request_is_the_same_object() -> None:
    request = ChatRequest(model="m", messages=[Message(role="user", content="Hi")])
    assert shape_of("m", Rules()) is None
    assert shaped(request, None) is request


def test_the_clients_request_is_never_changed() -> None:
    request = ChatRequest(model="m", messages=[Message(role="user", content="Hi")])
    assert shaped(request, shape_of("m", Rules(defaults={"seed": 1}))) is not request
    assert not isinstance(request.seed, int)


lengths = st.one_of(st.none(), st.integers(1, 40))


@given(lengths, lengths, lengths, lengths, st.booleans())
def test_no_request_gets_past_the_limit(
    default: int | None, most: int | None, old: int | None, new: int | None, is_chat: bool
) -> None:
    if default is not None and most is not None and default > most:
        default = most
    rules = Rules(defaults={} if default is None else {"max_tokens": default}, limits=Limits(max_tokens=most))
    request: GenerateRequest = CompletionRequest(model="m", prompt="", max_tokens=old)
    if is_chat:
        messages = [Message(role="user", content="Hi")]
        request = ChatRequest(model="m", messages=messages, max_tokens=old, max_completion_tokens=new)
    wanted = request.token_limit
    try:
        limit = shaped(request, shape_of("m", rules)).token_limit
    except InvalidRequest:
        assert most is not None
        assert max(old or 0, new or 0) > most
        return
    assert most is None or (limit is not None and limit <= most)
    if old or (is_chat and new):
        assert limit == wanted  # what was asked for is given or refused, never cut
    elif default is not None:
        assert limit == default


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"defaults": {"temprature": 1}}, r"`defaults.temprature` cannot be set; did you mean `temperature`\?.*'m'"),
        ({"defaults": {"temperature": 3}}, r"`defaults.temperature` cannot be 3: Expected `float` <= 2"),
        ({"defaults": {"temperature": "0"}}, r"`defaults.temperature` cannot be '0': Expected `float"),
        ({"defaults": {"stop": [""]}}, r"`defaults.stop`"),
        ({"defaults": {"n": 2}}, r"`defaults.n` cannot be set"),
        ({"defaults": {"stream": True}}, r"`defaults.stream` cannot be set"),
        ({"defaults": {"messages": []}}, r"`defaults.messages` cannot be set"),
        ({"defaults": {"max_completion_tokens": 5}}, r"write `defaults.max_tokens`"),
        ({"defaults": {"max_tokens": 0}}, r"`defaults.max_tokens` cannot be 0"),
        ({"defaults": {"max_tokens": "many"}, "limits": {"max_tokens": 5}}, r"cannot be 'many'"),
        ({"defaults": {"max_tokens": 6}, "limits": {"max_tokens": 5}}, r"\(6\) is more than `limits.max_tokens` \(5\)"),
        ({"limits": {"max_tokens": 0}}, r"at `models\[0\].limits.max_tokens`|>= 1"),
        ({"limits": {"max_token": 5}}, r"did you mean `max_tokens`"),
        ({"allowed_parameters": ["temp"]}, r"`allowed_parameters` holds 'temp'"),
        ({"refused_parameters": ["max_tokens"]}, r"write `limits: {max_tokens: N}`"),
        ({"allowed_parameters": [], "refused_parameters": ["seed"]}, r"leave out `refused_parameters`"),
    ],
)
def test_rules_that_cannot_hold_are_explained(rules: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"models": [fake_model() | rules]})
