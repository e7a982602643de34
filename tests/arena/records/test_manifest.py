"""Whoever changes a byte of a race is told by name, and a new report does not vouch for what was changed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from arena.commands.cli import app
from arena.records.check import check_files, check_run
from arena.records.export import export_race
from arena.records.manifest import NAME, changed_files, write_manifest
from arena.records.store import Store
from tests.arena.records.races import Speed, make_race


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    make_race(folder, {"a": Speed(), "b": Speed(capacity_rps=4)})
    with Store(folder / "arena.duckdb", read_only=True) as store:
        export_race(store, folder, folder / "parquet")
    return folder


@pytest.fixture
def race(finished: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "race"
    shutil.copytree(finished, copy)
    return copy


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def test_an_untouched_race_has_nothing_to_complain_about(race: Path) -> None:
    assert check_files(race) == []
    with Store(race / "arena.duckdb", read_only=True) as store:
        assert check_run(store, race) == []


def test_one_flipped_bit_anywhere_in_any_file_is_told_by_the_files_name(race: Path) -> None:
    dice = random.Random(7)
    kinds = {path.suffix for path in files_of(race)}
    assert {".duckdb", ".jsonl", ".plan", ".done", ".metrics", ".html", ".json", ".parquet", ".sql"} <= kinds
    for path in files_of(race):
        kept = path.read_bytes()
        for _ in range(3):
            flip(path, dice.randrange(len(kept)), dice.randrange(8))
            complaints = check_files(race)
            assert complaints, path
            assert complaints[0].startswith(path.relative_to(race).as_posix()), (path, complaints)
            path.write_bytes(kept)
    assert check_files(race) == []


def test_a_file_that_is_gone_or_longer_is_told(race: Path) -> None:
    spool, document = next((race / "spool").glob("*.jsonl")), race / "evidence.json"
    spool.unlink()
    document.write_bytes(document.read_bytes() + b" ")
    assert check_files(race) == [
        "evidence.json: the file has changed since the manifest was written.",
        f"spool/{spool.name}: the file is gone.",
    ]


def test_a_new_manifest_does_not_vouch_for_a_spool_that_was_changed(race: Path) -> None:
    spool = next((race / "spool").glob("*.jsonl"))
    marker = spool.with_name(spool.name + ".done")
    flip(spool, 100, 0)
    marker.unlink()
    write_manifest(race)
    told = changed_files(race)
    assert [complaint.split(":")[0] for complaint in told] == [f"spool/{spool.name}", f"spool/{marker.name}"]
    marker.write_text("0" * 64 + "\n")
    write_manifest(race)
    told = changed_files(race)
    assert [complaint.split(":")[0] for complaint in told] == [f"spool/{spool.name}", f"spool/{marker.name}"]


def test_a_race_without_a_manifest_says_how_to_get_one(race: Path) -> None:
    (race / NAME).unlink()
    assert "`goodgate arena report` writes it" in changed_files(race)[0]


def test_check_tells_a_store_that_cannot_be_opened_and_all_else_with_it(race: Path) -> None:
    (race / "arena.duckdb").write_bytes(b"not a database, but long enough to be taken for one" * 100)
    (race / "summary.json").write_text("{}")
    result = CliRunner().invoke(app, ["check", str(race)])
    assert result.exit_code == 1
    told = result.output
    assert "arena.duckdb: the file has changed" in told
    assert "summary.json: the file has changed" in told
    assert "cannot be read" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("UPDATE verdicts SET est = est * 2", "arena.duckdb keeps verdicts that its rows do not give"),
        ("UPDATE search_steps SET misses = 0", "arena.duckdb keeps verdicts that its rows do not give"),
        ("UPDATE client_health SET cpu = 0", "rows differ between the spool and the store"),
        ("UPDATE engine_health SET value = 0", "rows differ between the spool and the store"),
        ("UPDATE requests SET cached_tok = NULL", "rows differ between the spool and the store"),
    ],
)
def test_a_figure_in_the_store_that_the_rows_do_not_give_is_told(race: Path, statement: str, told: str) -> None:
    with Store(race / "arena.duckdb") as store:
        store.execute(statement)
    with Store(race / "arena.duckdb", read_only=True) as store:
        assert any(told in complaint for complaint in check_run(store, race))


def test_a_figure_in_the_page_is_compared_too(race: Path) -> None:
    page = race / "report.html"
    page.write_text(page.read_text("utf-8").replace("requests/s", "requests/m", 1), "utf-8")
    write_manifest(race)
    with Store(race / "arena.duckdb", read_only=True) as store:
        assert [complaint.split(" ")[0] for complaint in check_run(store, race)] == ["report.html"]
