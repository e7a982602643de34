"""Audits: each has a cell that it must stop and a near one that it must let pass."""

from dataclasses import replace

import numpy as np
import pytest

from arena.judging import audit
from arena.judging.audit import Finding, Row, verdict
from arena.load.arrivals import SECOND_NS, constant, poisson, seed_sequence

MS = 1_000_000


def row(seq: int, scheduled_s: float, *, life_s: float = 0.5, **changes: object) -> Row:
    """A healthy request: sent at once, first token after a fifth of its life."""
    at = round(scheduled_s * SECOND_NS)
    end = at + round(life_s * SECOND_NS)
    healthy = Row(
        seq=seq, measured=True, prompt_id=f"p{seq}", scheduled_ns=at, sent_ns=at + MS // 5, done_ns=end,
        first_gen_ns=at + round(life_s * SECOND_NS / 5), last_gen_ns=end, status="ok", max_tokens=64, in_tokens=130,
        out_tokens=64, cached_tokens=None, finish_reason="length", n_chunks=64, http=200, n_reads=64, gap_cv=0.2,
    )  # fmt: skip
    return replace(healthy, **changes)  # type: ignore[arg-type]


def audited(rows: list[Row], *, rate: float = 10, window_s: float = 20) -> dict[str, Finding]:
    findings = audit.audit_cell(
        rows,
        schedule_ns=[row.scheduled_ns for row in rows],
        rate_rps=rate,
        warmup_ns=0,
        horizon_ns=round(window_s * SECOND_NS),
        poisson_arrivals=True,
        lag_budget_ms=10,
    )
    return {finding.check: finding for finding in findings}


def poisson_rows(rate: float, window_s: float, *, seed: int = 1, life_s: float = 0.5) -> list[Row]:
    offsets = poisson(
        rate_rps=rate, horizon_ns=round(window_s * SECOND_NS), seed=seed_sequence(run=seed, cell=0, replicate=0)
    )
    return [row(seq, offset / SECOND_NS, life_s=life_s) for seq, offset in enumerate(offsets)]


def test_a_healthy_cell_passes_every_check() -> None:
    findings = audited(poisson_rows(10, 20))
    assert [finding for finding in findings.values() if not finding.ok] == []
    assert verdict(list(findings.values())) == ("ok", None)
    assert set(findings) >= {"client_lag_p99_ms", "unserved_share", "arrival_gaps_p", "arrival_dispersion_p"}


@pytest.mark.replay("R05", "R46")
def test_a_client_that_sends_late_invalidates_the_cell() -> None:
    rows = poisson_rows(10, 20)
    late = [replace(r, sent_ns=r.scheduled_ns + 30 * MS) if r.seq % 20 == 0 else r for r in rows]
    status, reason = verdict(list(audited(late).values()))
    assert status == "invalid_client"
    assert reason is not None
    assert "30.00 ms behind schedule" in reason


def test_a_cell_without_a_measured_request_is_invalid_and_not_a_pass() -> None:
    warm_up_only = [replace(r, measured=False) for r in poisson_rows(10, 20)]
    assert verdict(list(audited(warm_up_only).values())) == (
        "invalid_client",
        "No request fell into the measured window.",
    )


def test_a_request_that_never_left_invalidates_the_cell() -> None:
    rows = poisson_rows(10, 20)
    rows[7] = replace(rows[7], status="unsent", sent_ns=None, first_gen_ns=None, last_gen_ns=None, done_ns=None)
    assert verdict(list(audited(rows).values()))[0] == "invalid_client"


@pytest.mark.replay("R12", "R13")
def test_a_prompt_cache_that_serves_the_prompts_invalidates_the_cell_and_a_cached_template_does_not() -> None:
    template = [replace(r, cached_tokens=24) for r in poisson_rows(10, 20)]
    assert audited(template)["cached_prompt_share"].ok
    contaminated = [replace(r, cached_tokens=120) for r in poisson_rows(10, 20)]
    assert verdict(list(audited(contaminated).values()))[0] == "invalid_cache"


def overloaded(rate: float, capacity: float, window_s: float) -> list[Row]:
    """One server of fixed service time: beyond its capacity, the backlog grows until the end."""
    free, rows = 0.0, []
    for r in poisson_rows(rate, window_s):
        at = r.scheduled_ns / SECOND_NS
        free = max(free, at) + 1 / capacity
        rows.append(row(r.seq, at, life_s=free - at))
    return rows


def test_a_growing_backlog_makes_a_cell_unstable_however_short_the_waits_still_are() -> None:
    rows = overloaded(rate=40, capacity=30, window_s=30)
    status, reason = verdict(list(audited(rows, rate=40, window_s=30).values()))
    assert status == "unstable"
    assert reason is not None
    assert "backlog grew" in reason


@pytest.mark.parametrize("seed", range(8))
def test_a_busy_but_stable_queue_is_not_called_unstable(seed: int) -> None:
    free, rows = 0.0, []
    rng = np.random.default_rng(seed)
    for r in poisson_rows(16, 30, seed=seed):
        at = r.scheduled_ns / SECOND_NS
        free = max(free, at) + float(rng.exponential(1 / 20))
        rows.append(row(r.seq, at, life_s=free - at))
    assert audited(rows, rate=16, window_s=30)["unserved_share"].ok


def test_a_window_shorter_than_three_lives_says_nothing_of_the_backlog() -> None:
    finding = audited(poisson_rows(10, 4, life_s=2.0), window_s=4)["unserved_share"]
    assert finding.ok
    assert finding.value is None
    assert finding.effect == "note"


@pytest.mark.replay("R37", "R38", "R39")
def test_arrivals_that_are_no_poisson_process_are_found_out() -> None:
    even = [int(offset) for offset in constant(rate_rps=10, horizon_ns=60 * SECOND_NS)]  # equal gaps: far too smooth
    assert [finding.check for finding in audit.arrivals(even, 10) if not finding.ok] != []
    offsets = poisson(rate_rps=10, horizon_ns=60 * SECOND_NS, seed=seed_sequence(run=1, cell=1, replicate=1))
    doubled = [int(offset) for offset in offsets for _ in range(2)]
    assert any(not finding.ok for finding in audit.arrivals(doubled, 20))  # pairs: two processes with one seed
    assert any(not finding.ok for finding in audit.arrivals([int(o) for o in offsets], 20))  # half the stated rate


def test_the_arrival_audit_lets_honest_schedules_pass() -> None:
    failed = 0
    for seed in range(200):
        offsets = poisson(rate_rps=8, horizon_ns=40 * SECOND_NS, seed=seed_sequence(run=seed, cell=2, replicate=0))
        failed += any(not finding.ok for finding in audit.arrivals([int(offset) for offset in offsets], 8))
    assert failed <= 3  # three checks at 0.05 % each


@pytest.mark.replay("R12", "R14")
def test_a_prompt_that_was_sent_before_invalidates_the_cell_unless_the_cache_is_to_be_warm() -> None:
    rows = poisson_rows(10, 20)
    cell = {
        "schedule_ns": [row.scheduled_ns for row in rows], "rate_rps": 10.0, "warmup_ns": 0,
        "horizon_ns": 20 * SECOND_NS, "poisson_arrivals": True, "lag_budget_ms": 10.0,
    }  # fmt: skip
    status, reason = verdict(audit.audit_cell(rows, **cell, repeated=3))
    assert status == "invalid_cache"
    assert reason == "3 measured prompts had been sent to this engine before."
    assert verdict(audit.audit_cell(rows, **cell, repeated=3, warm_cache=True))[0] == "ok"
    cached = [replace(r, cached_tokens=120) for r in rows]
    assert verdict(audit.audit_cell(cached, **cell, warm_cache=True))[0] == "ok"


def test_a_cell_that_cannot_be_believed_is_not_also_called_unstable() -> None:
    findings = [
        Finding("unserved_share", False, 0.5, 0.1, "unstable", "backlog"),
        Finding("client_lag_p99_ms", False, 50, 10, "invalid_client", "late"),
        Finding("arrivals", False, 1, 20, "note", "few"),
    ]
    assert verdict(findings) == ("invalid_client", "late")
    assert verdict(findings[2:]) == ("ok", None)
