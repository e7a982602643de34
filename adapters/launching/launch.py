"""Start, watch and stop an engine as a child process.

    async with launch("llama_cpp", home=home, model_name="smollm2-135m-instruct") as process:
        ...                                   # the engine answers at process.url

What is launched is data, a `LaunchSpec`, which an engine's recipe (launching/recipes) makes. What this module promises:
- `start` returns when the engine, and nobody else, answers on its readiness path. It raises `EngineUnavailable` with
  the exit code, the last telling lines of the log and the log's path when it dies or is late.
- `stop` ends the engine and everything it has started: TERM, then KILL after the grace. Safe at any time, and twice.
- Nothing of the engine outlives this process, even if this process is killed: see adapters/launching/supervise.py.

One life of an engine is told here; adapters/launching/kept_alive.py starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec import Struct

from adapters.errors import EngineUnavailable, InvalidRequest
from adapters.launching.engine_log import is_full, open_log, read_tail, telling_lines
from adapters.launching.knobs import Knob
from adapters.launching.ports import HOST as HOST
from adapters.launching.ports import free_port as free_port
from adapters.launching.ports import held_by_others, who_listens
from adapters.launching.supervise import descendants
from adapters.launching.weights import Weights
from adapters.option_errors import read_options

if TYPE_CHECKING:
    import aiohttp

    from adapters.models.model_store import Model

SUPERVISOR = Path(__file__).with_name("supervise.py")
LOG_LIMIT_BYTES = 64 << 20
MARK = "GOODGATE_LAUNCH"  # the variable by which every process of one start is known
_PROBE_INTERVAL_S = 0.1
_PROBE_TIMEOUT_S = 2.0
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
    log_limit_bytes: int = LOG_LIMIT_BYTES  # a log that outgrows it is cut, down to its end
    prepare: Callable[[], object] | None = None  # work before the start: run in a thread, may take seconds
    temporary: Collection[Path] = ()  # what that has written for one life of the engine: gone when it is
    weights: Weights | None = None  # what it serves, once `prepare` has made it; None where that is not known


class Installation(Struct, frozen=True):
    """Can this engine be started here? `how` says what to do where it cannot."""

    available: bool
    version: str = ""
    how: str = ""


class Launchable:
    """An adapter class whose engine can be started from here, by the recipe that has the engine's name.

    A class without a recipe overrides `installed`, `launch_options` and `launch_spec`, and may override `knobs`.
    """

    engine: ClassVar[str]
    needs_model: ClassVar[bool] = True  # False: only the model's name matters to it

    @classmethod
    def recipe(cls) -> ModuleType:
        return importlib.import_module(f"adapters.launching.recipes.{cls.engine}")

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
    def knobs(cls) -> tuple[Knob, ...]:
        """The launch options that are worth tuning, the most important one first. Without a recipe there are none."""
        if importlib.util.find_spec(f"adapters.launching.recipes.{cls.engine}") is None:
            return ()
        knobs: tuple[Knob, ...] = cls.recipe().KNOBS
        return knobs

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
    engine: str,
    *,
    home: Path,
    model_name: str,
    options: Mapping[str, Any] | None = None,
    port: int | None = None,
    find_adapter: Callable[[str], type] | None = None,
) -> EngineProcess:
    """The process that will serve the model, not yet started. What is already known to be wrong is raised here."""
    from adapters.registry import adapter_class

    adapter = (find_adapter or adapter_class)(engine)
    if not issubclass(adapter, Launchable):
        raise EngineUnavailable(
            f"The engine {engine!r} cannot be started from here; start it yourself and give its url."
        )
    try:
        installation = adapter.installed(home)
        if not installation.available:
            raise EngineUnavailable(f"The engine {engine!r} is not installed here: {installation.how}")
        model = _model(adapter, home, model_name)
        read_options(options or {}, adapter.launch_options(), engine, "launch option")

        def spec_on(port: int) -> LaunchSpec:
            return adapter.launch_spec(home=home, model=model, port=port, options=options or {})

        spec = spec_on(free_port() if port is None else port)
    except msgspec.ValidationError as error:  # of a recipe that asks for more than its struct
        raise InvalidRequest(f"A launch option of {engine} is wrong: {error}.") from error
    except OSError as error:
        raise EngineUnavailable(f"{engine} cannot be started: {describe_os_error(error)}.") from error
    return EngineProcess(spec, home / "logs" / f"{engine}.log", spec_on=spec_on if port is None else None)


def _model(adapter: type[Launchable], home: Path, name: str) -> Model:
    from adapters.models.model_store import Model, ModelStore

    if not adapter.needs_model:
        return Model(name=name, path=home, format="gguf")
    return ModelStore(home).get(name)


class EngineNotUp(EngineUnavailable):
    """An engine of ours does not run as it should. `for_records` is the message without the lines of its log: those are
    for whoever runs it, since an engine may log prompts."""

    def __init__(self, summary: str, details: str) -> None:
        super().__init__(f"{summary}{details}")
        self.for_records = summary


class EngineCrashed(EngineNotUp):
    """An engine has ended by itself."""

    def __init__(self, summary: str, details: str, exit_code: int | None) -> None:
        super().__init__(summary, details)
        self.exit_code = exit_code


class EngineProcess:
    """One engine as a child process. It belongs to the loop that starts it, and can be started again after its end."""

    def __init__(self, spec: LaunchSpec, log_path: Path, *, spec_on: Callable[[int], LaunchSpec] | None = None) -> None:
        """`spec_on` tells the spec for another port, where nobody has asked for a certain one: `spec` is then that of
        the latest start."""
        self.spec = spec
        self._spec_on = spec_on
        self.log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._gone: asyncio.Task[None] | None = None  # ends when the process and its group have
        self._mark = ""
        self._started_at = 0.0
        self._ready_at: float | None = None
        self._ended_at: float | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.spec.port}"

    @property
    def pid(self) -> int | None:
        """The supervisor's process id, which is also the engine's process group."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def uptime_s(self) -> float | None:
        """How long it has been ready, or was until its end; None where it never was."""
        return None if self._ready_at is None else (self._ended_at or time.monotonic()) - self._ready_at

    async def __aenter__(self) -> EngineProcess:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> float:
        """Start the engine, wait until it is ready, and tell how long that took: no time for one that runs already.
        On failure or cancellation nothing is left running."""
        if self.is_running:
            return 0.0
        if self._gone is not None:
            await asyncio.wait({self._gone})  # what a killed supervisor has left still holds the port
        await self._find_port()
        await self._prepare()
        try:
            self._process = await self._spawn()
            self._gone = asyncio.create_task(self._see_off(self._process), name=f"the end of {self.spec.name}")
            await self._await_ready(self._process)
        except BaseException:
            await self.stop()
            raise
        self._ready_at = time.monotonic()
        return self._ready_at - self._started_at

    async def wait(self) -> int:
        """Wait until the engine has ended, for whatever reason; its exit code, or minus the signal that killed it."""
        if self._process is None or self._gone is None:
            raise RuntimeError(f"{self.spec.name} was not started")
        await asyncio.wait({self._gone})
        return await self._process.wait()

    async def stop(self) -> None:
        """End the engine and everything it has started, and wait until they are gone."""
        process, gone = self._process, self._gone
        if process is None or gone is None:
            return
        assert process.stdin is not None
        process.stdin.close()  # the supervisor takes it from here, even if this task is cancelled now
        try:
            await asyncio.wait({gone}, timeout=self.spec.stop_grace_s + _SUPERVISOR_SLACK_S)
            if process.returncode is None:  # the supervisor hangs
                _kill_group(process.pid)
                await asyncio.wait({gone})
        finally:
            for path in self.spec.temporary:
                path.unlink(missing_ok=True)

    def failure(self) -> EngineCrashed:
        """What to tell a person about an engine that has ended by itself."""
        code = None if self._process is None else self._process.returncode
        lived_s = (self._ended_at or time.monotonic()) - self._started_at
        summary = f"{self.spec.name} {describe_exit(code)} {lived_s:.{0 if lived_s >= 10 else 1}f} s after its start."
        hint = exit_hint(code, was_ready=self._ready_at is not None)
        return EngineCrashed(summary, f"{hint}{self._log_tail()}", code)

    async def _find_port(self) -> None:
        """A port that was free when it was chosen may be taken by now, in a pause between two lives above all."""
        try:
            check_port_free(self.spec)
        except EngineUnavailable:
            if self._spec_on is None:
                raise
            try:
                self.spec = await asyncio.to_thread(self._spec_on, free_port())  # it looks at files
            except OSError as error:
                raise EngineUnavailable(f"{self.spec.name} cannot be started: {describe_os_error(error)}.") from error

    async def _prepare(self) -> None:
        if self.spec.prepare is None:
            return
        try:
            await asyncio.to_thread(self.spec.prepare)
        except OSError as error:
            raise EngineUnavailable(f"{self.spec.name} cannot be started: {describe_os_error(error)}.") from error

    async def _spawn(self) -> asyncio.subprocess.Process:
        spec = self.spec
        self._mark = uuid.uuid4().hex
        env = json.dumps({**spec.env, MARK: self._mark})
        arguments = [str(spec.stop_grace_s), str(os.getpid()), str(spec.log_limit_bytes), env, *spec.argv]
        try:
            self.log_path, log = open_log(self.log_path)
        except OSError as error:
            raise EngineUnavailable(
                f"{spec.name} cannot be started, because its log {self.log_path} cannot be written: {error.strerror}."
            ) from error
        self._started_at, self._ready_at, self._ended_at = time.monotonic(), None, None
        try:
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
        except OSError as error:
            raise EngineUnavailable(f"{spec.name} cannot be started: {describe_os_error(error)}.") from error
        except asyncio.CancelledError:
            _kill_marked(self._mark)  # the loop kills the supervisor that nobody has got hold of
            raise

    async def _await_ready(self, process: asyncio.subprocess.Process) -> None:
        import aiohttp  # only a start needs it; who merely reads about an engine does not wait for it

        deadline = self._started_at + self.spec.ready_timeout_s
        ended = asyncio.create_task(process.wait())
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)) as client:
                while not ended.done() and not await self._answers(client):
                    if time.monotonic() >= deadline:
                        summary = f"{self.spec.name} was not ready after {self.spec.ready_timeout_s:g} s."
                        raise EngineNotUp(summary, self._log_tail())
                    await asyncio.wait({ended}, timeout=_PROBE_INTERVAL_S)
            if ended.done():
                await self.wait()
                raise self.failure()
            if stranger := held_by_others(self.spec.port, ours=descendants(process.pid)):
                raise EngineUnavailable(
                    f"{self.spec.name} cannot use port {self.spec.port}: {stranger} has taken it meanwhile and answers "
                    "there. Stop it or choose another port."
                )
        finally:
            ended.cancel()

    async def _answers(self, client: aiohttp.ClientSession) -> bool:
        import aiohttp

        try:
            async with client.get(self.url + self.spec.ready_path, allow_redirects=False) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False  # nobody listens yet, or the engine is still loading

    async def _see_off(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the supervisor's end. If somebody has killed it, what it watched over is ended here: at once,
        because later the system may have given the group's number to others."""
        if await process.wait() == -signal.SIGKILL:
            _kill_group(process.pid)
            await asyncio.to_thread(_kill_marked, self._mark)
        self._ended_at = time.monotonic()

    def _log_tail(self) -> str:
        full = " The disk that holds its log is full." if is_full(self.log_path) else ""
        lines = telling_lines(read_tail(self.log_path))
        if not lines:
            return f"{full} Its log is empty: {self.log_path}"
        shown = "".join(f"\n    {line}" for line in lines)
        return f"{full} Its last lines:{shown}\nThe whole log: {self.log_path}"


def _kill_group(number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)


def _kill_marked(mark: str) -> None:
    """KILL what belongs to one start, wherever it has moved: a worker that has left the group, and whose supervisor was
    killed, is nobody's child. Once more after each round that met somebody, because he may have forked meanwhile."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(100):
        if not (pids := _marked(wanted)):
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(wanted: bytes) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):  # on other systems there is no such file
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def check_port_free(spec: LaunchSpec) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's TIME_WAIT is no listener
        try:
            probe.bind((HOST, spec.port))
        except OSError as error:
            holder = who_listens(spec.port)
            raise EngineUnavailable(
                f"{spec.name} cannot use port {spec.port}: {error.strerror or error}. "
                f"Stop {holder or 'what listens there'} or choose another port."
            ) from error


def describe_os_error(error: OSError) -> str:
    """
    >>> describe_os_error(FileNotFoundError(2, "No such file or directory", "/nowhere"))
    '/nowhere: No such file or directory'
    """
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def describe_exit(code: int | None) -> str:
    """A wait code in words. A shell tells a signal as 128 and its number.

    >>> describe_exit(1), describe_exit(-9), describe_exit(137), describe_exit(-40)
    ('ended with exit code 1', 'was killed by SIGKILL', 'ended with exit code 137 (SIGKILL)', 'was killed by signal 40')
    """
    if code is None:
        return "is still running"
    if code < 0:
        return f"was killed by {_signal_name(-code) or f'signal {-code}'}"
    name = _signal_name(code - 128)
    return f"ended with exit code {code}{f' ({name})' if name else ''}"


def exit_hint(code: int | None, *, was_ready: bool) -> str:
    """What a person may not think of, for ends that say too little."""
    if code == 0 and not was_ready:
        return " An engine has to stay in the foreground: one that puts itself into the background is ended."
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return " The system kills in this way when memory runs out."
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal, or none at all
        return ""
