"""docs/arena-files.md against the schema: what it names exists, what exists is named, and its queries run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from arena.records.store import Store
from tests.arena.records.races import Speed, make_race

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "arena-files.md").read_text("utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("race")
    make_race(folder, {"a": Speed()}, rates=[4])
    return folder


def test_the_page_has_every_table_and_view_and_no_other(race: Path) -> None:
    with Store(race / "arena.duckdb", read_only=True) as store:
        tables = {row["name"] for row in store.query("SELECT table_name AS name FROM duckdb_tables()")}
        views = {row["name"] for row in store.query("SELECT view_name AS name FROM duckdb_views() WHERE NOT internal")}
        macros = {
            row["name"]
            for row in store.query(
                "SELECT DISTINCT function_name AS name FROM duckdb_functions() "
                "WHERE function_type = 'table_macro' AND NOT internal"
            )
        }
    listed = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    named = {name for cell in listed for name in re.findall(r"`(\w+)(?:\([\w, ]*\))?`", cell)}
    assert named == tables | views | macros


def test_the_page_has_every_file_of_a_race(race: Path) -> None:
    names = {path.relative_to(race).as_posix() for path in race.rglob("*") if path.is_file()}
    named = {name.replace("CELL", "a-4rps-0") for name in re.findall(r"`((?:spool/CELL|\w+)\.[\w.]+)`", PAGE)}
    assert names <= named, names - named


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.splitlines()[0][3:43])
def test_its_queries_run(race: Path, query: str) -> None:
    with Store(race / "arena.duckdb", read_only=True) as store:
        assert store.query(query)
