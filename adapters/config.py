"""Where Goodgate keeps its data: the one place that reads `GOODGATE_HOME`."""

from __future__ import annotations

import os
from pathlib import Path


def goodgate_home() -> Path:
    """The folder of models, engines, logs and state: `GOODGATE_HOME`, or `.goodgate` in the working folder."""
    return Path(os.environ.get("GOODGATE_HOME") or ".goodgate").expanduser().absolute()
