"""A native engine's stream that breaks off goes on elsewhere, and its client sees what it would have seen anyway. A
model of random weights writes halves of characters and whatever else makes a text hard to go on with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.rig import Gateway, Start, model, until
from tests.native_engine.tiny_llama import CHAT_TEMPLATE, tiny_config, write_tiny_llama

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
USAGE = {"stream_options": {"include_usage": True}}
MARK = b'"progress"'


@dataclass
class Cutting:
    """A way to an engine that is cut after so many pieces of each answer."""

    port: int
    after: int = 10**9
    num_cuts: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers += [writer, upstream]
        forward = asyncio.ensure_future(_pipe(reader, upstream))
        try:
            num_pieces = 0
            while data := await upstream_reader.read(65536):
                if data.startswith(b"HTTP/1.1 "):
                    num_pieces = 0  # of another answer on the same connection
                first, *others = data.split(MARK)
                writer.write(first)
                for rest in others:
                    num_pieces += 1
                    if num_pieces > self.after:
                        self.num_cuts += 1
                        await asyncio.sleep(0.3)  # so that the client has its first byte: before it, a break is a retry
                        return  # not a reset, which on a busy machine takes with it what has not been read yet
                    writer.write(MARK + rest)
        except ConnectionError:
            pass  # the gateway has left
        finally:
            forward.cancel()
            await asyncio.gather(forward, return_exceptions=True)
            upstream.transport.abort()
            writer.close()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)


Cut = Callable[[Gateway], Awaitable[tuple[Cutting, int]]]


@pytest.fixture
async def cut() -> AsyncIterator[Cut]:
    async with AsyncExitStack() as stack:

        async def before(gateway: Gateway) -> tuple[Cutting, int]:
            cutting = Cutting(gateway.port)
            server = await asyncio.start_server(cutting.serve, "127.0.0.1", 0)

            async def stop() -> None:
                server.close()
                for writer in cutting.writers:
                    writer.transport.abort()

            stack.push_async_callback(stop)
            return cutting, server.sockets[0].getsockname()[1]

        yield before


def peer(name: str, port: int, **options: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}"
    return {
        "engine": "goodgate_peer",
        "name": name,
        "options": {"url": url, "model": "m", "continues": True, **options},
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    config = tiny_config(max_model_len=1024)
    return [
        write_tiny_llama(tmp_path_factory.mktemp(name), config, chat_template=CHAT_TEMPLATE) for name in ("one", "two")
    ]


def native(folder: Path, **options: Any) -> dict[str, Any]:
    home = folder.parent / "home"  # kernels are compiled once
    home.mkdir(exist_ok=True)
    options = {"model": str(folder), "home": str(home), "kv_cache_mib": 32, "num_threads": 1, **options}
    return {"engine": "native", "options": options}


async def started(start: Start, replica: dict[str, Any]) -> Gateway:
    """To load a model takes its time on a busy machine."""
    engine = await start(model(replica), is_ready=False)
    await until(lambda: engine.fleet.models["m"].is_ready, timeout_s=60)
    return engine


@dataclass
class Pair:
    gateway: Gateway
    cutting: Cutting
    engine: Gateway

    async def told(self, after: int | None, **fields: Any) -> tuple[str, str | None, dict[str, Any] | None]:
        """Text, finish reason or code of the failure, and usage, where the way is cut after so many pieces."""
        self.cutting.after = 10**9 if after is None else after
        self.gateway.fleet.models["m"].turn = 0
        events = await self.gateway.events(**{**GREEDY, **USAGE, **fields})
        assert "progress" not in "".join(events)
        text, end, usage = "", None, None
        for event in events:
            if event == "[DONE]":
                return text, end, usage
            data = json.loads(event)
            if "error" in data:
                return text, data["error"]["code"], None
            usage = data["usage"] or usage
            for choice in data["choices"]:
                text += choice["delta"].get("content") or ""
                end = choice["finish_reason"] or end
        raise AssertionError("neither an error nor [DONE]")


@pytest.fixture
async def pair(start: Start, cut: Cut, folders: list[Path]) -> Pair:
    engine = await started(start, native(folders[0]))
    cutting, port = await cut(engine)
    replicas = peer("first", port), peer("second", engine.port)
    return Pair(await start(model(*replicas, routing="round_robin", continuation=True)), cutting, engine)


@pytest.mark.replay("F06")
async def test_f06_a_greedy_stream_that_breaks_goes_on_with_the_same_tokens(pair: Pair) -> None:
    expected, expected_end, expected_usage = await pair.told(None)
    assert expected_usage is not None
    for num_broken, after in enumerate((1, 10, 25), start=1):  # 60 tokens make some 40 pieces
        text, end, usage = await pair.told(after)
        assert pair.cutting.num_cuts == num_broken
        assert (text, end) == (expected, expected_end)
        assert usage is not None
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == expected_usage[name]  # the prompt once, and the tokens of both
    async with pair.gateway.client.get(f"{pair.gateway.url}/metrics") as response:
        assert 'goodgate_continuations_total{model="m",outcome="ok"} 3.0' in await response.text()
    await until(lambda: pair.gateway.open_requests.in_flight == 0)
    await until(lambda: pair.engine.open_requests.in_flight == 0)


async def test_a_stop_string_that_lies_across_the_break_still_ends_the_answer(pair: Pair) -> None:
    text, _, _ = await pair.told(None)
    for at in (8, 20):
        stop = text[at : at + 4]
        whole = await pair.told(None, stop=[stop])
        for after in (1, 5):
            assert (await pair.told(after, stop=[stop]))[:2] == whole[:2]


async def test_wherever_it_breaks_the_text_is_the_same(pair: Pair) -> None:
    whole = (await pair.told(None, max_tokens=24))[:2]
    for after in range(2, 24, 5):
        assert (await pair.told(after, max_tokens=24))[:2] == whole


@pytest.mark.replay("F06")
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "seed": 7},
        {"presence_penalty": 1.0},
        {"n": 2},
        {"repetition_penalty": 1.1},
    ],
)
async def test_f06_what_the_tokens_alone_do_not_decide_is_not_continued_but_told(
    start: Start, cut: Cut, folders: list[Path], fields: dict[str, Any]
) -> None:
    engine = await started(start, native(folders[0]))
    cutting, port = await cut(engine)
    gateway = await start(
        model(peer("first", port), peer("second", engine.port), routing="round_robin", continuation=True)
    )
    body = {**GREEDY, "max_tokens": 400, **fields}
    events = asyncio.ensure_future(gateway.events(**body))
    await until(lambda: engine.open_requests.in_flight > 0)
    await asyncio.sleep(0.1)
    for writer in cutting.writers:
        writer.transport.abort()
    *_, last = await events
    assert json.loads(last)["error"]["code"] == "stream_interrupted"


async def test_weights_that_differ_in_one_bit_do_not_go_on(start: Start, cut: Cut, folders: list[Path]) -> None:
    """Files of the same names and sizes."""
    weights = folders[1] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    one, two = await started(start, native(folders[0])), await started(start, native(folders[1]))
    cutting, port = await cut(one)
    gateway = await start(
        model(peer("first", port), peer("second", two.port), routing="round_robin", continuation=True)
    )
    _, end, _ = await Pair(gateway, cutting, one).told(5)
    assert end == "stream_interrupted"


async def test_without_the_key_a_break_is_told(start: Start, cut: Cut, folders: list[Path]) -> None:
    engine = await started(start, native(folders[0]))
    gateway = await start(model(peer("first", (await cut(engine))[1]), peer("second", engine.port)))
    events = await gateway.events(**GREEDY)
    assert events[-1] == "[DONE]"
    assert "progress" not in "".join(events)
