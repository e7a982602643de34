"""The fake engine's server: exact about time, plain about faults, and it speaks what OpenAI's client reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from adapters.fake import Adapter, FakeOptions
from adapters.launching.launch import EngineProcess, free_port
from adapters.models.model_store import Model
from adapters.servers.fake_server import Record, Server, take_request
from adapters.wire.sse import EventSplitter

BODY = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


@contextlib.asynccontextmanager
async def serving(record: Path | None = None, **dials: Any) -> AsyncIterator[str]:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(record.open("ab")) if record else None
        server = Server(msgspec.convert({"ttft_ms": 0, "itl_ms": 0, **dials}, FakeOptions), file)
        port = await server.start("127.0.0.1", 0)
        yield f"http://127.0.0.1:{port}"
        await server.stop()


@contextlib.asynccontextmanager
async def posted(url: str, **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    body = {**BODY, "stream": True, **fields}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/v1/chat/completions", json=body) as response:
        yield response


def records(path: Path) -> list[Record]:
    return [msgspec.json.decode(line, type=Record) for line in path.read_bytes().splitlines()]


async def open_raw(
    url: str, body: dict[str, Any], request_id: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a socket of our own, with nothing between us and its bytes."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    headers = ["POST /v1/chat/completions HTTP/1.1", f"X-Request-Id: {request_id}", f"Content-Length: {len(data)}"]
    writer.write("\r\n".join([*headers, "", ""]).encode() + data)
    return reader, writer


async def test_no_token_is_seen_before_its_stamp_and_all_soon_after(tmp_path: Path) -> None:
    path = tmp_path / "sent.jsonl"
    async with serving(path, ttft_ms=30, itl_ms=10, tokens=20) as url:
        sent_ns = time.monotonic_ns()
        reader, writer = await open_raw(url, {**BODY, "stream": True}, "r-7")
        seen: list[int] = []
        splitter = EventSplitter()
        while len(seen) < 20:
            chunk = await reader.read(65_536)
            now = time.monotonic_ns()
            payload = b"".join(line + b"\n" for line in chunk.split(b"\r\n"))  # drops the framing of HTTP chunks
            texts = [e for e in splitter.feed(payload) if b'"content":"' in e.data and b'"content":""' not in e.data]
            seen += [now] * len(texts)
        writer.close()
    (record,) = records(path)
    assert (record.request_id, record.outcome, len(record.token_ns)) == ("r-7", "ok", 20)
    assert sent_ns <= record.received_ns <= record.headers_ns <= record.token_ns[0]
    assert record.token_ns[0] - record.received_ns >= 29_000_000
    lags_ns = [seen_ns - stamp for stamp, seen_ns in zip(record.token_ns, seen, strict=True)]
    assert min(lags_ns) >= 0
    assert median(lags_ns) < 5_000_000
    gaps_ns = [later - earlier for earlier, later in pairwise(record.token_ns)]
    assert 8_000_000 < median(gaps_ns) < 12_000_000


async def test_the_official_client_reads_streams_and_whole_answers() -> None:
    async with serving(tokens=4) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        whole = await client.chat.completions.create(**BODY, n=2)  # type: ignore[call-overload]
        stream = await client.chat.completions.create(**BODY, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content != whole.choices[1].message.content
        assert (chunks[-1].usage.completion_tokens, whole.usage.completion_tokens) == (4, 8)
        completion = await client.completions.create(model="fake", prompt="x", max_tokens=2)
        assert (len(completion.choices[0].text.split()), completion.choices[0].finish_reason) == (2, "length")
        assert [model.id async for model in client.models.list()] == ["fake"]


@pytest.mark.parametrize(("kind", "status"), [("error", 500), ("overloaded", 503)])
async def test_a_fault_before_the_first_token_is_a_status(tmp_path: Path, kind: str, status: int) -> None:
    path = tmp_path / "sent.jsonl"
    async with serving(path, fail_rate=1, fail_kinds=[kind]) as url, posted(url) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"]
    (record,) = records(path)
    assert (record.outcome, record.token_ns) == ({500: "engine_failed", 503: "overloaded"}[status], [])


async def test_a_fault_half_way_is_an_event_without_done() -> None:
    async with serving(fail_rate=1, fail_kinds=["error_event"], tokens=4) as url, posted(url) as response:
        text = await response.text()
    events = [line for line in text.splitlines() if line]
    assert "error" in json.loads(events[-1].removeprefix("data: "))
    assert len(events) == 4  # the role, two tokens, the error
    assert "[DONE]" not in text


async def test_a_cut_is_a_broken_connection(tmp_path: Path) -> None:
    path = tmp_path / "sent.jsonl"
    async with serving(path, fail_rate=1, fail_kinds=["cut"], itl_ms=5) as url, posted(url) as response:
        with pytest.raises(aiohttp.ClientError):
            await response.text()
    assert [record.outcome for record in records(path)] == ["stream_interrupted"]


async def test_a_client_that_leaves_is_noticed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "sent.jsonl"
    async with serving(path, itl_ms=5, tokens=100_000, max_concurrent=1, max_model_len=10**6) as url:
        reader, writer = await open_raw(url, {**BODY, "stream": True}, "leaver")
        await reader.readuntil(b"content")
        writer.close()
        async with aiohttp.ClientSession() as client, asyncio.timeout(1):
            while "fake:requests_running 0" not in await (await client.get(f"{url}/metrics")).text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert [(record.request_id, record.outcome) for record in records(path)] == [("leaver", "client_gone")]


async def test_requests_on_one_connection_are_answered_one_after_the_other() -> None:
    async with serving(ttft_ms=5, tokens=2) as url:
        reader, writer = await open_raw(url, BODY, "a")
        writer.write(b"GET /health HTTP/1.1\r\n\r\nGET /nowhere HTTP/1.1\r\n\r\n")
        statuses = []
        for _ in range(3):
            head = await reader.readuntil(b"\r\n\r\n")
            statuses.append(int(head.split(b" ")[1]))
            await reader.readexactly(int(head.rpartition(b"Content-Length: ")[2]))
        writer.close()
    assert statuses == [200, 200, 404]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"nonsense\r\n\r\n", "HTTP/1"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "Content-Length"),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", "too long"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000, "too long"),
    ],
)
def test_what_is_no_request_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take_request(bytearray(data))


def test_a_request_is_taken_only_when_it_is_whole() -> None:
    whole = b"POST /p?q=1 HTTP/1.1\r\nContent-Length: 3\r\nX-Y:  z \r\n\r\nabc"
    for cut in range(len(whole)):
        assert take_request(bytearray(whole[:cut])) is None
    held = bytearray(whole + b"GET")
    request = take_request(held)
    assert request is not None
    assert (request.method, request.path, request.headers["x-y"], request.body) == ("POST", "/p", "z", b"abc")
    assert held == b"GET"


async def test_the_program_prints_its_port_writes_its_record_and_stops_on_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "sent.jsonl"
    arguments = ["--port", "0", "--ttft-ms=1", "--itl-ms", "1", "--tokens", "3", "--record", str(path)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "adapters.servers.fake_server", *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    port = int(await asyncio.wait_for(process.stdout.readline(), 20))
    async with aiohttp.ClientSession() as client:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with client.post(url, json={**BODY, "stream": True}, headers={"x-request-id": "r-1"}) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert [(record.request_id, len(record.token_ns)) for record in records(path)] == [("r-1", 3)]


async def test_a_dial_out_of_range_is_misuse() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "adapters.servers.fake_server", "--fail-rate", "2", stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert b"fail_rate" in stderr


async def test_the_launch_spec_starts_a_server_with_the_dials_under_the_models_name(tmp_path: Path) -> None:
    model = Model(name="small", path=tmp_path, format="gguf")
    options = {"tokens": 2, "ttft_ms": 0, "itl_ms": 0, "fail_kinds": ["cut", "error"]}
    spec = Adapter.launch_spec(home=tmp_path, model=model, port=free_port(), options=options)
    process = EngineProcess(spec, tmp_path / "fake.log")
    async with process, posted(process.url, model="small", stream=False) as response:
        answer = await response.json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (2, "stop")


async def test_it_embeds_for_openais_client() -> None:
    async with serving(dimensions=4) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.embeddings.create(model="fake", input=["the river", "the river"])
        assert [len(each.embedding) for each in answer.data] == [4, 4]
        assert answer.data[0].embedding == answer.data[1].embedding
        assert answer.usage.prompt_tokens == 4
        with pytest.raises(openai.NotFoundError, match="'other'"):
            await client.embeddings.create(model="other", input="the")


async def test_it_tells_ids_their_text_and_its_version() -> None:
    async with serving() as url, aiohttp.ClientSession(url) as client:
        async with client.post("/tokenize", json={"model": "fake", "prompt": "the river"}) as response:
            told = await response.json()
        async with client.post("/detokenize", json={"tokens": told["tokens"]}) as response:
            assert await response.json() == {"prompt": "the river"}
        async with client.get("/version") as response:
            assert (await response.json())["version"]
        async with client.post("/tokenize", json={"prompt": "a", "messages": []}) as response:
            assert response.status == 400
    assert told["count"] == 2


@pytest.mark.parametrize(("kind", "status"), [("error", 500), ("overloaded", 503)])
async def test_an_embedding_meets_the_faults_that_were_dialled(kind: str, status: int) -> None:
    async with serving(fail_rate=1, fail_kinds=[kind]) as url, aiohttp.ClientSession(url) as client:
        response = await client.post("/v1/embeddings", json={"model": "fake", "input": "the"})
        assert response.status == status
        response.release()
    async with serving(fail_rate=1, fail_kinds=["cut"]) as url, aiohttp.ClientSession(url) as client:
        with pytest.raises(aiohttp.ClientError):
            await client.post("/v1/embeddings", json={"model": "fake", "input": "the"})
