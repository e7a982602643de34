"""An engine as a child process: it is ready when start returns, says why when it is not, and never outlives us."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from adapters.errors import EngineUnavailable
from adapters.fake import Adapter
from adapters.launching import ports
from adapters.launching.engine_log import KEPT, open_log, telling_lines
from adapters.launching.launch import EngineProcess, LaunchSpec, describe_exit, exit_hint, free_port, launch
from adapters.launching.recipes import native
from adapters.models.model_store import Model
from tests.adapters.engine_twin import Twin, parent_of, until


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


async def test_what_was_written_for_one_life_of_an_engine_goes_with_it(twin: Twin, tmp_path: Path) -> None:
    config = tmp_path / "made.yaml"
    made = msgspec.structs.replace(twin.spec(), prepare=lambda: config.write_text("{}"), temporary=(config,))
    process = EngineProcess(made, twin.log)
    for _ in range(2):
        async with process:
            assert config.exists()
        assert not config.exists()


def test_our_own_engine_leaves_no_configuration_behind(tmp_path: Path) -> None:
    model = Model(name="m", path=tmp_path / "m", format="gguf")
    spec = native.launch_spec(home=tmp_path, model=model, port=1, options={})
    assert spec.prepare is not None
    spec.prepare()
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(spec.temporary)


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


@pytest.mark.skipif(sys.platform != "linux", reason="the twin's processes are counted in /proc")
@pytest.mark.parametrize("mode", ["worker", "worker thread"])
def test_no_process_of_the_engine_survives_a_kill_of_the_parent(twin: Twin, mode: str) -> None:
    with parent_of(twin, mode) as parent:
        assert parent.await_change()[0] == "Ready"
        twin.wait_for(2)
        parent.process.kill()
        twin.wait_for(0)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_engine_dies_with_a_supervisor_that_is_killed(twin: Twin) -> None:
    with parent_of(twin, "plain") as parent:
        _, supervisor = parent.await_change()
        os.kill(supervisor, signal.SIGKILL)
        twin.wait_for(0)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are found in /proc")
async def test_a_worker_that_left_the_group_does_not_survive_a_kill_of_the_supervisor(twin: Twin) -> None:
    process = twin.process("worker")
    await process.start()
    await twin.come_to(2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    await twin.come_to(0)


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


async def test_an_engine_that_puts_itself_into_the_background_is_ended_and_told_to_stay(twin: Twin) -> None:
    process = twin.process("daemon sick")
    with pytest.raises(EngineUnavailable, match=r"exit code 0 .*has to stay in the foreground"):
        await process.start()
    assert twin.num_starts() == 1
    assert twin.alive() == []


async def test_an_engine_that_accepts_and_never_answers_is_late(twin: Twin) -> None:
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"was not ready after 0\.5 s"):
        await twin.process("hung", timeout_s=0.5).start()
    assert time.monotonic() - began < 10
    assert twin.alive() == []


async def test_an_answer_that_points_elsewhere_is_no_readiness(twin: Twin) -> None:
    with pytest.raises(EngineUnavailable, match="was not ready"):
        await twin.process("elsewhere", timeout_s=0.5).start()


@pytest.mark.skipif(sys.platform != "linux", reason="who listens is read from /proc")
async def test_a_stranger_that_took_the_port_meanwhile_is_not_mistaken_for_the_engine(twin: Twin) -> None:
    process = twin.process(delay_s=60)
    starting = asyncio.create_task(process.start())
    await twin.come_to(1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", process.spec.port):
        with pytest.raises(EngineUnavailable, match=rf"port {process.spec.port}: .*\(pid {os.getpid()}\) has taken it"):
            await starting
    assert twin.alive() == []


@pytest.mark.skipif(sys.platform != "linux", reason="who listens is read from /proc")
def test_nobody_is_accused_of_a_port_where_not_all_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that runs as another user may hold it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert f"(pid {os.getpid()})" in ports.held_by_others(port, ours=[])
        monkeypatch.setattr(ports, "_sockets_of", lambda pid: None)  # as for a process that we may not look into
        assert ports.held_by_others(port, ours=[1]) == ""


async def test_a_log_without_end_is_cut_and_its_end_is_kept(twin: Twin) -> None:
    async with twin.process("talks", log_limit=100_000):  # it writes 20 MB
        await until(lambda: twin.log.read_bytes().startswith(b"[This log had outgrown 100000 bytes and was cut;"))
        await until(lambda: twin.log.stat().st_size <= 100_000)
        assert twin.log.read_bytes().endswith(b"the last word\n")


async def test_a_folder_that_cannot_be_written_is_a_sentence_and_no_traceback(twin: Twin) -> None:
    (twin.folder / "file").touch()
    spec = msgspec.structs.replace(twin.spec(), prepare=(twin.folder / "file" / "folder").mkdir)
    with pytest.raises(EngineUnavailable, match=r"twin cannot be started: .*file/folder: Not a directory"):
        await EngineProcess(spec, twin.log).start()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_an_engine_that_ends_on_a_full_disk_is_told_with_that(twin: Twin, small_disk: Path) -> None:
    process = EngineProcess(twin.spec("talks"), small_disk / "twin.log")
    with pytest.raises(EngineUnavailable, match=r"The disk that holds its log is full\."):
        await process.start()
    with pytest.raises(EngineUnavailable, match=r"The disk that holds its log is full\."):
        await process.start()
    assert twin.alive() == []


async def test_a_recipe_that_stumbles_over_a_file_is_a_sentence_and_no_traceback(tmp_path: Path) -> None:
    class Stumbling(Adapter):
        @classmethod
        def launch_spec(cls, *, home: Path, **_: object) -> LaunchSpec:
            raise PermissionError(errno.EACCES, "Permission denied", str(home / "secret"))

    with pytest.raises(EngineUnavailable, match=r"acme cannot be started: .*/secret: Permission denied\."):
        launch("acme", home=tmp_path, model_name="m", find_adapter=lambda _: Stumbling)


async def test_starts_cancelled_at_any_moment_leave_nothing_running(twin: Twin) -> None:
    for number in range(50):
        starting = asyncio.create_task(twin.process(delay_s=1, grace_s=15).start())
        await asyncio.sleep(number * 0.003)
        starting.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert time.monotonic() - began < 10, "TERM was lost on it, and it had its whole grace"
        await twin.come_to(0)


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGABRT, "SIGABRT"), (signal.SIGRTMIN + 6, "signal 40")]
)
async def test_whatever_signal_ends_the_engine_is_told_as_it_was(twin: Twin, number: int, words: str) -> None:
    async with twin.process() as process:
        for pid in twin.alive():
            os.kill(pid, number)
        assert await process.wait() == -number
        assert f"was killed by {words} " in process.failure().message
        told = process.failure().message
        await asyncio.sleep(0.2)
        assert process.failure().message == told, "its age at its end must not grow afterwards"


def test_only_an_engine_that_was_never_ready_is_told_to_stay_in_the_foreground() -> None:
    assert "foreground" in exit_hint(0, was_ready=False)
    assert exit_hint(0, was_ready=True) == ""  # vLLM's server ends so when its engine process has died
    assert "memory runs out" in exit_hint(137, was_ready=True)


async def test_a_system_without_proc_starts_engines_all_the_same(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.launching.supervise.IS_LINUX", False)
    monkeypatch.setattr("adapters.launching.ports._TABLES", ("/nowhere/tcp",))
    async with twin.process() as process:
        assert process.is_running


def test_ends_that_a_shell_tells_are_translated() -> None:
    assert describe_exit(137) == "ended with exit code 137 (SIGKILL)"
    assert describe_exit(255) == "ended with exit code 255"


def test_the_logs_of_the_last_starts_are_kept_and_no_more(tmp_path: Path) -> None:
    for number in range(KEPT + 3):
        path, log = open_log(tmp_path / "logs" / "vllm.log")
        with log:
            log.write(b"%d" % number)
    ages = ["vllm.log", *(f"vllm.log.{age}" for age in range(1, KEPT + 1))]
    assert sorted(file.name for file in path.parent.iterdir()) == ages
    assert [int((path.parent / name).read_text()) for name in ages] == list(range(KEPT + 2, 1, -1))


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


def test_nothing_that_an_engine_writes_can_command_a_terminal() -> None:
    assert telling_lines("\x1b]0;owned\x07error:\x00 \x1b[?25lno\x9b2J\x07") == ["error:  no 2J"]
