"""Which schema a store has, and how an older one is brought to that of this program.

    connection = connect(path, read_only=False)
    bring_up(connection, path, read_only=False)      # tables made or brought up to date, views defined

A file that may only be read is taken as it is or refused. A newer one is refused always, with its version.
"""

from __future__ import annotations

from importlib import metadata
from importlib.resources import files
from pathlib import Path

import duckdb

SCHEMA_VERSION = 2

# By the version that each starts from. What is new as a table is made by schema.sql afterwards; only what stands in
# tables that exist already is added here.
MIGRATIONS: dict[int, str] = {
    1: """
ALTER TABLE schema_meta ADD COLUMN tool_version VARCHAR;
ALTER TABLE runs ADD COLUMN clock_json VARCHAR;
ALTER TABLE plans ADD COLUMN drawn_json VARCHAR;
ALTER TABLE plan_rows ADD COLUMN prompt_sha256 VARCHAR;
ALTER TABLE plan_rows ADD COLUMN prompt_tokens INTEGER;
ALTER TABLE cells ADD COLUMN steady_from_ns BIGINT;
ALTER TABLE cells ADD COLUMN steady_to_ns BIGINT;
ALTER TABLE cells ADD COLUMN workers INTEGER;
ALTER TABLE cells ADD COLUMN clock VARCHAR;
ALTER TABLE cells ADD COLUMN foreign_cpu DOUBLE;
ALTER TABLE requests ADD COLUMN worker INTEGER DEFAULT 0;
ALTER TABLE requests ADD COLUMN text VARCHAR;
ALTER TABLE client_health ADD COLUMN worker INTEGER DEFAULT 0;
ALTER TABLE client_health ADD COLUMN machine_cpu DOUBLE;
UPDATE cells SET steady_from_ns = p.warmup_ns, steady_to_ns = p.horizon_ns
FROM plans AS p WHERE p.plan_sha256 = cells.plan_sha256 AND cells.ingested_utc IS NOT NULL;
UPDATE schema_meta SET version = 2;
""",
}


class StoreError(Exception):
    """The file is not a store that this program can read."""


def connect(path: Path, *, read_only: bool) -> duckdb.DuckDBPyConnection:
    """`StoreError` where another process writes it; a `duckdb.Error` where it is no database."""
    try:
        return duckdb.connect(str(path), read_only=read_only)
    except duckdb.IOException as error:
        if "Could not set lock" in str(error):
            raise StoreError(
                f"{path} is in use by another process, such as a race that is not over; try again when that has ended."
            ) from error
        raise


def bring_up(connection: duckdb.DuckDBPyConnection, path: Path, *, read_only: bool) -> None:
    version = _version(connection, path)
    if version is not None and version not in (SCHEMA_VERSION, *MIGRATIONS):
        raise StoreError(
            f"{path} has schema version {version}, this program reads version {SCHEMA_VERSION}; read it with the "
            "release of Goodgate that wrote it."
        )
    if not read_only:
        _make_tables(connection, version)
        _define_views(connection)
        return
    if version is None:
        raise StoreError(f"{path} holds no race: it was ended before it began.")
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}, this program reads version {SCHEMA_VERSION}; run `goodgate arena "
            f"report {path.parent}` where the file may be written, which brings it up to date."
        )
    _define_views(connection, "TEMP ")


def is_outdated(path: Path) -> bool:
    """Whether opening the file for writing would bring it to a later schema."""
    with connect(path, read_only=True) as connection:
        return _version(connection, path) in MIGRATIONS


def tool_version() -> str:
    """Of this program, as installed; "unknown" in a checkout that is not."""
    try:
        return metadata.version("goodgate")
    except metadata.PackageNotFoundError:
        return "unknown"


def _version(connection: duckdb.DuckDBPyConnection, path: Path) -> int | None:
    """None where there is no schema yet."""
    if not connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'schema_meta'").fetchall():
        return None
    try:
        row = connection.execute("SELECT version FROM schema_meta").fetchone()
    except duckdb.BinderException as error:
        raise StoreError(f"{path} is a database, but no store of the arena.") from error
    if row is None:
        return None
    if not isinstance(row[0], int):
        raise StoreError(f"{path} is a database, but no store of the arena.")
    return row[0]


def _make_tables(connection: duckdb.DuckDBPyConnection, version: int | None) -> None:
    """All or nothing: who is killed here leaves the file as it was."""
    connection.execute("BEGIN")
    try:
        for older in range(version or SCHEMA_VERSION, SCHEMA_VERSION):
            connection.execute(MIGRATIONS[older])
        connection.execute(_sql("schema.sql"))
        if version is None:
            connection.execute(
                "INSERT INTO schema_meta (version, tool_version, duckdb_version) VALUES (?, ?, ?)",
                [SCHEMA_VERSION, tool_version(), duckdb.__version__],
            )
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _define_views(connection: duckdb.DuckDBPyConnection, scope: str = "") -> None:
    """Anew each time that a store is opened, so that it is always scored by the definitions of this program.

    `scope` is "TEMP " where the file may not be written: such views live in the connection and hide stored ones.
    """
    views = _sql("views.sql")
    for kind in ("VIEW", "MACRO"):
        views = views.replace(f"CREATE OR REPLACE {kind}", f"CREATE OR REPLACE {scope}{kind}")
    connection.execute(views)


def _sql(name: str) -> str:
    return files("arena.records").joinpath(name).read_text("utf-8")
