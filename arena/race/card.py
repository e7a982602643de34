"""What a race is given: who races, and everything else that is known before it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapters.launching.launch import EngineProcess
from arena.load.workload import NOTHING
from arena.load.workloads.material import Material
from arena.race.energy import POWERCAP
from arena.race.recount import OpenCounter
from arena.race.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """An engine to be raced: one that we start (`process`), or an endpoint that is already up (`url`)."""

    name: str
    version: str | None = None
    process: Callable[[], EngineProcess] | None = None
    url: str | None = None
    model: str | None = None  # name to ask for; None: the only one that is served
    headers: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)  # what was tried to find these flags


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceCard:
    """Everything a race is given."""

    run_id: str
    started_utc: str
    seed: int
    scenario: Scenario
    quick: bool
    contenders: Sequence[Contender]
    out: Path
    host: Mapping[str, Any]
    clock: Mapping[str, Any] = field(default_factory=dict)  # what the stamps are read from
    material: Material = NOTHING  # what the files of the scenario hold
    git_sha: str | None = None
    command: str = ""
    calibrates: bool = False  # measure the client's floor first, and refuse the race where it is too high
    master: tuple[str, int] | None = None  # where workers of other hosts are waited for; None: all load is sent here
    control: str | None = None  # the contender that is entered a second time, for the A/A control
    powercap: Path = POWERCAP  # where the kernel shows the energy counters of processors
    open_counter: OpenCounter | None = None  # tokenizers of models, to count again what engines claim
