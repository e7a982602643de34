"""The archive: complete, readable by other programs and by an older DuckDB, several races side by side."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import duckdb
import msgspec
import pytest

from arena.load.plan import CellPlan
from arena.records.export import ExportError, export_race
from arena.records.manifest import changed_files
from arena.records.store import Store
from tests.arena.records.races import Speed, make_race

OLDER = Path(__file__).resolve().parents[3] / ".venv" / "duckdb-1.5" / "bin" / "python"
FIGURES = (
    "SELECT run_id, cell_id, ttft_n, ttft_p99_ms, tpot_p50_ms FROM v_cells JOIN cells USING (cell_id) ORDER BY ALL"
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two races in one archive, the second one exported twice."""
    root = tmp_path_factory.mktemp("export")
    for run_id, seed in (("first race", 1), ("second", 2), ("second", 2)):
        folder = root / run_id
        if not folder.exists():
            make_race(folder, {"a": Speed()}, run_id=run_id, seed=seed)
        with Store(folder / "arena.duckdb", read_only=True) as store:
            export_race(store, folder, root / "archive")
    return root / "archive"


def figures_of_the_stores(archive: Path) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for run_id in ("first race", "second"):
        with Store(archive.parent / run_id / "arena.duckdb", read_only=True) as store:
            for row in store.query(FIGURES):
                rows.append(tuple({**row, "cell_id": f"{run_id}/{row['cell_id']}"}.values()))
    return rows


def test_every_table_comes_back_with_every_row_of_every_race(archive: Path) -> None:
    with duckdb.connect() as connection:
        for run_id in ("first race", "second"):
            with Store(archive.parent / run_id / "arena.duckdb", read_only=True) as store:
                for table in [row["name"] for row in store.query("SELECT table_name AS name FROM duckdb_tables()")]:
                    columns = [row["column_name"] for row in store.query(f"DESCRIBE {table}")]
                    kept = connection.execute(
                        f"SELECT {', '.join(columns)} FROM read_parquet('{archive}/{table}/*/*.parquet', "
                        "hive_partitioning = true, hive_types_autocast = false) WHERE run_id = ? ORDER BY ALL",
                        [run_id],
                    ).fetchall()
                    stored = store.query(f"SELECT * FROM {table} ORDER BY ALL")
                    assert kept == [tuple(row.values()) for row in stored], table


def test_the_archive_gives_the_figures_of_the_stores(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(archive)
    with duckdb.connect() as connection:
        connection.execute((archive / "arena.sql").read_text("utf-8"))
        assert connection.execute(FIGURES).fetchall() == figures_of_the_stores(archive)


@pytest.mark.skipif(not OLDER.exists(), reason="needs duckdb 1.5 in .venv/duckdb-1.5 (make older-duckdb)")
def test_an_older_duckdb_reads_the_archive(archive: Path) -> None:
    """DuckDB 2 writes a storage format that 1.5 cannot open; Parquet is what outlives it."""
    program = f"""
import duckdb, json
assert duckdb.__version__.startswith("1.5"), duckdb.__version__
connection = duckdb.connect()
connection.execute(open("arena.sql", encoding="utf-8").read())
print(json.dumps(connection.execute({FIGURES!r}).fetchall()))
"""
    ran = subprocess.run([OLDER, "-c", program], cwd=archive, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert [tuple(row) for row in json.loads(ran.stdout)] == figures_of_the_stores(archive)


def test_a_plan_in_the_archive_still_has_its_digest(archive: Path) -> None:
    paths = sorted((archive / "plans_json").glob("*.json"))
    assert len(paths) == 6  # three rates, two seeds
    for path in paths:
        document = json.loads(path.read_text("utf-8"))
        assert document.pop("plan_sha256") == path.stem
        for request in document["requests"]:
            request["body"] = request["body"].encode()
        plan = msgspec.convert({**document, "cell_id": "any"}, CellPlan, builtin_types=(bytes,))
        assert plan.sha256 == path.stem


def test_an_archive_that_is_damaged_or_somebody_elses_is_not_added_to(archive: Path, tmp_path: Path) -> None:
    folder = archive.parent / "second"
    (tmp_path / "notes.txt").write_text("mine")
    with Store(folder / "arena.duckdb", read_only=True) as store:
        with pytest.raises(ExportError, match="holds something other than an archive"):
            export_race(store, folder, tmp_path)
        export_race(store, folder, tmp_path / "own")
        data = next((tmp_path / "own" / "requests").rglob("*.parquet"))
        data.write_bytes(data.read_bytes()[:-1])
        assert changed_files(tmp_path / "own")[0].startswith("requests/run_id=second/data_0.parquet")
        with pytest.raises(ExportError, match=r"is damaged \(requests/run_id=second"):
            export_race(store, folder, tmp_path / "own")
