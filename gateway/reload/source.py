"""Where the configuration comes from: its file, what the command line says instead, and one worker's share of it.

source = ConfigSource(Path("goodgate.yaml"), port=8080)
reading = source.read()                        # ConfigError with a sentence that names the place
source.digest(reading.config) == reading.digest     # until the file has changed, or one with a secret of a replica
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from adapters import registry
from gateway.config import Config, ConfigError, config_of, read_config_file, read_secret_file, secret_files
from gateway.web import workers


@dataclass(frozen=True, slots=True)
class Reading:
    config: Config
    digest: str


class Source(Protocol):
    def read(self) -> Reading:
        """The configuration, checked completely, with the digest of what it came from. Raises `ConfigError`."""

    def digest(self, config: Config) -> str:
        """What it is by now: another digest than that of `config` as soon as something has changed."""

    def spread(self) -> None:
        """Have the other workers of this gateway read it too."""


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """One a gateway; it goes to each of its workers."""

    path: Path
    host: str | None = None
    port: int | None = None
    is_open: bool = False
    num_workers: int = 1

    def read(self) -> Reading:
        text = read_config_file(self.path)
        config = self._overridden(config_of(text, self.path))
        if self.num_workers > 1:
            workers.check_shareable(config, registry.adapter_class)
            config = workers.share_of(config, self.num_workers)
        return Reading(config, _digest(text, secret_files(config)))

    def digest(self, config: Config) -> str:
        try:
            text = read_config_file(self.path)
        except ConfigError as error:
            text = error.message.encode()
        return _digest(text, secret_files(config))

    def spread(self) -> None:
        if self.num_workers > 1:
            os.kill(os.getppid(), signal.SIGHUP)  # the parent passes it on

    def _overridden(self, config: Config) -> Config:
        changes: dict[str, Any] = {}
        if self.host is not None:
            changes["host"] = self.host
        if self.port is not None:
            changes["port"] = self.port
        server = msgspec.structs.replace(config.server, **changes)
        auth = msgspec.structs.replace(config.auth, open=config.auth.open or self.is_open)
        return msgspec.structs.replace(config, server=server, auth=auth)


def _digest(text: bytes, files: Sequence[Path]) -> str:
    total = hashlib.sha256(text)
    for file in files:
        try:
            total.update(hashlib.sha256(read_secret_file(file)).digest())
        except OSError as error:  # what that means says who reads the configuration
            total.update(repr(error).encode())
    return total.hexdigest()
