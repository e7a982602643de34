"""Whole races over real sockets, against scripted engines whose capacities are known."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.launching.launch import EngineProcess, LaunchSpec, free_port
from arena.judging.cells import CellResult, read_cell
from arena.judging.judge import judge_race
from arena.judging.results import RaceResult
from arena.judging.so_far import SoFar
from arena.load.loadgen import Progress
from arena.race.bakeoff import race
from arena.race.card import Contender, RaceCard
from arena.race.scenario import Scenario
from arena.race.scenario_file import parse
from arena.records.check import check_run
from arena.records.store import Store
from arena.reports.report import publish, render
from arena.reports.summary import summary

# One request takes 40 + 7 * 10 = 110 ms, so an engine of `n` slots serves 9.1 n requests/s.
PACE = ["--ttft-ms", "40", "--itl-ms", "10"]

SCENARIO = """
name: scripted
model: fake
workload: {kind: synthetic, prompt: {kind: fixed, tokens: 20}, output: {kind: fixed, tokens: 8}}
slo: {ttft_ms: 1000, tpot_ms: 30}
search: {start_rps: 1, step: 1.5, stride: 2, max_rps: 200, max_cells: 3, max_replicates: 1, burst: 12}
cell: {warmup_s: 0.2, duration_s: 1.5, settle_s: 0.05}
"""


class Log:
    """Keeps what a race tells."""

    def __init__(self) -> None:
        self.judged: list[str] = []
        self.failed: dict[str, str] = {}
        self.in_flight = 0
        self.first_verdict = asyncio.Event()

    def engine_starting(self, name: str) -> None: ...

    def engine_ready(self, name: str, words: str) -> None: ...

    def engine_failed(self, name: str, words: str) -> None:
        self.failed[name] = words

    def cell_starting(self, name: str, rate_rps: float, expected_s: float) -> None: ...

    def cell_progress(self, name: str, progress: Progress, so_far: SoFar) -> None:
        self.in_flight = max(self.in_flight, progress.in_flight)

    def cell_judged(self, name: str, cell: CellResult) -> None:
        self.judged.append(name)
        self.first_verdict.set()


@contextmanager
def scripted(*arguments: str) -> Iterator[str]:
    """A fake engine in a process of its own; its url."""
    command = [sys.executable, "-m", "adapters.servers.fake_server", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            yield f"http://127.0.0.1:{port}"
        finally:  # a race that raises has to show its error, and not wait for an engine that nobody stops
            process.terminate()


def card(out: Path, contenders: list[Contender], *, text: str = SCENARIO, seed: int = 11) -> RaceCard:
    return RaceCard(
        run_id="run-1",
        started_utc="2026-01-01T00:00:00+00:00",
        seed=seed,
        scenario=parse(text, source="test"),
        quick=True,
        contenders=contenders,
        out=out,
        host={"cpu": "test", "cores": 2},
    )


def launched(name: str, *argv: str) -> Contender:
    """A contender that the race starts itself. PORT in its command is replaced by a free one."""

    def process() -> EngineProcess:
        port = free_port()
        command = tuple(part.replace("PORT", str(port)) for part in argv)
        spec = LaunchSpec(name=name, argv=command, port=port, ready_timeout_s=20, stop_grace_s=2)
        return EngineProcess(spec, Path(LOGS[0]) / f"{name}.log")

    return Contender(name=name, version="1", process=process)


LOGS: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    LOGS.append(str(tmp_path_factory.mktemp("logs")))
    yield
    LOGS.clear()


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> tuple[RaceResult, Path, Log]:
    """One race: an engine of eight times the capacity against two equal ones."""
    out, log = tmp_path_factory.mktemp("race"), Log()
    with (
        scripted(*PACE, "--max-concurrent", "1") as slow,
        scripted(*PACE, "--max-concurrent", "1") as twin,
        scripted(*PACE, "--max-concurrent", "8") as fast,
    ):
        contenders = [Contender(name=name, url=url) for name, url in (("slow", slow), ("twin", twin), ("fast", fast))]
        result = asyncio.run(race(card(out, contenders), log))
    publish(result, out)
    return result, out, log


def test_the_engine_with_eight_times_the_capacity_wins(raced: tuple[RaceResult, Path, Log]) -> None:
    result = raced[0]
    best = result.engines[0]
    assert best.name == "fast"
    assert best.rank is not None
    assert (best.rank.lo, best.rank.hi) == (1, 1)
    assert best.goodput is not None
    assert 15 < best.goodput.rate_rps < 73  # its capacity is 72.7
    assert result.is_valid, result.invalid_reasons


def test_two_equal_engines_share_their_ranks(raced: tuple[RaceResult, Path, Log]) -> None:
    ranks = {engine.name: engine.rank for engine in raced[0].engines}
    assert ranks["slow"] == ranks["twin"]
    assert str(ranks["slow"]) == "2\N{EN DASH}3"


def test_every_engine_meets_the_same_plan_at_the_same_rung_and_cells_alternate(
    raced: tuple[RaceResult, Path, Log],
) -> None:
    result, _, log = raced
    plans: dict[tuple[int, int], set[str]] = {}
    for engine in result.engines:
        for cell in engine.cells:
            plans.setdefault((cell.rung, cell.replicate), set()).add(cell.plan_sha256)
    assert all(len(digests) == 1 for digests in plans.values())
    assert len(plans) < sum(len(engine.cells) for engine in result.engines)  # some plan was met by two engines
    assert log.judged[:6] == ["slow", "twin", "fast", "fast", "twin", "slow"]
    assert log.in_flight > 0


def test_the_report_is_computed_again_from_the_store_alone(raced: tuple[RaceResult, Path, Log]) -> None:
    result, out, _ = raced
    with Store(out / "arena.duckdb", read_only=True) as store:
        again = judge_race(store)
    assert summary(again) == summary(result)
    assert render(again) == render(result) == (out / "report.html").read_text("utf-8")


def test_the_files_of_a_race_check_out_until_one_is_touched(raced: tuple[RaceResult, Path, Log]) -> None:
    _, out, _ = raced
    with Store(out / "arena.duckdb", read_only=True) as store:
        assert check_run(store, out) == []
        spool = next(iter(sorted((out / "spool").glob("*.jsonl"))))
        kept = spool.read_bytes()
        spool.write_bytes(kept.replace(b'"status":"ok"', b'"status":"no"', 1))
        evidence = out / "evidence.json"
        proof = evidence.read_text()
        evidence.write_text(proof.replace('"rank": [\n', '"rank": [\n9, ', 1))
        try:
            complaints = check_run(store, out)
        finally:
            spool.write_bytes(kept)
            evidence.write_text(proof)
    assert [complaint.split(":")[0] for complaint in complaints if "spool" in complaint] == [spool.stem]
    assert any(complaint.startswith("evidence.json") for complaint in complaints)


def test_the_slots_of_a_race_are_recorded_with_what_a_fixed_task_took_before_each(
    raced: tuple[RaceResult, Path, Log],
) -> None:
    result = raced[0]
    slots = [reading.slot for reading in result.drift]
    assert slots == sorted(slots)
    assert {reading.slot: reading.engine for reading in result.drift} == {
        cell.slot: engine.name for engine in result.engines for cell in engine.cells
    }
    assert all(reading.task_ms > 0 for reading in result.drift)
    assert [control.kind for control in result.controls] == ["drift"]


def test_engines_on_the_same_plan_are_compared_request_by_request(raced: tuple[RaceResult, Path, Log]) -> None:
    result = raced[0]
    rows = {(row.first, row.second, row.metric): row for row in result.paired}
    shared = rows["slow", "twin", "in_time"] if ("slow", "twin", "in_time") in rows else rows["twin", "slow", "in_time"]
    assert shared.requests > 0
    assert shared.difference == pytest.approx(0, abs=0.5)


def test_the_same_engine_under_two_names_is_raced_beside_the_ranking_and_not_told_from_itself(tmp_path: Path) -> None:
    text = SCENARIO.replace("max_cells: 3", "max_cells: 2")
    with scripted(*PACE, "--max-concurrent", "4") as url:
        racing = replace(card(tmp_path, [Contender(name="solo", url=url)], text=text), control="solo")
        result = asyncio.run(race(racing, Log()))
    assert result.notes.control == ("solo", "solo-again")
    assert {engine.name: str(engine.rank) if engine.rank else None for engine in result.engines} == {
        "solo": "1",
        "solo-again": None,
    }
    control = next(control for control in result.controls if control.kind == "aa")
    assert control.ok is True
    assert result.is_valid, result.invalid_reasons


@pytest.mark.slow
def test_engines_that_do_not_start_or_die_are_told_with_their_last_words_and_the_race_goes_on(tmp_path: Path) -> None:
    server = [sys.executable, "-m", "adapters.servers.fake_server", "--port", "PORT", *PACE]
    dies = (
        "import os, sys, threading, runpy; threading.Timer(2.5, lambda: (print('fatal: out of luck', flush=True), "
        "os._exit(7))).start(); sys.argv = ['fake', *sys.argv[1:]]; "
        "runpy.run_module('adapters.servers.fake_server', run_name='__main__')"
    )
    contenders = [
        launched("broken", sys.executable, "-c", "raise SystemExit('error: no such model')"),
        launched("mortal", sys.executable, "-c", dies, *server[3:]),
        launched("healthy", *server),
    ]
    log = Log()
    text = SCENARIO.replace("max_cells: 3", "max_cells: 1").replace("duration_s: 1.5", "duration_s: 2.5")
    result = asyncio.run(race(card(tmp_path, contenders, text=text), log))
    by_name = {engine.name: engine for engine in result.engines}
    assert by_name["healthy"].rank is not None
    assert by_name["broken"].rank is None
    assert "error: no such model" in log.failed["broken"]
    assert "fatal: out of luck" in log.failed["mortal"]
    assert "exit code 7" in log.failed["mortal"]
    assert by_name["mortal"].rank is None
    assert by_name["mortal"].cells[0].failures > 0  # what it did until then is not lost
    assert not result.is_valid
    assert {"broken", "mortal"} == {reason.split(":")[0] for reason in result.invalid_reasons}
    assert "out of luck" in render(result)


@pytest.mark.slow
def test_in_the_second_round_engines_take_their_turns_in_reverse_and_only_one_is_up_at_a_time(tmp_path: Path) -> None:
    server = [
        sys.executable,
        "-m",
        "adapters.servers.fake_server",
        "--port",
        "PORT",
        "--ttft-ms",
        "5",
        "--itl-ms",
        "1",
        "--max-concurrent",
        "1",
    ]
    up: list[EngineProcess] = []

    def watched(contender: Contender) -> Contender:
        make = contender.process
        assert make is not None

        def process() -> EngineProcess:
            assert not any(engine.is_running for engine in up)
            up.append(make())
            return up[-1]

        return Contender(name=contender.name, process=process)

    text = (
        SCENARIO.replace("max_cells: 3", "max_cells: 2").replace("duration_s: 1.5", "duration_s: 0.4") + "rounds: 2\n"
    )
    log = Log()
    result = asyncio.run(race(card(tmp_path, [watched(launched(name, *server)) for name in "ab"], text=text), log))
    assert log.judged == ["a", "b", "b", "a"]
    assert len(up) == 4
    assert result.notes.residency == "one"
    assert not any(engine.is_running for engine in up)


def test_an_interrupted_race_stops_its_engines_and_keeps_what_it_has(tmp_path: Path) -> None:
    server = [sys.executable, "-m", "adapters.servers.fake_server", "--port", "PORT", *PACE]
    started: list[EngineProcess] = []
    contender = launched("solo", *server)
    assert contender.process is not None
    make = contender.process

    def process() -> EngineProcess:
        started.append(make())
        return started[-1]

    async def interrupted() -> RaceResult:
        watched = Contender(name="solo", process=process)
        log = Log()
        running = asyncio.create_task(race(card(tmp_path, [watched]), log))
        await log.first_verdict.wait()
        await asyncio.sleep(0.8)  # into the second cell
        running.cancel()
        return await running

    result = asyncio.run(interrupted())
    assert result.notes.interrupted
    assert result.engines[0].cells[0].is_valid
    assert result.engines[0].cells[-1].status == "planned"
    assert result.engines[0].goodput is not None
    assert "interrupted" in result.invalid_reasons[0]
    assert not started[0].is_running
    with Store(tmp_path / "arena.duckdb", read_only=True) as store:
        assert check_run(store, tmp_path)[0].startswith("summary.json cannot be read")
        publish(result, tmp_path)
        assert check_run(store, tmp_path) == []


def test_an_endpoint_where_nobody_listens_is_out_and_says_so(tmp_path: Path) -> None:
    log = Log()
    nobody = Contender(name="ghost", url=f"http://127.0.0.1:{free_port()}")
    result = asyncio.run(race(card(tmp_path, [nobody]), log))
    assert "Nothing answers at http://127.0.0.1:" in log.failed["ghost"]
    assert result.engines[0].rank is None
    assert result.engines[0].goodput is None
    assert "No engine could be ranked" in render(result)


@pytest.mark.slow
@pytest.mark.parametrize("num_valid", [0, 1])
def test_three_invalid_cells_in_a_row_end_a_turn_and_an_engine_without_a_valid_one_in_any_turn_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_valid: int
) -> None:
    """Invalid cells do not count against the budget, so nothing else would ever end a turn on a busy machine."""
    valid_ones = iter([True] * num_valid)

    def mostly_late(store: Store, cell_id: str, scenario: Scenario, *, aborted: str | None) -> CellResult:
        late = not next(valid_ones, False)
        store.judge_cell(cell_id, "invalid_client" if late else "ok", "The client was late." if late else None)
        return read_cell(store, cell_id, scenario)

    monkeypatch.setattr("arena.race.cell_runner.judge_cell", mostly_late)
    server = [sys.executable, "-m", "adapters.servers.fake_server", "--port", "PORT", *PACE, "--max-concurrent", "4"]
    text = SCENARIO.replace("duration_s: 1.5", "duration_s: 0.2") + "rounds: 2\n"
    log = Log()

    async def race_with_patience() -> RaceResult:
        async with asyncio.timeout(40):
            return await race(card(tmp_path, [launched("unlucky", *server)], text=text), log)

    result = asyncio.run(race_with_patience())
    if num_valid:
        assert log.judged == ["unlucky"] * (num_valid + 3 + 3)  # a second turn, in the second round
        assert not log.failed
        assert result.engines[0].rank is not None
    else:
        assert log.judged == ["unlucky"] * (3 + 3)
        assert "3 invalid cells in a row" in log.failed["unlucky"]
        assert result.engines[0].rank is None
