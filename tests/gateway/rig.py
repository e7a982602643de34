"""A gateway on a real socket for a test, and engines to put behind it.

    gateway = await start(model(fake()))      # a running gateway; gateway.url, gateway.open_requests, gateway.fleet
    upstream = await upstream_of(script)              # an HTTP engine whose every byte is in the test

Every test ends with the check that no task is left behind.
"""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web

from adapters import registry
from gateway.admission.open_requests import OpenRequests
from gateway.app import PARTS, create_app
from gateway.config import AdapterClass, Config, FindAdapter, parse_config
from gateway.reload.source import Reading
from gateway.replicas.fleet import Fleet
from gateway.tenants.quotas import Quotas
from gateway.web.server import listen, serving

HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


@dataclass
class Told:
    """A configuration without a file: what the test says now."""

    data: dict[str, Any]
    find: FindAdapter

    def read(self) -> Reading:
        config = parse_config(self.data, self.find)
        return Reading(config, self.digest(config))

    def digest(self, config: Config) -> str:
        return json.dumps(self.data)

    def spread(self) -> None:
        """There is one worker."""


@dataclass
class Gateway:
    url: str
    port: int
    app: web.Application
    client: aiohttp.ClientSession
    source: Told
    # The official clients are made when a test first wants them: they cost more to start than the gateway.
    _openai: list[openai.AsyncOpenAI] = field(default_factory=list)
    _anthropic: list[anthropic.AsyncAnthropic] = field(default_factory=list)

    @property
    def open_requests(self) -> OpenRequests:
        return self.app[PARTS].open_requests

    @property
    def quotas(self) -> Quotas:
        return self.app[PARTS].quotas

    async def reload(self, *models: dict[str, Any], **sections: Any) -> tuple[int, Any]:
        """Have it serve these models by these sections from now on, as an operator would: status and answer."""
        self.source.data = {**self.source.data, "models": list(models), **sections}
        status, body, _ = await self.post("/admin/reload", b"")
        return status, body

    @property
    def fleet(self) -> Fleet:
        return self.app[PARTS].fleet

    @property
    def openai(self) -> openai.AsyncOpenAI:
        if not self._openai:
            self._openai.append(openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0))
        return self._openai[0]

    @property
    def anthropic(self) -> anthropic.AsyncAnthropic:
        if not self._anthropic:
            self._anthropic.append(anthropic.AsyncAnthropic(base_url=self.url, api_key="none", max_retries=0))
        return self._anthropic[0]

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Status, JSON and headers of a POST."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(
            self.url + path,
            data=io.BytesIO(data),  # aiohttp warns of large bodies that are plain bytes
            headers={"Content-Type": "application/json", **headers},
        ) as response:
            return response.status, await response.json(), response.headers

    async def chat(self, **fields: Any) -> tuple[int, Any, Any]:
        return await self.post("/v1/chat/completions", {**HELLO, **fields})

    async def events(self, path: str = "/v1/chat/completions", **fields: Any) -> list[str]:
        """The data of every event of a stream, `[DONE]` included, as the bytes say."""
        body = {**HELLO, "stream": True, **fields}
        body = {key: value for key, value in body.items() if value is not None}
        async with self.client.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            text = await response.text()
        return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(self.url + path) as response:
            return response.status, await response.json()

    async def ready(self) -> Gateway:
        await until(lambda: all(replica.is_ready for replica in self.fleet.replicas), timeout_s=60)  # models load
        return self


Start = Callable[..., Awaitable[Gateway]]


async def until(condition: Callable[[], bool], timeout_s: float = 5) -> None:
    """Wait for something that is about to be true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - plain attributes are watched; nothing announces their change
            await asyncio.sleep(0.005)


async def raw(gateway: Gateway, data: bytes, wait_s: float = 3) -> bytes:
    """Everything the gateway says to these bytes, until it closes or falls silent. A client that is cut off while it
    still sends has its answer too, which asyncio's streams would drop."""
    loop = asyncio.get_running_loop()
    sock = socket.create_connection(("127.0.0.1", gateway.port))
    sock.setblocking(False)

    async def send() -> None:
        with suppress(ConnectionError):
            await loop.sock_sendall(sock, data)

    sending = asyncio.create_task(send())
    answer = b""
    try:
        async with asyncio.timeout(wait_s):
            with suppress(ConnectionError):
                while piece := await loop.sock_recv(sock, 65536):
                    answer += piece
    except TimeoutError:
        answer += b"<open>"
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        sock.close()
    return answer


def fake_model(**options: Any) -> dict[str, Any]:
    """A model served by one fast fake engine."""
    return model(fake(**options))


def fake(name: str | None = None, **options: Any) -> dict[str, Any]:
    named = {} if name is None else {"name": name}
    return {"engine": "fake", **named, "options": {"ttft_ms": 0, "itl_ms": 0, "tokens": 5, **options}}


def model(*replicas: dict[str, Any], name: str = "m", **fields: Any) -> dict[str, Any]:
    return {"name": name, "replicas": list(replicas), **fields}


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:
        baseline = len(asyncio.all_tasks())

        async def start_gateway(
            *models: dict[str, Any],
            engines: dict[str, AdapterClass] | None = None,
            is_ready: bool = True,
            **sections: Any,
        ) -> Gateway:
            def find(engine: str) -> AdapterClass:
                return (engines or {}).get(engine) or registry.adapter_class(engine)

            data = {
                "server": {"port": 0, "drain_timeout_s": 0.5, **sections.pop("server", {})},
                "overload": {"memory_mib": "unlimited", "max_loop_lag_ms": 60_000, **sections.pop("overload", {})},
                "health": {"interval_s": 60, "recheck_s": 60, **sections.pop("health", {})},
                "reload": {"watch": False, **sections.pop("reload", {})},
                "models": list(models),
                **sections,
            }
            source = Told(data, find)
            read = source.read()
            app = create_app(read.config, home=tmp_path, find_adapter=find, source=source, digest=read.digest)
            sock = listen("127.0.0.1", 0)
            port = sock.getsockname()[1]
            await stack.enter_async_context(serving(app, sock))
            client = await stack.enter_async_context(aiohttp.ClientSession())
            gateway = Gateway(f"http://127.0.0.1:{port}", port, app, client, source)
            stack.push_async_callback(_close_clients, gateway)
            return await gateway.ready() if is_ready else gateway

        yield start_gateway
    await until(lambda: len(asyncio.all_tasks()) <= baseline)


async def _close_clients(gateway: Gateway) -> None:
    for client in (*gateway._openai, *gateway._anthropic):
        await client.close()


@dataclass
class Upstream:
    """An engine as a script: what it was sent, and when its clients left."""

    port: int
    requests: list[Request] = field(default_factory=list)
    num_closed: int = 0  # connections that the other side has ended

    def replica(self, name: str | None = None, engine: str = "vllm", **options: Any) -> dict[str, Any]:
        named = {} if name is None else {"name": name}
        url = f"http://127.0.0.1:{self.port}"
        return {"engine": engine, **named, "options": {"url": url, "model": "served", **options}}

    @property
    def num_generations(self) -> int:
        return len(self.requests)


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: bytes


Script = Callable[["Reply"], Awaitable[None]]


class Reply:
    """The engine's side of one generation."""

    def __init__(self, upstream: Upstream, request: Request, writer: asyncio.StreamWriter) -> None:
        self.upstream = upstream
        self.request = request
        self.number = len(upstream.requests)  # from 1
        self._writer = writer

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def status(self, status: int, body: bytes, *headers: str) -> None:
        head = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
        await self.raw("\r\n".join(head).encode() + b"\r\n\r\n" + body)

    async def begin(self) -> None:
        await self.raw(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: close\r\n\r\n"
        )

    async def event(self, data: bytes) -> None:
        await self.block(b"data: " + data + b"\n\n")

    async def block(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def piece(self, text: str) -> None:
        await self.event(b'{"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}' % text.encode())

    async def finish(self, reason: str = "stop") -> None:
        await self.event(b'{"choices":[{"index":0,"delta":{},"finish_reason":"%s"}]}' % reason.encode())

    async def usage(self, prompt_tokens: int = 3, completion_tokens: int = 2) -> None:
        await self.event(
            b'{"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}'
            % (prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)
        )

    async def done(self) -> None:
        await self.event(b"[DONE]")
        await self.end()

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def answer(self, *texts: str) -> None:
        """A whole well-behaved answer."""
        await self.begin()
        for text in texts:
            await self.piece(text)
        await self.finish()
        await self.usage(completion_tokens=len(texts))
        await self.done()

    def reset(self) -> None:
        """Drop the connection without a goodbye (RST)."""
        self._writer.transport.abort()

    async def until_left(self) -> None:
        """Wait until the other side has gone, which ends the script."""
        await asyncio.Event().wait()


@pytest.fixture
async def upstream_of() -> AsyncIterator[Callable[..., Awaitable[Upstream]]]:
    async with AsyncExitStack() as stack:

        async def start_upstream(script: Script, port: int = 0) -> Upstream:
            tasks: set[asyncio.Task[None]] = set()

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                tasks.add(task)
                try:
                    await _serve_connection(upstream, script, reader, writer)
                except (ConnectionError, asyncio.IncompleteReadError):
                    pass  # left before it had asked for anything
                except asyncio.CancelledError:
                    pass  # the test is over; asyncio's stream server would log a cancelled handler as a fault
                finally:
                    tasks.discard(task)
                    writer.close()

            server = await asyncio.start_server(serve, "127.0.0.1", port, limit=64 << 20)
            upstream = Upstream(server.sockets[0].getsockname()[1])

            async def stop() -> None:
                server.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

            stack.push_async_callback(stop)
            return upstream

        yield start_upstream


async def _serve_connection(
    upstream: Upstream, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    line, *header_lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in header_lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    path = line.split()[1]
    if path == "/health":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        return
    if not path.startswith(("/v1/", "/tokenize", "/detokenize")):
        writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        return
    request = Request(path, headers, body)
    upstream.requests.append(request)
    play = asyncio.ensure_future(script(Reply(upstream, request, writer)))
    left = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait({play, left}, return_when=asyncio.FIRST_COMPLETED)
        has_failed = play.done() and isinstance(play.exception(), ConnectionError)
        if left.done() or has_failed:
            upstream.num_closed += 1
        elif play.done():
            play.result()
    finally:
        for task in (play, left):
            task.cancel()
        await asyncio.gather(play, left, return_exceptions=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
