"""Start, watch and stop an engine as a child process.

    async with launch("llama_cpp", home=home, model_name="smollm2-135m-instruct") as process:
        ...                                   # the engine answers at process.url

What is launched is data, a `LaunchSpec`, which an engine's recipe (adapters/recipes) makes. What this module promises:
- `start` returns when the engine answers on its readiness path, and raises `EngineUnavailable` with the exit code, the
  last telling lines of the log and the log's path when it dies or is late.
- `stop` ends the engine and everything it has started: TERM, then KILL after the grace. Safe at any time, and twice.
- Nothing of the engine outlives this process, even if this process is killed: see adapters/supervise.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec import Struct

from adapters.errors import EngineUnavailable, InvalidRequest

if TYPE_CHECKING:
    import aiohttp

    from adapters.model_store import Model

HOST = "127.0.0.1"
SUPERVISOR = Path(__file__).with_name("supervise.py")
_PROBE_INTERVAL_S = 0.1
_PROBE_TIMEOUT_S = 2.0
_LOG_TAIL_BYTES = 64 << 10
_LOG_LINES_SHOWN = 8
_SUPERVISOR_SLACK_S = 5.0  # for the supervisor to notice, to KILL what ignored TERM, and to reap


class LaunchSpec(Struct, frozen=True, kw_only=True):
    """How to run one engine. `env` is added to our own environment."""

    name: str  # what messages call it
    argv: tuple[str, ...]
    port: int
    env: Mapping[str, str] = {}
    ready_path: str = "/health"
    ready_timeout_s: float = 120.0
    stop_grace_s: float = 10.0
    prepare: Callable[[], object] | None = None  # work before the start: run in a thread, may take seconds


class Installation(Struct, frozen=True):
    """Can this engine be started here? `how` says what to do where it cannot."""

    available: bool
    version: str = ""
    how: str = ""


class Launchable:
    """An adapter class whose engine can be started from here, by the recipe that has the engine's name.

    A class without a recipe overrides `installed`, `launch_options` and `launch_spec`.
    """

    engine: ClassVar[str]
    needs_model: ClassVar[bool] = True  # False: only the model's name matters to it

    @classmethod
    def recipe(cls) -> ModuleType:
        return importlib.import_module(f"adapters.recipes.{cls.engine}")

    @classmethod
    def installed(cls, home: Path) -> Installation:
        installation: Installation = cls.recipe().installed(home)
        return installation

    @classmethod
    def launch_options(cls) -> type[Struct]:
        """What `options` of a launch may hold. Whoever reads a configuration checks them before anything starts."""
        options: type[Struct] = cls.recipe().Options
        return options

    @classmethod
    def launch_spec(cls, *, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
        spec: LaunchSpec = cls.recipe().launch_spec(home=home, model=model, port=port, options=options)
        return spec


class Installable(Launchable):
    """An adapter whose engine can be installed from here, too. `say` receives each step as one line."""

    @classmethod
    def install(cls, home: Path, say: Callable[[str], None]) -> None:
        cls.recipe().install(home, say)


def launch(
    engine: str, *, home: Path, model_name: str, options: Mapping[str, Any] | None = None, port: int | None = None
) -> EngineProcess:
    """The process that will serve the model, not yet started. What is already known to be wrong is raised here."""
    from adapters.registry import adapter_class

    adapter = adapter_class(engine)
    if not issubclass(adapter, Launchable):
        raise EngineUnavailable(
            f"The engine {engine!r} cannot be started from here; start it yourself and give its url."
        )
    installation = adapter.installed(home)
    if not installation.available:
        raise EngineUnavailable(f"The engine {engine!r} is not installed here: {installation.how}")
    model = _model(adapter, home, model_name)
    port = free_port() if port is None else port
    try:
        msgspec.convert(dict(options or {}), adapter.launch_options())
        spec = adapter.launch_spec(home=home, model=model, port=port, options=options or {})
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"A launch option of {engine} is wrong: {error}.") from error
    return EngineProcess(spec, home / "logs" / f"{engine}.log")


def _model(adapter: type[Launchable], home: Path, name: str) -> Model:
    from adapters.model_store import Model, ModelStore

    if not adapter.needs_model:
        return Model(name=name, path=home, format="gguf")
    return ModelStore(home).get(name)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class EngineProcess:
    """One engine as a child process. It belongs to the loop that starts it, and can be started again after a stop."""

    def __init__(self, spec: LaunchSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._gone: asyncio.Task[None] | None = None  # ends when the process and its group have
        self._started_at = 0.0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.spec.port}"

    @property
    def pid(self) -> int | None:
        """The supervisor's pid, which is also the id of the engine's process group."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def __aenter__(self) -> EngineProcess:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the engine and wait until it is ready. On failure or cancellation nothing is left running."""
        if self.is_running:
            return
        check_port_free(self.spec)
        if self.spec.prepare is not None:
            await asyncio.to_thread(self.spec.prepare)
        self._process = await self._spawn()
        self._gone = asyncio.create_task(_see_off(self._process), name=f"the end of {self.spec.name}")
        try:
            await self._await_ready(self._process)
        except BaseException:
            await self.stop()
            raise

    async def wait(self) -> int:
        """Wait until the engine has ended, for whatever reason; its exit code, or minus the signal that killed it."""
        if self._process is None:
            raise RuntimeError(f"{self.spec.name} was not started")
        return await self._process.wait()

    async def stop(self) -> None:
        """End the engine and everything it has started, and wait until they are gone."""
        process, gone = self._process, self._gone
        if process is None or gone is None:
            return
        assert process.stdin is not None
        process.stdin.close()  # the supervisor takes it from here, even if this task is cancelled now
        await asyncio.wait({gone}, timeout=self.spec.stop_grace_s + _SUPERVISOR_SLACK_S)
        if process.returncode is None:  # the supervisor hangs
            _kill_group(process.pid)
            await asyncio.wait({gone})

    def failure(self) -> EngineUnavailable:
        """What to tell a person about an engine that has ended by itself."""
        code = None if self._process is None else self._process.returncode
        after_s = time.monotonic() - self._started_at
        return EngineUnavailable(
            f"{self.spec.name} {describe_exit(code)} {after_s:.0f} s after its start.{self._log_tail()}"
        )

    async def _spawn(self) -> asyncio.subprocess.Process:
        spec = self.spec
        arguments = [str(spec.stop_grace_s), str(os.getpid()), json.dumps(dict(spec.env)), *spec.argv]
        try:
            self.log_path, log = open_log(self.log_path)
        except OSError as error:
            raise EngineUnavailable(
                f"{spec.name} cannot be started, because its log {self.log_path} cannot be written: {error.strerror}."
            ) from error
        self._started_at = time.monotonic()
        with log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(SUPERVISOR),
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _await_ready(self, process: asyncio.subprocess.Process) -> None:
        import aiohttp  # only a start needs it; who merely reads about an engine does not wait for it

        deadline = self._started_at + self.spec.ready_timeout_s
        ended = asyncio.create_task(process.wait())
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)) as client:
                while not ended.done() and not await self._answers(client):
                    if time.monotonic() >= deadline:
                        raise EngineUnavailable(
                            f"{self.spec.name} was not ready after {self.spec.ready_timeout_s:g} s.{self._log_tail()}"
                        )
                    await asyncio.wait({ended}, timeout=_PROBE_INTERVAL_S)
            if ended.done():
                raise self.failure()
        finally:
            ended.cancel()

    async def _answers(self, client: aiohttp.ClientSession) -> bool:
        import aiohttp

        try:
            async with client.get(self.url + self.spec.ready_path) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False  # nobody listens yet, or the engine is still loading

    def _log_tail(self) -> str:
        lines = telling_lines(read_tail(self.log_path))
        shown = "".join(f"\n    {line}" for line in lines)
        return (
            f" Its last lines:{shown}\nThe whole log: {self.log_path}"
            if lines
            else f" Its log is empty: {self.log_path}"
        )


async def _see_off(process: asyncio.subprocess.Process) -> None:
    """Wait for the supervisor's end. If somebody has killed it, what it watched over is ended here: at once, because
    later the system may have given the group's number to others."""
    if await process.wait() == -signal.SIGKILL:
        _kill_group(process.pid)


def _kill_group(number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)


def check_port_free(spec: LaunchSpec) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's TIME_WAIT is no listener
        try:
            probe.bind((HOST, spec.port))
        except OSError as error:
            raise EngineUnavailable(
                f"{spec.name} cannot use port {spec.port}: {error.strerror or error}. "
                "Stop what listens there or choose another port."
            ) from error


def open_log(path: Path) -> tuple[Path, IO[bytes]]:
    """Open a fresh log and keep the previous one as `*.previous.log`.

    The lock lives in the open file that the engine inherits, so it lasts exactly as long as the engine. A log that a
    running engine writes is left alone, and the next free name is used: vllm.log, vllm-2.log, ...
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        candidate = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        if not _is_in_use(candidate):
            break
    with contextlib.suppress(FileNotFoundError):
        candidate.replace(candidate.with_suffix(f".previous{candidate.suffix}"))
    log = candidate.open("wb", buffering=0)
    with contextlib.suppress(BlockingIOError):  # lost a race for the same name: the two then share the file
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return candidate, log


def _is_in_use(log: Path) -> bool:
    try:
        with log.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_COMPLAINT = re.compile(
    r"error|exception|fail|fatal|cannot|can't|unable|not found|no such|invalid|out of memory", re.IGNORECASE
)


def telling_lines(log: str) -> list[str]:
    """The few last lines that say what went wrong; just the last lines where none complains."""
    lines = [clean[:300] for line in re.split(r"[\r\n]+", _ANSI.sub("", log)) if (clean := line.strip())]
    return ([line for line in lines if _COMPLAINT.search(line)] or lines)[-_LOG_LINES_SHOWN:]


def describe_exit(code: int | None) -> str:
    """A wait code in words.

    >>> describe_exit(1), describe_exit(-9)
    ('ended with exit code 1', 'was killed by SIGKILL')
    """
    if code is None:
        return "is still running"
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
