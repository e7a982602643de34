"""What is measured, as processes of their own, and what the system knows of them.

    with Engine.started(itl_ms=10) as engine, gateway(config, home) as served:
        engine.tell(Mode.SLOW); served.url; rss_mb(served.pid); cpu_s(served.pid)

Nothing here reads the environment: children have ours, and what is theirs alone is set by `env`.
"""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from adapters.errors import GoodgateError
from gateway.commands.bench.engine import Mode
from gateway.tenants.budgets import Budget
from gateway.tenants.keys import KeyStore, NewKey
from gateway.tenants.limits import Limits

START_S = 90.0  # LiteLLM takes long on few cores
STOP_S = 40.0
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
EPHEMERAL = 32768  # ports from here on are given to outgoing connections, which may take one while its owner is down


class BenchError(GoodgateError):
    """The measurement cannot be made. The message says what to do."""

    code = "bench_error"


class Gateway(Struct, frozen=True):
    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reload(self) -> None:
        os.kill(self.pid, signal.SIGHUP)


class Engine:
    """A scripted engine, which can be killed and comes back where it was."""

    def __init__(self, *, ttft_ms: float = 10, itl_ms: float = 10) -> None:
        self.port = free_port()
        self._dials = ["--port", str(self.port), "--ttft-ms", str(ttft_ms), "--itl-ms", str(itl_ms)]
        self._process = self._launched()

    @classmethod
    @contextmanager
    def started(cls, *, ttft_ms: float = 10, itl_ms: float = 10) -> Iterator[Engine]:
        engine = cls(ttft_ms=ttft_ms, itl_ms=itl_ms)
        try:
            yield engine
        finally:
            engine.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, mode: Mode) -> None:
        self._say(mode.value)

    def num_open(self) -> int:
        """Generations that it works on."""
        self._say("open")
        return int(self._line())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def restart(self) -> None:
        self._process = self._launched()

    def _launched(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gateway.commands.bench.engine", *self._dials],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()  # its port: it listens
        return self._process

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"The scripted engine on port {self.port} has ended; what it wrote stands above.")
        return line


@contextmanager
def gateway(config: Path, home: Path) -> Iterator[Gateway]:
    """A serving gateway, whose log goes to a file as in production: it is part of what a request costs."""
    log = home / "gateway.log"
    command = ["env", f"GOODGATE_HOME={home}", sys.executable, "-m", "goodgate", "serve", "--config", str(config)]
    with log.open("w") as stderr, running(command, stderr=stderr, stdout=subprocess.DEVNULL) as process:
        wait_until(
            lambda: "replica ready" in log.read_text(), lambda: f"The gateway did not start: {log.read_text()}", process
        )
        port = log.read_text().partition("listens on ")[2].split()[0].rpartition(":")[2]
        yield Gateway(process.pid, int(port))


@contextmanager
def running(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process for as long as the block lasts; in a group of its own, so that its children end with it."""
    process = subprocess.Popen(command, start_new_session=True, **how)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_until(
    condition: Callable[[], bool], what_failed: Callable[[], str], process: subprocess.Popen[bytes] | None = None
) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline or (process is not None and process.poll() is not None):
            raise BenchError(what_failed())
        time.sleep(0.01)


def config_text(
    ports: Sequence[int],
    *,
    model: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    weight: int = 1,
    **sections: Any,
) -> str:
    """A configuration of one model `m` on the engines at these ports."""
    replicas = [
        {
            "engine": "openai_compatible",
            "weight": weight,
            "options": {"url": f"http://127.0.0.1:{port}", "model": "m", **(options or {})},
        }
        for port in ports
    ]
    served = {"name": "m", "replicas": replicas, **(model or {})}
    return json.dumps({"server": {"port": 0}, "models": [served], **sections})


def make_key(home: Path, **fields: Any) -> str:
    """A key with limits and a budget that are looked at and never reached."""
    bounds = Limits(requests_per_min=10**9, tokens_per_min=10**9, concurrent=10**6)
    return KeyStore(home).create(NewKey(name="bench", limits=bounds, budget=Budget(tokens=10**12), **fields))


def free_port() -> int:
    while True:
        port = random.randrange(20000, EPHEMERAL)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


# ------------------------------------------------------------------------------------------- what the system knows


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def peak_rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def num_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def family(pid: int) -> Iterator[int]:
    """The process and its descendants."""
    yield pid
    with suppress(FileNotFoundError):  # a thread has ended since
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from family(int(child))


def cpu_s(pid: int) -> float:
    """Of the process and its descendants, so far."""
    ticks = 0
    for each in family(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))  # its own, and that of children it has waited for
    return ticks / TICKS_A_SECOND


def threads_cpu_ms(pid: int) -> float:
    """Of the threads that it has, to the nanosecond: `cpu_s` counts in hundredths of a second."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e6


def machine() -> str:
    """The processor, its cores, the memory and our Python, for the head of a table. An interpreter that was built
    without profile-guided optimisation takes about a fifth longer for the same requests."""
    cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition(":")[2].partition("\n")[0].strip()
    kib = int(Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[0])
    return f"{os.cpu_count()} cores of {cpu or 'an unnamed processor'}, {kib / (1 << 20):.0f} GiB, {_python()}"


def _python() -> str:
    is_optimised = "--enable-optimizations" in str(sysconfig.get_config_var("CONFIG_ARGS"))
    return f"CPython {platform.python_version()} built {'with' if is_optimised else 'without'} PGO"
