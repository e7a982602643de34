"""The race, from scenario to report. `race` tells the story; everything it calls does one thing.

    scenario -> engine up -> probe -> warm-up burst -> cells (plan, load, ingest, audit, judge) -> next rate ... ->
    ranking

Engines compete for the machine, so by default (`residency: one`) only the engine under test runs, in blocks of cells,
and rounds go a, b, then b, a. Where engines stay up together (`residency: all`, or endpoints that somebody else runs),
single cells are interleaved instead. `arena.race.order` has the order, the store the slot of each cell. At the same
rung and replicate, every engine meets the same plan. Before each cell a fixed task is timed, which shows whether the
machine has moved.

An engine that does not start, dies or stops answering is reported with its own last words, and the race goes on
without it. Ctrl-C ends the race: children are stopped, and what has been measured is judged and reported as a partial
result.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from adapters.errors import GoodgateError
from adapters.launching.launch import EngineProcess
from arena.judging import audit, results
from arena.judging.cells import CellResult
from arena.judging.controls import DRIFT_CHECK
from arena.judging.ladder import Outcome
from arena.judging.results import EngineNotes, RaceResult, RunNotes
from arena.judging.search import Probe, next_probe
from arena.judging.so_far import SoFar, Tally
from arena.load import spool as spools
from arena.load.calibration import Calibration
from arena.load.closed_plan import closed_plan
from arena.load.loadgen import ClosedLoop, Limits, Progress, run_cell
from arena.load.plan import CellPlan, PromptSource, Target
from arena.load.spool_follower import Follower
from arena.load.workload import NOTHING, CellKey
from arena.load.workloads.material import Material
from arena.race.energy import POWERCAP, readable_counters, sampled
from arena.race.engine_metrics import metric_rows, watched
from arena.race.fixed_task import fixed_task_ms
from arena.race.order import in_round, twin_name
from arena.race.planned import plan_cell, prompts_of
from arena.race.probe import WISHES, WISHES_OF_NATURAL_ENDS, Found, is_alive, probe, warm_up
from arena.race.raced_with import settings_of, weights_of
from arena.race.scenario import Scenario
from arena.race.sending import crew_of, fit_client
from arena.records.store import CellRecord, EngineRecord, RunRecord, Store
from arena.records.verdicts import search_rows, verdict_rows

# Goodput lies below the throughput of a burst, which no latency limit holds back. 0.75 is a first guess; the search
# corrects it.
FIRST_RATE_SHARE = 0.75
MAX_INVALID_IN_A_ROW = 3


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


class Show(Protocol):
    """What a race tells while it runs."""

    def client_calibrating(self, words: str) -> None: ...
    def engine_starting(self, name: str) -> None: ...
    def engine_ready(self, name: str, words: str) -> None: ...
    def engine_failed(self, name: str, words: str) -> None: ...
    def cell_starting(self, name: str, rate_rps: float, expected_s: float) -> None: ...
    def cell_progress(self, name: str, progress: Progress, so_far: SoFar) -> None: ...
    def cell_judged(self, name: str, cell: CellResult) -> None: ...


@dataclass(slots=True)
class Entry:
    """A contender's state in the race."""

    contender: Contender
    notes: EngineNotes = field(default_factory=EngineNotes)
    process: EngineProcess | None = None
    target: Target | None = None
    first_rung: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    attempts: dict[int, int] = field(default_factory=dict)  # cells run at each rung, the invalid ones too
    invalid_in_a_row: int = 0
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


async def race(
    card: RaceCard, show: Show, course_of: Callable[[RaceCard, Store, Show], Course] | None = None
) -> RaceResult:
    """Run a race to its end, or to its interruption, and return what the store then says. `course_of` makes another
    course than the search for goodput.
    """
    (card.out / "spool").mkdir(parents=True, exist_ok=True)
    with Store(card.out / "arena.duckdb") as store:
        course = (course_of or Course)(card, store, show)
        course.record_run()
        try:
            await course.run()
            course.is_complete = True
        except asyncio.CancelledError:
            _stay_alive()
        finally:
            await course.stop_engines()
        course.record_run()
        result = results.judge_race(store)
        store.record_verdicts(verdict_rows(result), search_rows(result))
        return result


def _stay_alive() -> None:
    """The interruption has been taken; the task goes on to judge and to report."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


class Course:
    """One race under way: the only writer of its store and the only owner of its child processes."""

    is_search = True  # for goodput; otherwise what it finds out is no evidence of that

    def __init__(self, card: RaceCard, store: Store, show: Show) -> None:
        self.card = card
        self.scenario = card.scenario
        self.settings = card.scenario.settings
        self.store = store
        self.show = show
        contenders, self.control = with_twin(card.contenders, card.control)
        self.entries = [Entry(contender) for contender in contenders]
        self.slot = 0
        self.counters, self.energy_missing = readable_counters(card.powercap)
        self.calibration: Calibration | None = None
        self.is_complete = False

    async def run(self) -> None:
        if self.card.calibrates:
            self.show.client_calibrating("measures the client's own errors against an engine that computes nothing")
            self.calibration = await fit_client(self.scenario)
            self.show.client_calibrating(self.calibration.verdict.words)
            self.record_run()
        if loop := self.scenario.load.closed:
            await self._close_loops(loop)
        elif self.stays_resident:
            await self._interleave_cells()
        else:
            await self._take_turns()

    @property
    def stays_resident(self) -> bool:
        external = all(entry.contender.process is None for entry in self.entries)
        return external or self.scenario.residency == "all"

    async def _take_turns(self) -> None:
        """One engine at a time. The last round may use what earlier rounds have left."""
        budget = self.scenario.search.max_cells
        for round_number in range(1, self.scenario.rounds + 1):
            ceiling = math.ceil(budget * round_number / self.scenario.rounds)
            for entry in in_round(self.entries, round_number):
                if entry.is_out or self._next(entry) is None:
                    continue
                try:
                    await self._bring_up(entry)
                    while entry.goes_on and entry.cells_run < ceiling and (step := self._next(entry)):
                        await self._run_cell(entry, step)
                except GoodgateError as error:
                    self._drop(entry, error.message)
                finally:
                    await self._stop(entry)

    async def _close_loops(self, loop: ClosedLoop) -> None:
        """No search: each engine runs the same number of cells, in turns, the order reversed every time."""
        for replicate in range(self.scenario.search.max_replicates):
            for entry in in_round(self.entries, replicate + 1):
                if entry.is_out:
                    continue
                try:
                    if entry.target is None or not self.stays_resident:
                        await self._bring_up(entry)
                    await self._run_closed_cell(entry, loop, replicate)
                except GoodgateError as error:
                    self._drop(entry, error.message)
                finally:
                    if not self.stays_resident:
                        await self._stop(entry)

    async def _interleave_cells(self) -> None:
        """All engines are up; each runs one cell, then each runs its next one, in another order."""
        for entry in self.entries:
            try:
                await self._bring_up(entry)
            except GoodgateError as error:
                self._drop(entry, error.message)
        round_number = 1
        while active := [entry for entry in in_round(self.entries, round_number) if self._may_run(entry)]:
            for entry in active:
                step = self._next(entry)
                assert step is not None
                try:
                    if self.scenario.restart == "round" and round_number > 1:
                        await self._restart(entry)
                    await self._run_cell(entry, step)
                except GoodgateError as error:
                    self._drop(entry, error.message)
            round_number += 1

    def _may_run(self, entry: Entry) -> bool:
        return entry.goes_on and entry.cells_run < self.scenario.search.max_cells and self._next(entry) is not None

    def _next(self, entry: Entry) -> Probe | None:
        return next_probe(entry.outcomes, self.settings, first_rung=entry.first_rung)

    async def _bring_up(self, entry: Entry) -> None:
        """Start it where it is ours to start, find out what it speaks, warm it up, and take a first guess at its
        rate.
        """
        self.show.engine_starting(entry.name)
        started = time.monotonic()
        contender = entry.contender
        if contender.process is not None:
            entry.process = contender.process()
            await entry.process.start()
        url = entry.process.url if entry.process else contender.url
        assert url is not None
        entry.invalid_in_a_row = 0
        warm = prompts_of(self.scenario, self.card.material, self._key(None, entry))
        wishes = WISHES if self.scenario.exact_output else WISHES_OF_NATURAL_ENDS
        found = await probe(url, model=contender.model, prompt=warm(0), headers=contender.headers, wishes=wishes)
        start_s = time.monotonic() - started
        entry.target = found.target(entry.name)
        burst_rps = await self._warm_up(entry.target, warm)
        self.store.record_warmup(entry.name, [warm(seq).prompt_id for seq in range(1 + sum(self._bursts))])
        if not entry.outcomes:
            entry.first_rung = self.settings.rung_below(burst_rps * FIRST_RATE_SHARE)
        entry.notes = EngineNotes(
            probe=found.to_dict(),
            launched=contender.process is not None,
            start_s=start_s,
            burst_rps=burst_rps,
            weights=await weights_of(entry.process),
            settings=settings_of(entry.process, contender.flags, found.settings),
            tuning=dict(contender.tuning),
        )
        self._record_engine(entry, found)
        self.show.engine_ready(
            entry.name,
            f"up in {start_s:.1f} s, a burst of {self.scenario.search.burst} ran at {burst_rps:.1f} requests/s",
        )
        await asyncio.sleep(self.scenario.cell.settle_s)

    async def _warm_up(self, target: Target, prompts: PromptSource) -> float:
        """Two bursts, a small one for whatever is still cold, and the one that is counted; requests a second."""
        timeout_s = self.scenario.search.burst_timeout_s
        small, whole = self._bursts
        await warm_up(target, lambda seq: prompts(1 + seq), small, timeout_s=timeout_s)
        return await warm_up(target, lambda seq: prompts(1 + small + seq), whole, timeout_s=timeout_s)

    @property
    def _bursts(self) -> tuple[int, int]:
        return math.ceil(self.scenario.search.burst / 4), self.scenario.search.burst

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
        await self._fire(entry, plan, Probe(loop.concurrency, likely_rps, replicate), replicate, closed=loop)

    async def _run_cell(self, entry: Entry, step: Probe) -> None:
        replicate = entry.attempts.get(step.rung, 0)
        if replicate and self.scenario.restart == "replicate":
            await self._restart(entry)
        assert entry.target is not None
        entry.attempts[step.rung] = replicate + 1
        result = await self._fire(entry, self._plan(entry, step, replicate), step, replicate)
        self._learn(entry, result)

    async def _fire(
        self, entry: Entry, plan: CellPlan, step: Probe, replicate: int, *, closed: ClosedLoop | None = None
    ) -> CellResult:
        """One cell, from its announcement to its judgement."""
        assert entry.target is not None
        self.slot += 1
        self.store.record_cell(
            CellRecord(
                cell_id=plan.cell_id,
                run_id=self.card.run_id,
                engine_id=entry.name,
                replicate=replicate,
                slot=self.slot,
                rate_rps=step.rate_rps,
            ),
            plan,
        )
        self.store.record_audit(plan.cell_id, DRIFT_CHECK, fixed_task_ms(), None, True)
        deadline_s = self.scenario.slo.deadline_s(self.scenario.longest_output)
        cell = self.scenario.cell
        self.show.cell_starting(
            entry.name, step.rate_rps, cell.warmup_s + cell.window_s(step.rate_rps) + deadline_s / 2
        )
        spool = self.card.out / "spool" / f"{plan.cell_id}.jsonl"
        followed = Follower(spool.parent, cell=plan.cell_id)
        async with sampled(self.counters) as energy, watched(entry.target) as metrics:
            run = await run_cell(
                plan,
                entry.target,
                spool,
                limits=Limits(request_timeout_s=deadline_s + 0.5),
                crew=crew_of(self.scenario, self.card.master),
                closed=closed,
                on_progress=partial(self._tell_progress, entry.name, followed, Tally(self.scenario.slo)),
            )
        spools.write_metrics(run.spool, metric_rows(metrics, run.epoch_unix_ns))
        self.store.record_energy(plan.cell_id, energy)
        self.store.ingest(plan.cell_id, run.spool)
        if closed:
            self.store.set_rate(plan.cell_id, run.measured / cell.duration_s)
        result = judge_cell(self.store, plan.cell_id, self.scenario, aborted=run.aborted)
        self.show.cell_judged(entry.name, result)
        if result.failures:
            await self._check_alive(entry)
        await asyncio.sleep(cell.settle_s)
        return result

    def _tell_progress(self, name: str, followed: Follower, tally: Tally, progress: Progress) -> None:
        """Read here, out of the spool: the load process has nothing to do with it."""
        for _, row in followed.rows():
            tally.add(row)
        self.show.cell_progress(name, progress, tally.so_far())

    def _learn(self, entry: Entry, result: CellResult) -> None:
        if result.is_valid:
            entry.invalid_in_a_row = 0
            entry.outcomes.append(result.outcome())
            return
        entry.invalid_in_a_row += 1
        if not entry.goes_on and not entry.outcomes:  # with valid cells it is judged by those, and has another turn
            self._drop(entry, f"{MAX_INVALID_IN_A_ROW} invalid cells in a row, the last because: {result.reason}")

    async def _check_alive(self, entry: Entry) -> None:
        assert entry.target is not None
        if entry.process is not None and not entry.process.is_running:
            raise entry.process.failure()
        if not await is_alive(entry.target):
            raise GoodgateError(f"It stopped answering at {entry.target.url}.")

    def _plan(self, entry: Entry, step: Probe, replicate: int) -> CellPlan:
        key = CellKey(self.card.seed, step.rung, replicate)
        cell_id = f"{entry.name}-{step.rate_rps:g}rps-{replicate}"
        return plan_cell(self.scenario, self.card.material, key, cell_id=cell_id, rate_rps=step.rate_rps)

    def _key(self, rung: int | None, entry: Entry) -> CellKey:
        """Prompts of the burst: others each time that the engine is warmed up."""
        return CellKey(self.card.seed, rung, len(entry.outcomes))

    def _drop(self, entry: Entry, words: str) -> None:
        entry.is_out = True
        entry.notes = msgspec.structs.replace(entry.notes, failure=words)
        self._record_engine(entry)
        self.show.engine_failed(entry.name, words)

    async def _restart(self, entry: Entry) -> None:
        """A replicate of its own: runs carry over what they did to memory, caches and kernels."""
        invalid_in_a_row = entry.invalid_in_a_row
        await self._stop(entry)
        await self._bring_up(entry)
        entry.invalid_in_a_row = invalid_in_a_row  # a restart between invalid cells must not make them endless

    async def _stop(self, entry: Entry) -> None:
        if entry.process is not None:
            await entry.process.stop()
            entry.process = None

    async def stop_engines(self) -> None:
        for entry in self.entries:
            await self._stop(entry)

    def record_run(self) -> None:
        """Once at the start, as interrupted, so that a killed race leaves a store that says so, and at its end."""
        notes = RunNotes(
            scenario=self.scenario,
            quick=self.card.quick,
            order=tuple(entry.name for entry in self.entries),
            residency="all" if self.stays_resident else "one",
            interrupted=not self.is_complete,
            command=self.card.command,
            calibration=self.calibration,
            told=self.card.material.told,
            energy_missing=tuple(self.energy_missing),
            searched=self.is_search,
            control=self.control,
        )
        self.store.record_run(
            RunRecord(
                run_id=self.card.run_id,
                started_utc=self.card.started_utc,
                scenario=self.scenario.name,
                seed=self.card.seed,
                git_sha=self.card.git_sha,
                host=self.card.host,
                clock=self.card.clock,
                notes=msgspec.json.encode(notes).decode(),
            )
        )
        for entry in self.entries:
            self._record_engine(entry)

    def _record_engine(self, entry: Entry, found: Found | None = None) -> None:
        contender = entry.contender
        model = entry.target.model if entry.target else contender.model or self.scenario.model
        self.store.record_engine(
            EngineRecord(
                engine_id=entry.name,
                run_id=self.card.run_id,
                name=entry.name,
                version=contender.version,
                endpoint=entry.target.url if entry.target else contender.url or "",
                model=found.model if found else model,
                weights_sha=entry.notes.weights.get("served_sha256"),
                flags=contender.flags,
                capability=msgspec.to_builtins(entry.notes),
            )
        )


def with_twin(contenders: Sequence[Contender], name: str | None) -> tuple[Sequence[Contender], tuple[str, str] | None]:
    """The contenders, with a second entry of the named one at the end; and the two names."""
    chosen = next((contender for contender in contenders if contender.name == name), None)
    if chosen is None:
        return contenders, None
    twin = twin_name(chosen.name, [contender.name for contender in contenders])
    return [*contenders, replace(chosen, name=twin)], (chosen.name, twin)


def judge_cell(store: Store, cell_id: str, scenario: Scenario, *, aborted: str | None) -> CellResult:
    """Audit a cell, write down what was found, and judge it."""
    findings = results.audit_cell(store, cell_id, scenario)
    for finding in findings:
        store.record_audit(cell_id, finding.check, finding.value, finding.threshold, finding.ok)
    status, reason = audit.verdict(findings)
    if aborted:
        store.judge_cell(cell_id, "aborted", aborted)
    else:
        store.judge_cell(cell_id, status, reason)
    return results.read_cell(store, cell_id, scenario)
