"""OpenAI's own answers on /v1/responses, recorded: the same requests, put to the gateway, get the same answers.

An engine says, as a chat, what the recorded model said. What is compared is everything but ids, times, counts, and the
fields that a server may leave out. The recordings are no part of the repository: see tests/gateway/openai_responses.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.handlers.test_responses import UpstreamOf, delta, sent
from tests.gateway.openai_responses import FOLDER, check, check_event
from tests.gateway.rig import Reply, Script, Start, model

RECORDED = None if FOLDER is None else FOLDER / "sse/simonw-llm"
# A server's own affair, or fields that the description does not ask for.
OPTIONAL = {
    "id", "item_id", "sequence_number", "created_at", "completed_at", "model", "usage", "obfuscation", "phase",
    "billing", "moderation", "user", "frequency_penalty", "presence_penalty", "prompt_cache_retention", "temperature",
    "top_p", "verbosity", "strict", "additionalProperties", "encrypted_content", "service_tier",
}  # fmt: skip
ONLY_OURS = {"response.function_call_arguments.done": {"name"}}  # the description asks for it, the recordings are older


def recordings(pattern: str) -> list[Any]:
    if RECORDED is None or not RECORDED.is_dir():
        return [pytest.param(None, marks=pytest.mark.skip(reason="no folder of recorded replies (shared/data)"))]
    files = sorted(RECORDED.glob(pattern))
    assert files, f"{RECORDED} holds none of {pattern}"
    return [pytest.param(file, id=file.name) for file in files]


def read(file: Path) -> str:
    return file.read_text()


def request_of(file: Path) -> dict[str, Any]:
    name = file.name.removesuffix(".sse").removesuffix(".response.json")
    recorded = json.loads(file.with_name(f"{name}.request.json").read_text())
    return {**recorded["body"], "model": "m"}


def comparable(value: Any) -> Any:
    if isinstance(value, list):
        return [comparable(each) for each in value]
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items() if key not in OPTIONAL}
    return value


def events_in(text: str) -> Iterator[dict[str, Any]]:
    for block in text.strip().split("\n\n"):
        yield json.loads(block.split("\ndata: ")[1])


def as_engine(output: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> Script:
    """An engine that says it in the same pieces, as a chat."""

    async def script(reply: Reply) -> None:
        await reply.begin()
        num_calls = 0
        for index, item in enumerate(output):
            pieces = [each["delta"] for each in deltas if each["output_index"] == index]
            if item["type"] == "message":
                for piece in pieces or [item["content"][0]["text"]]:
                    await delta(reply, content=piece)
            elif item["type"] == "function_call":
                head = {"index": num_calls, "id": item["call_id"], "type": "function"}
                await delta(reply, tool_calls=[{**head, "function": {"name": item["name"], "arguments": ""}}])
                for piece in pieces or [item["arguments"]]:
                    await delta(reply, tool_calls=[{"index": num_calls, "function": {"arguments": piece}}])
                num_calls += 1
        await reply.finish("tool_calls" if num_calls else "stop")
        await reply.usage()
        await reply.done()

    return script


def without_reasoning(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's reasoning is encrypted, so an engine cannot say it."""
    return [item for item in output if item["type"] != "reasoning"]


@pytest.mark.parametrize("file", recordings("responses_*.sse"))
async def test_a_recorded_stream_is_told_again(start: Start, upstream_of: UpstreamOf, file: Path) -> None:
    recorded = list(events_in(read(file)))
    output = recorded[-1]["response"]["output"]
    assert without_reasoning(output) == output
    deltas = [event for event in recorded if event["type"].endswith(".delta")]
    gateway = await start(model((await upstream_of(as_engine(output, deltas))).replica()))
    async with gateway.client.post(f"{gateway.url}/v1/responses", json=request_of(file)) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        ours = list(events_in(await response.text()))
    assert [event["type"] for event in ours] == [event["type"] for event in recorded]
    for told, wanted in zip(ours, recorded, strict=True):
        check_event(told)
        more = set(told) - set(wanted)
        assert more == ONLY_OURS.get(told["type"], set())
        assert comparable({key: told[key] for key in set(told) - more}) == comparable(wanted)
        assert told["sequence_number"] == wanted["sequence_number"]


@pytest.mark.parametrize("file", recordings("responses_*.response.json"))
async def test_a_recorded_answer_is_given_again(start: Start, upstream_of: UpstreamOf, file: Path) -> None:
    recorded = json.loads(read(file))["body"]
    output = without_reasoning(recorded["output"])
    upstream = await upstream_of(as_engine(output, []))
    gateway = await start(model(upstream.replica()))
    asked = request_of(file)
    status, ours, _ = await gateway.post("/v1/responses", asked)
    assert status == 200, ours
    check("Response", ours)
    assert comparable(ours) == comparable({**recorded, "output": output})
    assert set(recorded["usage"]) == set(ours["usage"])
    roles = {"function_call": "assistant", "function_call_output": "tool"}
    wanted = [roles.get(item.get("type", "message"), item.get("role")) for item in asked["input"]]
    turns = [turn["role"] for turn in sent(upstream, 1)["messages"]]
    assert turns == [role for role in wanted if role is not None]
