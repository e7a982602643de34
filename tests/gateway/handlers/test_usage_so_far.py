"""`stream_options.continuous_usage_stats` at the gateway: each event has the engine's count, or the request is refused
by name. Benchmarks send it with every request."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.gateway.rig import Reply, Script, Start, Upstream, fake, fake_model, model

OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
UpstreamOf = Callable[[Script], Awaitable[Upstream]]


def counts(events: list[str]) -> list[int | None]:
    assert events[-1] == "[DONE]"
    usages = [json.loads(event)["usage"] for event in events[:-1]]
    return [usage and usage["completion_tokens"] for usage in usages]


async def test_every_event_of_a_chat_has_the_usage_so_far(start: Start) -> None:
    gateway = await start(fake_model(tokens=3))
    events = await gateway.events(stream_options=OPTIONS)
    assert counts(events) == [0, 1, 2, 3, 3, 3]  # role, three tokens, the finish reason, the account
    usages = [json.loads(event)["usage"] for event in events[:-1]]
    assert {usage["prompt_tokens"] for usage in usages} == {usages[-1]["prompt_tokens"]}
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)


async def test_every_event_of_a_completion_has_the_usage_so_far(start: Start) -> None:
    gateway = await start(fake_model(tokens=3))
    fields: dict[str, Any] = {"messages": None, "prompt": "Hi", "max_tokens": 3}
    assert counts(await gateway.events("/v1/completions", **fields, stream_options=OPTIONS)) == [1, 2, 3, 3, 3]


async def test_without_it_only_the_last_event_has_usage(start: Start) -> None:
    gateway = await start(fake_model(tokens=3))
    assert counts(await gateway.events(stream_options={"include_usage": True})) == [None] * 5 + [3]


MARK = ',"usage":null}\n\n'


async def test_the_counts_of_an_engine_pass_through_and_a_text_that_looks_like_our_mark_stays(
    start: Start, upstream_of: UpstreamOf
) -> None:
    async def script(reply: Reply) -> None:
        await reply.begin()
        for text, num_tokens, reason in [("a" + MARK, 4, None), (MARK, 9, None), ("", 10, "stop")]:
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
            usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
            await reply.event(json.dumps({"choices": [choice], "usage": usage}).encode())
        await reply.usage(prompt_tokens=7, completion_tokens=10)
        await reply.done()

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    events = await gateway.events(stream_options=OPTIONS)
    assert json.loads(upstream.requests[0].body)["stream_options"] == OPTIONS
    assert counts(events) == [0, 4, 9, 10, 10]
    said = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-2])
    assert said == "a" + MARK + MARK


async def test_an_engine_that_does_not_count_is_named_in_a_400(start: Start, upstream_of: UpstreamOf) -> None:
    async def script(reply: Reply) -> None:
        await reply.answer("a")

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica(engine="llama_cpp")))
    status, body, _ = await gateway.chat(stream=True, stream_options=OPTIONS)
    assert status == 400
    assert body["error"]["param"] == "stream_options.continuous_usage_stats"
    assert "llama_cpp" in body["error"]["message"]
    assert upstream.num_generations == 0


async def test_where_one_replica_counts_and_another_does_not_the_one_that_does_answers(
    start: Start, upstream_of: UpstreamOf
) -> None:
    async def script(reply: Reply) -> None:
        await reply.answer("a")

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica(engine="llama_cpp"), fake("counts", tokens=3)))
    for _ in range(4):
        assert counts(await gateway.events(stream_options=OPTIONS))[-1] == 3
    assert upstream.num_generations == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stream_options": {"continuous_usage_stats": True}}, "include_usage"),
        ({"stream_options": OPTIONS, "n": 2}, "one choice"),
        ({"stream_options": {**OPTIONS, "continuous_usage_stats": 1}}, "bool"),
    ],
)
async def test_what_cannot_be_counted_is_refused(start: Start, fields: dict[str, Any], says: str) -> None:
    gateway = await start(fake_model())
    status, body, _ = await gateway.chat(stream=True, **fields)
    assert status == 400
    assert body["error"]["param"] == "stream_options"
    assert says in body["error"]["message"]


async def test_several_prompts_are_refused_too(start: Start) -> None:
    gateway = await start(fake_model())
    body = {"model": "m", "prompt": ["a", "b"], "max_tokens": 2, "stream": True, "stream_options": OPTIONS}
    status, answer, _ = await gateway.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "stream_options")
