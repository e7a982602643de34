"""docker-compose.yml as Compose reads it: merged, with the variables' defaults put in.

services()["vllm"]["command"]      # [..., "--port=8000"]
"""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?::-([^}]*))?\}")
# Which engine a service runs, where its name is not the adapter's with dashes.
ENGINES = {"vllm-cpu": "vllm", "triton": "triton_server"}


def variables() -> dict[str, set[str]]:
    """Every variable of the file, with the defaults that it is given."""
    found: dict[str, set[str]] = {}
    for match in VARIABLE.finditer(_without_comments()):
        if match[1]:
            found.setdefault(match[1], set()).add(match[2] or "")
    return found


def documented() -> dict[str, str]:
    """The variables of .env.example with their values."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@functools.cache
def document() -> dict[str, Any]:
    text = VARIABLE.sub(lambda match: "$" if match[0] == "$$" else match[2] or "", _without_comments())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = document()["services"]
    return found


def engine_services(profile: str) -> dict[str, dict[str, Any]]:
    """The services of a profile that are engines: they have an image of their own."""
    mine = {name: each for name, each in services().items() if profile in each.get("profiles", [])}
    return {name: each for name, each in mine.items() if "build" not in each}


def engine_of(service: str) -> str:
    return ENGINES.get(service, service.replace("-", "_"))


def command(service: dict[str, Any]) -> list[str]:
    words = service.get("command", [])
    return shlex.split(words) if isinstance(words, str) else list(words)


def flags(words: list[str]) -> dict[str, str]:
    """`--name=value` or `--name value` of a command line; a flag without a value has an empty one."""
    found = {}
    for word, follower in zip(words, [*words, "--"][1:], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            found[name] = value if equals or follower.startswith("-") else follower
    return found


def listening_ports(service: dict[str, Any]) -> set[int]:
    """The ports that a service's command line makes it listen on; the gateway's is in its configuration."""
    given = flags(command(service))
    ports = {int(given[name]) for name in ("--port", "--http-port", "--metrics-port") if name in given}
    if "--web.listen-address" in given:
        ports.add(int(given["--web.listen-address"].rpartition(":")[2]))
    return ports


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80


def _without_comments() -> str:
    return "\n".join(line for line in COMPOSE.read_text().splitlines() if not line.lstrip().startswith("#"))
