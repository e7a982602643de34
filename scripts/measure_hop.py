"""What one request to an engine costs in CPU: the hop of ours beside aiohttp's client session, and the adapter over it.

    python scripts/measure_hop.py

The engine is a process that answers every request with one JSON object of 0.5 KB. Only this process's CPU is counted,
so other work on the machine moves the figures little; each is the best of five rounds.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec
import uvloop

from adapters.types import decode_chat
from adapters.vllm import Adapter
from adapters.wire.hop.pool import Origin, Pool
from adapters.wire.hop.request import head, opening

ROUNDS, REQUESTS = 5, 600
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 340}], "max_tokens": 100}).encode()
MESSAGE = {"role": "assistant", "content": "word " * 60}
ANSWER = json.dumps(
    {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 90, "completion_tokens": 60, "total_tokens": 150},
    }
).encode()
SAID = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)


class Engine(asyncio.Protocol):
    """It reads nothing: what arrives in one piece is a request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"}"):
            self._transport.write(SAID)  # type: ignore[attr-defined]


def serve(ports: multiprocessing.Queue[int]) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


async def measure(name: str, ask: Callable[[], Awaitable[None]]) -> None:
    rounds = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(REQUESTS):
            await ask()
        rounds.append((time.process_time() - begun) / REQUESTS * 1e6)
    print(f"{name:32} {min(rounds):6.0f} us of CPU a request", flush=True)


async def compare(url: str) -> None:
    route = f"{url}/v1/chat/completions"
    kind = {"Content-Type": "application/json"}
    now = asyncio.get_running_loop().time
    pool = Pool(Origin.of(route), connect_timeout_s=2, keepalive_s=4)
    start = opening("POST", route, kind)
    adapter = Adapter(msgspec.convert({"url": url, "model": "m"}, Adapter.Options))
    await adapter.start()

    async def through_hop() -> None:
        response = await pool.send(head(start, {}, len(BODY)), BODY, now() + 60)
        while await response.read(now() + 60):
            pass

    async def through_adapter() -> None:
        async for _ in adapter.generate(decode_chat(BODY), request_id="r"):
            pass

    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def through_session() -> None:
            async with session.post(route, data=BODY, headers=kind) as response:
                await response.read()

        await measure("aiohttp's client session", through_session)
    await measure("adapters/wire/hop", through_hop)
    await measure("the adapter of vLLM over it", through_adapter)
    await adapter.close()
    pool.close()


def main() -> None:
    ports: multiprocessing.Queue[int] = multiprocessing.Queue()
    engine = multiprocessing.Process(target=serve, args=(ports,), daemon=True)
    engine.start()
    try:
        uvloop.run(compare(f"http://127.0.0.1:{ports.get(timeout=30)}"))
    finally:
        engine.terminate()
        engine.join()


if __name__ == "__main__":
    main()
