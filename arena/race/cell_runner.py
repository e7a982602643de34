"""One cell of a race, from its announcement in the store to its judgement."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from arena.judging import audit
from arena.judging.cell_audit import audit_cell
from arena.judging.cells import CellResult, read_cell
from arena.judging.controls import DRIFT_CHECK
from arena.judging.so_far import Tally
from arena.load import spool as spools
from arena.load.loadgen import CellRun, ClosedLoop, Limits, Progress, run_cell
from arena.load.plan import CellPlan
from arena.load.spool_follower import Follower
from arena.race.card import RaceCard
from arena.race.energy import Counter, Sample, sampled
from arena.race.engine_life import check_alive
from arena.race.engine_metrics import metric_rows, watched
from arena.race.entries import Entry
from arena.race.fixed_task import fixed_task_ms
from arena.race.scenario import Scenario
from arena.race.sending import crew_of
from arena.race.show import Show
from arena.records.rows import CellRecord
from arena.records.store import Store


class CellRunner:
    """Runs cells one after the other: their slots are numbered here."""

    def __init__(self, card: RaceCard, store: Store, show: Show, counters: Sequence[Counter]) -> None:
        self._card = card
        self._scenario = card.scenario
        self._store = store
        self._show = show
        self._counters = counters
        self._slot = 0

    async def run(
        self, entry: Entry, plan: CellPlan, *, rate_rps: float, replicate: int, closed: ClosedLoop | None = None
    ) -> CellResult:
        """Fire `plan` at the entry's engine, store what came, and judge it. `rate_rps` of a closed loop is a guess
        beforehand. Raises a `GoodgateError` where requests failed because the engine is gone.
        """
        self._announce(entry, plan, rate_rps, replicate)
        run, energy = await self._fire(entry, plan, closed)
        self._store.record_energy(plan.cell_id, energy)
        self._store.ingest(plan.cell_id, run.spool)
        if closed:
            self._store.set_rate(plan.cell_id, run.measured / self._scenario.cell.duration_s)
        result = judge_cell(self._store, plan.cell_id, self._scenario, aborted=run.aborted)
        self._show.cell_judged(entry.name, result)
        if result.failures:
            await check_alive(entry)
        await asyncio.sleep(self._scenario.cell.settle_s)
        return result

    def _announce(self, entry: Entry, plan: CellPlan, rate_rps: float, replicate: int) -> None:
        """What a kill would leave of it: its plan and its slot. The fixed task shows whether the machine has moved."""
        self._slot += 1
        cell = CellRecord(
            cell_id=plan.cell_id,
            run_id=self._card.run_id,
            engine_id=entry.name,
            replicate=replicate,
            slot=self._slot,
            rate_rps=rate_rps,
        )
        self._store.record_cell(cell, plan)
        self._store.record_audit(plan.cell_id, DRIFT_CHECK, fixed_task_ms(), None, True)
        window_s = self._scenario.cell.window_s(rate_rps)
        expected_s = self._scenario.cell.warmup_s + window_s + self._deadline_s / 2
        self._show.cell_starting(entry.name, rate_rps, expected_s)

    async def _fire(self, entry: Entry, plan: CellPlan, closed: ClosedLoop | None) -> tuple[CellRun, Sequence[Sample]]:
        assert entry.target is not None
        spool = self._card.out / "spool" / f"{plan.cell_id}.jsonl"
        followed = Follower(spool.parent, cell=plan.cell_id)
        async with sampled(self._counters) as energy, watched(entry.target) as metrics:
            run = await run_cell(
                plan,
                entry.target,
                spool,
                limits=Limits(request_timeout_s=self._deadline_s + 0.5),
                crew=crew_of(self._scenario, self._card.master),
                closed=closed,
                on_progress=partial(self._tell_progress, entry.name, followed, Tally(self._scenario.slo)),
            )
        spools.write_metrics(run.spool, metric_rows(metrics, run.epoch_unix_ns))
        return run, energy

    def _tell_progress(self, name: str, followed: Follower, tally: Tally, progress: Progress) -> None:
        """Read here, out of the spool: the load process has nothing to do with it."""
        for _, row in followed.rows():
            tally.add(row)
        self._show.cell_progress(name, progress, tally.so_far())

    @property
    def _deadline_s(self) -> float:
        return self._scenario.slo.deadline_s(self._scenario.longest_output)


def judge_cell(store: Store, cell_id: str, scenario: Scenario, *, aborted: str | None) -> CellResult:
    """Audit a cell, write down what was found, and judge it. `aborted`: why its load broke off, if it did."""
    findings = audit_cell(store, cell_id, scenario)
    for finding in findings:
        store.record_audit(cell_id, finding.check, finding.value, finding.threshold, finding.ok)
    status, reason = audit.verdict(findings)
    if aborted:
        store.judge_cell(cell_id, "aborted", aborted)
    else:
        store.judge_cell(cell_id, status, reason)
    return read_cell(store, cell_id, scenario)
