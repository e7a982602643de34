"""What was raced, in settings: how an engine was launched, what it reports of itself, and which weights it serves.

It is part of the result: another flag is another engine. Paths are cut to their last name, which tells of no user.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from adapters.launching.launch import EngineProcess

_LONG_PATH = re.compile(r"/(?:[^/\s\"':=]+/){2,}(?=[^/\s\"':=]+)")


def settings_of(
    process: EngineProcess | None, options: Mapping[str, Any], reported: Mapping[str, Any]
) -> dict[str, Any]:
    """`launched` is missing for an endpoint that somebody else runs, `reported` is empty where an engine tells none."""
    launched = {}
    if process is not None:
        env = {name: short(value) for name, value in process.spec.env.items() if name != "PYTHONPATH"}
        launched = {"options": dict(options), "argv": [short(word) for word in process.spec.argv], "env": env}
    return {"launched": launched, "reported": short_in(reported)}


async def weights_of(process: EngineProcess | None) -> dict[str, Any]:
    """What a launched engine serves, with digests; empty for an endpoint."""
    if process is None or process.spec.weights is None:
        return {}
    return await asyncio.to_thread(process.spec.weights.told)


def short(text: str) -> str:
    """Each absolute path of three names or more in a text, by its last one."""
    return _LONG_PATH.sub(".../", text)


def short_in(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: short_in(item) for key, item in value.items()}
    if isinstance(value, list):
        return [short_in(item) for item in value]
    return short(value) if isinstance(value, str) else value
