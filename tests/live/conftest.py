"""Real engines: each started by `goodgate engines up`, with a gateway in front, and stopped again.

`native` and `openvino` start in seconds and always run where they are installed; `llama_cpp` and `vllm` only with
GOODGATE_LIVE=all, which `make live` sets. With GOODGATE_LIVE_REPORTS=DIR each engine's report is left there as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.launching.launch import Launchable, free_port
from adapters.models.model_store import DEFAULT_MODEL, ModelStore
from adapters.probing.probe import Report
from adapters.registry import adapter_class

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("GOODGATE_HOME", ROOT / ".goodgate")).resolve()
GOODGATE = [sys.executable, "-m", "goodgate"]
QUICK, SLOW = ("native", "openvino"), ("llama_cpp", "vllm")
READY_WITHIN_S = 60.0
REPORTS = pytest.StashKey[list[Report]]()


def why_not(engine: str) -> str:
    """The reason for which an engine is not tried here; empty where it is."""
    if engine in SLOW and os.environ.get("GOODGATE_LIVE") != "all":
        return f"{engine} takes too long for every day: make live"
    adapter = adapter_class(engine)
    assert issubclass(adapter, Launchable)
    state = adapter.installed(HOME)
    return "" if state.available else f"{engine} is not installed in {HOME}: {state.how}"


class Live:
    """One engine that was started for the tests of one module, and a gateway before it."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine = engine
        self.model = DEFAULT_MODEL
        self._folder = folder
        self._environment = {**os.environ, "GOODGATE_HOME": str(HOME), "COLUMNS": "300"}
        self.ready_s = 0.0
        self.url = ""

    def start(self) -> None:
        """As a person does it, and timed as a person would."""
        began = time.monotonic()
        command = [*GOODGATE, "engines", "up", self.engine, "--no-restart"]
        self.up = subprocess.Popen(
            command, cwd=ROOT, env=self._environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self.up.stdout is not None
        said = []
        for line in self.up.stdout:
            said.append(line)
            if address := [word for word in line.split() if word.startswith("http://")]:
                self.url = address[0].removesuffix("/v1")
                break
        if not self.url:
            self.up.communicate(timeout=30)  # it has ended, and its pipe must not spoil a later test
        assert self.url, f"{self.engine} did not start:\n{''.join(said)}"
        self.ready_s = time.monotonic() - began

    def stop(self) -> int:
        """Ctrl-C, and how the command ended."""
        self.up.send_signal(signal.SIGINT)
        self.up.communicate(timeout=30)
        return self.up.returncode

    def probe(self) -> Report:
        """What `goodgate engines probe` finds. Our own engine's adapter lives in the process of the probe."""
        target = self.engine if self.engine == "native" else self.url
        command = [*GOODGATE, "engines", "probe", target, "--json"]
        result = subprocess.run(
            command, cwd=ROOT, env=self._environment, text=True, capture_output=True, timeout=400, check=False
        )
        assert result.returncode in (0, 1), result.stderr
        report = msgspec.json.decode(result.stdout, type=Report)
        adapter = adapter_class(self.engine)
        assert issubclass(adapter, Launchable)
        version = adapter.installed(HOME).version
        return msgspec.structs.replace(report, version=version, ready_s=self.ready_s)

    @contextlib.contextmanager
    def gateway(self) -> Iterator[str]:
        """The url of `goodgate serve` with this engine as its only replica."""
        options = {"model": self.model} if self.engine == "native" else {"url": self.url}
        replica = {"engine": self.engine, "options": options}
        config = {
            "health": {"interval_s": 0.2},
            "logs": {"access": False},
            "models": [{"name": self.model, "replicas": [replica]}],
        }
        path = self._folder / f"{self.engine}.yaml"
        path.write_text(json.dumps(config))
        port = free_port()
        command = [*GOODGATE, "serve", "--config", str(path), "--port", str(port)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=self._environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            self._await_ready(process, f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=40)

    @staticmethod
    def _await_ready(process: subprocess.Popen[str], url: str) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline and process.poll() is None:
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
                urllib.request.urlopen(f"{url}/ready", timeout=2),
            ):
                return
            time.sleep(0.1)
        process.kill()
        raise AssertionError(f"the gateway is not ready:\n{process.communicate()[1]}")


@pytest.fixture(scope="module", params=[*QUICK, *SLOW])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if reason := why_not(request.param):
        pytest.skip(reason)
    store = ModelStore(HOME)
    if DEFAULT_MODEL not in {model.name for model in store.list()}:
        store.pull(DEFAULT_MODEL)
    engine = Live(request.param, tmp_path_factory.mktemp("live"))
    try:
        engine.start()
        yield engine
    finally:
        if engine.up.poll() is None:
            engine.stop()


@pytest.fixture(scope="module")
def gateway(live: Live) -> Iterator[str]:
    with live.gateway() as url:
        yield url


def loads_of(gateway: str) -> list[dict[str, Any]]:
    """What the replicas behind a gateway tell of their load."""
    with urllib.request.urlopen(f"{gateway}/admin/status", timeout=5) as response:
        models = json.load(response)["models"]
    return [replica["load"] for model in models for replica in model["replicas"]]


def processes_below(pid: int) -> set[int]:
    """Every descendant of a process, by Linux's own account."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo.extend(below)
    return found


def keep(config: pytest.Config, report: Report) -> None:
    """For the table at the end, and where it is asked for as a file."""
    config.stash.setdefault(REPORTS, []).append(report)
    if folder := os.environ.get("GOODGATE_LIVE_REPORTS"):
        path = Path(folder) / f"{report.engine}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    from adapters.probing.faces import tally

    reports = config.stash.get(REPORTS, [])
    if reports:
        terminalreporter.write_sep("-", "live engines")
        terminalreporter.write_line(f"{'engine':12}{'version':14}{'ready':>8}{'first token':>14}  what the probe found")
    for report in reports:
        first = f"{report.first_token_s:.2f} s" if report.first_token_s is not None else "-"
        ready = f"{report.ready_s:.1f} s" if report.ready_s is not None else "-"
        terminalreporter.write_line(f"{report.engine:12}{report.version:14}{ready:>8}{first:>14}  {tally(report)}")
