"""The entry list: each contender with its state in the race, and the second entry of the A/A control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from adapters.launching.launch import EngineProcess
from arena.judging.cells import CellResult
from arena.judging.ladder import Outcome
from arena.judging.notes import EngineNotes
from arena.load.plan import Target
from arena.race.card import Contender
from arena.race.order import twin_name

MAX_INVALID_IN_A_ROW = 3


@dataclass(slots=True)
class Entry:
    """A contender's state in the race. `process` and `target` are those of the engine that is up."""

    contender: Contender
    notes: EngineNotes = field(default_factory=EngineNotes)
    process: EngineProcess | None = None
    target: Target | None = None
    first_rung: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    attempts: dict[int, int] = field(default_factory=dict)  # cells run at each rung, the invalid ones too
    invalid_in_a_row: int = 0
    last_invalid: str = ""
    is_out: bool = False

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def cells_run(self) -> int:
        """Cells that count against the budget: an invalid one is the client's fault and is run again."""
        return len(self.outcomes)

    @property
    def goes_on(self) -> bool:
        """Invalid cells cost nothing of the budget, so a run of them has to end the turn."""
        return not self.is_out and self.invalid_in_a_row < MAX_INVALID_IN_A_ROW

    def take(self, result: CellResult) -> None:
        """Count a cell that has been judged."""
        if result.is_valid:
            self.invalid_in_a_row = 0
            self.outcomes.append(result.outcome())
        else:
            self.invalid_in_a_row += 1
            self.last_invalid = result.reason or "no reason is known"


def with_twin(contenders: Sequence[Contender], name: str | None) -> tuple[Sequence[Contender], tuple[str, str] | None]:
    """The contenders, with a second entry of the named one at the end; and the two names."""
    chosen = next((contender for contender in contenders if contender.name == name), None)
    if chosen is None:
        return contenders, None
    twin = twin_name(chosen.name, [contender.name for contender in contenders])
    return [*contenders, replace(chosen, name=twin)], (chosen.name, twin)
