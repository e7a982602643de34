"""Several load processes are one load: the target sees the plan, and no row is lost, whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy.stats import chi2, kstest

from arena.load import crew_words as words
from arena.load import scripted_engine as scripted
from arena.load import spool
from arena.load.arrivals import poisson, seed_sequence
from arena.load.distributed import limits_of, merge, most_at_once, share_of
from arena.load.loadgen import Crew, Limits, Progress, run_cell, spool_header
from arena.load.plan import CellPlan, Prompt, Target, build_plan
from arena.load.scripted_engine import RunningEngine, Script, Step
from arena.load.spool import HealthRow, RequestRow, SpoolFooter, SpoolHeader, SpoolWriter
from tests.arena.cells import MS, Fired, plan_of

SECOND = 1_000_000_000
ONE_TOKEN = Script(steps=[Step(0, scripted.text_event("a") + scripted.finish_event() + scripted.DONE)])


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with scripted.running() as running:
        yield running


def poisson_plan(cell_id: str, *, rate_rps: float, duration_s: float) -> CellPlan:
    script = msgspec.to_builtins(ONE_TOKEN)
    return build_plan(
        cell_id,
        rate_rps=rate_rps,
        duration_s=duration_s,
        warmup_s=0.5,
        cooldown_s=3,
        prompts=lambda seq: Prompt(f"p{seq}", {"script": script}, 1),
        seed=seed_sequence(run=11, cell=0, replicate=0),
    )


def dispersion_is_poisson(times_ns: np.ndarray, window_s: float, level: float = 0.99) -> bool:
    """Variance over mean of the counts in whole seconds, in the chi-square band of a Poisson process."""
    counts = np.bincount((times_ns // SECOND).astype(int), minlength=int(window_s))[: int(window_s)]
    statistic = float(((counts - counts.mean()) ** 2).sum() / counts.mean())
    low, high = chi2.ppf([(1 - level) / 2, (1 + level) / 2], len(counts) - 1)
    return bool(low <= statistic <= high)


@pytest.mark.replay("R37", "R38", "R13")
@pytest.mark.parametrize("workers", range(1, 9))
def test_shares_of_a_plan_are_together_the_plan_and_apart_from_each_other(workers: int) -> None:
    """Forks that share a seed send the same gaps and the same prompts: dispersion 3.6 with four of them."""
    plan = poisson_plan("cell", rate_rps=20, duration_s=10)
    shares = [share_of(plan, worker, workers) for worker in range(workers)]
    prompts = [{request.prompt_id for request in share.requests} for share in shares]
    assert sum(map(len, prompts)) == len(set().union(*prompts)) == len(plan.requests)
    merged = sorted((request for share in shares for request in share.requests), key=lambda request: request.seq)
    assert tuple(merged) == plan.requests
    assert max(map(len, prompts)) - min(map(len, prompts)) <= 1


@pytest.mark.replay("R37", "R38")
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_merged_arrivals_are_poisson_in_fifty_seeds(workers: int) -> None:
    within = lag_one = 0
    for seed in range(50):
        offsets = poisson(rate_rps=20, horizon_ns=60 * SECOND, seed=seed_sequence(run=seed, cell=0, replicate=0))
        merged = np.sort(np.concatenate([offsets[worker::workers] for worker in range(workers)]))
        within += dispersion_is_poisson(merged, 60)
        gaps = np.diff(merged)
        lag_one += abs(float(np.corrcoef(gaps[:-1], gaps[1:])[0, 1])) < 3 / len(gaps) ** 0.5
    assert within >= 48
    assert lag_one >= 48


async def crew_cell(engine: RunningEngine, folder: Path, workers: int) -> Fired:
    plan = poisson_plan(f"crew-{workers}", rate_rps=40, duration_s=6)
    path = folder / f"{plan.cell_id}.jsonl"
    run = await run_cell(plan, Target(engine.url, "scripted", "scripted"), path, crew=Crew(workers=workers))
    everything = list(spool.read_rows(path))
    rows = {row.seq: row for row in everything if isinstance(row, RequestRow)}
    fired = Fired(run, rows, engine.take_log(), everything)
    assert run.aborted is None
    assert {row.seq for row in rows.values() if row.measured} == {request.seq for request in plan.measured}
    return fired


@pytest.mark.slow
@pytest.mark.replay("R37", "R38", "R43")
@pytest.mark.parametrize("workers", [2, 8])
async def test_what_the_target_receives_from_several_processes_is_poisson(
    engine: RunningEngine, tmp_path: Path, workers: int
) -> None:
    """Judged on the engine's own stamps and on the merged sends: gaps (KS), counts, and no lock-step."""
    fired = await crew_cell(engine, tmp_path, workers)
    rows = sorted((row for row in fired.rows.values() if row.measured), key=lambda row: row.seq)
    assert {row.worker for row in fired.rows.values()} == set(range(workers))
    sent = np.sort(np.array([row.sent_ns for row in rows], dtype=float))
    received = np.array([fired.log.requests[f"{fired.run.cell_id}-{row.seq}"].received_ns for row in rows], dtype=float)
    for times in (sent, np.sort(received)):
        gaps = np.diff(times) / 1e9
        assert kstest(gaps * 40, "expon").pvalue > 0.001
        assert abs(float(np.corrcoef(gaps[:-1], gaps[1:])[0, 1])) < 4 / len(gaps) ** 0.5
        assert dispersion_is_poisson(times - times[0], 5, level=0.9999)
    header, footer = fired.everything[0], fired.everything[-1]
    assert isinstance(header, SpoolHeader)
    assert isinstance(footer, SpoolFooter)
    assert (header.workers, header.clock, header.gc_frozen) == (workers, "monotonic", True)
    assert footer.max_in_flight <= fired.log.max_in_flight
    assert {row.worker for row in fired.everything if isinstance(row, HealthRow)} == set(range(workers))
    assert header.plan_sha256 == poisson_plan("of any name", rate_rps=40, duration_s=6).sha256
    assert not spool.worker_files(fired.run.spool)
    spool.verify(fired.run.spool)


@pytest.mark.replay("R43")
def test_a_limit_on_requests_in_flight_is_shared_out_and_not_multiplied() -> None:
    for workers in range(1, 9):
        parts = [
            limits_of(Limits(max_in_flight=100, warm_connections=10), worker, workers) for worker in range(workers)
        ]
        assert sum(part.max_in_flight for part in parts) == 100
        assert sum(part.warm_connections for part in parts) == 10


def test_what_was_in_flight_at_once_is_counted_over_all_processes() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(0, 10), (10, 20), (5, 6)]) == 2
    assert most_at_once([(0, 10), (1, 9), (2, 8)]) == 3


async def test_a_worker_killed_in_mid_cell_aborts_it_and_loses_no_request_silently(
    engine: RunningEngine, tmp_path: Path
) -> None:
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.done and not killed:
            killed.append(progress.workers[1])
            os.kill(progress.workers[1], signal.SIGKILL)

    plan = plan_of([(20.0 * index, ONE_TOKEN) for index in range(300)], cell_id="widow")
    path = tmp_path / "widow.jsonl"
    run = await run_cell(plan, Target(engine.url, "scripted", "scripted"), path, crew=Crew(workers=2), on_progress=kill)
    engine.take_log()
    assert "Load worker 2 of 2 was killed by SIGKILL" in (run.aborted or "")
    rows = {row.seq: row for row in spool.read_rows(path) if isinstance(row, RequestRow)}
    assert set(rows) == set(range(300))
    assert run.ok > 0
    assert {row.err_class for row in rows.values() if row.status == "unsent"} == {"client_died"}
    assert run.unsent == 300 - run.ok
    spool.verify(path)
    assert not spool.worker_files(path)


async def test_workers_that_never_come_are_said_to_be_missing(tmp_path: Path) -> None:
    plan = plan_of([(0, ONE_TOKEN)], cell_id="lonely")
    crew = Crew(workers=2, starts_workers=False, joining_s=0.5)
    run = await run_cell(plan, Target("http://127.0.0.1:9", "m", "n"), tmp_path / "lonely.jsonl", crew=crew)
    assert "0 of 2 load workers had joined within 0.5 s" in (run.aborted or "")
    assert "goodgate arena worker" in (run.aborted or "")
    assert (run.measured, run.unsent) == (1, 1)


def test_a_clock_of_another_host_is_mapped_by_wall_time_once() -> None:
    epoch = words.Epoch("boot-a", 5_000, 1_000_000)
    assert words.local_epoch_ns(epoch, boot="boot-a", monotonic_ns=1, unix_ns=2) == (5_000, "monotonic")
    assert words.local_epoch_ns(epoch, boot="boot-b", monotonic_ns=70_000, unix_ns=999_000) == (71_000, "wall")
    unknown = words.Epoch(None, 5_000, 1_000_000)
    assert words.local_epoch_ns(unknown, boot=None, monotonic_ns=7, unix_ns=1_000_000) == (7, "wall")


def part(path: Path, worker: int, seqs: range, plan: CellPlan, *, closes: bool) -> None:
    writer = SpoolWriter(spool.worker_file(path, worker))
    writer.write(spool_header(Target("http://x", "m", "n"), plan))
    for seq in seqs:
        due = plan.requests[seq].scheduled_ns
        writer.write(
            RequestRow(
                seq=seq, measured=True, worker=worker, prompt_id=f"prompt-{seq}", max_tokens=8, scheduled_ns=due,
                sent_ns=due, done_ns=due + 5 * MS, status="ok",
            )
        )  # fmt: skip
    footer = SpoolFooter(requests=writer.num_requests, max_in_flight=9, connections_opened=2, cooldown_exhausted=False)
    writer.finish(footer) if closes else writer.close()


@pytest.mark.parametrize("closed", [(True, True), (True, False), (False, False)])
def test_spools_of_workers_become_one_and_a_torn_one_never_a_whole(tmp_path: Path, closed: tuple[bool, bool]) -> None:
    plan = plan_of([(index, Script(steps=[])) for index in range(10)])
    path = tmp_path / "cell.jsonl"
    for worker, closes in enumerate(closed):
        part(path, worker, range(worker, 10, 2), plan, closes=closes)
    merge(path, 2, spool_header(Target("http://x", "m", "n"), plan), foreign_cpu=0.25)
    assert spool.is_complete(path) == all(closed)
    rows = [row for row in spool.read_rows(path) if isinstance(row, RequestRow)]
    assert [row.seq for row in rows] == list(range(10))
    if all(closed):
        last = list(spool.read_rows(path))[-1]
        assert isinstance(last, SpoolFooter)
        assert (last.requests, last.max_in_flight, last.connections_opened, last.foreign_cpu) == (10, 5, 4, 0.25)
    assert not spool.worker_files(path)


def test_a_worker_that_left_no_file_is_not_forgotten(tmp_path: Path) -> None:
    plan = plan_of([(index, Script(steps=[])) for index in range(4)])
    path = tmp_path / "cell.jsonl"
    part(path, 0, range(0, 4, 2), plan, closes=True)
    header = spool_header(Target("http://x", "m", "n"), plan)
    merge(path, 2, header)
    assert not spool.is_complete(path)
    spool.account_for_missing(path, plan, header, "gone")
    statuses = {row.seq: row.status for row in spool.read_rows(path) if isinstance(row, RequestRow)}
    assert statuses == {0: "ok", 1: "unsent", 2: "ok", 3: "unsent"}


async def test_a_closed_loop_is_not_shared_out(tmp_path: Path) -> None:
    from arena.load.loadgen import ClosedLoop

    plan = plan_of([(0, ONE_TOKEN)])
    with pytest.raises(ValueError, match="one load process"):
        await run_cell(
            plan, Target("http://x", "m", "n"), tmp_path / "s", crew=Crew(workers=2), closed=ClosedLoop(concurrency=1)
        )


async def test_workers_of_another_host_send_their_rows_over_the_wire(engine: RunningEngine, tmp_path: Path) -> None:
    """The master cannot read their files: it asks for them, and the cell is whole all the same."""
    import socket
    import sys

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = []
    for _ in range(2):
        command = ("-m", "arena.commands.cli", "worker", "--master", f"127.0.0.1:{port}", "--cells", "1")
        workers.append(await asyncio.create_subprocess_exec(sys.executable, *command))
    plan = plan_of([(20.0 * index, ONE_TOKEN) for index in range(30)], cell_id="abroad")
    path = tmp_path / "abroad.jsonl"
    crew = Crew(workers=2, port=port, starts_workers=False)
    run = await run_cell(plan, Target(engine.url, "scripted", "scripted"), path, crew=crew)
    engine.take_log()
    assert [await asyncio.wait_for(worker.wait(), 10) for worker in workers] == [0, 0]
    assert (run.aborted, run.ok) == (None, 30)
    spool.verify(path)
