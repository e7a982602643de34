"""The course of a race: whose turn it is, which rate comes next, and who is out.

Engines compete for the machine, so by default (`residency: one`) only the engine under test runs, in blocks of cells,
and rounds go a, b, then b, a. Where engines stay up together (`residency: all`, or endpoints that somebody else runs),
single cells are interleaved instead. `arena.race.order` has the order. At the same rung and replicate, every engine
meets the same plan.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from adapters.errors import GoodgateError
from arena.judging.search import Probe, next_probe
from arena.load.calibration import Calibration
from arena.load.closed_plan import closed_plan
from arena.load.loadgen import ClosedLoop
from arena.load.plan import CellPlan
from arena.load.workload import CellKey
from arena.race.card import RaceCard
from arena.race.cell_runner import CellRunner
from arena.race.energy import readable_counters
from arena.race.engine_life import bring_up, stop
from arena.race.entries import MAX_INVALID_IN_A_ROW, Entry, with_twin
from arena.race.order import in_round
from arena.race.planned import plan_cell, prompts_of
from arena.race.race_record import RaceRecord
from arena.race.recount import recount
from arena.race.sending import fit_client
from arena.race.show import Show
from arena.records.store import Store

# Goodput lies below the throughput of a burst, which no latency limit holds back. 0.75 is a first guess; the search
# corrects it.
FIRST_RATE_SHARE = 0.75


class Course:
    """One race under way: the only writer of its store and the only owner of its child processes."""

    is_search = True  # for goodput; otherwise what it finds out is no evidence of that

    def __init__(self, card: RaceCard, store: Store, show: Show) -> None:
        self.card = card
        self.scenario = card.scenario
        self.settings = card.scenario.settings
        self.show = show
        self.calibration: Calibration | None = None
        self.uncounted: tuple[str, ...] = ()
        contenders, control = with_twin(card.contenders, card.control)
        self.entries = [Entry(contender) for contender in contenders]
        counters, energy_missing = readable_counters(card.powercap)
        self._cells = CellRunner(card, store, show, counters)
        self._record = RaceRecord(
            card=card,
            store=store,
            residency="all" if self.stays_resident else "one",
            searched=self.is_search,
            control=control,
            energy_missing=tuple(energy_missing),
        )

    @property
    def stays_resident(self) -> bool:
        """Whether engines are up together, or one at a time."""
        external = all(entry.contender.process is None for entry in self.entries)
        return external or self.scenario.residency == "all"

    def write_down(self, *, is_complete: bool = False) -> None:
        """What is known of the race and its engines, for whoever reads its store now or after a kill."""
        self._record.run(self.entries, calibration=self.calibration, uncounted=self.uncounted, is_complete=is_complete)

    async def calibrate_client(self) -> None:
        """Raises `ClientUnfit` where this machine's client cannot measure."""
        self.show.client_calibrating("measures the client's own errors against an engine that computes nothing")
        self.calibration = await fit_client(self.scenario)
        self.show.client_calibrating(self.calibration.verdict.words)
        self.write_down()

    async def recount(self) -> None:
        """Count again what the engines claim, when nothing is measured any more: with the tokenizer of the scenario's
        model where we have started the engine, else of the model that it names.
        """
        if self.card.open_counter is None:
            return
        models = {
            entry.name: self.scenario.model if entry.contender.process else entry.target.model
            for entry in self.entries
            if entry.target is not None
        }
        self.uncounted = await asyncio.to_thread(recount, self._record.store, models, self.card.open_counter)

    async def run(self) -> None:
        if loop := self.scenario.load.closed:
            await self._close_loops(loop)
        elif self.stays_resident:
            await self._interleave_cells()
        else:
            await self._take_turns()
        self._drop_the_unmeasured()

    async def stop_engines(self) -> None:
        for entry in self.entries:
            await stop(entry)

    async def _take_turns(self) -> None:
        """One engine at a time. The last round may use what earlier rounds have left."""
        budget = self.scenario.search.max_cells
        for round_number in range(1, self.scenario.rounds + 1):
            ceiling = math.ceil(budget * round_number / self.scenario.rounds)
            for entry in in_round(self.entries, round_number):
                if entry.is_out or self._next(entry) is None:
                    continue
                try:
                    with self._drops(entry):
                        await self._bring_up(entry)
                        while entry.goes_on and entry.cells_run < ceiling and (step := self._next(entry)):
                            await self._run_cell(entry, step)
                finally:
                    await stop(entry)

    async def _close_loops(self, loop: ClosedLoop) -> None:
        """No search: each engine runs the same number of cells, in turns, the order reversed every time."""
        for replicate in range(self.scenario.search.max_replicates):
            for entry in in_round(self.entries, replicate + 1):
                if entry.is_out:
                    continue
                try:
                    with self._drops(entry):
                        if entry.target is None or not self.stays_resident:
                            await self._bring_up(entry)
                        await self._run_closed_cell(entry, loop, replicate)
                finally:
                    if not self.stays_resident:
                        await stop(entry)

    async def _interleave_cells(self) -> None:
        """All engines are up; each runs one cell, then each runs its next one, in another order."""
        for entry in self.entries:
            with self._drops(entry):
                await self._bring_up(entry)
        round_number = 1
        while active := [entry for entry in in_round(self.entries, round_number) if self._may_run(entry)]:
            for entry in active:
                step = self._next(entry)
                assert step is not None
                with self._drops(entry):
                    if self.scenario.restart == "round" and round_number > 1:
                        await self._restart(entry)
                    await self._run_cell(entry, step)
            round_number += 1

    def _may_run(self, entry: Entry) -> bool:
        return entry.goes_on and entry.cells_run < self.scenario.search.max_cells and self._next(entry) is not None

    def _next(self, entry: Entry) -> Probe | None:
        return next_probe(entry.outcomes, self.settings, first_rung=entry.first_rung)

    async def _bring_up(self, entry: Entry) -> None:
        self.show.engine_starting(entry.name)
        up = await bring_up(entry, self.card)
        entry.invalid_in_a_row = 0
        if not entry.outcomes:
            entry.first_rung = self.settings.rung_below(up.burst_rps * FIRST_RATE_SHARE)
        self._record.brought_up(entry, up)
        burst = self.scenario.search.burst
        words = f"up in {up.start_s:.1f} s, a burst of {burst} ran at {up.burst_rps:.1f} requests/s"
        self.show.engine_ready(entry.name, words)
        await asyncio.sleep(self.scenario.cell.settle_s)

    async def _restart(self, entry: Entry) -> None:
        """A replicate of its own: runs carry over what they did to memory, caches and kernels."""
        invalid_in_a_row = entry.invalid_in_a_row
        await stop(entry)
        await self._bring_up(entry)
        entry.invalid_in_a_row = invalid_in_a_row  # a restart between invalid cells must not make them endless

    async def _run_cell(self, entry: Entry, step: Probe) -> None:
        replicate = entry.attempts.get(step.rung, 0)
        if replicate and self.scenario.restart == "replicate":
            await self._restart(entry)
        entry.attempts[step.rung] = replicate + 1
        plan = self._plan(entry, step, replicate)
        result = await self._cells.run(entry, plan, rate_rps=step.rate_rps, replicate=replicate)
        entry.take(result)

    async def _run_closed_cell(self, entry: Entry, loop: ClosedLoop, replicate: int) -> None:
        """Its rate is what the loop came to, known when it is over."""
        cell, likely_rps = self.scenario.cell, entry.notes.burst_rps or 1.0
        key = CellKey(self.card.seed, loop.concurrency, replicate)
        plan = closed_plan(
            f"{entry.name}-closed{loop.concurrency}-{replicate}",
            loop=loop,
            likely_rps=likely_rps,
            warmup_s=cell.warmup_s,
            duration_s=cell.duration_s,
            prompts=prompts_of(self.scenario, self.card.material, key),
        )
        await self._cells.run(entry, plan, rate_rps=likely_rps, replicate=replicate, closed=loop)

    def _plan(self, entry: Entry, step: Probe, replicate: int) -> CellPlan:
        key = CellKey(self.card.seed, step.rung, replicate)
        cell_id = f"{entry.name}-{step.rate_rps:g}rps-{replicate}"
        return plan_cell(self.scenario, self.card.material, key, cell_id=cell_id, rate_rps=step.rate_rps)

    def _drop_the_unmeasured(self) -> None:
        """Invalid cells end a turn, and are seldom the engine's doing: it is out when all its turns were in vain."""
        for entry in self.entries:
            if not entry.is_out and not entry.goes_on and not entry.outcomes:
                words = f"{MAX_INVALID_IN_A_ROW} invalid cells in a row, the last because: {entry.last_invalid}"
                self._drop(entry, words)

    @contextmanager
    def _drops(self, entry: Entry) -> Iterator[None]:
        """An error in the block is the engine's: it is out, and the race goes on without it."""
        try:
            yield
        except GoodgateError as error:
            self._drop(entry, error.message)

    def _drop(self, entry: Entry, words: str) -> None:
        entry.is_out = True
        entry.notes = msgspec.structs.replace(entry.notes, failure=words)
        self._record.engine(entry)
        self.show.engine_failed(entry.name, words)
