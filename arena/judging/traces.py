"""What a report draws request by request: how many were in flight, how late each first token came, how long tokens
paused. Read from the store; nothing here enters a verdict.

`read_traces` looks at three things and no more, so that a race of many cells is reported quickly: the flow of every
cell (one query), the course of one cell an engine (the one at its goodput), and the pauses between tokens at the rate
that all engines can be compared at.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arena.records.store import Store

if TYPE_CHECKING:
    from arena.judging.cells import CellResult
    from arena.judging.results import EngineResult

SECOND_NS = 1e9
MOMENTS = 240  # of a course, at which requests in flight are counted
QUANTILES = 200  # steps in which a distribution of pauses is handed on


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One cell's measured window, in requests a second: what was due, what was answered in it, what met both limits."""

    offered_rps: float
    completed_rps: float
    good_rps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One cell from its first request to its last, in seconds of the cell's clock.

    `requests` are (due, TTFT in ms) of all requests, those of warm-up and cool-down too; infinity for a failure.
    Cool-down requests that were cut off when the cell was over are in flight until then, and have no TTFT: they were
    only there to keep the load up.
    """

    cell_id: str
    rate_rps: float
    warmup_s: float
    horizon_s: float
    end_s: float
    requests: tuple[tuple[float, float], ...]
    in_flight: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    flows: Mapping[str, Flow] = field(default_factory=dict)  # by cell
    courses: Mapping[str, Course] = field(default_factory=dict)  # by engine
    gaps_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by engine; quantiles 0, 1/200 ... 1


def read_traces(store: Store, engines: Sequence[EngineResult], *, ttft_ms: float, tpot_ms: float) -> Traces:
    """`ttft_ms` and `tpot_ms` are the limits."""
    courses, gaps = {}, {}
    for engine in engines:
        cell = _at_rate(engine, engine.headline_rps)
        if cell is not None:
            courses[engine.engine_id] = read_course(store, cell)
        peer = _at_rate(engine, comparable_rate(engines, engine))
        if peer is not None and (found := _gaps(store, peer.cell_id)):
            gaps[engine.engine_id] = found
    return Traces(flows=_flows(store, ttft_ms, tpot_ms), courses=courses, gaps_ms=gaps)


def comparable_rate(engines: Sequence[EngineResult], engine: EngineResult) -> float | None:
    """The tested rate of this engine that is nearest to the lowest goodput of all: a load that every engine carries."""
    goodputs = [other.goodput.rate_rps for other in engines if other.goodput and other.goodput.rate_rps]
    rates = {cell.rate_rps for cell in engine.cells if cell.is_valid and cell.samples}
    if not rates:
        return None
    reference = min(goodputs) if goodputs else min(rates)
    return min(rates, key=lambda rate: abs(math.log(rate / reference)))


def read_course(store: Store, cell: CellResult) -> Course:
    plan = store.query("SELECT warmup_ns, horizon_ns FROM plans WHERE plan_sha256 = ?", [cell.plan_sha256])[0]
    rows = store.query(
        "SELECT measured, scheduled_ns, first_gen_ns, last_gen_ns, done_ns, status FROM requests WHERE cell_id = ? "
        "ORDER BY scheduled_ns",
        [cell.cell_id],
    )
    requests, entered, left = [], [], []
    for row in rows:
        is_ok = row["status"] == "ok" and row["first_gen_ns"] is not None
        due = row["scheduled_ns"]
        if row["status"] != "cancelled":
            requests.append((due / SECOND_NS, (row["first_gen_ns"] - due) / 1e6 if is_ok else math.inf))
        gone = row["last_gen_ns"] if is_ok else row["done_ns"]
        if row["status"] != "unsent":
            entered.append(due / SECOND_NS)
            left.append(math.inf if gone is None else gone / SECOND_NS)
    horizon_s = plan["horizon_ns"] / SECOND_NS
    end_s = max([horizon_s, *(second for second in left if second < math.inf)])
    return Course(
        cell_id=cell.cell_id,
        rate_rps=cell.rate_rps,
        warmup_s=plan["warmup_ns"] / SECOND_NS,
        horizon_s=horizon_s,
        end_s=end_s,
        requests=tuple(requests),
        in_flight=tuple(_levels(entered, sorted(left), end_s)),
    )


def _levels(entered: Sequence[float], left: Sequence[float], end_s: float) -> list[tuple[float, int]]:
    """Requests in the system at evenly spaced moments; both series are sorted."""
    moments = [end_s * step / MOMENTS for step in range(MOMENTS + 1)]
    return [(at, bisect_right(entered, at) - bisect_right(left, at)) for at in moments]


def _at_rate(engine: EngineResult, rate_rps: float | None) -> CellResult | None:
    """The engine's first valid cell at a rate."""
    cells = [cell for cell in engine.cells if cell.is_valid and cell.samples and cell.rate_rps == rate_rps]
    return min(cells, key=lambda cell: cell.slot) if cells else None


def _gaps(store: Store, cell_id: str) -> tuple[float, ...]:
    """Quantiles of the pauses between chunks, over the measured answers that came whole."""
    steps = ", ".join(f"{step / QUANTILES:g}" for step in range(QUANTILES + 1))
    rows = store.query(
        f"SELECT quantile_disc(chunk_gap_ms, [{steps}]) AS gaps FROM v_itl WHERE cell_id = ? AND measured AND ok",
        [cell_id],
    )
    return tuple(rows[0]["gaps"] or ())


def _flows(store: Store, ttft_ms: float, tpot_ms: float) -> dict[str, Flow]:
    """Answers count in the window in which they ended, whenever they were due, as in a server's own counter."""
    rows = store.query(
        """
        SELECT r.cell_id, any_value(p.horizon_ns - p.warmup_ns) / 1e9 AS window_s,
            count(*) FILTER (WHERE r.measured) AS due,
            count(*) FILTER (WHERE r.status = 'ok' AND r.last_gen_ns BETWEEN p.warmup_ns AND p.horizon_ns) AS ended,
            any_value(s.good) AS good
        FROM requests AS r JOIN cells USING (cell_id) JOIN plans AS p USING (plan_sha256)
            JOIN slo_cells(?, ?) AS s USING (cell_id)
        GROUP BY r.cell_id
        """,
        [ttft_ms, tpot_ms],
    )
    return {
        row["cell_id"]: Flow(
            offered_rps=row["due"] / row["window_s"],
            completed_rps=row["ended"] / row["window_s"],
            good_rps=row["good"] / row["window_s"],
        )
        for row in rows
    }
