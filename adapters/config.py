"""What the adapters take from the environment: where Goodgate keeps its data, and the keys of engines."""

from __future__ import annotations

import os
from pathlib import Path

from adapters.errors import EngineUnavailable


def goodgate_home() -> Path:
    """The folder of models, engines, logs and state: `GOODGATE_HOME`, or `.goodgate` in the working folder."""
    return Path(os.environ.get("GOODGATE_HOME") or ".goodgate").expanduser().absolute()


def secret(variable: str) -> str:
    """The key that an environment variable holds; empty where none is named. `EngineUnavailable` if it is not set."""
    if not variable:
        return ""
    value = os.environ.get(variable, "")
    if not value:
        raise EngineUnavailable(f"The environment variable {variable} is not set; it should hold the engine's key.")
    return value
