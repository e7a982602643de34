"""Has the process itself still room? Pure: what its state is goes in, what presses it comes out.

    resource = pressing(config, reading, was=None)      # "memory", "files" or "loop"; None: there is room
    raise Pressed(resource)

A process without memory, file descriptors or turns of its event loop fails everything that is open in it, so what is
new is refused before: by a share of the limit, and until there is clearly room again (`RELIEF`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

from adapters.errors import Overloaded
from gateway.config import OverloadConfig

Resource: TypeAlias = Literal["memory", "files", "loop"]

RELIEF = 0.95  # of what began the shedding: less than that ends it
RETRY_AFTER_S: Mapping[Resource, float] = {"memory": 5, "files": 2, "loop": 1}
_WHAT: Mapping[Resource, str] = {
    "memory": "has hardly any memory left",
    "files": "has hardly any file descriptors left",
    "loop": "is behind with what it has",
}


class Pressed(Overloaded):
    """Refused before the body is read; the connection is given up with it."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(f"The gateway {_WHAT[resource]}; try again shortly.", retry_after_s=RETRY_AFTER_S[resource])


class Reading(NamedTuple):
    """The process's state. A limit or a size that nobody can tell is None."""

    lag_s: float = 0.0  # how late the event loop came to the last look
    resident_bytes: int | None = None
    memory_limit: int | None = None
    open_files: int | None = None
    files_limit: int | None = None


def pressing(config: OverloadConfig, reading: Reading, was: Resource | None) -> Resource | None:
    """What is short, the most deadly first; `was` is the last answer.

    >>> config = OverloadConfig(shed_at=0.9, max_loop_lag_ms=1000)
    >>> pressing(config, Reading(open_files=89, files_limit=100), None)
    >>> pressing(config, Reading(open_files=90, files_limit=100), None)
    'files'
    >>> pressing(config, Reading(open_files=86, files_limit=100), "files")
    'files'
    >>> pressing(config, Reading(lag_s=2.0), None)
    'loop'
    """
    for resource, share in _shares(config, reading):
        if share >= (RELIEF if resource == was else 1):
            return resource
    return None


def files_to_shed_at(config: OverloadConfig, limit: int | None) -> float:
    """So many open ones begin the shedding."""
    return float("inf") if limit is None else limit * config.shed_at


def files_to_drop_at(config: OverloadConfig, limit: int | None) -> float:
    """And from so many on, half way to the limit, a new connection is not even read: engines need the rest."""
    return float("inf") if limit is None else limit * (1 + config.shed_at) / 2


def _shares(config: OverloadConfig, reading: Reading) -> Iterator[tuple[Resource, float]]:
    """Of what begins the shedding, so much is used."""
    if reading.resident_bytes is not None and reading.memory_limit is not None:
        yield "memory", reading.resident_bytes / (reading.memory_limit * config.shed_at)
    if reading.open_files is not None:
        yield "files", reading.open_files / files_to_shed_at(config, reading.files_limit)
    yield "loop", reading.lag_s * 1000 / config.max_loop_lag_ms
