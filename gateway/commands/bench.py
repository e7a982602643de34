"""What the gateway costs: the same requests to the fake engine directly and through the gateway, each in a process of
its own.

    python -m gateway.commands.bench [--seconds 4] [--connections 1,16]

Closed loop over kept connections, with a client written by hand on raw sockets, so that its own cost is small and the
same on both sides. The engine is the fake at zero delay over HTTP, so what remains is software. "In process" has the
fake inside the gateway, where there is no second hop: it shows the gateway alone. On a machine with few cores the
client, the gateway and the engine compete, so look at the differences and not at the sums.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from msgspec import Struct

WARMUP_SHARE = 0.2
STREAM_TOKENS = 256
END_OF_STREAM = b"0\r\n\r\n"
HEAD_END = b"\r\n\r\n"


class Target(Struct, frozen=True):
    name: str
    port: int


class Timing(Struct, frozen=True):
    """Latencies of whole requests, in ms, and the rate over the measured time."""

    p50_ms: float
    p99_ms: float
    rps: float


def main() -> None:
    arguments = _arguments()
    with ExitStack() as stack:
        targets = _start_all(stack)
        print(f"{'':34}{'p50 ms':>9}{'p99 ms':>9}{'req/s':>9}")
        for num_connections in arguments.connections:
            for target in targets:
                timing = asyncio.run(measure(target, num_connections, arguments.seconds, max_tokens=16, stream=False))
                label = f"{target.name}, {num_connections} connection{'s' * (num_connections > 1)}"
                print(f"{label:34}{timing.p50_ms:9.2f}{timing.p99_ms:9.2f}{timing.rps:9.0f}")
        print(f"\n{'':34}{'chunks/s':>9}")
        for num_connections in arguments.connections:
            for target in targets:
                timing = asyncio.run(
                    measure(target, num_connections, arguments.seconds, max_tokens=STREAM_TOKENS, stream=True)
                )
                label = f"{target.name}, {num_connections} stream{'s' * (num_connections > 1)}"
                print(f"{label:34}{timing.rps * STREAM_TOKENS:9.0f}")


async def measure(target: Target, num_connections: int, seconds: float, *, max_tokens: int, stream: bool) -> Timing:
    """Each connection asks again as soon as it has its answer; the first part of the time does not count."""
    request = request_bytes(max_tokens=max_tokens, stream=stream)
    latencies: list[float] = []
    begin = time.perf_counter() + seconds * WARMUP_SHARE
    end = begin + seconds

    async def ask_repeatedly() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1 << 20)
        while (sent := time.perf_counter()) < end:
            writer.write(request)
            await (read_stream(reader) if stream else read_whole(reader))
            done = time.perf_counter()
            if begin <= sent and done <= end:
                latencies.append((done - sent) * 1e3)
        writer.close()

    await asyncio.gather(*(ask_repeatedly() for _ in range(num_connections)))
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return Timing(p50_ms=cuts[49], p99_ms=cuts[98], rps=len(latencies) / seconds)


def request_bytes(*, max_tokens: int, stream: bool) -> bytes:
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Tell me something about gateways. " * 28}],  # about 1 KB
            "max_tokens": max_tokens,
            "stream": stream,
        }
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def read_whole(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(HEAD_END)
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the benchmark's request failed: {head.split(HEAD_END[:2])[0].decode()}")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    await reader.readexactly(length)


async def read_stream(reader: asyncio.StreamReader) -> None:
    """Read to the last chunk without looking inside: parsing would measure this client."""
    tail = b""
    while not tail.endswith(END_OF_STREAM):
        piece = await reader.read(1 << 16)
        if not piece:
            raise RuntimeError("the benchmark's stream was cut")
        tail = (tail + piece)[-len(END_OF_STREAM) :]


def _start_all(stack: ExitStack) -> list[Target]:
    """The fake engine, a gateway in front of it, and a gateway with a fake inside."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    dials = ["--ttft-ms", "0", "--itl-ms", "0", "--tokens", str(STREAM_TOKENS), "--model", "m"]
    engine = stack.enter_context(
        _started([sys.executable, "-m", "adapters.servers.fake_server", "--port", "0", *dials])
    )
    engine_port = int(_first_line(engine.stdout).split()[-1].rpartition(":")[2])
    remote = {"engine": "goodgate_peer", "options": {"url": f"http://127.0.0.1:{engine_port}", "model": "m"}}
    inside = {"engine": "fake", "options": {"ttft_ms": 0, "itl_ms": 0, "tokens": STREAM_TOKENS}}
    targets = [Target("engine itself", engine_port)]
    for name, replica in (("through the gateway", remote), ("in process", inside)):
        path = folder / f"{replica['engine']}.yaml"
        path.write_text(json.dumps({"server": {"port": 0}, "models": [{"name": "m", "replicas": [replica]}]}))
        # The access log goes to a file, as in production: it is part of the cost.
        log = stack.enter_context((folder / f"{name}.log").open("w+"))
        stack.enter_context(
            _started([sys.executable, "-m", "goodgate", "serve", "--config", str(path)], stderr=log),
        )
        targets.append(Target(name, _gateway_port(Path(log.name))))
    return targets


def _gateway_port(log: Path) -> int:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = log.read_text()
        if "listens on" in text and "replica ready" in text:
            return int(text.partition("listens on ")[2].split()[0].rpartition(":")[2])
        time.sleep(0.05)
    raise RuntimeError(f"the gateway did not start: {log.read_text()}")


@contextmanager
def _started(command: list[str], stderr: IO[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def _first_line(stream: IO[str] | None) -> str:
    if stream is None:
        raise RuntimeError("the fake engine has no output")
    return stream.readline()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What the gateway adds to a request, measured against the fake engine."
    )
    parser.add_argument("--seconds", type=float, default=4, help="measured time of each row (default 4)")
    parser.add_argument(
        "--connections",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 16],
        help="numbers of connections, with commas (default 1,16)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
