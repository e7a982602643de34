"""Long events and long prompts through an adapter: time grows with their length, not with its square."""

from __future__ import annotations

import json
import time

import msgspec

from adapters.conformance import chat, collect
from adapters.vllm import Adapter
from tests.adapters.hop.engine import Engine, Step

KIB = 1 << 10
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event_of(num_chars: int) -> bytes:
    choice = {"index": 0, "delta": {"content": "x" * num_chars}, "finish_reason": "stop"}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def in_tiny_writes(data: bytes, size: int) -> list[Step]:
    """Each is a chunk of its own, and the loop turns after each, so that each is a read of its own."""
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    steps: list[Step] = [HEAD]
    for piece in pieces:
        steps += [b"%x\r\n%b\r\n" % (len(piece), piece), 0.0]
    return [*steps, b"0\r\n\r\n"]


async def seconds_for(steps: list[Step], prompt: str, expected: int) -> float:
    async with Engine(steps) as engine:
        adapter = Adapter(msgspec.convert({"url": engine.url, "model": "small"}, Adapter.Options))
        await adapter.start()
        begun = time.process_time()
        chunks = await collect(adapter, chat(messages=[{"role": "user", "content": prompt}]))
        took = time.process_time() - begun
        await adapter.close()
    assert sum(len(chunk.text) for chunk in chunks) == expected
    return took


async def test_an_event_of_1_mib_in_tiny_writes_takes_linear_time() -> None:
    async def seconds(num_chars: int) -> float:
        return await seconds_for(in_tiny_writes(event_of(num_chars), 256), "Hi", num_chars)

    await seconds(16 * KIB)
    small, large = await seconds(128 * KIB), await seconds(1024 * KIB)
    assert large < 2.5 * 8 * small


async def test_a_prompt_of_8_mib_takes_linear_time() -> None:
    async def seconds(num_chars: int) -> float:
        return await seconds_for(
            [HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event_of(1)), event_of(1))], "x" * num_chars, 1
        )

    await seconds(KIB)
    small, large = await seconds(1024 * KIB), await seconds(8192 * KIB)
    assert large < 3 * 8 * small
