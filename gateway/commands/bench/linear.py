"""Whether large pieces cost linear time: a body of 8 MiB and an event of 1 MiB that come in tiny writes.

report = linear(rounds=3, folder=...)        # report.rows: the body and the event, each once, twice and four times
"""

from __future__ import annotations

import http.server
import math
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from gateway.commands.bench.lean import request
from gateway.commands.bench.processes import BenchError, config_text, gateway, machine, make_key, threads_cpu_ms
from gateway.commands.bench.verdict import Claim

FACTORS = (1, 2, 4)
BODY_BYTES, EVENT_BYTES = 2 << 20, 256 << 10  # the smallest; four times as much is 8 MiB and 1 MiB
PIECE_BYTES = 64
SMALL = 16
MAX_EXPONENT = 1.2  # of linear time with noise; quadratic would be 2


class Row(Struct, frozen=True):
    """CPU time of the gateway for each size. `exponent`: 1 is linear, 2 quadratic."""

    name: str
    sizes: Sequence[int]
    cpu_ms: Sequence[float]

    @property
    def exponent(self) -> float:
        return math.log(self.cpu_ms[-1] / self.cpu_ms[0]) / math.log(self.sizes[-1] / self.sizes[0])


class Report(Struct, frozen=True):
    date: str
    machine: str
    rows: Sequence[Row]


def linear(*, rounds: int, folder: Path) -> Report:
    key = make_key(folder)
    config = folder / "gateway.yaml"
    with _upstream() as upstream:
        config.write_text(config_text([upstream.server_port]))
        with gateway(config, folder) as served:

            def cost(body_bytes: int, event_bytes: int) -> float:
                """The least of some tries, in CPU ms: whatever else the gateway does in that time comes on top."""
                upstream.event = _event(event_bytes)
                asked = request(key, 16, stream=True, content="x" * body_bytes)
                return min(_cost(served.port, served.pid, asked) for _ in range(rounds))

            cost(SMALL, SMALL)
            bodies, events = ([base * factor for factor in FACTORS] for base in (BODY_BYTES, EVENT_BYTES))
            rows = [
                Row("a body", bodies, [cost(size, SMALL) for size in bodies]),
                Row("an event", events, [cost(SMALL, size) for size in events]),
            ]
    return Report(datetime.now(UTC).date().isoformat(), machine(), rows)


def claims(report: Report) -> list[Claim]:
    return [
        Claim(
            f"{row.name} of {row.sizes[-1] >> 20} MiB costs linear time", f"size ^ {row.exponent:.2f}", is_linear(row)
        )
        for row in report.rows
    ]


def is_linear(row: Row) -> bool:
    return row.exponent <= MAX_EXPONENT


def _cost(port: int, pid: int, asked: bytes) -> float:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before = threads_cpu_ms(pid)
        for piece in _pieces(asked):
            sock.sendall(piece)
        answer = b""
        while b"[DONE]" not in answer[-64:]:
            read = sock.recv(1 << 16)
            if not read:
                raise BenchError(f"The gateway ended the answer early: {answer[-200:].decode(errors='replace')}")
            answer = answer[-64:] + read
        return threads_cpu_ms(pid) - before


class _Upstream(http.server.ThreadingHTTPServer):
    event = b""


class _Handler(http.server.BaseHTTPRequestHandler):
    """An engine whose whole answer is one event, which it writes in tiny pieces."""

    server: _Upstream

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for piece in _pieces(self.server.event):
            self.wfile.write(piece)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: it would cost more than the writes."""


@contextmanager
def _upstream() -> Iterator[_Upstream]:
    with _Upstream(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))


def _event(num_bytes: int) -> bytes:
    choice = '{"index":0,"delta":{"content":"%s"},"finish_reason":null}' % ("x" * num_bytes)
    finish = '{"index":0,"delta":{},"finish_reason":"stop"}'
    return "".join(f'data: {{"choices":[{each}]}}\n\n' for each in (choice, finish)).encode() + b"data: [DONE]\n\n"
