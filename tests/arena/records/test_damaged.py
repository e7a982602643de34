"""Folders of races as bad disks, full disks and other programs leave them: told in a sentence, and nothing is lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from click.testing import Result
from typer.testing import CliRunner

from arena.commands.cli import app
from arena.judging.ladder import SearchSettings
from arena.load import spool as spools
from arena.records.manifest import changed_files
from arena.records.store import Store
from tests.arena.records.races import Speed, make_race
from tests.arena.records.test_crash import unjudge

CELL = "a-4rps-0"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("race") / "race"
    make_race(folder, {"a": Speed()}, rates=(4, 8))
    return folder


@pytest.fixture
def race(whole: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "race"))


def arena(*words: str, home: Path | None = None) -> Result:
    environment = {"COLUMNS": "400", **({"GOODGATE_HOME": str(home)} if home else {})}
    return CliRunner().invoke(app, list(words), env=environment)


def is_told(result: Result, words: str, code: int = 1) -> None:
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert words in " ".join(result.output.split())


def with_a_byte_of_no_text(path: Path) -> None:
    """Not UTF-8, in the middle of a string."""
    content = path.read_bytes()
    at = content.rindex(b"model") if b"model" in content else content.index(b"poisson")
    path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("plan", with_a_byte_of_no_text),
        ("metrics", with_a_byte_of_no_text),
        ("plan", lambda path: path.write_bytes(path.read_bytes()[:-9])),
        ("metrics", lambda path: path.write_bytes(path.read_bytes()[:-9])),
        ("done", lambda path: path.write_bytes(b"\xff\xfe")),
        ("done", lambda path: path.unlink()),
    ],
)
def test_a_file_beside_a_spool_that_is_no_text_any_more_is_told_and_not_traced(
    race: Path, file: str, damage: Callable[[Path], object]
) -> None:
    damage(race / "spool" / f"{CELL}.jsonl.{file}")
    is_told(arena("check", str(race)), f"{CELL}: the spool is damaged")


def test_a_damaged_plan_ends_an_export_with_its_own_name(race: Path) -> None:
    plan = race / "spool" / f"{CELL}.jsonl.plan"
    plan.write_bytes(plan.read_bytes()[:-9])
    is_told(arena("export", str(race)), f"{plan} is damaged")


@pytest.mark.parametrize("lost", ["", ".done"])
def test_one_damaged_spool_does_not_keep_a_killed_race_from_its_report(race: Path, lost: str) -> None:
    """A machine that lost its power: one cell's spool had ended and is damaged, the other's waits to be taken in."""
    for cell in (CELL, "a-8rps-0"):
        unjudge(race, cell, ingested=False)
    damaged = race / "spool" / f"{CELL}.jsonl{lost}"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    reported = arena("report", str(race), "--json")
    is_told(reported, f"{CELL} is left out: {race / 'spool' / CELL}.jsonl has changed since its cell ended", code=0)
    assert "a-8rps-0 was taken in" in reported.output
    with Store(race / "arena.duckdb", read_only=True) as store:
        assert {row["cell_id"] for row in store.query("SELECT cell_id FROM v_cells")} == {"a-8rps-0"}
    is_told(arena("check", str(race)), f"{CELL}: there is a finished spool, but the store has no such cell")


@pytest.mark.parametrize("nested", ["{" * 3 + '"files":' + "[" * 100_000, "\xff", "{", ""])
def test_a_manifest_that_cannot_be_read_is_told_and_written_anew(race: Path, nested: str) -> None:
    (race / "manifest.json").write_bytes(nested.encode("latin-1"))
    is_told(arena("check", str(race)), "manifest.json cannot be read")
    assert arena("report", str(race)).exit_code == 0
    assert changed_files(race) == []


@pytest.mark.parametrize("command", ["report", "check", "export", "compare", "history"])
def test_a_race_that_is_not_over_is_told_as_such_and_left_alone(race: Path, command: str, tmp_path: Path) -> None:
    """Its own process holds the store; `cannot be read: IO Error: Could not set lock` says nothing to anybody."""
    before = (race / "arena.duckdb").read_bytes()
    opens = f"duckdb.connect({str(race / 'arena.duckdb')!r})"
    holds = f"import duckdb, sys; c = {opens}; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        folders = [str(race)] * (2 if command == "compare" else 1)
        told = arena(command, *folders, home=tmp_path)
        holder.kill()
    is_told(told, "arena.duckdb is in use by another process, such as a race", code=0 if command == "history" else 1)
    assert (race / "arena.duckdb").read_bytes() == before


def with_files_of_at_most(num_bytes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """As on a disk that is full: a write beyond that takes a part, the next one fails."""
    return subprocess.run(
        [sys.executable, "-m", "arena.commands.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes)),
    )


def test_a_full_disk_leaves_the_older_report_as_it_was(race: Path) -> None:
    documents = ("report.html", "report.md", "summary.json", "manifest.json")
    before = {name: (race / name).read_bytes() for name in documents}
    done = with_files_of_at_most(4096, "report", str(race))
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert {name: (race / name).read_bytes() for name in documents} == before
    assert not list(race.glob("*.tmp"))


def test_an_export_that_broke_off_can_be_done_again(race: Path) -> None:
    done = with_files_of_at_most(8192, "export", str(race))
    assert done.returncode == 1
    assert "could not be written" in done.stderr or "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    again = arena("export", str(race))
    assert again.exit_code == 0, again.output
    assert changed_files(race / "parquet") == []
    assert not list((race / "parquet").rglob("*.tmp"))
    assert arena("check", str(race)).exit_code == 0


def test_an_export_into_the_folder_of_a_race_is_refused(race: Path) -> None:
    before = sorted(race.rglob("*"))
    is_told(arena("export", str(race), "--out", str(race)), "is the folder of a race")
    assert sorted(race.rglob("*")) == before


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE marks; CREATE TABLE marks (x INTEGER)",
        "DROP TABLE races; CREATE TABLE races (x INTEGER)",
        """UPDATE marks SET mark = '{"run_id": 1}'""",
    ],
)
def test_an_index_of_another_make_says_that_it_may_be_deleted(race: Path, tmp_path: Path, statement: str) -> None:
    assert arena("history", str(race), home=tmp_path).exit_code == 0
    index = tmp_path / "arena" / "history.duckdb"
    with duckdb.connect(str(index)) as connection:
        connection.execute(statement)
    is_told(arena("history", str(race), home=tmp_path), f"{index} cannot be used as an index")
    index.unlink()
    assert arena("history", str(race), home=tmp_path).exit_code == 0


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE schema_meta SET version = 99",
        "DROP TABLE schema_meta; CREATE TABLE schema_meta (version VARCHAR); INSERT INTO schema_meta VALUES ('new')",
        "DROP TABLE schema_meta; CREATE TABLE schema_meta (release INTEGER)",
    ],
)
@pytest.mark.parametrize("command", ["report", "check", "export"])
def test_a_store_of_another_release_or_program_is_refused_and_not_traced(
    race: Path, command: str, statement: str
) -> None:
    with duckdb.connect(str(race / "arena.duckdb")) as connection:
        connection.execute(statement)
    before = (race / "arena.duckdb").read_bytes()
    told = arena(command, str(race))
    assert "schema version 99" in told.output or "no store of the arena" in told.output
    is_told(told, "arena.duckdb")
    assert (race / "arena.duckdb").read_bytes() == before


def test_half_a_line_at_the_end_of_a_nearly_full_disk_is_not_followed_by_whole_ones(tmp_path: Path) -> None:
    """The kernel takes a part of a write and says so by its count alone: what follows would make it one broken line."""
    path = tmp_path / "cell.jsonl"
    code = (
        "import pathlib, resource, sys; from arena.load.spool import HealthRow, SpoolWriter\n"
        f"writer = SpoolWriter(pathlib.Path({str(path)!r}))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (250, -1))\n"
        "row = HealthRow(t_ns=1, cpu=0.5, loop_lag_ns=7, in_flight=3, sockets=4)\n"
        "try:\n    [writer.write(row) for _ in range(10)]\n"
        "except OSError as error:\n    print(error.strerror)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "File too large\n"
    assert path.stat().st_size == 250
    rows = list(spools.read_rows(path))
    assert len(rows) == 2
    assert json.loads(path.read_bytes().splitlines()[0])["row"] == "health"


def test_what_cannot_be_read_by_its_owner_is_told(race: Path) -> None:
    """A folder in the place of a file stands for every file that cannot be opened, also for root."""
    for name in ("report.html", "summary.json"):
        (race / name).unlink()
        os.mkdir(race / name)
    is_told(arena("check", str(race)), "report.html: the file is gone.")
    is_told(arena("report", str(race)), "Is a directory")


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM plans",
        "UPDATE runs SET run_id = 'other'",
        "UPDATE runs SET started_utc = 'yesterday'",
        "UPDATE runs SET host_json = 'null'",
        "UPDATE engines SET flags_json = 'x'",
        "UPDATE plans SET warmup_ns = -5",
        "UPDATE cells SET rate_rps = 'nan'::DOUBLE",
        "UPDATE cells SET rate_rps = -1",
        "UPDATE cells SET engine_id = 'nobody'",
        "UPDATE cells SET cell_id = '../../../etc/passwd' WHERE slot = 1",
    ],
)
def test_rows_that_no_race_writes_are_told_and_not_traced(race: Path, statement: str) -> None:
    with duckdb.connect(str(race / "arena.duckdb")) as connection:
        connection.execute(statement)
    before = (race / "arena.duckdb").read_bytes()
    for command in ("report", "check", "export"):
        is_told(arena(command, str(race)), "which no race writes")
    assert (race / "arena.duckdb").read_bytes() == before


def test_a_closed_loop_that_nobody_answered_has_a_rung() -> None:
    """Its rate is 0, and the logarithm of that ended the race."""
    assert SearchSettings(start_rps=1.0, step=2.0).nearest_rung(0.0) < -20
