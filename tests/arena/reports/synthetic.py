"""A race that never took place, of a real one's shape: four engines behind queues of known capacity, seeded.

Each engine is a number of slots that serve one request each; what is raced is a Poisson stream. Everything a report
reads comes out of that one simulation: samples, verdicts, courses, flows, audits.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from adapters.launching.knobs import Knob
from arena.judging import stats
from arena.judging.audit import Finding
from arena.judging.cells import CellResult, Sample
from arena.judging.economy import Economy
from arena.judging.knee import Knee
from arena.judging.notes import EngineNotes, RunNotes
from arena.judging.ranking import compare_all, rank_sets
from arena.judging.results import EngineResult, RaceResult
from arena.judging.search import estimate
from arena.judging.traces import Course, Flow, Traces
from arena.load.calibration import Calibration, Floor
from arena.race import tuning
from arena.race.scenario_file import parse
from arena.race.sending import budget_of
from arena.race.tuning import Trial, Tuning

SCENARIO = parse(
    """
name: chat
title: A chat of one turn, 100 words in, 64 tokens out
model: smollm2-135m-instruct
workload: {kind: synthetic, prompt: {kind: uniform, low: 80, high: 120}, output: {kind: fixed, tokens: 64}}
slo: {ttft_ms: 1000, tpot_ms: 60}
""",
    source="synthetic",
)
SLO, SETTINGS = SCENARIO.slo, SCENARIO.settings
WARMUP_S, WINDOW_S = 5.0, 60.0

CALIBRATION = Calibration(
    asked_rps=128,
    budget=budget_of(SLO),
    floors=(
        Floor(
            rate_rps=128, chunks_per_s=8192, requests=192, ttft_p50_ms=0.06, ttft_p99_ms=0.44, gap_p50_ms=0.02,
            gap_p99_ms=0.31, lag_p99_ms=0.29, cpu=0.41,
        ),
    ),
)  # fmt: skip
DEPTH = Knob(option="max_num_seqs", meaning="batch depth", values=(4, 8, 16, 32, 64))
TUNING = Tuning(
    engine="vllm",
    knobs=(DEPTH,),
    start={"max_num_seqs": 16},
    budget=tuning.Budget(cells=20),
    trials=tuple(
        Trial(settings={"max_num_seqs": depth}, goodput_rps=rate, lo=rate * 0.8, hi=rate * 1.2, cells=4, seconds=60.0)
        for depth, rate in ((4, 1.41), (8, 2.0), (16, 2.83), (32, 2.38), (64, 1.19))
    ),
    is_finished=True,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """`slots` requests at a time, each `tokens` long at `tpot_ms`, which grows by `crowding` with each neighbour."""

    name: str
    version: str
    slots: int
    prefill_ms: float
    tpot_ms: float
    crowding: float
    flags: tuple[tuple[str, object], ...] = ()

    @property
    def capacity_rps(self) -> float:
        return self.slots / (self.prefill_ms / 1000 + 0.063 * self.tpot_ms * (1 + self.crowding * (self.slots - 1)))


KINDS = (
    Kind("native", "0.1.0", 24, 35, 12.0, 0.09),
    Kind("openvino", "2026.4.1", 20, 45, 13.0, 0.10, (("threads", 2),)),
    Kind("vllm", "0.32.0", 16, 80, 25.0, 0.085, (("omp_threads", 2), ("bind", "nobind"))),
    Kind("llama_cpp", "11434", 6, 160, 10.0, 0.45, (("quantization", "q8_0"), ("parallel", 16))),
)


@cache
def synthetic_race(kinds: tuple[Kind, ...] = KINDS, *, quick: bool = False) -> RaceResult:
    rng = np.random.default_rng(7)
    cells: dict[str, list[CellResult]] = {kind.name: [] for kind in kinds}
    flows: dict[str, Flow] = {}
    courses: dict[str, dict[float, Course]] = {kind.name: {} for kind in kinds}
    slot = 0
    for offset in (-6, -3, -1, 0, 1, -1, 2, 4):
        for kind in kinds:
            slot += 1
            rung = SETTINGS.rung_below(kind.capacity_rps) + offset
            cell, flow, course = _cell(kind, rung, slot, rng)
            cells[kind.name].append(cell)
            flows[cell.cell_id] = flow
            courses[kind.name].setdefault(cell.rate_rps, course)
    return _judged(kinds, cells, flows, courses, quick=quick)


def _cell(kind: Kind, rung: int, slot: int, rng: np.random.Generator) -> tuple[CellResult, Flow, Course]:
    rate = SETTINGS.rate(rung)
    end_s = WARMUP_S + WINDOW_S + 8
    due = np.cumsum(rng.exponential(1 / rate, int(rate * end_s * 1.3) + 20))
    due = due[due < end_s].tolist()
    free = [0.0] * kind.slots
    rows: list[tuple[float, float, float, float]] = []  # due, TTFT ms, TPOT ms, end
    for at in due:
        start = max(at, heapq.heappop(free))
        busy = sum(until > start for until in free)
        prefill = kind.prefill_ms * float(rng.lognormal(0, 0.12))
        tpot = kind.tpot_ms * (1 + kind.crowding * busy) * float(rng.lognormal(0, 0.05))
        end = start + (prefill + 63 * tpot) / 1000
        heapq.heappush(free, end)
        is_lost = rng.random() < 0.0015
        rows.append((at, math.inf if is_lost else (start - at) * 1000 + prefill, tpot, end))
    measured = [row for row in rows if WARMUP_S <= row[0] < WARMUP_S + WINDOW_S]
    samples = tuple(
        Sample(scheduled_s=at, ttft_ms=ttft, tpot_ms=tpot if ttft < math.inf else None, ok=ttft < math.inf)
        for at, ttft, tpot, _ in measured
    )
    severities = [sample.severity(SLO) for sample in samples]
    missed = [severity > 1 for severity in severities]
    effect = stats.design_effect(missed, severities)
    late = sum(end > WARMUP_S + WINDOW_S + 4 for *_, end in measured)
    status, reason = (
        ("ok", None) if late < 0.1 * len(measured) else ("unstable", "The backlog grew by 23% of the load.")
    )
    if slot == 9:
        status, reason = "invalid_client", "p99 of the sends was 12.31 ms behind schedule, allowed are 10.00 ms."
    cell = CellResult(
        cell_id=f"{kind.name}-{rate:g}rps-{slot}",
        engine_id=kind.name,
        rung=rung,
        rate_rps=rate,
        replicate=0,
        slot=slot,
        status=status,
        reason=reason,
        samples=samples,
        misses=sum(missed),
        design_effect=effect,
        verdict=stats.judge(len(missed) / effect, (len(missed) if reason else sum(missed)) / effect),
        findings=(
            Finding(
                "client_lag_p99_ms", status != "invalid_client", 12.3 if slot == 9 else 0.3 + slot / 90, 10, "note", ""
            ),
            Finding("unsent_requests", True, 0, 0, "note", ""),
            Finding("arrival_gaps_p", True, 0.4, 0.0005, "note", ""),
            Finding("arrival_dispersion_p", True, 0.7, 0.0005, "note", ""),
            Finding("unserved_share", status != "unstable", 0.23 if status == "unstable" else 0.01, 0.1, "note", ""),
            Finding("cached_prompt_share", True, 0.11, 0.35, "note", ""),
        ),
        plan_sha256=f"{rung + 1000:04x}" * 16,
    )
    ended = sum(WARMUP_S <= end < WARMUP_S + WINDOW_S and ttft < math.inf for _, ttft, _, end in rows)
    good = len(missed) - sum(missed)
    flow = Flow(offered_rps=len(missed) / WINDOW_S, completed_rps=ended / WINDOW_S, good_rps=good / WINDOW_S)
    moments = [end_s * step / 240 for step in range(241)]
    levels = tuple((at, sum(came <= at < end for came, _, _, end in rows)) for at in moments)
    course = Course(
        cell_id=cell.cell_id,
        rate_rps=rate,
        warmup_s=WARMUP_S,
        horizon_s=WARMUP_S + WINDOW_S,
        end_s=end_s,
        requests=tuple((at, ttft) for at, ttft, _, _ in rows),
        in_flight=levels,
    )
    return cell, flow, course


def _judged(
    kinds: tuple[Kind, ...],
    cells: dict[str, list[CellResult]],
    flows: dict[str, Flow],
    courses: dict[str, dict[float, Course]],
    *,
    quick: bool,
) -> RaceResult:
    valid = {name: [cell for cell in known if cell.is_valid] for name, known in cells.items()}
    better = compare_all({name: Knee([cell.outcome() for cell in known], SETTINGS) for name, known in valid.items()})
    ranks = rank_sets(list(valid), better)
    engines, gaps, shown = [], {}, {}
    rng = np.random.default_rng(8)
    for kind in kinds:
        goodput = estimate([cell.outcome() for cell in valid[kind.name]], SETTINGS)
        rate = goodput.rate_rps or min(cell.rate_rps for cell in valid[kind.name])
        shown[kind.name] = courses[kind.name][rate]
        pauses = np.sort(kind.tpot_ms * rng.lognormal(0.3, 0.5, 4000))
        gaps[kind.name] = tuple(float(pauses[min(3999, step * 20)]) for step in range(201))
        engines.append(
            EngineResult(
                engine_id=kind.name,
                name=kind.name,
                version=kind.version,
                model=SCENARIO.model,
                endpoint="http://127.0.0.1:8000",
                notes=EngineNotes(
                    probe={"exact_length": True, "counts_tokens": True, "refused": []},
                    start_s=4.2,
                    burst_rps=9.0,
                    tuning=TUNING.told() if kind.name == "vllm" else {},
                ),
                goodput=goodput,
                cells=tuple(cells[kind.name]),
                headline=tuple(s for cell in valid[kind.name] if cell.rate_rps == rate for s in cell.samples),
                headline_rps=rate,
                rank=ranks[kind.name],
                unranked=(),
                settings=dict(kind.flags),
                economy=Economy(
                    tokens_per_s=rate * 64,
                    joules_per_token=round(21 / rate, 3),
                    tokens_per_joule=round(rate / 21, 3),
                    energy_sources=("rapl:package-0",),
                    price_per_hour=0.19,
                    currency="USD",
                    tokens_per_money=rate * 64 * 3600 / 0.19,
                ),
            )
        )
    engines.sort(
        key=lambda engine: (engine.rank.lo if engine.rank else 99, -(engine.goodput.rate_rps if engine.goodput else 0))
    )
    return RaceResult(
        run_id="chat-20261130-120000",
        started_utc="2026-11-30T12:00:00+00:00",
        seed=20261130,
        git_sha="26103acb6e3f",
        host={"os": "Linux-6.1-x86_64", "cpu": "AMD EPYC 9R14", "cores": 2, "memory_gib": 23.4, "python": "3.11.2"},
        notes=RunNotes(
            scenario=SCENARIO,
            quick=quick,
            order=tuple(kind.name for kind in kinds),
            calibration=CALIBRATION,
            command="goodgate arena run chat --engines native,openvino,vllm,llama_cpp -o llama_cpp.quantization=q8_0",
        ),
        engines=tuple(engines),
        better=better,
        invalid_reasons=(),
        prompt_tokens=131.0,
        answer_tokens=64.0,
        traces=Traces(flows=flows, courses=shown, gaps_ms=gaps),
    )
