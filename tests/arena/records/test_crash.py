"""SIGKILL at any moment: no finished cell is lost, and no half cell is shown as a whole one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from typer.testing import CliRunner

from arena.commands.cli import app
from arena.load import spool as spools
from arena.load.spool import RequestRow
from arena.race.recovery import settle
from arena.records.check import check_files, check_run
from arena.records.store import Store
from arena.reports.report import publish
from tests.arena.race.test_bakeoff import scripted
from tests.arena.records.races import Speed, make_race

SCENARIO = """
name: killed
model: fake
workload: {kind: synthetic, prompt: {kind: fixed, tokens: 20}, output: {kind: fixed, tokens: 4}}
slo: {ttft_ms: 300, tpot_ms: 60}
search: {start_rps: 8, step: 1.5, stride: 1, max_rps: 60, max_cells: 6, max_replicates: 2, burst: 4}
cell: {warmup_s: 0.1, duration_s: 0.5, settle_s: 0}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with scripted("--ttft-ms", "20", "--itl-ms", "5") as url:
        yield url


@contextlib.contextmanager
def racing(server: str, folder: Path, *, max_cells: int) -> Iterator[subprocess.Popen[bytes]]:
    scenario = folder.parent / f"{folder.name}.yaml"
    scenario.write_text(SCENARIO.replace("max_cells: 6", f"max_cells: {max_cells}"))
    command = [sys.executable, "-m", "arena.commands.cli", "run", str(scenario), "--targets", f"one={server}"]
    with subprocess.Popen(
        [*command, "--out", str(folder), "--no-calibration"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        yield process
        process.kill()


def wait_until_a_spool_begins(folder: Path, process: subprocess.Popen[bytes]) -> None:
    while not list((folder / "spool").glob("*.jsonl")):
        assert process.poll() is None, "the race ended before its first cell"
        time.sleep(0.01)


def load_process_of(driver: int) -> int | None:
    """The load process that is running now, by the driver's children."""
    children = Path(f"/proc/{driver}/task/{driver}/children").read_text().split()
    for child in map(int, children):
        with contextlib.suppress(OSError):
            if b"arena.load.loadgen_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


def nothing_is_lost_or_half(folder: Path) -> None:
    """What holds of every race, however it ended, once it has been looked at."""
    with Store(folder / "arena.duckdb", read_only=True) as store:
        cells = {row["cell_id"]: row for row in store.query("SELECT * FROM cells")}
        for spool in (folder / "spool").glob("*.jsonl"):
            cell = cells[spool.stem]
            is_finished = spools.is_complete(spool)
            assert (cell["ingested_utc"] is not None) == is_finished
            assert (cell["status"] in ("planned", "unjudged")) != is_finished
            in_store = store.query("SELECT count(*) AS n FROM requests WHERE cell_id = ?", [spool.stem])[0]["n"]
            in_spool = sum(isinstance(row, RequestRow) for row in spools.read_rows(spool))
            assert in_store == (in_spool if is_finished else 0)
        assert check_run(store, folder) == []
    assert check_files(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_driver_killed_at_any_moment_leaves_whole_cells_only(server: str, tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "race"
    with racing(server, folder, max_cells=6) as driver:
        wait_until_a_spool_begins(folder, driver)
        time.sleep(random.Random(seed).uniform(0, 1.5))  # a race takes about three seconds
        driver.send_signal(signal.SIGKILL)
        assert driver.wait() == -signal.SIGKILL, "the race was over already"
    deadline = time.monotonic() + 10  # the load process sees that its driver is gone; until then it writes
    while lives_of(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    finished = {path.stem for path in (folder / "spool").glob("*.jsonl") if spools.is_complete(path)}
    told = CliRunner().invoke(app, ["report", str(folder), "--json"])
    assert told.exit_code == 0, told.output
    document = json.loads(told.stdout)
    assert document["valid"] is False
    assert "interrupted" in document["invalid_reasons"][0]
    with Store(folder / "arena.duckdb", read_only=True) as store:
        assert finished == {row["cell_id"] for row in store.query("SELECT cell_id FROM v_cells")}
    nothing_is_lost_or_half(folder)


def lives_of(folder: Path) -> list[int]:
    """Load processes of this race that are still there; each has its spool open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(file).startswith(str(folder / "spool")) for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_load_process_killed_at_any_moment_is_an_aborted_cell_with_all_its_rows(
    server: str, tmp_path: Path, seed: int
) -> None:
    folder = tmp_path / "race"
    killed = 0
    with racing(server, folder, max_cells=1) as driver:
        wait_until_a_spool_begins(folder, driver)
        time.sleep(random.Random(seed).uniform(0, 0.4))
        while driver.poll() is None:
            victim = load_process_of(driver.pid) if not killed else None
            if victim is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed += 1
            time.sleep(0.02)
    assert killed
    with Store(folder / "arena.duckdb", read_only=True) as store:
        cells = store.query("SELECT * FROM cells WHERE ingested_utc IS NOT NULL")
        aborted = [cell for cell in cells if cell["status"] == "aborted"]
        assert len(aborted) <= 1
        for cell in aborted:
            assert "was killed by SIGKILL" in cell["reason"]
            planned = "SELECT count(*) AS n FROM plan_rows JOIN plans USING (plan_sha256) WHERE plan_sha256 = ? AND "
            due = store.query(
                planned + "scheduled_ns >= warmup_ns AND scheduled_ns < horizon_ns", [cell["plan_sha256"]]
            )
            measured = store.query("SELECT count(*) AS n FROM v_measured WHERE cell_id = ?", [cell["cell_id"]])
            assert measured == due
    nothing_is_lost_or_half(folder)


def unjudge(folder: Path, cell_id: str, *, ingested: bool) -> None:
    """What the store looks like when the driver is killed just before, or just after, it has taken the cell in."""
    with Store(folder / "arena.duckdb") as store:
        store.execute("DELETE FROM audits WHERE cell_id = ?", [cell_id])
        store.execute("UPDATE cells SET status = 'unjudged' WHERE cell_id = ?", [cell_id])
        if not ingested:
            store.execute(
                "UPDATE cells SET status = 'planned', reason = NULL, ingested_utc = NULL WHERE cell_id = ?", [cell_id]
            )
            for table in ("requests", "token_events", "client_health", "engine_health"):
                store.execute(f"DELETE FROM {table} WHERE cell_id = ?", [cell_id])


@pytest.mark.parametrize(("ingested", "told"), [(False, "was taken in"), (True, "was judged")])
def test_a_finished_cell_that_the_store_does_not_know_yet_is_taken_in_once(
    tmp_path: Path, ingested: bool, told: str
) -> None:
    made = make_race(tmp_path, {"a": Speed()})
    published = {name: (tmp_path / name).read_bytes() for name in ("summary.json", "evidence.json", "report.html")}
    unjudge(tmp_path, "a-8rps-0", ingested=ingested)
    with Store(tmp_path / "arena.duckdb", read_only=True) as store:
        assert check_run(store, tmp_path)
    assert any(told in words for words in settle(tmp_path))
    store_bytes = (tmp_path / "arena.duckdb").read_bytes()
    assert settle(tmp_path) == []
    assert (tmp_path / "arena.duckdb").read_bytes() == store_bytes
    publish(made, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in published} == published
    nothing_is_lost_or_half(tmp_path)


def test_a_cell_that_nobody_has_judged_enters_no_figure(tmp_path: Path) -> None:
    make_race(tmp_path, {"a": Speed()})
    unjudge(tmp_path, "a-16rps-0", ingested=True)
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 1
    assert "a-16rps-0: it was never judged" in result.output
    result = CliRunner().invoke(app, ["check", "--repair", str(tmp_path)])
    assert result.exit_code == 0, result.output


OLDER = """
ALTER TABLE schema_meta DROP COLUMN tool_version; ALTER TABLE runs DROP COLUMN clock_json;
ALTER TABLE plan_rows DROP COLUMN prompt_sha256;
ALTER TABLE plan_rows DROP COLUMN prompt_tokens; ALTER TABLE plans DROP COLUMN drawn_json;
ALTER TABLE cells DROP COLUMN steady_from_ns;
ALTER TABLE cells DROP COLUMN steady_to_ns;
ALTER TABLE cells DROP COLUMN workers; ALTER TABLE cells DROP COLUMN clock; ALTER TABLE cells DROP COLUMN foreign_cpu;
ALTER TABLE requests DROP COLUMN worker; ALTER TABLE requests DROP COLUMN text;
ALTER TABLE client_health DROP COLUMN worker; ALTER TABLE client_health DROP COLUMN machine_cpu;
DROP TABLE energy; DROP TABLE verdicts; DROP TABLE search_steps; DROP TABLE engine_health;
UPDATE schema_meta SET version = 1;
"""


def test_a_store_of_the_first_schema_is_brought_up_to_date_by_report_and_only_by_it(tmp_path: Path) -> None:
    make_race(tmp_path, {"a": Speed()}, has_metrics=False)
    with Store(tmp_path / "arena.duckdb") as store:
        store.execute(OLDER)
    refused = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert refused.exit_code == 1
    assert "goodgate arena report" in refused.output
    assert "schema version 1, this program reads version 2" in " ".join(refused.output.split())
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0
    nothing_is_lost_or_half(tmp_path)
    with Store(tmp_path / "arena.duckdb", read_only=True) as store:
        assert store.query("SELECT count(*) AS n FROM verdicts WHERE est > 0") == [{"n": 1}]


def test_a_race_killed_before_its_store_had_a_schema_is_told_in_a_sentence(tmp_path: Path) -> None:
    duckdb.connect(str(tmp_path / "arena.duckdb")).close()
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "holds no race: it was ended before it began" in result.output
