"""What a race remembers of itself and of its engines beside the columns of the store, as JSON."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from arena.load.calibration import Calibration
from arena.race.scenario import Scenario


class RunNotes(Struct, frozen=True, kw_only=True):
    """What a run must remember beyond the columns of the store; kept as JSON in `runs.notes`."""

    scenario: Scenario
    quick: bool = False
    order: tuple[str, ...] = ()
    residency: str = "one"
    interrupted: bool = False
    command: str = ""
    calibration: Calibration | None = None  # the client's own errors here, measured before the race
    told: tuple[str, ...] = ()  # what of the scenario's files had to be cut or left out
    energy_missing: tuple[str, ...] = ()  # of each kind of counter that could not be read, why
    searched: bool = True  # for goodput; False: the rate was given, so nothing is known of a higher one
    uncounted: tuple[str, ...] = ()  # why texts of some models could not be counted by their tokenizers
    control: tuple[str, str] | None = None  # an engine that was entered twice, and the name of its second entry


class EngineNotes(Struct, frozen=True, kw_only=True):
    """What became of an engine; kept as JSON in `engines.capability_json`."""

    probe: dict[str, Any] = {}
    launched: bool = True
    start_s: float | None = None
    burst_rps: float | None = None
    failure: str | None = None
    weights: dict[str, Any] = {}  # digests, precision and relation to the model's file; empty where it is not told
    settings: dict[str, Any] = {}  # how it was launched, and its own report of its settings
    tuning: dict[str, Any] = {}  # what `--tune` tried and found
