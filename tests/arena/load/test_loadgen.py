"""The load generator on real sockets against a scripted engine. Each test is named after the symptom it would show."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from arena.load import scripted_engine as scripted
from arena.load import spool
from arena.load.arrivals import seed_sequence
from arena.load.loadgen import Limits, Progress, run_cell
from arena.load.plan import CellPlan, PlannedRequest, Prompt, Target, build_plan, request_body
from arena.load.scripted_engine import (
    DONE,
    RunningEngine,
    Script,
    Step,
    finish_event,
    role_event,
    text_event,
    usage_event,
)
from arena.load.spool import HealthRow, SpoolFooter, SpoolHeader
from tests.arena.cells import MS, fire, gaps_ms, plan_of

TOLERANCE_MS = 5.0  # of gaps in tests that assert a mechanism; precision has a test of its own (test_truth)
ABOUT_MS = 20.0  # of stamps there: what they are not to be taken for lies 100 ms and more away


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with scripted.running() as running:
        yield running


def quick(**options: object) -> Script:
    return scripted.stream_script(ttft_ms=20, itl_ms=5, tokens=3, **options)


ENDING = finish_event() + DONE

CORPUS: dict[str, Script] = {
    "role_first": Script(steps=[Step(0, role_event()), Step(200, text_event("Hi")), Step(210, ENDING)]),
    "late_role": Script(
        steps=[Step(50, role_event()), *(Step(400 + 20 * i, text_event("a")) for i in range(3)), Step(450, ENDING)]
    ),
    "reasoning": Script(
        steps=[
            Step(100, text_event("", reasoning_content="hm")),
            Step(250, text_event("Hi")),
            Step(251, finish_event() + usage_event(2, reasoning_tokens=1) + DONE),
        ]
    ),
    "late_usage": Script(
        steps=[Step(20, text_event("a")), Step(40, text_event("b") + finish_event()), Step(340, usage_event(2) + DONE)]
    ),
    "small_events": Script(
        steps=[*(Step(20 * i, 'data: {"choices":[{"text":"a"}]}\n\n') for i in range(1, 16)), Step(320, DONE)]
    ),
    "four_tokens_a_chunk": Script(
        steps=[*(Step(40 * i, text_event("a b c d", usage=4 * i)) for i in range(1, 6)), Step(201, ENDING)]
    ),
    "no_reuse": quick(framing="close"),
    "with_length": quick(framing="length"),
    "http_500": Script(
        steps=[Step(5, '{"error": "no"}')], status=500, content_type="application/json", framing="length"
    ),
    "error_event": Script(
        steps=[Step(5, text_event("a")), Step(10, scripted.event({"error": {"message": "oom"}}) + DONE)]
    ),
    "cut_off": Script(steps=[Step(5, text_event("a"))], end="cut", end_at_ms=30),
    "reset": Script(steps=[Step(5, text_event("a"))], end="reset", end_at_ms=30),
    "quiet_end": Script(steps=[Step(5, text_event("a"))]),
    "no_answer": Script(steps=[], end="reset", end_at_ms=10),
    "not_a_stream": Script(steps=[Step(5, "{}")], content_type="application/json", framing="length"),
    "hang": Script(steps=[Step(5, text_event("a"))], end="hang"),
    "last": quick(),
}


@pytest.fixture(scope="module")
def corpus(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, spool.RequestRow]:
    """One run for all scripts: they do not disturb each other, and a run costs a second and a half to start."""
    plan = plan_of([(20.0 * index, script) for index, script in enumerate(CORPUS.values())], cell_id="corpus")
    fired = asyncio.run(fire(engine, plan, tmp_path_factory.mktemp("corpus"), limits=Limits(request_timeout_s=1.0)))
    assert fired.run.aborted is None
    return {name: fired.rows[seq] for seq, name in enumerate(CORPUS)}


def after_send(row: spool.RequestRow, stamp: int | None) -> float:
    assert stamp is not None
    assert row.sent_ns is not None
    return (stamp - row.sent_ns) / MS


@pytest.mark.replay("R01")
def test_a_role_chunk_is_not_taken_for_the_first_token(corpus: dict[str, spool.RequestRow]) -> None:
    row = corpus["role_first"]
    assert after_send(row, row.first_gen_ns) == pytest.approx(200, abs=ABOUT_MS)
    assert after_send(row, row.role_ns) < 50


@pytest.mark.replay("R02", "R03")
def test_the_first_gap_is_not_stretched_by_an_early_role(corpus: dict[str, spool.RequestRow]) -> None:
    row = corpus["late_role"]
    assert after_send(row, row.first_gen_ns) == pytest.approx(400, abs=ABOUT_MS)
    assert gaps_ms(row) == pytest.approx([20, 20], abs=ABOUT_MS - TOLERANCE_MS)


@pytest.mark.replay("R25")
def test_reasoning_ends_the_ttft_and_text_the_ttfo(corpus: dict[str, spool.RequestRow]) -> None:
    row = corpus["reasoning"]
    assert after_send(row, row.first_gen_ns) == pytest.approx(100, abs=ABOUT_MS)
    assert after_send(row, row.first_text_ns) == pytest.approx(250, abs=ABOUT_MS)
    assert (row.out_tok_usage, row.out_tok_counted, row.reason_tok_usage) == (2, 2, 1)


@pytest.mark.replay("R26", "R27")
def test_a_late_usage_event_does_not_move_the_end(corpus: dict[str, spool.RequestRow]) -> None:
    row = corpus["late_usage"]
    assert after_send(row, row.last_gen_ns) == pytest.approx(40, abs=ABOUT_MS)
    assert after_send(row, row.usage_ns) == pytest.approx(340, abs=ABOUT_MS)


@pytest.mark.replay("R30")
def test_events_of_40_bytes_do_not_come_in_lumps_of_a_kilobyte(corpus: dict[str, spool.RequestRow]) -> None:
    row = corpus["small_events"]
    assert row.n_chunks == 15
    assert sorted(gaps_ms(row))[7] == pytest.approx(20, abs=2)
    assert max(gaps_ms(row)) < 20 + 4 * TOLERANCE_MS


@pytest.mark.replay("R18")
def test_four_tokens_a_chunk_are_four_tokens(corpus: dict[str, spool.RequestRow]) -> None:
    row = corpus["four_tokens_a_chunk"]
    assert (row.token_n, row.tokens_known) == ([4] * 5, True)
    assert statistics.median(gaps_ms(row)) == pytest.approx(40, abs=TOLERANCE_MS)
    assert sum(gaps_ms(row)) == pytest.approx(160, abs=ABOUT_MS)


@pytest.mark.replay("R22", "R26")
def test_every_kind_of_failure_is_a_failure(corpus: dict[str, spool.RequestRow]) -> None:
    """Other tools report up to 25 of 54 such answers as successes."""
    outcomes = {name: (row.status, row.err_class) for name, row in corpus.items() if row.status != "ok"}
    assert outcomes == {
        "http_500": ("error", "http_500"),
        "error_event": ("error", "error_event"),
        "cut_off": ("truncated", "cut_off"),
        "reset": ("truncated", "reset"),
        "quiet_end": ("truncated", "no_end"),
        "no_answer": ("error", "reset"),
        "not_a_stream": ("error", "not_a_stream"),
        "hang": ("timeout", "request_timeout"),
    }


@pytest.mark.replay("R50")
def test_a_request_that_never_ends_is_given_up_at_its_limit_and_keeps_what_it_got(
    corpus: dict[str, spool.RequestRow],
) -> None:
    row = corpus["hang"]
    assert 1000 <= after_send(row, row.done_ns) < 1300
    assert row.n_chunks == 1


@pytest.mark.replay("R20")
def test_missing_things_are_null_and_never_zero(corpus: dict[str, spool.RequestRow]) -> None:
    row = corpus["http_500"]
    missing = (row.role_ns, row.first_gen_ns, row.first_text_ns, row.last_gen_ns, row.usage_ns, row.out_tok_usage)
    assert missing == (None,) * 6
    assert corpus["role_first"].out_tok_usage is None


@pytest.mark.replay("R09")
def test_connections_are_reused_and_each_row_says_so(corpus: dict[str, spool.RequestRow]) -> None:
    assert {row.reused for row in corpus.values()} == {True}  # of the warm pool
    assert corpus["no_reuse"].status == corpus["with_length"].status == corpus["last"].status == "ok"


@pytest.mark.replay("R09")
async def test_sixty_requests_one_after_the_other_share_the_warm_connections_and_no_more(
    engine: RunningEngine, tmp_path: Path
) -> None:
    """A warm pool that is filled up again and again hides connections which are never used twice."""
    engine.take_log()
    plan = plan_of([(40.0 * index, quick()) for index in range(60)], cell_id="reuse")
    fired = await fire(engine, plan, tmp_path, limits=Limits(warm_connections=2))
    assert fired.run.ok == 60
    assert fired.log.connections < 30


async def test_the_body_is_the_plan_and_the_targets_own_fields(engine: RunningEngine, tmp_path: Path) -> None:
    plan = plan_of([(0, quick())], cell_id="body")
    fired = await fire(engine, plan, tmp_path)
    assert fired.log.asked["body-0"] == {
        "model": "scripted", "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.replay("R07", "R54")
async def test_a_frozen_engine_makes_every_request_of_that_time_late_not_one(
    engine: RunningEngine, tmp_path: Path
) -> None:
    """Coordinated omission: a closed loop would wait out the freeze and show a single outlier."""
    scripts = [quick(freeze_ms=1000 if index == 10 else 0) for index in range(60)]
    fired = await fire(engine, plan_of([(20.0 * i, s) for i, s in enumerate(scripts)], cell_id="freeze"), tmp_path)
    ttft_ms = [(row.first_gen_ns - row.scheduled_ns) / MS for _, row in sorted(fired.rows.items()) if row.first_gen_ns]
    assert len(ttft_ms) == 60
    expected = [20 + max(0, 1000 - 20 * (i - 10)) if i >= 10 else 20 for i in range(60)]
    errors = sorted(abs(a - b) for a, b in zip(ttft_ms, expected, strict=True))
    assert errors[54] < 50, errors  # 5 % of the freeze, on the whole curve but for a few: fifty answers leave at once
    assert sum(value > 100 for value in ttft_ms) >= 40
    assert max(ttft_ms) == pytest.approx(1020, rel=0.05)


@pytest.mark.replay("R05", "R07")
async def test_a_stalled_client_keeps_the_schedule_and_shows_its_lag(engine: RunningEngine, tmp_path: Path) -> None:
    """What a queue in the client hides: the clock must start when a request was due, not when it left."""
    stopped: list[int] = []

    def stall(progress: Progress) -> None:
        if not stopped:
            stopped.append(progress.pid)
            os.kill(progress.pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.6, os.kill, progress.pid, signal.SIGCONT)

    plan = plan_of([(10.0 * index, quick()) for index in range(150)], cell_id="stall")
    fired = await fire(engine, plan, tmp_path, on_progress=stall)
    assert fired.run.aborted is None
    assert len(fired.rows) == 150
    assert [fired.rows[i].scheduled_ns for i in range(150)] == [request.scheduled_ns for request in plan.requests]
    lags = [(row.sent_ns - row.scheduled_ns) / MS for row in fired.rows.values() if row.sent_ns is not None]
    assert 500 < max(lags) < 800
    assert sum(lag > 50 for lag in lags) >= 40
    assert fired.run.lag_p99_ms is not None
    assert fired.run.lag_p99_ms > 2.0
    assert max(row.loop_lag_ns for row in fired.everything if isinstance(row, HealthRow)) > 400 * MS


@pytest.mark.replay("R06", "R51")
async def test_an_engine_of_capacity_one_shows_a_growing_ttft_and_all_its_in_flight(
    engine: RunningEngine, tmp_path: Path
) -> None:
    """Service 50 ms, arrivals every 25 ms: the queue, and so the TTFT, grows by 25 ms a request, without a barrier."""
    script = Script(steps=[Step(50, text_event("a") + ENDING)], serial=True)
    fired = await fire(engine, plan_of([(25.0 * i, script) for i in range(24)], cell_id="serial"), tmp_path)
    ttft_ms = [(fired.rows[i].first_gen_ns or 0) / MS - 25.0 * i for i in range(24)]
    assert ttft_ms == pytest.approx([50 + 25 * i for i in range(24)], rel=0.1, abs=30)
    assert fired.log.max_in_flight >= 11


@pytest.mark.replay("R10", "R43")
async def test_three_hundred_at_once_are_three_hundred_in_flight(engine: RunningEngine, tmp_path: Path) -> None:
    """Client libraries stop at 100 connections; here only the stated limit stops anything."""
    script = Script(steps=[Step(600, text_event("a") + ENDING)])
    fired = await fire(engine, plan_of([(index * 0.5, script) for index in range(300)], cell_id="crowd"), tmp_path)
    assert fired.run.ok == 300
    assert fired.log.max_in_flight == fired.run.max_in_flight == 300
    assert sum(row.reused is False for row in fired.rows.values()) >= 300 - 2 * Limits().warm_connections
    opened = next(row for row in fired.rows.values() if row.reused is False)
    assert opened.sent_ns is not None
    assert opened.connected_ns is not None
    assert opened.wrote_ns is not None
    assert opened.sent_ns <= opened.connected_ns <= opened.wrote_ns


@pytest.mark.replay("R06", "R43")
async def test_beyond_the_limit_requests_are_unsent_misses_and_nothing_waits(
    engine: RunningEngine, tmp_path: Path
) -> None:
    script = Script(steps=[Step(400, text_event("a") + ENDING)])
    plan = plan_of([(10.0 * index, script) for index in range(10)], cell_id="cap")
    fired = await fire(engine, plan, tmp_path, limits=Limits(max_in_flight=4, warm_connections=2))
    assert [fired.rows[i].status for i in range(10)] == ["ok"] * 4 + ["unsent"] * 6
    assert {fired.rows[i].err_class for i in range(4, 10)} == {"max_in_flight"}
    assert (fired.run.unsent, fired.run.max_in_flight, fired.log.max_in_flight) == (6, 4, 4)
    assert fired.rows[9].sent_ns is fired.rows[9].reused is None


@pytest.mark.replay("R04")
async def test_the_offered_rate_is_the_asked_one_and_lag_does_not_add_up(engine: RunningEngine, tmp_path: Path) -> None:
    """Relative sleeps lose a little each time: 183 instead of 200 requests per second."""
    script = msgspec.to_builtins(Script(steps=[Step(0, text_event("a") + ENDING)]))
    plan = build_plan(
        "rate",
        rate_rps=200,
        duration_s=3,
        warmup_s=0.5,
        cooldown_s=5,
        prompts=lambda seq: Prompt(f"p{seq}", {"script": script}, 1),
        seed=seed_sequence(run=5, cell=0, replicate=0),
    )
    fired = await fire(engine, plan, tmp_path)
    rows = sorted((row for row in fired.rows.values() if row.measured), key=lambda row: row.seq)
    assert {row.seq for row in rows} == {request.seq for request in plan.measured}
    lags = [(row.sent_ns - row.scheduled_ns) / MS for row in rows if row.sent_ns is not None]
    assert len(lags) == len(plan.measured)
    half = len(lags) // 2
    assert sorted(lags[half:])[half // 2] - sorted(lags[:half])[half // 2] < 1.0
    assert sorted(lags)[half] < 2.0
    warm = [row for row in fired.rows.values() if not row.measured and row.scheduled_ns < plan.warmup_ns]
    assert warm, "the warm-up was not offered"


async def test_load_is_kept_up_until_the_last_measured_answer(engine: RunningEngine, tmp_path: Path) -> None:
    """An emptying engine would flatter the tail. What is in flight at the end is let go, and is nobody's failure."""
    slow = Script(steps=[Step(500, text_event("a") + ENDING)])
    plan = plan_of([(0, slow), *((20.0 * index, slow) for index in range(1, 100))], cell_id="tail")
    plan = CellPlan("tail", "constant", 50.0, 0, 15 * MS, plan.requests)
    fired = await fire(engine, plan, tmp_path)
    assert (fired.run.measured, fired.run.ok) == (1, 1)
    assert 20 <= len(fired.rows) <= 40
    cancelled = [row for row in fired.rows.values() if row.status == "cancelled"]
    assert len(cancelled) >= 20
    assert not any(row.measured for row in cancelled)
    footer = fired.everything[-1]
    assert isinstance(footer, SpoolFooter)
    assert not footer.cooldown_exhausted


async def test_a_load_process_killed_in_mid_cell_loses_no_request_silently(
    engine: RunningEngine, tmp_path: Path
) -> None:
    def kill(progress: Progress) -> None:
        os.kill(progress.pid, signal.SIGKILL)

    plan = plan_of([(20.0 * index, quick()) for index in range(100)], cell_id="killed")
    fired = await fire(engine, plan, tmp_path, on_progress=kill)
    assert "killed by SIGKILL" in (fired.run.aborted or "")
    assert set(fired.rows) == set(range(100))
    assert 5 < fired.run.ok < 60
    unsent = [row for row in fired.rows.values() if row.status == "unsent"]
    assert len(unsent) == 100 - fired.run.ok
    assert {row.err_class for row in unsent} == {"client_died"}
    spool.verify(fired.run.spool)


async def test_a_cell_that_overstays_is_stopped_and_accounted_for(engine: RunningEngine, tmp_path: Path) -> None:
    pids: list[int] = []
    plan = plan_of([(0, quick()), (60_000, quick())], cell_id="overstay")
    fired = await fire(
        engine, plan, tmp_path, limits=Limits(time_limit_s=6), on_progress=lambda progress: pids.append(progress.pid)
    )
    assert fired.run.aborted == "The cell overstayed its time limit of 6 s."
    assert (fired.rows[0].status, fired.rows[1].status) == ("ok", "unsent")
    assert not is_alive(pids[0])


async def test_a_cancelled_driver_leaves_no_load_process_behind(engine: RunningEngine, tmp_path: Path) -> None:
    pids: asyncio.Queue[int] = asyncio.Queue()
    plan = plan_of([(0, quick()), (60_000, quick())], cell_id="cancelled")
    task = asyncio.create_task(fire(engine, plan, tmp_path, on_progress=lambda progress: pids.put_nowait(progress.pid)))
    pid = await pids.get()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(pid)
    engine.take_log()


async def test_a_load_process_whose_driver_was_killed_ends_by_itself(engine: RunningEngine, tmp_path: Path) -> None:
    path = tmp_path / "orphan.jsonl"
    plan = plan_of([(0, quick()), (60_000, quick())], cell_id="orphan")
    plan.write(spool.plan_file(path))
    job = msgspec.json.encode({"target": Target(engine.url, "m", "n"), "limits": Limits(), "spool": str(path)})
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "arena.load.loadgen_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(job + b"\n")
    await process.stdout.readline()
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 5) == 3
    assert not spool.is_complete(path)
    engine.take_log()


async def test_a_target_that_is_not_there_fails_every_request_and_not_the_cell(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        plan = plan_of([(10.0 * index, quick()) for index in range(5)], cell_id="nobody")
        run = await run_cell(
            plan, Target(url, "m", "n"), tmp_path / "nobody.jsonl", limits=Limits(connect_timeout_s=0.5)
        )
    rows = [row for row in spool.read_rows(run.spool) if isinstance(row, spool.RequestRow)]
    assert run.aborted is None
    assert [(row.status, row.err_class) for row in rows] == [("error", "connect_refused")] * 5


async def test_a_target_that_cannot_be_measured_says_why(tmp_path: Path) -> None:
    plan = plan_of([(0, quick())], cell_id="tls")
    run = await run_cell(plan, Target("https://127.0.0.1", "m", "n"), tmp_path / "tls.jsonl")
    assert "plain http://" in (run.aborted or "")
    assert (run.measured, run.unsent, run.lag_p99_ms) == (1, 1, None)
    header = next(spool.read_rows(run.spool))
    assert isinstance(header, SpoolHeader)
    assert header.epoch_monotonic_ns is None


async def test_a_body_larger_than_the_socket_buffer_arrives_whole(engine: RunningEngine, tmp_path: Path) -> None:
    body = msgspec.json.encode({"script": quick(), "padding": "x" * 8_000_000})
    plan = CellPlan("large", "constant", 1.0, 0, 1, (PlannedRequest(0, 0, "p", body, 8),))
    fired = await fire(engine, plan, tmp_path)
    row = fired.rows[0]
    assert row.status == "ok"
    assert row.wrote_ns is not None
    assert row.first_byte_ns is not None
    assert row.wrote_ns <= row.first_byte_ns
    assert len(fired.log.asked["large-0"]["padding"]) == 8_000_000


def test_one_plan_has_one_digest_for_every_engine_and_survives_the_disk(tmp_path: Path) -> None:
    plan = plan_of([(5, quick()), (10, quick())])
    again = plan.for_cell("another")
    assert again.sha256 == plan.sha256
    assert plan_of([(5, quick()), (11, quick())]).sha256 != plan.sha256
    plan.write(tmp_path / "plan")
    assert CellPlan.read(tmp_path / "plan") == plan
    assert CellPlan.read(tmp_path / "plan").sha256 == plan.sha256


def test_a_body_joins_the_plan_and_the_target() -> None:
    plan = plan_of([(0, quick())])
    target = Target("http://x", 'na"me', "n", fields={"stream": True, "ignore_eos": True})
    body = msgspec.json.decode(request_body(plan.requests[0], target))
    assert (body["model"], body["ignore_eos"], body["stream"]) == ('na"me', True, True)
    assert "script" in body


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_long_answer_that_ends_the_cell_keeps_its_row(engine: RunningEngine, tmp_path: Path) -> None:
    """It is parsed in slices; the end of the cell came between two of them, and the request left the denominator."""
    answer = [Step(20 + 0.4 * index, text_event("a")) for index in range(500)]
    script = Script(steps=[*answer, Step(221, ENDING)])
    fired = await fire(engine, plan_of([(0, script)] * 4, cell_id="long"), tmp_path)
    assert sorted(fired.rows) == [0, 1, 2, 3]
    assert {(row.status, row.n_chunks) for row in fired.rows.values()} == {("ok", 500)}
