"""Native engines as processes, with the real model: one is killed, or its connection cut, in the middle of a greedy
answer, and the client's text is that of the uninterrupted run. Where that cannot be, he sees an error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adapters.launching.launch import EngineProcess
from adapters.launching.restart import Policy
from adapters.launching.supervise import descendants
from adapters.models.model_store import DEFAULT_MODEL, ModelStore
from gateway.records.ledger_files import FOLDER
from gateway.records.ledger_reader import LedgerReader
from gateway.records.record import Record, detail_of
from gateway.replicas.replica import Replica
from tests.gateway.rig import Gateway, Start, model, until

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="an engine's process is found in /proc"),
]

PATIENCE_S = 60
QUESTION: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Explain photosynthesis to a child of seven. ¡Añade emojis! 😀"}],
    "max_tokens": 24,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture
def native_home(tmp_path: Path) -> None:
    """The gateway's home has the default model, and the kernels that were compiled before."""
    home = Path(os.environ.get("GOODGATE_HOME", ".goodgate")).resolve()
    if not (home / "models" / DEFAULT_MODEL).exists():
        ModelStore(home).pull(DEFAULT_MODEL)
    for folder in ("models", "cache"):
        (home / folder).mkdir(exist_ok=True)
        (tmp_path / folder).symlink_to(home / folder)


@dataclass
class Told:
    """What a client has seen of an answer, and what the ledger has of it."""

    text: str = ""
    usage: dict[str, Any] | None = None
    error: str | None = None
    is_whole: bool = False
    by: str = ""
    request_id: str = ""


async def told(
    gateway: Gateway, temperature: float = 0, *, after: int = 0, strike: Callable[[str], None] | None = None
) -> Told:
    """The answer, during which `strike` hits the replica that gives it after so many pieces."""
    story, num_pieces = Told(), 0
    body = {**QUESTION, "temperature": temperature}
    async with gateway.client.post(f"{gateway.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        story.by, story.request_id = response.headers["x-goodgate-replica"], response.headers["x-request-id"]
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                story.is_whole = True
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                story.error = event["error"]["code"]
                continue
            story.usage = event["usage"] or story.usage
            for choice in event["choices"]:
                story.text += choice["delta"].get("content") or ""
                num_pieces += 1
                if num_pieces == after and strike is not None:
                    strike(story.by)
    return story


async def attempts_of(story: Told, reader: LedgerReader) -> tuple[Record, list[tuple[str, str, str]]]:
    await until(lambda: reader.find(story.request_id) is not None)
    found = reader.find(story.request_id)
    assert found is not None
    tries = detail_of(found.record).attempts
    return found.record, [(each.replica, each.why, each.outcome) for each in tries]


class Resettable:
    """A way to a server whose connections can be reset."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._clients: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.append(writer)
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._upstream)
        ways = [asyncio.ensure_future(_pump(reader, upstream)), asyncio.ensure_future(_pump(upstream_reader, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for each in (writer, upstream):
            each.close()

    def reset(self) -> None:
        """RST to the gateway."""
        for writer in self._clients:
            sock = writer.get_extra_info("socket")
            if sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)


def process_of(replica: Replica) -> EngineProcess:
    assert replica.process is not None
    return replica.process


def kill(replica: Replica) -> None:
    supervisor = process_of(replica).pid
    assert supervisor is not None
    os.kill(descendants(supervisor)[0], signal.SIGKILL)


@pytest.mark.replay("F06")
@pytest.mark.usefixtures("native_home")
async def test_f06_the_text_is_that_of_the_uninterrupted_run_when_an_engine_is_killed_in_the_middle(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pair of processes for all of it, since each takes seconds to load; so the kill comes last."""
    monkeypatch.setattr("gateway.replicas.lives.RESTARTS", Policy(first_delay_s=600, last_delay_s=600))
    options = {"kv_cache_mib": 32, "max_num_seqs": 4, "num_threads": 1}
    pair = [
        {"engine": "native", "name": name, "launch": True, "model": DEFAULT_MODEL, "options": options} for name in "ab"
    ]
    gateway = await start(model(*pair, routing="round_robin", continuation=True), is_ready=False)
    replicas = {replica.name: replica for replica in gateway.fleet.replicas}
    reader = LedgerReader(tmp_path / FOLDER)
    await until(lambda: all(replica.is_ready for replica in replicas.values()), PATIENCE_S)
    whole = await told(gateway)
    assert whole.is_whole
    assert whole.usage is not None

    async def check_continued(story: Told) -> None:
        assert (story.error, story.is_whole, story.text) == (None, True, whole.text)
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert story.usage is not None
        assert whole.usage is not None
        assert [story.usage[count] for count in counts] == [whole.usage[count] for count in counts]
        record, tries = await attempts_of(story, reader)
        (other,) = {"a", "b"} - {story.by}
        assert tries == [(story.by, "", "stream_interrupted"), (other, "continuation", "ok")]
        assert (record.status, record.completion_tokens) == (200, QUESTION["max_tokens"])

    async with AsyncExitStack() as stack:
        ways = {name: Resettable(process_of(replica).spec.port) for name, replica in replicas.items()}
        for name, way in ways.items():
            server = await stack.enter_async_context(await asyncio.start_server(way.serve, "127.0.0.1", 0))
            client = replicas[name].adapter.client  # type: ignore[union-attr]
            client.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await check_continued(await told(gateway, after=8, strike=lambda name: ways[name].reset()))

        lost = await told(gateway, temperature=1.0, after=8, strike=lambda name: ways[name].reset())
        assert (lost.error, lost.is_whole) == ("stream_interrupted", False)
        _, tries = await attempts_of(lost, reader)
        assert tries == [(lost.by, "", "stream_interrupted")]

        await check_continued(await told(gateway, after=5, strike=lambda name: kill(replicas[name])))
        for way in ways.values():
            way.reset()
