"""What `goodgate doctor` looks at: each check gives one finding, and a failing one says what to do.

Only what the configuration asks for can fail: a gateway in front of remote engines needs neither torch nor a model.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from adapters import registry
from adapters.errors import GoodgateError
from adapters.launching.launch import Launchable
from adapters.models.model_store import DEFAULT_MODEL, ModelStore, is_store_name
from gateway.config import Config, ReplicaConfig, load_config
from gateway.web import process
from gateway.web.server import CannotListen, listen

OLDEST_PYTHON = (3, 11)
COMPILERS = ("cc", "gcc", "clang")


class Finding(Struct, frozen=True):
    """One thing that was looked at. A failure keeps the gateway from serving; other gaps are only told."""

    subject: str
    state: str
    advice: str = ""
    is_failure: bool = False

    @property
    def mark(self) -> str:
        return "FAIL" if self.is_failure else "note" if self.advice else "  ok"


def examine(config_path: Path, home: Path) -> Iterator[Finding]:
    yield _python()
    yield _torch()
    yield _compiler()
    config, finding = _config(config_path)
    yield finding
    local = _run_here(config) if config is not None else []
    yield _models(home, {name for replica in local if (name := _model_of(replica))})
    if config is not None:
        yield _port(config)
        yield _open_files(config)
    yield from _engines(home, {replica.engine for replica in local})


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("Python", version, "Install Python 3.11 or newer.", is_failure=True)
    return Finding("Python", version)


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "not installed", "The native engine needs it: pip install 'goodgate[native]'.")
    return Finding("torch", "installed")


def _compiler() -> Finding:
    for name in COMPILERS:
        if shutil.which(name):
            return Finding("C compiler", name)
    advice = "The native engine is slower without its compiled kernels: install gcc or clang."
    return Finding("C compiler", "none found", advice)


def _config(path: Path) -> tuple[Config | None, Finding]:
    try:
        config = load_config(path)
    except GoodgateError as error:
        return None, Finding("configuration", "not usable", error.message, is_failure=True)
    return config, Finding("configuration", f"{path} ({len(config.models)} model{'s' * (len(config.models) != 1)})")


def _run_here(config: Config) -> list[ReplicaConfig]:
    """The replicas that run on this machine: in the gateway's process, or started by it."""
    replicas = [replica for model in config.models for replica in model.replicas]
    return [each for each in replicas if each.launch or registry.adapter_class(each.engine).in_process]


def _model_of(replica: ReplicaConfig) -> str:
    """The model of the store that the replica loads; empty where it loads none."""
    adapter = registry.adapter_class(replica.engine)
    if issubclass(adapter, Launchable) and not adapter.needs_model:
        return ""
    name = str(replica.model if replica.launch else replica.options.get("model", ""))
    return name if is_store_name(name) else ""


def _models(home: Path, wanted: set[str]) -> Finding:
    store = ModelStore(home)
    try:
        for name in sorted(wanted):
            store.get(name)
        names = [model.name for model in store.list()]
    except GoodgateError as error:
        return Finding("models", "not complete", error.message, is_failure=True)
    if not names:
        advice = f"Fetch the default model: goodgate models pull {DEFAULT_MODEL}"
        return Finding("models", f"none in {store.root}", advice)
    return Finding("models", ", ".join(names))


def _port(config: Config) -> Finding:
    address = f"{config.server.host}:{config.server.port}"
    try:
        listen(config.server.host, config.server.port).close()
    except CannotListen as error:
        return Finding("port", address, error.message, is_failure=True)
    return Finding("port", f"{address} is free")


def _open_files(config: Config) -> Finding:
    files, wanted = process.raise_files_limit(), process.files_wanted(config.server.max_in_flight)
    if files is None or files >= wanted:
        return Finding("open files", "without a limit" if files is None else f"up to {files}")
    advice = f"For `max_in_flight: {config.server.max_in_flight}` it should be {wanted}: raise it with ulimit -n."
    return Finding("open files", f"up to {files}", advice)


def _engines(home: Path, used: set[str]) -> Iterator[Finding]:
    for engine in registry.engine_names():
        try:
            adapter = registry.adapter_class(engine)
        except registry.UnknownEngine as error:  # a broken plug-in must not hide the other engines
            yield Finding(f"engine {engine}", "cannot be loaded", str(error))
            continue
        if not issubclass(adapter, Launchable):
            yield Finding(f"engine {engine}", "runs elsewhere")
            continue
        installation = adapter.installed(home)
        if installation.available:
            yield Finding(f"engine {engine}", installation.version or "available")
        else:
            advice = installation.how[:1].upper() + installation.how[1:]
            yield Finding(f"engine {engine}", "not installed here", advice, is_failure=engine in used)
