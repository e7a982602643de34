"""The gateways that ours is measured beside: how each is installed, started before an upstream, and asked.

    with started(PEERS[0], upstream_port, folder) as target: ...        # Target(name, port, headers, pid)

Each has a folder of its own under GOODGATE_HOME/peers. None is needed: those that are not there are named with the
command that installs them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from gateway.commands.bench.processes import BenchError, free_port, running, wait_until

BODY_BYTES = 400
ROUTE = "/v1/chat/completions"
LAST_WORDS = 2000


class Target(Struct, frozen=True):
    """Something that answers chats. `pid` is what its CPU time is taken of, with its children."""

    name: str
    port: int
    pid: int
    headers: Mapping[str, str] = {}


class Peer(Struct, frozen=True):
    """`program` is where it is, below its folder, once `install` was run there; `command` starts it."""

    name: str
    folder: str
    program: str
    install: Sequence[str]
    command: Callable[[Path, int, int, Path], Sequence[str]]  # program, own port, upstream's port, folder for files
    headers: Callable[[int], Mapping[str, str]] = lambda upstream: {}

    def place(self, peers: Path) -> Path:
        return peers / self.folder / self.program

    def is_installed(self, peers: Path) -> bool:
        return self.place(peers).exists()


def chat_body() -> bytes:
    """One fixed body of 400 bytes."""
    text = "Tell me a short story about a fox, a dog and an old tree, in at most three sentences, and end it well. " * 8
    head = (
        '{"model":"m","messages":[{"role":"system","content":"You are a helpful assistant."},{"role":"user","content":"'
    )
    tail = '"}],"max_tokens":64,"temperature":0.7}'
    return (head + text[: BODY_BYTES - len(head) - len(tail)] + tail).encode()


def _router(program: Path, port: int, upstream: int, folder: Path) -> Sequence[str]:
    """vLLM's router and SMG, which comes of it; each would take the same port for its metrics."""
    return [
        str(program),
        *(["launch"] if program.name == "smg" else []),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        *("--worker-urls", f"http://127.0.0.1:{upstream}"),
    ]


def _portkey(program: Path, port: int, upstream: int, folder: Path) -> Sequence[str]:
    return ["node", str(program), "--headless", f"--port={port}"]


def _portkey_headers(upstream: int) -> Mapping[str, str]:
    return {
        "x-portkey-provider": "openai",
        "x-portkey-custom-host": f"http://127.0.0.1:{upstream}/v1",
        "Authorization": "Bearer none",
    }


def _litellm(program: Path, port: int, upstream: int, folder: Path) -> Sequence[str]:
    served = {"model": "openai/m", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
    config = folder / "litellm.yaml"
    models = [{"model_name": "m", "litellm_params": served}]
    keyless = {"dangerously_permit_weak_or_unset_master_key": True}  # it serves on loopback for some seconds
    config.write_text(json.dumps({"model_list": models, "general_settings": keyless}))
    return [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]


def _pip(requirement: str) -> Sequence[str]:
    return ["bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]


PEERS = (
    Peer("vllm-router 0.1.17", "vllm-router", "bin/vllm-router", _pip("vllm-router==0.1.17"), _router),
    Peer("SMG 1.13.0", "smg", "bin/smg", _pip("smg==1.13.0"), _router),
    Peer(
        "Portkey",
        "portkey",
        "node_modules/@portkey-ai/gateway/build/start-server.js",
        ["npm", "install", "--silent", "@portkey-ai/gateway"],
        _portkey,
        _portkey_headers,
    ),
    Peer("LiteLLM proxy 1.106.12", "litellm", "bin/litellm", _pip("litellm[proxy]==1.106.12"), _litellm),
)


def install(peers: Path, say: Callable[[str], None]) -> None:
    """Each that is missing, in a folder of its own; Python ones in environments of their own."""
    for peer in PEERS:
        if peer.is_installed(peers):
            continue
        folder = peers / peer.folder
        say(f"installing {peer.name} in {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        if peer.install[0] == "bin/python":
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        program = shutil.which(peer.install[0]) or str(folder / peer.install[0])
        try:
            subprocess.run([program, *peer.install[1:]], cwd=folder, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BenchError(f"{peer.name} could not be installed: {error}") from error


@contextmanager
def started(peer: Peer, peers: Path, upstream: int, folder: Path) -> Iterator[Target]:
    port = free_port()
    log = folder / f"{peer.folder}.log"
    command = peer.command(peer.place(peers), port, upstream, folder)
    with log.open("w") as output, running(command, stdout=output, stderr=output, cwd=folder) as process:
        target = Target(peer.name, port, process.pid, peer.headers(upstream))
        wait_until(
            lambda: answers(target), lambda: f"{peer.name} did not start: {log.read_text()[-LAST_WORDS:]}", process
        )
        yield target


def answers(target: Target) -> bool:
    """Whether a chat comes through."""
    headers = {"Content-Type": "application/json", **target.headers}
    request = urllib.request.Request(f"http://127.0.0.1:{target.port}{ROUTE}", chat_body(), headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            status: int = response.status
            return status == 200
    except OSError:  # not yet, or not with 200
        return False
