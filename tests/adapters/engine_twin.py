"""A twin of an engine: a small program that is started, crashes and misbehaves as it is told.

    process = twin.process("worker deaf", delay_s=0.3)      # an EngineProcess, not yet started
    twin.alive()                                            # the processes of all engines that it has started

Every test that uses the fixture ends with the check that none of them is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapters.launching.launch import EngineProcess, LaunchSpec, free_port

ROOT = Path(__file__).parents[2]

# It answers /health after a while. Its worker ignores TERM and, unless it is loyal, has left the process group.
ENGINE = """
import http.server, os, signal, socket, subprocess, sys, time

port, delay_s, mode = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3].split()
pids = os.environ["PID_FOLDER"]
starts = len(os.listdir(pids))
if "daemon" in mode and os.fork():
    time.sleep(0.3)
    sys.exit(0)
open(f"{pids}/{os.getpid()}", "w").close()
if "worker" in mode:
    code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \\
           "open(os.environ['PID_FOLDER'] + '/' + str(os.getpid()), 'w').close(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session="loyal" not in mode)
if "deaf" in mode:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("loading", flush=True)
time.sleep(delay_s)
if "frail" in mode and starts == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if "dies" in mode or "dies-again" in mode and starts:
    print("\\x1b[31mRuntimeError: the weights are not there\\x1b[0m\\n\\n", file=sys.stderr, flush=True)
    print("shutting down", flush=True)
    sys.exit(3)
if "misused" in mode:
    print("error: unrecognized arguments: --fast", file=sys.stderr)
    sys.exit(2)
if "talks" in mode:
    for _ in range(20000):
        print("x" * 999)
    print("the last word", flush=True)
if "hung" in mode:
    listener = socket.create_server(("127.0.0.1", port))
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/crash":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)  # the signal may reach another thread, and this one must not answer meanwhile
        self.send_response(503 if "sick" in mode else 302 if "elsewhere" in mode else 200)
        self.send_header("Location", "/crash")
        self.end_headers()
    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Twin:
    """Makes launch specs of the twin, and knows which of its processes still live."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids = folder / "pids"
        self.pids.mkdir()
        self.script = folder / "engine.py"
        self.script.write_text(ENGINE)
        self.log = folder / "logs" / "twin.log"

    def spec(
        self,
        mode: str = "plain",
        *,
        delay_s: float = 0.0,
        timeout_s: float = 20.0,
        grace_s: float = 5,
        log_limit: int = 1 << 20,
    ) -> LaunchSpec:
        port = free_port()
        return LaunchSpec(
            name="twin",
            argv=(sys.executable, str(self.script), str(port), str(delay_s), mode),
            env={"PID_FOLDER": str(self.pids)},
            port=port,
            ready_timeout_s=timeout_s,
            stop_grace_s=grace_s,
            log_limit_bytes=log_limit,
        )

    def process(self, mode: str = "plain", **settings: float) -> EngineProcess:
        return EngineProcess(self.spec(mode, **settings), self.log)

    def alive(self) -> list[int]:
        return [int(path.name) for path in self.pids.iterdir() if is_alive(int(path.name))]

    def num_starts(self) -> int:
        return len(list(self.pids.iterdir()))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_for(self, count: int, timeout_s: float = 20) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.alive()) != count:
            assert time.monotonic() < deadline, f"{len(self.alive())} processes live, expected {count}"
            time.sleep(0.02)

    async def come_to(self, count: int) -> None:
        await asyncio.to_thread(self.wait_for, count)


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    """Wait for something that is about to be true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - processes and files are watched; nothing announces their change
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def twin(tmp_path: Path) -> Iterator[Twin]:
    twin = Twin(tmp_path)
    yield twin
    left = twin.alive()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes outlived the test"


# Runs the twin as a gateway would, and says whenever something changes.
PARENT = """
import asyncio, sys, threading
sys.path.insert(0, sys.argv[1])
from contextlib import aclosing
from pathlib import Path
from adapters.launching.kept_alive import kept_alive
from adapters.launching.launch import EngineProcess, LaunchSpec
from adapters.launching.restart import Policy
env, port, argv = {"PID_FOLDER": sys.argv[2]}, int(sys.argv[3]), tuple(sys.argv[5:])
spec = LaunchSpec(name="twin", argv=argv, env=env, port=port, stop_grace_s=0.3)
async def main():
    process = EngineProcess(spec, Path(sys.argv[4]))
    async with aclosing(kept_alive(process, Policy(first_delay_s=600, last_delay_s=600))) as changes:
        async for change in changes:
            print(type(change).__name__, process.pid, flush=True)
if "thread" in spec.argv[-1]:
    worker = threading.Thread(target=asyncio.run, args=(main(),))
    worker.start(); worker.join()
else:
    asyncio.run(main())
"""


class Parent:
    """The process that runs the twin."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def await_change(self) -> tuple[str, int]:
        """The next change, and the supervisor's pid."""
        assert self.process.stdout is not None
        name, pid = self.process.stdout.readline().split()
        return name, int(pid)


@contextlib.contextmanager
def parent_of(twin: Twin, mode: str, **settings: float) -> Iterator[Parent]:
    spec = twin.spec(mode, **settings)
    command = [sys.executable, "-c", PARENT, str(ROOT), str(twin.pids), str(spec.port), str(twin.log), *spec.argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Parent(process)
        finally:
            process.kill()
