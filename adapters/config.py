"""What the adapters take from the environment: where Goodgate keeps its data, and the keys of engines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from adapters.errors import EngineUnavailable


def goodgate_home() -> Path:
    """The folder of models, engines, logs and state: `GOODGATE_HOME`, or `.goodgate` in the working folder."""
    return Path(os.environ.get("GOODGATE_HOME") or ".goodgate").expanduser().absolute()


# What a child process needs to run and to find its way out. Proxies may hold a password, which is for that very use.
_FOR_CHILDREN = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


def bare_environment() -> dict[str, str]:
    """The least of our environment, for a program that should see no key that is not meant for it."""
    names = (*_FOR_CHILDREN, *_PROXIES, *map(str.lower, _PROXIES))
    return {name: os.environ[name] for name in names if name in os.environ}


def whole_environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment as it is, with `settings` over it: for installers, which need what the user has set for them."""
    return {**os.environ, **(settings or {})}


def variable(name: str) -> str:
    """What one environment variable holds; empty where it is not set."""
    return os.environ.get(name, "")


def secret(variable: str) -> str:
    """The key that an environment variable holds; empty where none is named. `EngineUnavailable` if it is not set."""
    if not variable:
        return ""
    value = os.environ.get(variable, "")
    if not value:
        raise EngineUnavailable(f"The environment variable {variable} is not set; it should hold the engine's key.")
    return value
