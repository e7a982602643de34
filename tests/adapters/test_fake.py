"""The fake engine is repeatable, keeps its pace, and fails exactly as it was told."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.base import Load
from adapters.errors import EngineFailed, GoodgateError, Overloaded, StreamInterrupted
from adapters.fake import Adapter, FakeOptions, answer, fault_of
from adapters.types import ChatRequest, Chunk, EmbeddingRequest, TokenizeRequest


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi there"}], **fields}
    return msgspec.convert(body, ChatRequest)


async def started(**dials: Any) -> Adapter:
    adapter = Adapter(msgspec.convert({"ttft_ms": 0, "itl_ms": 0, **dials}, FakeOptions))
    await adapter.start()
    return adapter


async def collect(adapter: Adapter, request: ChatRequest, request_id: str = "r") -> list[Chunk]:
    return [chunk async for chunk in adapter.generate(request, request_id=request_id)]


def text_of(chunks: list[Chunk], index: int = 0) -> str:
    return "".join(chunk.text for chunk in chunks if chunk.index == index)


async def test_equal_prompt_and_seed_give_equal_text_and_others_do_not() -> None:
    adapter = await started()
    same = [text_of(await collect(adapter, chat())) for _ in range(2)]
    other_seed = text_of(await collect(adapter, chat(seed=1)))
    two = await collect(adapter, chat(n=2))
    assert same[0] == same[1] != other_seed
    assert text_of(two, 0) == same[0] != text_of(two, 1)


@pytest.mark.parametrize(
    ("fields", "num_tokens", "reason"),
    [
        ({}, 32, "stop"),
        ({"max_tokens": 5}, 5, "length"),
        ({"max_tokens": 100}, 32, "stop"),
        ({"max_tokens": 100, "ignore_eos": True}, 100, "length"),
        ({"min_tokens": 50}, 50, "stop"),
        ({"max_completion_tokens": 3, "max_tokens": 9}, 3, "length"),
    ],
)
async def test_lengths_are_those_asked_for(fields: dict[str, Any], num_tokens: int, reason: str) -> None:
    chunks = await collect(await started(), chat(**fields))
    assert (len(text_of(chunks).split()), chunks[-2].finish_reason) == (num_tokens, reason)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == num_tokens


@pytest.mark.replay("W05")
@given(st.integers(0, 2**31), st.integers(0, 20), st.integers(1, 6))
def test_a_stop_string_never_leaks_wherever_it_falls(seed: int, start: int, length: int) -> None:
    text = "".join(answer(chat(), FakeOptions(seed=seed), 0).pieces)
    stop = text[start : start + length]
    stopped = answer(chat(stop=[stop]), FakeOptions(seed=seed), 0)
    assert "".join(stopped.pieces) == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"


async def test_tokens_leave_at_their_own_moments_however_slow_the_reader() -> None:
    adapter = await started(ttft_ms=50, itl_ms=20, tokens=12)
    begun = time.monotonic()
    stamps = []
    async for chunk in adapter.generate(chat(), request_id="r"):
        if chunk.text:
            stamps.append(time.monotonic() - begun)
            await asyncio.sleep(0.015)
    for number, stamp in enumerate(stamps):
        assert stamp >= 0.050 + number * 0.020 - 0.002
    assert median(b - a for a, b in pairwise(stamps)) < 0.028  # waiting after each token would make it 35 ms


async def test_only_so_many_are_served_at_a_time_and_the_rest_queue_in_order() -> None:
    adapter = await started(ttft_ms=20, tokens=1, max_concurrent=1, max_queued=2)
    order: list[str] = []

    async def one(name: str) -> None:
        await collect(adapter, chat(), name)
        order.append(name)

    tasks = [asyncio.create_task(one(name)) for name in "abc"]
    await asyncio.sleep(0.005)
    assert await adapter.load() == Load(running=1, waiting=2)
    with pytest.raises(Overloaded) as caught:
        await collect(adapter, chat(), "d")
    assert caught.value.retry_after_s == 1
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]
    assert await adapter.load() == Load(running=0, waiting=0)


async def test_leaving_the_queue_frees_the_place_in_it() -> None:
    adapter = await started(ttft_ms=30, tokens=1, max_concurrent=1)
    first = asyncio.create_task(collect(adapter, chat(), "a"))
    second = asyncio.create_task(collect(adapter, chat(), "b"))
    await asyncio.sleep(0.005)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert await adapter.load() == Load(running=1, waiting=0)
    await first


@pytest.mark.parametrize(
    ("kind", "error", "num_pieces"),
    [
        ("error", EngineFailed, 0),
        ("overloaded", Overloaded, 0),
        ("error_event", EngineFailed, 16),
        ("cut", StreamInterrupted, 16),
    ],
)
async def test_each_fault_comes_when_and_as_it_should(kind: str, error: type[GoodgateError], num_pieces: int) -> None:
    adapter = await started(fail_rate=1, fail_kinds=[kind])
    seen: list[Chunk] = []

    async def read() -> None:
        async for chunk in adapter.generate(chat(), request_id="r"):
            seen.append(chunk)

    with pytest.raises(error):
        await read()
    assert len(seen) == num_pieces
    assert await adapter.load() == Load(running=0, waiting=0)


async def test_a_stall_lasts_until_the_caller_leaves() -> None:
    adapter = await started(fail_rate=1, fail_kinds=["stall"])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collect(adapter, chat()), 0.1)
    assert await adapter.load() == Load(running=0, waiting=0)


def test_faults_are_repeatable_and_as_frequent_as_told() -> None:
    dials = msgspec.convert({"fail_rate": 0.2, "fail_kinds": ["error", "cut"], "seed": 3}, FakeOptions)
    drawn = [fault_of(f"request-{number}", dials) for number in range(20_000)]
    assert drawn == [fault_of(f"request-{number}", dials) for number in range(20_000)]
    for kind in ("error", "cut"):
        assert 1800 < drawn.count(kind) < 2200
    assert {fault_of(f"request-{number}", FakeOptions()) for number in range(1000)} == {None}


@pytest.mark.parametrize(
    "dials", [{"fail_rate": 2}, {"tokens": 0}, {"fail_kinds": ["bad"]}, {"fail_kinds": []}, {"x": 1}]
)
def test_dials_out_of_range_are_refused(dials: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(dials, FakeOptions)


async def test_texts_that_share_words_lie_close_and_every_vector_has_length_1() -> None:
    adapter = await started(dimensions=256)
    texts = ["the river follows one road", "one road follows the river near", "morning answers every signal", "  "]
    told = await adapter.embed(EmbeddingRequest(model="fake", input=list(texts)))
    assert told.prompt_tokens == 5 + 6 + 4

    def likeness(one: int, other: int) -> float:
        return sum(a * b for a, b in zip(told.vectors[one], told.vectors[other], strict=True))

    assert [likeness(index, index) for index in range(4)] == pytest.approx([1.0] * 4)
    assert likeness(0, 1) > 0.8 > 0.3 > likeness(0, 2)


async def test_words_that_it_does_not_know_have_ids_of_their_own_and_read_back_as_unknown() -> None:
    adapter = await started()
    ids = (await adapter.tokenize(TokenizeRequest(model="fake", prompt="the zebra follows a zebra"))).ids
    assert ids[1] == ids[4]
    assert len(set(ids)) == 4
    assert await adapter.detokenize(ids) == "the <unk> follows a <unk>"


async def test_an_embedding_waits_for_a_slot_and_can_be_left() -> None:
    adapter = await started(max_concurrent=1, ttft_ms=60_000)
    tasks = [asyncio.create_task(adapter.embed(EmbeddingRequest(model="fake", input=["the"]))) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert await adapter.load() == Load(running=1, waiting=1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await adapter.load() == Load(running=0, waiting=0)
