"""Detectors: each has an engine that plays its trick over real sockets, and honest engines that nobody may accuse."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from arena.judging import detectors
from arena.judging.audit import audit_cell, verdict
from arena.judging.cell_audit import audit_rows
from arena.judging.findings import SECOND_NS, Disparity, Row
from arena.load import scripted_engine as scripted
from arena.load.scripted_engine import DONE, Script, Step, finish_event, text_event, usage_event
from arena.records.rows import CellRecord, EngineRecord, RunRecord
from arena.records.store import Store
from tests.arena.batching import honest_rows
from tests.arena.cells import fire, plan_of
from tests.arena.judging.test_audit import row

TOKENS = 24
WHOLE = finish_event() + usage_event(TOKENS) + DONE


def honest(number: int) -> Script:
    return scripted.stream_script(ttft_ms=30, itl_ms=6 + number % 3, tokens=TOKENS)


def all_at_the_end(number: int) -> Script:
    """Silence for as long as the answer takes to make, then all of it within a few milliseconds."""
    return Script(steps=[*(Step(150 + 0.2 * i, text_event("word ")) for i in range(TOKENS)), Step(155, WHOLE)])


def in_lumps(number: int) -> Script:
    """Eight events in one write, sixty milliseconds apart; its usage says that each is a token."""
    return Script(steps=[*(Step(30 + 60 * i, text_event("word ") * 8) for i in range(TOKENS // 8)), Step(160, WHOLE)])


def one_big_event(number: int) -> Script:
    """As lumps, but each of them re-framed as one event."""
    return Script(steps=[*(Step(30 + 60 * i, text_event("word " * 12)) for i in range(TOKENS // 12)), Step(160, WHOLE)])


def speculative(number: int) -> Script:
    return Script(
        steps=[*(Step(30 + 15 * i, text_event("word word word ")) for i in range(TOKENS // 3)), Step(160, WHOLE)]
    )


def turns_every_fifth_away(number: int) -> Script:
    if number % 5:
        return honest(number)
    return Script(
        steps=[Step(2, '{"error": {"message": "busy"}}')], status=503, content_type="application/json", framing="length"
    )


def stops_short(number: int) -> Script:
    """Under the same flag as all others it gives half of the tokens, and says that it had nothing more to say."""
    if number % 10:
        return honest(number)
    end = finish_event("stop") + usage_event(TOKENS // 2) + DONE
    return Script(steps=[*(Step(30 + 6 * i, text_event("word ")) for i in range(TOKENS // 2)), Step(100, end)])


def one_token(number: int) -> Script:
    return Script(steps=[Step(30, text_event("No.") + finish_event("stop") + usage_event(1) + DONE)])


def cold_at_first(number: int) -> Script:
    return scripted.stream_script(ttft_ms=600 if number in (0, 2, 3) else 20, itl_ms=1, tokens=4)


PLAYS: tuple[Callable[[int], Script], ...] = (
    honest, all_at_the_end, in_lumps, one_big_event, speculative, turns_every_fifth_away, stops_short, one_token,
    cold_at_first,
)  # fmt: skip
REQUESTS = 40  # of each
Played = dict[Callable[[int], Script], list[Row]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Played, Store]]:
    """All plays in one cell, a request of each in turn, and what the store says of them."""
    folder = tmp_path_factory.mktemp("plays")
    plan = plan_of([(8.0 * seq, PLAYS[seq % len(PLAYS)](seq // len(PLAYS))) for seq in range(REQUESTS * len(PLAYS))])
    plan = replace(plan, requests=tuple(replace(request, max_tokens=TOKENS) for request in plan.requests))
    with scripted.running() as engine:
        fired = asyncio.run(fire(engine, plan, folder))
    with Store(folder / "arena.duckdb") as store:
        store.record_run(RunRecord(run_id="run", started_utc="2026-01-01T00:00:00Z", scenario="x", seed=1, host={}))
        store.record_engine(
            EngineRecord(engine_id="e", run_id="run", name="e", endpoint="", model="m", flags={}, capability={})
        )
        cell = CellRecord(cell_id="cell", run_id="run", engine_id="e", replicate=0, slot=1, rate_rps=1)
        store.record_cell(cell, plan)
        store.ingest("cell", fired.run.spool)
        rows = audit_rows(store, "cell")
        yield {play: [each for each in rows if PLAYS[each.seq % len(PLAYS)] is play] for play in PLAYS}, store


def accusations(rows: Sequence[Row]) -> list[Disparity]:
    return [
        *detectors.fake_streaming("it", rows),
        *detectors.lumps("it", rows),
        *detectors.even_pace("it", rows),
        *detectors.dropped_load("it", [rows]),
    ]


@pytest.mark.replay("R32")
def test_an_answer_that_comes_whole_at_its_end_is_called_no_stream(played: tuple[Played, Store]) -> None:
    found = accusations(played[0][all_at_the_end])
    assert ("streaming", True) in [(each.check, each.blocks) for each in found]


def test_tokens_that_come_eight_at_a_time_are_called_held_back(played: tuple[Played, Store]) -> None:
    found = accusations(played[0][in_lumps])
    assert [(each.check, each.blocks) for each in found] == [("buffering", True)]
    assert "8 events come at a time" in found[0].words


def test_lumps_that_were_framed_as_one_event_are_found_by_the_engines_own_count(played: tuple[Played, Store]) -> None:
    found = accusations(played[0][one_big_event])
    assert [(each.check, each.blocks) for each in found] == [("buffering", True)]


def test_three_tokens_an_event_are_told_and_cost_no_rank(played: tuple[Played, Store]) -> None:
    found = accusations(played[0][speculative])
    assert [(each.check, each.blocks) for each in found] == [("several_tokens", False)]


def test_requests_that_are_turned_away_are_counted_in_the_cell_and_told_of_the_engine(
    played: tuple[Played, Store],
) -> None:
    rows = played[0][turns_every_fifth_away]
    finding = detectors.refused(rows)
    assert (finding.ok, finding.value) == (False, 8)
    found = accusations(rows)
    assert [(each.check, each.blocks) for each in found] == [("dropped_load", False)]
    assert "20%" in found[0].words


def test_answers_that_end_early_are_found_in_the_cell_where_they_do(played: tuple[Played, Store]) -> None:
    rows = played[0][stops_short]
    assert detectors.ended_early(rows).value == pytest.approx(0.1)
    assert not detectors.ended_early(rows).ok


@pytest.mark.replay("R21")
def test_one_token_answers_have_no_tpot_and_are_not_taken_for_fast_ones(played: tuple[Played, Store]) -> None:
    rows = played[0][one_token]
    finding = detectors.one_token(rows)
    assert (finding.ok, finding.value) == (False, REQUESTS)
    asked = f"WHERE seq % {len(PLAYS)} = {PLAYS.index(one_token)}"
    tpots = played[1].query(f"SELECT tpot_ms FROM v_measured {asked}")
    assert [each["tpot_ms"] for each in tpots] == [None] * REQUESTS  # missing is missing, and not 0 ms
    judged = played[1].query(f"SELECT meets_tpot, good FROM slo_requests(1000, 1) {asked}")
    assert all(each["meets_tpot"] for each in judged)  # by its TTFT alone; test_parity.py: and so it gets no rank


@pytest.mark.replay("R47")
def test_a_cell_whose_first_requests_met_cold_kernels_is_invalid(played: tuple[Played, Store]) -> None:
    rows = played[0][cold_at_first]
    finding = detectors.first_wave(rows)
    assert not finding.ok
    assert finding.effect == "invalid_cold"
    status, reason = verdict(
        audit_cell(
            rows, schedule_ns=[each.scheduled_ns for each in rows], rate_rps=125, warmup_ns=0,
            horizon_ns=SECOND_NS, poisson_arrivals=False, lag_budget_ms=1000,
        )
    )  # fmt: skip
    assert status == "invalid_cold"
    assert reason is not None
    assert "began cold" in reason


@pytest.mark.replay("R47")
def test_ten_cold_requests_of_a_hundred_are_found_though_the_median_is_fine() -> None:
    """The shape that was reported: p50 0.7 s, p95 57 s."""
    cold = [row(seq, seq * 2.0, life_s=57.0) for seq in range(10)]
    cold = [replace(r, first_gen_ns=r.scheduled_ns + 50 * SECOND_NS) for r in cold]
    warm = [row(seq, 60 + seq * 2.0, life_s=0.7) for seq in range(10, 100)]
    assert not detectors.first_wave([*cold, *warm]).ok


def test_an_honest_stream_is_accused_of_nothing(played: tuple[Played, Store]) -> None:
    rows = played[0][honest]
    assert accusations(rows) == []
    assert all(check(rows).ok for check in (detectors.refused, detectors.ended_early, detectors.one_token))
    assert detectors.first_wave(rows).ok


CAPACITY_RPS = 20.0  # of the honest engine below, about


@pytest.mark.parametrize("load", [0.3, 0.8, 1.1])
def test_honest_engines_are_accused_at_no_load_at_200_seeds(load: float) -> None:
    """The bound that docs/fairness.md states: no accusation in 600 engines, so less than one in 200 at 95 %."""
    accused, cold = [], 0
    for seed in range(200):
        rows = honest_rows(seed, rate_rps=CAPACITY_RPS * load, window_s=12)
        accused += accusations(rows)
        cold += not detectors.first_wave(rows).ok
    assert accused == []
    assert cold == 0


@pytest.mark.parametrize("load", [0.8, 1.1])
def test_a_queue_with_rare_slow_requests_is_seldom_called_cold(load: float) -> None:
    """One server, service times that vary 1.3 times their mean: what comes closest to a cold start and is none."""
    cold = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        free, rows = 0.0, []
        for seq, due in enumerate(np.cumsum(rng.exponential(1 / load, 120))):
            free = max(free, float(due)) + float(rng.lognormal(-0.5, 1))
            rows.append(replace(row(seq, float(due)), first_gen_ns=round(free * SECOND_NS)))
        cold += not detectors.first_wave(rows).ok
    assert cold <= 2


def test_a_long_prompt_with_a_short_answer_is_no_fake_stream() -> None:
    """30 s of prefill for 20,000 tokens and then 24 tokens within a second: 3 % of its time, and honest."""
    rows = [
        replace(
            row(seq, seq * 40.0), first_gen_ns=round((seq * 40 + 30) * SECOND_NS), in_tokens=20_000, out_tokens=24,
            last_gen_ns=round((seq * 40 + 31) * SECOND_NS), n_chunks=24,
        )
        for seq in range(20)
    ]  # fmt: skip
    assert detectors.fake_streaming("it", rows) == []


def test_an_even_pace_under_a_load_that_moves_is_told_and_blocks_nothing() -> None:
    def paced(row: Row) -> Row:
        """Made as by the honest engine, shown on a beat of 40 ms."""
        assert row.first_gen_ns is not None
        assert row.out_tokens is not None
        return replace(row, last_gen_ns=row.first_gen_ns + 40_000_000 * (row.out_tokens - 1), gap_cv=0.01)

    rows = honest_rows(1, rate_rps=CAPACITY_RPS, window_s=12)
    assert [each.blocks for each in detectors.even_pace("it", [paced(row) for row in rows])] == [False]
    assert detectors.even_pace("it", rows) == []


def test_a_cold_start_cannot_be_seen_where_later_requests_failed_and_that_is_said() -> None:
    rows = [row(seq, seq / 10) for seq in range(40)]
    failed = [replace(r, status="timeout", first_gen_ns=None) if r.seq > 20 else r for r in rows]
    finding = detectors.first_wave(failed)
    assert finding.ok
    assert "nothing to compare" in finding.words
    assert "Too few" in detectors.first_wave(rows[:20]).words
    assert not math.isnan(finding.threshold or 0)
