"""Locust's web page beside a race, as long as the race lasts.

with web_view(out / "spool", 8089) as url: ...
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec


class WebError(Exception):
    """One sentence that says why there is no page."""


@contextmanager
def web_view(spools: Path, port: int) -> Iterator[str]:
    """The page's address. 0 is any free port. Raises WebError where it cannot be served."""
    with subprocess.Popen(
        [sys.executable, "-m", "arena.load.web_view"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is the race's, which ends it in its own order
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            process.stdin.write(msgspec.json.encode({"spools": str(spools), "port": port}) + b"\n")
            process.stdin.flush()
            url = process.stdout.readline().decode().strip()
            if not url:
                said = process.stderr.read().decode("utf-8", "replace").strip().splitlines()
                raise WebError(f"Locust's page cannot be served on port {port}: {said[-1] if said else 'it ended'}")
            yield url
        finally:
            process.kill()
