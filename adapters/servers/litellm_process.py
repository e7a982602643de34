"""The process of adapters/servers/litellm_worker.py as the gateway sees it: started, asked, left, and started again.

    worker = LitellmProcess(python, setup)
    facts = await worker.facts()                      # starts it where it does not run; raises `EngineUnavailable`
    await worker.check_alive()                        # the same, and it has to answer
    async with aclosing(await worker.ask("chat", fields)) as events:
        async for event in events: ...                # leaving early stops the provider
    await worker.close()

The channel is a socket pair: it has no name that others could open, and keys travel over it alone, neither on a
command line nor in an environment. Between us and the worker stands launching/supervise.py, so that it never outlives
us. A worker that has ended fails its open calls; the next use starts another, after the back-off of restart.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from adapters.config import bare_environment
from adapters.errors import BodyTooLarge, EngineUnavailable, StreamInterrupted
from adapters.launching.engine_log import telling_lines
from adapters.launching.launch import SUPERVISOR, describe_exit
from adapters.launching.restart import Crashes, Policy
from adapters.servers.litellm_worker import (
    CALL,
    CANCEL,
    END,
    EVENT,
    FAILED,
    MAX_FRAME,
    MORE,
    PING,
    READY,
    REFUSED,
    SETUP,
    WINDOW,
    frame,
    read_frame,
)

WORKER = Path(__file__).with_name("litellm_worker.py")
START_TIMEOUT_S = 60.0
STOP_GRACE_S = 2.0
PING_TIMEOUT_S = 3.0  # it imports nothing and waits for nobody once it is up: who is silent for so long is frozen
LOG_TAIL_BYTES = 16 << 10  # of what the worker writes; kept in memory, because it might quote a prompt

PATIENT = Policy(max_quick=sys.maxsize)  # each use asks for it anew, so it is never given up

NAME = "The litellm worker"


class Facts(Struct, frozen=True):
    """What litellm knows of the configured model."""

    version: str
    provider: str
    mode: str
    parameters: frozenset[str]
    embedding_parameters: frozenset[str]
    has_text_route: bool


class Failure(Struct, frozen=True):
    """How a call has failed, in the worker's words."""

    kind: str
    status: int
    message: str
    param: str | None = None
    retry_after: str | None = None


class CallFailed(Exception):
    """The provider or litellm refused or failed a call."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Call:
    """One call as its reader sees it. `None` in the queue: the worker has ended."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[tuple[bytes, bytes] | None] = asyncio.Queue()  # the worker sends WINDOW at most


class _Running:
    """A worker that runs, from its first to its last moment."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket, folder: str) -> None:
        self.facts: Facts | None = None
        self.ready_at: float | None = None
        self._process = process
        self._channel = channel
        self._folder = folder
        self._calls: dict[int, _Call] = {}
        self._log = bytearray()
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.is_open = True

    @classmethod
    async def spawn(cls, python: str) -> _Running:
        folder = tempfile.mkdtemp(prefix="goodgate-litellm-")  # 0700; its home and working folder, empty
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(SUPERVISOR), str(STOP_GRACE_S), str(os.getpid()), "0", "{}"),
                *(python, "-I", str(WORKER), str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={**bare_environment(), "HOME": folder, "AWS_EC2_METADATA_DISABLED": "true"},
                cwd=folder,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            theirs.close()
        return cls(process, ours, folder)

    async def set_up(self, setup: Mapping[str, Any]) -> Facts:
        """Hand the key over and learn what litellm knows. Raises `EngineUnavailable`."""
        self._tasks.append(asyncio.create_task(self._keep_log(), name="the litellm worker's log"))
        reader, self._writer = await asyncio.open_unix_connection(sock=self._channel)
        self.send(0, SETUP, msgspec.json.encode(setup))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await read_frame(reader)
                if answer is None:
                    await self._process.wait()
        except TimeoutError:
            raise EngineUnavailable(f"{NAME} was not ready after {START_TIMEOUT_S:g} s.") from None
        if answer is None:
            raise EngineUnavailable(f"{NAME} {describe_exit(self._process.returncode)}.{self._log_tail()}")
        if answer[1] == REFUSED:
            raise EngineUnavailable(msgspec.json.decode(answer[2])["message"])
        assert answer[1] == READY
        self.facts = msgspec.json.decode(answer[2], type=Facts)
        self.ready_at = asyncio.get_running_loop().time()
        self._tasks.append(asyncio.create_task(self._receive(reader), name="the litellm worker's channel"))
        return self.facts

    def send(self, number: int, kind: bytes, payload: bytes = b"") -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(frame(number, kind, payload))

    async def drain(self) -> None:
        assert self._writer is not None
        with contextlib.suppress(ConnectionError):  # the reader of the channel says so to every call
            await self._writer.drain()

    def open(self, number: int) -> _Call:
        call = self._calls[number] = _Call()
        return call

    def forget(self, number: int) -> None:
        self._calls.pop(number, None)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while (received := await read_frame(reader)) is not None:
            number, kind, payload = received
            call = self._calls.get(number)  # None: it was cancelled while this was under way
            if call is not None:
                call.frames.put_nowait((kind, payload))
        self.is_open = False
        for call in self._calls.values():
            call.frames.put_nowait(None)

    async def ping(self, number: int) -> None:
        """Raises `EngineUnavailable` where no answer comes: the channel of a frozen process stays open."""
        call = self.open(number)
        self.send(number, PING)
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                answer = await call.frames.get()
        except TimeoutError:
            raise EngineUnavailable(
                f"{NAME} has not answered for {PING_TIMEOUT_S:g} s; see if it is stopped."
            ) from None
        finally:
            self.forget(number)
        if answer is None:
            raise _lost(has_begun=False)

    async def _keep_log(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._log += data
            del self._log[:-LOG_TAIL_BYTES]

    def _log_tail(self) -> str:
        lines = telling_lines(self._log.decode("utf-8", "replace"))
        return "".join(f"\n    {line}" for line in lines)

    async def stop(self) -> None:
        """End the worker, and wait until it is gone."""
        self.is_open = False
        if self._writer is not None:
            self._writer.close()
        else:
            self._channel.close()
        assert self._process.stdin is not None
        self._process.stdin.close()  # the supervisor takes it from here, even if this task is cancelled now
        if await self._process.wait() == -signal.SIGKILL:  # somebody has killed the supervisor itself
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._tasks:
            await asyncio.wait(self._tasks)
        shutil.rmtree(self._folder, ignore_errors=True)


class LitellmProcess:
    """At most one worker, started when it is used."""

    def __init__(self, python: str, setup: Mapping[str, Any]) -> None:
        # The worker has another working folder. Links stay: a Python knows its environment by where it was called.
        self._python = str(Path(python).absolute()) if os.sep in python else python or sys.executable
        self._setup = setup
        self._numbers = itertools.count(1)
        self._running: _Running | None = None
        self._starting: asyncio.Task[_Running] | None = None
        self._burial: asyncio.Task[None] | None = None
        self._crashes = Crashes()
        self._not_before = 0.0
        self._reason = ""
        self._is_closed = False
        self.num_open = 0

    async def facts(self) -> Facts:
        running = await self._connected()
        assert running.facts is not None
        return running.facts

    async def check_alive(self) -> None:
        running = await self._connected()
        await running.ping(self._next_number())

    async def ask(self, route: str, fields: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The answer's events, each as JSON. Raises `CallFailed`, and our errors for what happens to the worker."""
        payload = msgspec.json.encode({"route": route, "fields": fields})
        if len(payload) > MAX_FRAME:
            raise BodyTooLarge(f"The request is larger than the {MAX_FRAME >> 20} MiB that can be passed on.")
        return self._events(await self._connected(), payload)

    async def _events(self, running: _Running, payload: bytes) -> AsyncGenerator[bytes, None]:
        number = self._next_number()
        call = running.open(number)
        self.num_open += 1
        has_ended = False
        num_read = 0
        try:
            running.send(number, CALL, payload)
            await running.drain()
            while True:
                received = await call.frames.get() if running.is_open or not call.frames.empty() else None
                has_ended = received is None or received[0] in (END, FAILED)
                if received is None:
                    raise _lost(num_read > 0)
                kind, data = received
                if kind == FAILED:
                    raise CallFailed(msgspec.json.decode(data, type=Failure))
                if kind == END:
                    return
                assert kind == EVENT
                yield data
                num_read += 1
                if num_read % (WINDOW // 2) == 0:
                    running.send(number, MORE, b"%d" % (WINDOW // 2))
        finally:
            self.num_open -= 1
            running.forget(number)
            if not has_ended:
                running.send(number, CANCEL)

    def _next_number(self) -> int:
        return next(self._numbers) % 2**32

    async def _connected(self) -> _Running:
        """The worker that runs, or a new one. Who is cancelled while waiting does not cancel its start."""
        if self._running is not None and self._running.is_open:
            return self._running
        await self._bury()
        if self._is_closed:
            raise EngineUnavailable(f"{NAME} is closed.")
        if self._starting is None:
            wait_s = self._not_before - asyncio.get_running_loop().time()
            if wait_s > 0:
                raise EngineUnavailable(f"{self._reason} It is started again in {wait_s:.0f} s at the earliest.")
            self._starting = asyncio.create_task(self._start(), name="a start of the litellm worker")
            self._starting.add_done_callback(self._has_started)
        return await asyncio.shield(self._starting)

    async def _start(self) -> _Running:
        try:
            running = await _Running.spawn(self._python)
        except OSError as error:
            raise EngineUnavailable(f"{NAME} cannot be started with {self._python}: {error.strerror}.") from error
        try:
            await running.set_up(self._setup)
        except BaseException:
            await running.stop()
            raise
        return running

    def _has_started(self, starting: asyncio.Task[_Running]) -> None:
        self._starting = None
        if starting.cancelled():
            return
        error = starting.exception()
        if error is None:
            self._running = starting.result()
        else:
            self._count_crash(None, getattr(error, "message", f"{NAME} did not start."))

    async def _bury(self) -> None:
        """Account for a worker that has ended by itself. Who is cancelled while waiting does not end its removal."""
        running, self._running = self._running, None
        if running is not None:
            assert running.ready_at is not None
            self._count_crash(asyncio.get_running_loop().time() - running.ready_at, f"{NAME} has ended by itself.")
            self._burial = asyncio.create_task(running.stop(), name="the removal of a litellm worker")
        if self._burial is not None:
            await asyncio.shield(self._burial)

    def _count_crash(self, uptime_s: float | None, reason: str) -> None:
        self._crashes = self._crashes.and_one(uptime_s)
        self._not_before = asyncio.get_running_loop().time() + (self._crashes.delay_s(PATIENT) or 0.0)
        self._reason = reason

    async def close(self) -> None:
        """Safe to call twice, and while it starts. Nothing is started afterwards."""
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if self._burial is not None:
            await asyncio.wait({self._burial})
        running, self._running = self._running, None
        if running is not None:
            await running.stop()


def _lost(has_begun: bool) -> EngineUnavailable | StreamInterrupted:
    if has_begun:
        return StreamInterrupted(f"{NAME} ended in the middle of an answer.")
    return EngineUnavailable(f"{NAME} ended before it answered; another try starts it again.")
