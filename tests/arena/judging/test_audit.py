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
        out_tokens=64, cached_tokens=None, finish_reason="length", n_chunks=64,
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


@pytest.mark.replay("R15")
def test_an_engine_that_answers_shorter_loses_its_rank() -> None:
    honest = [row(seq, seq / 10) for seq in range(50)]
    short = [replace(r, out_tokens=12, finish_reason="stop") for r in honest]
    found = audit.disparities({"honest": honest, "short": short})
    assert [(d.engine, d.check) for d in found] == [("short", "output_length")]


def test_an_engine_without_usage_loses_its_rank() -> None:
    silent = [replace(row(seq, seq / 10), out_tokens=None, in_tokens=None) for seq in range(50)]
    assert [d.check for d in audit.disparities({"silent": silent})] == ["output_length"]


@pytest.mark.replay("R36")
def test_an_engine_that_counts_other_prompts_loses_its_rank_and_a_token_more_does_not() -> None:
    usual = [row(seq, seq / 10) for seq in range(50)]
    nearly = [replace(r, in_tokens=131) for r in usual]
    other = [replace(r, in_tokens=171) for r in usual]
    found = audit.disparities({"a": usual, "b": nearly, "c": other})
    assert [(d.engine, d.check) for d in found] == [("c", "prompt_length")]
    assert "+31" in found[0].words or "+30" in found[0].words


def test_prompt_lengths_are_compared_only_over_prompts_that_all_have_met() -> None:
    small = [row(seq, seq / 10, in_tokens=50) for seq in range(50)]
    large = [row(seq, seq / 10, in_tokens=500, prompt_id=f"q{seq}") for seq in range(50)]
    assert audit.disparities({"a": small, "b": large}) == []


@pytest.mark.replay("R32")
def test_an_answer_that_comes_in_one_piece_at_the_end_is_no_stream() -> None:
    real = [row(seq, seq / 10) for seq in range(50)]
    fake = [replace(r, first_gen_ns=r.last_gen_ns - MS) for r in real if r.last_gen_ns is not None]
    assert [(d.engine, d.check) for d in audit.disparities({"real": real, "fake": fake})] == [("fake", "streaming")]


def test_a_cell_that_cannot_be_believed_is_not_also_called_unstable() -> None:
    findings = [
        Finding("unserved_share", False, 0.5, 0.1, "unstable", "backlog"),
        Finding("client_lag_p99_ms", False, 50, 10, "invalid_client", "late"),
        Finding("arrivals", False, 1, 20, "note", "few"),
    ]
    assert verdict(findings) == ("invalid_client", "late")
    assert verdict(findings[2:]) == ("ok", None)
