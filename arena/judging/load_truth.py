"""The load generator on trial: cells whose answers are known, judged by the views that judge engines.

rows = asyncio.run(trial(say=print))         # about a minute
rows[0].case, rows[0].claimed, rows[0].truth, rows[0].is_right
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arena.load import spool as spools
from arena.load import truth_cases as cases
from arena.load.arrivals import seed_sequence
from arena.load.loadgen import CellRun, Limits, run_cell
from arena.load.plan import CellPlan, Prompt, Target, build_plan
from arena.load.scripted_engine import RunningEngine, stream_script
from arena.load.spool import RequestRow, SpoolError
from arena.load.truth import scripted
from arena.records.rows import CellRecord, EngineRecord, RunRecord
from arena.records.store import Store

LIMITS = Limits()
TIMING_TOLERANCE = 0.02  # of a figure whose truth is exact; the rest is other work on the machine
ARRIVAL_SECONDS = 20.0
ARRIVAL_RPS = 50.0
DISPERSION_BAND = (0.4, 1.9)  # 99.8 % of honest Poisson arrivals over 20 s: chi-square with 19 degrees of freedom
LAG_ONE_BAND = 0.1  # three standard errors of a correlation over 1,000 gaps


@dataclass(frozen=True, slots=True)
class TruthRow:
    """One line of the table: what the load generator claims, and what is true."""

    case: str
    claimed: str
    truth: str
    is_right: bool


async def trial(say: Callable[[str], None] = lambda words: None) -> list[TruthRow]:
    async with scripted() as engine:
        with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "truth.duckdb") as store:
            court = Court(engine, store, Path(folder))
            say("answers that are easily misread")
            await court.run(cases.answers_plan())
            log = await asyncio.to_thread(engine.take_log)
            found = [*judge_answers(store, cases.true_role_ttft_ms(log))]
            say("54 failures of five kinds")
            await court.run(cases.failures_plan(), Limits(request_timeout_s=1.5))
            found.append(judge_failures(store))
            say(f"arrivals, {ARRIVAL_SECONDS:g} s of them")
            found.append(_arrivals(await court.rows_of(_arrivals_plan())))
            say("a freeze of five seconds, behind a limit of 20 in flight")
            freeze = cases.freeze_plan()
            rows = await court.rows_of(freeze, Limits(max_in_flight=cases.CAP, beyond="wait", warm_connections=4))
            return [*found, _freeze(freeze, rows)]


class Court:
    """Runs cells against one scripted engine, and takes them into one store."""

    def __init__(self, engine: RunningEngine, store: Store, folder: Path) -> None:
        self._target = Target(engine.url, "scripted", "scripted")
        self._store = store
        self._folder = folder
        store.record_run(RunRecord(run_id="truth", started_utc="", scenario="truth", seed=0, host={}))
        store.record_engine(
            EngineRecord(
                engine_id="scripted", run_id="truth", name="scripted", endpoint=engine.url, model="scripted", flags={},
                capability={},
            )
        )  # fmt: skip

    async def run(self, plan: CellPlan, limits: Limits = LIMITS) -> CellRun:
        self._store.record_cell(
            CellRecord(
                cell_id=plan.cell_id, run_id="truth", engine_id="scripted", replicate=0, slot=0, rate_rps=plan.rate_rps
            ),
            plan,
        )
        run = await run_cell(plan, self._target, self._folder / f"{plan.cell_id}.jsonl", limits=limits)
        if run.aborted:
            raise SpoolError(f"The cell {plan.cell_id!r} of the trial was aborted: {run.aborted}")
        self._store.ingest(plan.cell_id, run.spool)
        return run

    async def rows_of(self, plan: CellPlan, limits: Limits = LIMITS) -> list[RequestRow]:
        run = await self.run(plan, limits)
        return [row for row in spools.read_rows(run.spool) if isinstance(row, RequestRow) and row.measured]


def _arrivals_plan() -> CellPlan:
    script = stream_script(ttft_ms=20, itl_ms=5, tokens=2)
    return build_plan(
        "arrivals",
        rate_rps=ARRIVAL_RPS,
        duration_s=ARRIVAL_SECONDS,
        warmup_s=0.5,
        cooldown_s=1,
        prompts=lambda seq: Prompt(f"arrival-{seq}", {"script": script}, 2),
        seed=seed_sequence(run=2, cell=0, replicate=0),
    )


def judge_answers(store: Store, role_ttft_ms: float) -> list[TruthRow]:
    by_prompt = {row["prompt_id"]: row for row in store.query("SELECT * FROM v_measured WHERE cell_id = 'answers'")}
    rows = [by_prompt[f"answers-{seq}"] for seq in range(len(by_prompt))]
    role, chunks, single = rows[:20], rows[20:40], rows[40:]
    ttft_ms = _middle(role, "ttft_send_ms")
    tpot_ms = _middle(chunks, "tpot_ms")
    per_token_ms = store.query(
        "SELECT quantile_disc(per_token_ms, 0.5) AS middle FROM v_itl WHERE cell_id = 'answers' AND seq >= 20 AND "
        "seq < 40"
    )[0]["middle"]
    with_tpot = sum(row["tpot_ms"] is not None for row in single)
    return [
        _timing("role chunk first: TTFT, ms", ttft_ms, role_ttft_ms),
        _timing("4 tokens a chunk: TPOT, ms", tpot_ms, cases.FOUR_TOKENS_MS),
        _timing("4 tokens a chunk: gap a token, ms", per_token_ms, cases.FOUR_TOKENS_MS),
        TruthRow("one-token answers with a TPOT", str(with_tpot), "0", with_tpot == 0 and len(single) > 0),
    ]


def judge_failures(store: Store) -> TruthRow:
    found = store.query("SELECT count(*) AS n FROM v_measured WHERE cell_id = 'failures' AND status != 'ok'")[0]["n"]
    wrong = store.query(
        "SELECT count(*) AS n FROM v_measured WHERE cell_id = 'failures' AND status != 'ok' AND seq % 2 = 1"
    )[0]["n"]
    return TruthRow(
        "failures found, of five kinds", str(found), str(cases.NUM_FAILURES), found == cases.NUM_FAILURES and not wrong
    )


def _arrivals(rows: Sequence[RequestRow]) -> TruthRow:
    sent = [row.sent_ns for row in rows if row.sent_ns is not None]
    dispersion, lag_one = cases.dispersion_and_lag_one(sent)
    low, high = DISPERSION_BAND
    is_right = low <= dispersion <= high and lag_one is not None and abs(lag_one) <= LAG_ONE_BAND
    claimed = f"{dispersion:.2f}, " + ("none" if lag_one is None else f"{lag_one:+.2f}")
    return TruthRow("Poisson arrivals: dispersion, lag-1 of gaps", claimed, "about 1, about 0", is_right)


def _freeze(plan: CellPlan, rows: Sequence[RequestRow]) -> TruthRow:
    truth_ms = statistics.fmean(cases.true_ttft_ms([request.scheduled_ns / 1e6 for request in plan.requests]))
    seen = [(row.first_gen_ns - row.scheduled_ns) / 1e6 for row in rows if row.first_gen_ns is not None]
    claimed_ms = statistics.fmean(seen) if len(seen) == len(plan.requests) else None
    return _timing(f"5-s freeze, {cases.CAP} in flight at most: mean TTFT, ms", claimed_ms, truth_ms)


def _timing(case: str, claimed_ms: float | None, truth_ms: float) -> TruthRow:
    if claimed_ms is None:
        return TruthRow(case, "nothing", f"{truth_ms:.1f}", False)
    is_right = abs(claimed_ms - truth_ms) <= TIMING_TOLERANCE * truth_ms
    return TruthRow(case, f"{claimed_ms:.1f}", f"{truth_ms:.1f}", is_right)


def _middle(rows: Sequence[Mapping[str, Any]], column: str) -> float | None:
    values = [row[column] for row in rows if row[column] is not None]
    return statistics.median(values) if len(values) == len(rows) else None
