"""A step of the native engine that cannot be computed, for want of memory for one: who was in it, who comes next."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.rig import Gateway, Start, model, until
from tests.native_engine.tiny_llama import write_tiny_chat_llama

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_llama(tmp_path_factory.mktemp("tiny"))


async def serving(
    start: Start, folder: Path, home: Path, *, dials: dict[str, Any] | None = None, **fields: Any
) -> Gateway:
    options = {"model": str(folder), "home": str(home), "kv_cache_mib": 32, "num_threads": 1, "max_num_seqs": 16}
    return await start(model({"engine": "native", "options": {**options, **(dials or {})}}, **fields))


def native(gateway: Gateway) -> Any:
    return gateway.fleet.replicas[0].started_adapter._engine  # type: ignore[attr-defined]


def fail_a_step(gateway: Gateway, number: int) -> None:
    """The step of this number, from now on and from 1, finds no memory."""
    runner = native(gateway)._engine._runner
    run, steps = runner.run, iter(range(1, 10**9))

    def run_or_fail(plan: Any) -> Any:
        if next(steps) == number:
            raise MemoryError("no room for the step")
        return run(plan)

    runner.run = run_or_fail


async def is_at_rest(gateway: Gateway) -> None:
    await until(lambda: gateway.open_requests.in_flight == 0)
    await until(lambda: native(gateway).stats().kv_blocks_used == 0)


@pytest.mark.replay("F30")
async def test_f30_a_step_that_fails_amid_a_stream_ends_that_one_and_the_next_is_served(
    start: Start, folder: Path, native_home: Path
) -> None:
    gateway = await serving(start, folder, native_home)
    expected = (await gateway.chat(**GREEDY))[1]["choices"]
    fail_a_step(gateway, 5)
    *texts, last = await gateway.events(**GREEDY)
    assert texts
    assert json.loads(last)["error"]["code"] == "stream_interrupted"
    await is_at_rest(gateway)
    assert gateway.fleet.replicas[0].is_ready
    status, body, _ = await gateway.chat(**GREEDY)
    assert (status, body["choices"]) == (200, expected)


@pytest.mark.replay("F30")
async def test_f30_a_step_that_fails_before_the_first_token_is_made_again(
    start: Start, folder: Path, native_home: Path
) -> None:
    gateway = await serving(start, folder, native_home)
    expected = (await gateway.chat(**GREEDY))[1]["choices"]
    fail_a_step(gateway, 1)
    assert (await gateway.events(**GREEDY))[-1] == "[DONE]"
    gateway = await serving(start, folder, native_home, max_attempts=1)
    fail_a_step(gateway, 1)
    status, body, _ = await gateway.chat(**GREEDY)
    assert (status, body["error"]["code"]) == (502, "engine_failed")
    assert body["error"]["message"] == "The native engine failed in a step; its log says why."
    status, body, _ = await gateway.chat(**GREEDY)
    assert (status, body["choices"]) == (200, expected)


@pytest.mark.replay("F30")
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_f30_fifty_streams_meet_a_failing_step_and_all_that_end_well_are_those_of_a_quiet_day(
    start: Start, folder: Path, native_home: Path, seed: int
) -> None:
    gateway = await serving(start, folder, native_home)
    expected = (await gateway.chat(**GREEDY))[1]["choices"][0]["message"]["content"]
    fail_a_step(gateway, 4 * seed)
    ends = await asyncio.gather(*(gateway.events(**GREEDY) for _ in range(50)))
    broken = [events[-1] for events in ends if events[-1] != "[DONE]"]
    assert 0 < len(broken) <= 16  # those in the step; those who waited, or had seen nothing, are served
    assert all("stream_interrupted" in last for last in broken)
    whole = [events for events in ends if events[-1] == "[DONE]"]
    for *events, _ in whole:
        pieces = [json.loads(each)["choices"][0]["delta"].get("content", "") for each in events]
        assert "".join(pieces) == expected
    await is_at_rest(gateway)
    assert (await gateway.chat(**GREEDY))[1]["choices"][0]["message"]["content"] == expected
