"""What a race writes down of itself and of its engines; `arena.race.cell_runner` writes what concerns a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from arena.judging.notes import RunNotes
from arena.load.calibration import Calibration
from arena.race.card import RaceCard
from arena.race.engine_life import BroughtUp
from arena.race.entries import Entry
from arena.records.rows import EngineRecord, RunRecord
from arena.records.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceRecord:
    """The rows of one race in its store. Each is written again whenever more is known."""

    card: RaceCard
    store: Store
    residency: str  # "all" engines up together, or "one" at a time
    searched: bool  # for goodput
    control: tuple[str, str] | None  # an engine that was entered twice, and the name of its second entry
    energy_missing: tuple[str, ...]  # of each kind of counter that could not be read, why

    def run(
        self,
        entries: Sequence[Entry],
        *,
        calibration: Calibration | None,
        uncounted: tuple[str, ...],
        is_complete: bool,
    ) -> None:
        """Once at the start, as interrupted, so that a killed race leaves a store that says so, and at its end."""
        card = self.card
        notes = RunNotes(
            scenario=card.scenario,
            quick=card.quick,
            order=tuple(entry.name for entry in entries),
            residency=self.residency,
            interrupted=not is_complete,
            command=card.command,
            calibration=calibration,
            told=card.material.told,
            energy_missing=self.energy_missing,
            searched=self.searched,
            control=self.control,
            uncounted=uncounted,
        )
        self.store.record_run(
            RunRecord(
                run_id=card.run_id,
                started_utc=card.started_utc,
                scenario=card.scenario.name,
                seed=card.seed,
                git_sha=card.git_sha,
                host=card.host,
                clock=card.clock,
                notes=msgspec.json.encode(notes).decode(),
            )
        )
        for entry in entries:
            self.engine(entry)

    def brought_up(self, entry: Entry, up: BroughtUp) -> None:
        self.store.record_warmup(entry.name, up.prompt_ids)
        self.engine(entry)

    def engine(self, entry: Entry) -> None:
        contender = entry.contender
        model = entry.target.model if entry.target else contender.model or self.card.scenario.model
        self.store.record_engine(
            EngineRecord(
                engine_id=entry.name,
                run_id=self.card.run_id,
                name=entry.name,
                version=contender.version,
                endpoint=entry.target.url if entry.target else contender.url or "",
                model=model,
                weights_sha=entry.notes.weights.get("served_sha256"),
                flags=contender.flags,
                capability=msgspec.to_builtins(entry.notes),
            )
        )
