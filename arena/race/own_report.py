"""What an engine says of its own settings, where it has a route for that. It becomes part of the result.

The routes are those that engines in the field have (`/version`, `/props`, `/server_info`); whoever has none answers 404
and has said nothing. Keys and secrets are left out, long texts (chat templates) are cut.
"""

from __future__ import annotations

import re
from typing import Any

import aiohttp
import msgspec

from adapters.errors import EngineProtocolError
from arena.load.asking import whole
from arena.load.spool import UNREADABLE

ROUTES = ("/version", "/props", "/server_info")
MOST_BYTES = 256 << 10
MOST_TEXT = 200
MOST_ITEMS = 200
SECRET = re.compile(r"(api|admin|auth|access|hf|secret)_?(key|token)|password|secret|credential", re.IGNORECASE)


async def own_report(client: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """By route, each JSON object that the engine answers there. An engine that does not answer at all tells nothing."""
    told = {}
    for route in ROUTES:
        try:
            async with client.get(url + route, allow_redirects=False) as response:
                if response.status != 200:
                    continue
                report = msgspec.json.decode(await whole(response, MOST_BYTES))
        except (aiohttp.ClientError, TimeoutError, OSError, EngineProtocolError, *UNREADABLE):
            continue  # no such route, or none that speaks JSON: it is an offer, not a duty
        if isinstance(report, dict):
            told[route] = without_secrets(report)
    return told


def without_secrets(value: Any) -> Any:
    """The same value to keep and to show: no secrets, no long texts, no endless lists."""
    if isinstance(value, dict):
        kept = {str(key): item for key, item in value.items() if not SECRET.search(str(key))}
        return {key: without_secrets(item) for key, item in list(kept.items())[:MOST_ITEMS]}
    if isinstance(value, list):
        return [without_secrets(item) for item in value[:MOST_ITEMS]]
    if isinstance(value, str) and len(value) > MOST_TEXT:
        return value[:MOST_TEXT] + " ..."
    return value
