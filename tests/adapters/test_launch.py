"""An engine as a child process: it is ready when start returns, says why when it is not, and never outlives us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from adapters.errors import EngineUnavailable
from adapters.launch import EngineProcess, LaunchSpec, free_port, open_log, telling_lines

ROOT = Path(__file__).parents[2]

# A twin of an engine: it answers /health after a while; its worker ignores TERM and has left the process group.
ENGINE = """
import http.server, os, signal, subprocess, sys, time

port, delay_s, mode = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
pids = os.environ["PID_FOLDER"]
open(f"{pids}/{os.getpid()}", "w").close()
if "worker" in mode:
    code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \\
           "open(os.environ['PID_FOLDER'] + '/' + str(os.getpid()), 'w').close(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session="loyal" not in mode)
if "deaf" in mode:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("loading", flush=True)
time.sleep(delay_s)
if "dies" in mode:
    print("\\x1b[31mRuntimeError: the weights are not there\\x1b[0m\\n\\n", file=sys.stderr, flush=True)
    print("shutting down", flush=True)
    sys.exit(3)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/crash":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)  # the signal may reach another thread, and this one must not answer meanwhile
        self.send_response(503 if "sick" in mode else 200)
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
        self, mode: str = "plain", *, delay_s: float = 0.0, timeout_s: float = 20.0, grace_s: float = 5
    ) -> LaunchSpec:
        port = free_port()
        return LaunchSpec(
            name="twin",
            argv=(sys.executable, str(self.script), str(port), str(delay_s), mode),
            env={"PID_FOLDER": str(self.pids)},
            port=port,
            ready_timeout_s=timeout_s,
            stop_grace_s=grace_s,
        )

    def process(self, mode: str = "plain", **settings: float) -> EngineProcess:
        return EngineProcess(self.spec(mode, **settings), self.log)

    def alive(self) -> list[int]:
        return [int(path.name) for path in self.pids.iterdir() if _is_alive(int(path.name))]

    def wait_for(self, count: int, timeout_s: float = 10) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.alive()) != count:
            assert time.monotonic() < deadline, f"{len(self.alive())} processes live, expected {count}"
            time.sleep(0.02)


def _is_alive(pid: int) -> bool:
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


async def test_the_engine_answers_when_start_returns_and_is_gone_when_stop_returns(twin: Twin) -> None:
    async with twin.process(delay_s=0.3) as process:
        assert process.is_running
        async with aiohttp.ClientSession() as client, client.get(process.url + "/health") as response:
            assert response.status == 200
    assert not process.is_running
    assert twin.alive() == []


async def test_an_engine_that_dies_while_loading_is_reported_with_its_code_and_its_own_words(twin: Twin) -> None:
    process = twin.process("dies", delay_s=0.1)
    with pytest.raises(EngineUnavailable) as caught:
        await process.start()
    message = caught.value.message
    assert "exit code 3" in message
    assert "RuntimeError: the weights are not there" in message
    assert "\x1b" not in message
    assert str(twin.log) in message
    assert not process.is_running


async def test_an_engine_that_is_late_is_stopped_and_reported(twin: Twin) -> None:
    process = twin.process("sick", timeout_s=0.5)
    with pytest.raises(EngineUnavailable, match=r"was not ready after 0\.5 s"):
        await process.start()
    assert twin.alive() == []


async def test_a_command_that_does_not_exist_is_reported_by_name(tmp_path: Path) -> None:
    spec = LaunchSpec(name="ghost", argv=("/nowhere/ghost-server",), port=free_port())
    with pytest.raises(EngineUnavailable, match=r"(?s)exit code 127.*cannot start /nowhere/ghost-server"):
        await EngineProcess(spec, tmp_path / "ghost.log").start()


async def test_a_log_that_cannot_be_written_is_a_reason_and_no_traceback(twin: Twin) -> None:
    twin.log.parent.write_text("in the way")
    with pytest.raises(EngineUnavailable, match=r"its log .* cannot be written"):
        await EngineProcess(twin.spec(), twin.log).start()


async def test_an_occupied_port_is_refused_before_anything_starts(twin: Twin) -> None:
    spec = twin.spec()
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", spec.port))
        squatter.listen()
        with pytest.raises(EngineUnavailable, match=f"cannot use port {spec.port}"):
            await EngineProcess(spec, twin.log).start()
    assert list(twin.pids.iterdir()) == []


async def test_stop_ends_a_worker_that_ignores_term_and_left_the_group(twin: Twin) -> None:
    process = twin.process("worker", grace_s=0.3)
    await process.start()
    twin.wait_for(2)
    await process.stop()
    assert twin.alive() == []


async def test_an_engine_that_ignores_term_is_killed_after_the_grace(twin: Twin) -> None:
    process = twin.process("deaf", grace_s=0.3)
    await process.start()
    began = time.monotonic()
    await process.stop()
    assert 0.3 <= time.monotonic() - began < 4
    assert twin.alive() == []


async def test_stop_is_harmless_before_a_start_twice_and_after_a_crash(twin: Twin) -> None:
    process = twin.process()
    await process.stop()
    await process.start()
    await asyncio.gather(process.stop(), process.stop())
    await process.stop()
    assert twin.alive() == []


async def test_a_stopped_engine_can_be_started_again(twin: Twin) -> None:
    process = twin.process()
    for _ in range(2):
        await process.start()
        assert process.is_running
        await process.stop()


async def test_a_crash_while_serving_ends_wait_names_the_signal_and_takes_the_workers_along(twin: Twin) -> None:
    async with twin.process("worker") as process:
        twin.wait_for(2)
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientError):
                await client.get(process.url + "/crash")
        assert await asyncio.wait_for(process.wait(), 10) == -signal.SIGSEGV
        assert "was killed by SIGSEGV" in process.failure().message
        twin.wait_for(0)


async def test_a_start_that_is_cancelled_leaves_nothing_running(twin: Twin) -> None:
    starting = asyncio.create_task(twin.process("worker", delay_s=60, grace_s=0.3).start())
    await asyncio.to_thread(twin.wait_for, 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert twin.alive() == []


PARENT = """
import asyncio, sys, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from adapters.launch import EngineProcess, LaunchSpec
env, port, argv = {"PID_FOLDER": sys.argv[2]}, int(sys.argv[3]), tuple(sys.argv[5:])
spec = LaunchSpec(name="twin", argv=argv, env=env, port=port, stop_grace_s=0.3)
async def main():
    process = EngineProcess(spec, Path(sys.argv[4]))
    await process.start()
    print(process.pid, flush=True)
    await asyncio.sleep(600)
if "thread" in spec.argv[-1]:
    worker = threading.Thread(target=asyncio.run, args=(main(),))
    worker.start(); worker.join()
else:
    asyncio.run(main())
"""


@contextlib.contextmanager
def parent_of(twin: Twin, mode: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that runs the twin; yields it and the supervisor's pid once the engine is ready."""
    spec = twin.spec(mode)
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(ROOT), str(twin.pids), str(spec.port), str(twin.log)]
    with subprocess.Popen([*command, *spec.argv], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            yield parent, int(parent.stdout.readline())
        finally:
            parent.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="the twin's processes are counted in /proc")
@pytest.mark.parametrize("mode", ["worker", "worker-thread"])
def test_no_process_of_the_engine_survives_a_kill_of_the_parent(twin: Twin, mode: str) -> None:
    with parent_of(twin, mode) as (parent, _):
        twin.wait_for(2)
        parent.kill()
        twin.wait_for(0)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_engine_dies_with_a_supervisor_that_is_killed(twin: Twin) -> None:
    with parent_of(twin, "plain") as (_, supervisor):
        twin.wait_for(1)
        os.kill(supervisor, signal.SIGKILL)
        twin.wait_for(0)


async def test_stop_cleans_up_after_a_supervisor_that_was_killed(twin: Twin) -> None:
    process = twin.process("loyal worker")
    await process.start()
    await asyncio.to_thread(twin.wait_for, 2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await process.stop()
    await asyncio.to_thread(twin.wait_for, 0)


async def test_the_workers_of_a_supervisor_that_was_killed_end_without_waiting_for_stop(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = twin.process("loyal worker")
    await process.start()
    await asyncio.to_thread(twin.wait_for, 2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await asyncio.to_thread(twin.wait_for, 0)
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda number, _: killed.append(number))
    await process.stop()
    assert killed == []  # by now the group's number may be somebody else's


def test_the_log_of_the_run_before_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    for text in (b"first", b"second", b"third"):
        path, log = open_log(tmp_path / "logs" / "vllm.log")
        with log:
            log.write(text)
    assert path.read_bytes() == b"third"
    assert path.with_name("vllm.previous.log").read_bytes() == b"second"


def test_two_engines_of_one_kind_do_not_share_a_log(tmp_path: Path) -> None:
    first, log = open_log(tmp_path / "vllm.log")
    with log:
        second, other = open_log(tmp_path / "vllm.log")
        other.close()
    assert (first.name, second.name) == ("vllm.log", "vllm-2.log")


def test_the_telling_lines_are_the_complaints_or_else_the_last_lines() -> None:
    assert telling_lines("a\n\x1b[1mValueError: no\x1b[0m\r\n\nbye\n") == ["ValueError: no"]
    assert telling_lines("one\n\ntwo") == ["one", "two"]
    assert telling_lines("") == []
