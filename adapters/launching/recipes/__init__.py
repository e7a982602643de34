"""Recipes: how to install and start the engines that Goodgate can run itself, one module an engine.

Each recipe module offers these functions, which its adapter hands on by being `Launchable` or `Installable`:

    installed(home) -> Installation
    install(home, say)                                   # every step is said; safe to run again after a failure
    Options                                              # a struct: what can be set for a launch
    KNOBS                                                # those of them that decide how much it carries
    launch_spec(home=, model=, port=, options=) -> LaunchSpec

An engine gets a Python environment of its own under `GOODGATE_HOME/engines/<engine>`, because engines pin versions that
exclude each other. Environments cannot be built elsewhere and moved, so `installed.json`, written last, is what makes
one count: an installation that broke off looks like none, and the next run continues it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from adapters.config import whole_environment
from adapters.errors import GoodgateError
from adapters.launching.launch import Installation

Say = Callable[[str], None]
MARKER = "installed.json"
MADE = "environment.made"  # written when Python's venv has come to its end: one that broke off may lack its pip


class InstallFailed(GoodgateError):
    """An engine could not be installed; the message says which step failed and where its output is."""


class Marker(Struct, frozen=True):
    """What an environment holds, written when everything in it has been tried."""

    packages: dict[str, str]


class Environment:
    """The Python environment of one engine, and the steps that build it."""

    def __init__(self, home: Path, engine: str) -> None:
        self.engine = engine
        self.folder = home / "engines" / engine
        self.python = self.folder / "bin" / "python"
        self.log = home / "logs" / f"install-{engine}.log"

    def installation(self, packages: Mapping[str, str]) -> Installation:
        """Available when the environment holds exactly these packages, in these versions."""
        how = f"run `goodgate engines install {self.engine}`"
        version = next(iter(packages.values()))
        try:
            marker = msgspec.json.decode((self.folder / MARKER).read_bytes(), type=Marker)
        except (FileNotFoundError, NotADirectoryError):
            unfinished = " (an unfinished installation will be continued)" if self.folder.exists() else ""
            return Installation(available=False, version=version, how=f"{how}{unfinished}.")
        except (msgspec.DecodeError, OSError) as error:
            return Installation(available=False, version=version, how=f"{how}; its marker cannot be read: {error}.")
        if marker.packages != dict(packages):
            held = ", ".join(f"{name} {number}" for name, number in marker.packages.items())
            return Installation(available=False, version=version, how=f"{how} to replace {held}.")
        return Installation(available=True, version=version)

    def create(self, say: Say) -> None:
        """Make the environment, or go on with the one that is there; from here on it counts as unfinished."""
        (self.folder / MARKER).unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        if not (self.folder / MADE).exists():
            say(f"making a Python environment in {self.folder}")
            self.run([sys.executable, "-m", "venv", "--clear", str(self.folder)], "making the environment")
            (self.folder / MADE).touch()

    def remove(self) -> None:
        """Take the environment away; the marker first, so that what a break-off leaves counts as unfinished."""
        if self.folder.exists():
            (self.folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(self.folder)

    def pip(self, *arguments: str, doing: str, settings: Mapping[str, str] | None = None) -> None:
        self.run([str(self.python), "-I", "-m", "pip", "--disable-pip-version-check", *arguments], doing, settings)

    def run(self, command: list[str], doing: str, settings: Mapping[str, str] | None = None) -> str:
        """Run one step; its output is returned and kept in the log. `InstallFailed` quotes the last line."""
        with self.log.open("ab+") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            began = log.tell()
            result = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, check=False, env=whole_environment(settings)
            )
            log.seek(began)
            output = log.read().decode("utf-8", "replace")
        if result.returncode != 0:
            last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "it said nothing")
            raise InstallFailed(
                f"Installing {self.engine} failed while {doing}: {last} (all its output: {self.log}). "
                f"Run `goodgate engines install {self.engine}` again to continue."
            )
        return output

    def finish(self, packages: Mapping[str, str], say: Say) -> None:
        path = self.folder / MARKER
        draft = path.with_suffix(".tmp")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(Marker(dict(packages)))) + b"\n")
        draft.replace(path)
        say(f"{self.engine} {next(iter(packages.values()))} is ready")


def num_cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
