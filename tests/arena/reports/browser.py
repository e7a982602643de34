"""Chromium without a window, spoken to over a pipe (the DevTools protocol: JSON, each message ended by a zero byte).

    with Browser(profile_folder) as browser:
        seen = browser.look_at(page, width=360, is_dark=True)
        seen.requests, seen.complaints, seen.evaluate("document.title")

A pipe needs no port and no library. What the page asked the network for, and whatever the console said, is kept.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 60  # on a busy machine a start may take a while; nothing is judged by it
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip

# The protocol wants descriptors 3 and 4; by way of high ones, since the pipe's own may be those.
BECOME = """
import fcntl, os, sys
hers, its = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 64) for number in sys.argv[1:3])
os.dup2(hers, 3)
os.dup2(its, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclass
class Seen:
    """One page, looked at in one size and dress."""

    browser: Browser
    session: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def evaluate(self, expression: str) -> Any:
        answer = self.browser.ask(
            "Runtime.evaluate", session=self.session, expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path, *, top: int = 0, height: int | None = None) -> None:
        """A PNG of the page, or of a stripe of it."""
        size = self.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": top, "width": size[0], "height": height or size[1] - top, "scale": 1}
        shot = self.browser.ask("Page.captureScreenshot", session=self.session, clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


class Browser:
    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        hers, self._to = os.pipe()
        self._from, its = os.pipe()
        settings = (*ARGUMENTS, f"--user-data-dir={profile}")
        command = [sys.executable, "-I", "-c", BECOME, str(hers), str(its), CHROMIUM, *settings]
        self._process = subprocess.Popen(
            command, pass_fds=(hers, its), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        os.close(hers)
        os.close(its)
        self._left, self._number = b"", 0
        self._seen: dict[str, Seen] = {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._to, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        os.close(self._to)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    @contextlib.contextmanager
    def look_at(self, page: Path, *, width: int, height: int = 900, is_dark: bool = False) -> Iterator[Seen]:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        seen = self._seen[session] = Seen(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable", session=session)
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            session=session, width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.ask("Emulation.setEmulatedMedia", session=session, features=[scheme])
        self.ask("Page.navigate", session=session, url=page.as_uri())
        deadline = time.monotonic() + PATIENCE_S
        while seen.evaluate("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, "the page was never loaded"
        yield seen
        self.ask("Target.closeTarget", targetId=target)

    def ask(self, method: str, *, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {
            "id": self._number,
            "method": method,
            "params": parameters,
            **({"sessionId": session} if session else {}),
        }
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        seen = self._seen.get(event.get("sessionId", ""))
        if seen is None:
            return
        said = event["params"]
        match event["method"]:
            case "Network.requestWillBeSent":
                seen.requests.append(said["request"]["url"])
            case "Runtime.exceptionThrown":
                seen.complaints.append(str(said["exceptionDetails"]))
            case "Log.entryAdded":
                seen.complaints.append(said["entry"]["text"])
            case "Runtime.consoleAPICalled":
                seen.complaints.append(str(said["args"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._from], [], [], PATIENCE_S)
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded


def main() -> None:
    """`python -m tests.arena.reports.browser report.html docs/report.png 1280 1500`: the upper part of a page."""
    page, picture, width, height = sys.argv[1:]
    with (
        tempfile.TemporaryDirectory() as profile,
        Browser(Path(profile)) as browser,
        browser.look_at(Path(page).resolve(), width=int(width)) as seen,
    ):
        seen.picture(Path(picture), height=int(height))


if __name__ == "__main__":
    main()
