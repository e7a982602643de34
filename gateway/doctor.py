"""What `goodgate doctor` looks at: each check gives one finding, and a failing one says what to do."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from adapters import registry
from adapters.errors import GoodgateError
from adapters.launch import Launchable
from adapters.model_store import DEFAULT_MODEL, ModelStore
from gateway.config import Config, load_config
from gateway.server import CannotListen, listen

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
    yield _models(home)
    if config is not None:
        yield _port(config)
    yield from _engines(home)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("Python", version, "Install Python 3.11 or newer.", is_failure=True)
    return Finding("Python", version)


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "not installed", "The native engine needs it: pip install 'goodgate[native]'.", True)
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


def _models(home: Path) -> Finding:
    try:
        names = [model.name for model in ModelStore(home).list()]
    except GoodgateError as error:
        return Finding("models", "cannot be listed", error.message, is_failure=True)
    if not names:
        advice = f"Fetch the default model: goodgate models pull {DEFAULT_MODEL}"
        return Finding("models", f"none in {home / 'models'}", advice, is_failure=True)
    return Finding("models", ", ".join(names))


def _port(config: Config) -> Finding:
    address = f"{config.server.host}:{config.server.port}"
    try:
        listen(config.server.host, config.server.port).close()
    except CannotListen as error:
        return Finding("port", address, error.message, is_failure=True)
    return Finding("port", f"{address} is free")


def _engines(home: Path) -> Iterator[Finding]:
    for engine in registry.engine_names():
        try:
            adapter = registry.adapter_class(engine)
        except Exception as error:  # a broken plug-in must not hide the other engines
            yield Finding(f"engine {engine}", "cannot be loaded", f"{type(error).__name__}: {error}")
            continue
        if not issubclass(adapter, Launchable):
            yield Finding(f"engine {engine}", "reached by its url")
            continue
        installation = adapter.installed(home)
        if installation.available:
            yield Finding(f"engine {engine}", installation.version or "available")
        else:
            yield Finding(f"engine {engine}", "not installed here", installation.how)
