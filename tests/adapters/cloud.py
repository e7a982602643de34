"""Which Python has litellm: it cannot share one with the test tools, whose openai SDK and hub client are newer."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NO_CLOUD = "litellm is not installed; `make cloud` installs it beside the test tools"


@cache
def cloud_python() -> str | None:
    own = ROOT / ".venv" / "cloud" / "bin" / "python"
    if own.exists():
        return str(own)
    return sys.executable if find_spec("litellm") is not None else None
