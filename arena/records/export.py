"""A race as Parquet: an archive that outlives a storage format, read by any DuckDB, Polars or Spark.

    OUT/requests/run_id=RUN/data_0.parquet    one folder a table, partitioned by run: many races share an archive
    OUT/plans_json/SHA256.json                each plan as it was fired, prompts included
    OUT/arena.sql                             the tables and the views over the files, for `duckdb -init arena.sql`
    OUT/manifest.json                         size and SHA-256 of every file

Metrics are not exported, their definitions are: `arena.sql` holds the same views that the store is judged by.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from arena.load import spool as spools
from arena.load.plan import CellPlan
from arena.load.spool import UNREADABLE
from arena.records.manifest import NAME, changed_files, put, write_manifest
from arena.records.store import Store

PLANS = "plans_json"
QUERIES = "arena.sql"
SHARED = ("plans", "plan_rows")  # named by their digests: races with equal plans hold equal rows


class ExportError(Exception):
    """One sentence that says why nothing was written."""


@dataclass(frozen=True, slots=True)
class Written:
    rows: int
    files: int
    bytes: int


def export_race(store: Store, folder: Path, out: Path) -> Written:
    """Write the race in `folder` into the archive `out`. A second time replaces what the first has written, be it whole
    or broken off. `ExportError` where it cannot be done.
    """
    _refuse_foreign(out)
    run_id = store.query("SELECT run_id FROM runs")[0]["run_id"]
    tables = [row["table_name"] for row in store.query("SELECT table_name FROM duckdb_tables() ORDER BY table_name")]
    out.mkdir(parents=True, exist_ok=True)
    if not (out / NAME).exists():
        write_manifest(out)  # who is stopped before the last one has begun an archive, and no folder of somebody else
    _export_plans(folder / "spool", out)
    try:
        rows = sum(_export_table(store, table, run_id, out) for table in tables)
    except duckdb.Error as error:
        raise ExportError(f"{out} could not be written ({str(error).splitlines()[0]}); run it again.") from error
    put(out, {QUERIES: _queries(store, tables).encode("utf-8")})
    write_manifest(out)
    paths = [path for path in out.rglob("*") if path.is_file()]
    return Written(rows, len(paths), sum(path.stat().st_size for path in paths))


def _refuse_foreign(out: Path) -> None:
    """An archive is added to only as long as its manifest vouches for all that it holds."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if (out / "arena.duckdb").exists():
        raise ExportError(f"{out} is the folder of a race, which stays as it is; choose another --out.")
    if not (out / NAME).is_file():
        raise ExportError(f"{out} holds something other than an archive of races; choose another --out.")
    if complaints := changed_files(out):
        raise ExportError(f"{out} is damaged ({complaints[0]}) Nothing was added to it; choose another --out.")


def _export_table(store: Store, table: str, run_id: str, out: Path) -> int:
    """The table's rows, and how many. The run's id is in the folder's name, as Hive partitions have it."""
    columns = _columns(store, table)
    partition = out / table / f"run_id={_hive(run_id)}"
    partition.mkdir(parents=True, exist_ok=True)
    target = partition / "data_0.parquet"
    draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    quoted = str(draft).replace("'", "''")
    try:
        store.execute(
            f"COPY (SELECT {', '.join(columns)} FROM {table}) TO '{quoted}' (FORMAT parquet, COMPRESSION zstd)"
        )
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return int(store.query(f"SELECT count(*) AS n FROM {table}")[0]["n"])


def _columns(store: Store, table: str) -> list[str]:
    """All but the run's id."""
    rows = store.query(
        "SELECT column_name FROM duckdb_columns() WHERE table_name = ? AND column_name <> 'run_id' "
        "ORDER BY column_index",
        [table],
    )
    return [row["column_name"] for row in rows]


def _hive(value: str) -> str:
    """As DuckDB and Hive write a value into a folder's name."""
    return re.sub(r"[^A-Za-z0-9_.-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), value)


def _export_plans(spool_folder: Path, out: Path) -> None:
    """Every plan that was fired, once."""
    for path in map(spools.plan_file, sorted(spool_folder.glob("*.jsonl"))):
        try:
            plan = CellPlan.read(path)
        except FileNotFoundError:
            continue
        except UNREADABLE as error:
            raise ExportError(f"{path} is damaged ({error}); `goodgate arena check` tells what else is.") from error
        put(out, {f"{PLANS}/{plan.sha256}.json": plan_json(plan)})


def plan_json(plan: CellPlan) -> bytes:
    """`body` is the request's exact text, so that the digest can be computed again."""
    document: dict[str, Any] = msgspec.to_builtins(plan, builtin_types=(bytes,))
    del document["cell_id"]  # the same plan serves many cells
    for request in document["requests"]:
        request["body"] = request["body"].decode("utf-8")
    return msgspec.json.format(msgspec.json.encode({"plan_sha256": plan.sha256, **document}), indent=1) + b"\n"


def _queries(store: Store, tables: list[str]) -> str:
    head = (
        "-- Run in this folder: duckdb -init arena.sql. The tables of all races in it, and the metrics over them.\n"
        "-- Cells and engines are named run/cell and run/engine here, since races use the same names again.\n\n"
    )
    views = "".join(f"CREATE OR REPLACE VIEW {table} AS {_reading(store, table)};\n" for table in tables)
    return head + views + "\n" + files("arena.records").joinpath("views.sql").read_text("utf-8")


def _reading(store: Store, table: str) -> str:
    source = f"read_parquet('{table}/*/*.parquet', hive_partitioning = true, hive_types_autocast = false)"
    if table in SHARED:
        return f"SELECT DISTINCT * EXCLUDE (run_id) FROM {source}"
    names = [name for name in _columns(store, table) if name in ("cell_id", "engine_id")]
    unique = ", ".join(f"run_id || '/' || {name} AS {name}" for name in names)
    return f"SELECT *{f' REPLACE ({unique})' if unique else ''} FROM {source}"
