"""Many races in one index: what each engine carried, when, in which version, on which machine.

    with History(home / "arena" / "history.duckdb") as history:
        history.update(find_races([home / "arena"]))
        history.marks(races)

The index is no second truth. It holds what judging says of each race's own store, which is only read; a race whose
store has changed, and every race once a definition has, is judged again. Who deletes it loses nothing but time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import TracebackType

import duckdb
import msgspec

from arena.judging.judge import judge_race
from arena.judging.results import EngineResult, RaceResult
from arena.judging.trends import Mark
from arena.load.spool import UNREADABLE
from arena.race.config import fingerprint
from arena.records.schema import StoreError, connect
from arena.records.sense import refuse_nonsense
from arena.records.store import Store

DATABASE = "arena.duckdb"
SETTLED_BY = (  # whatever decides what is said of a race
    ("arena.judging", (".py",)),
    ("arena.records", ("views.sql", "store.py", "schema.py", "history.py")),
    ("arena.race", ("scenario.py",)),
)


class HistoryError(Exception):
    """One sentence that says why there is no history."""


@dataclass(frozen=True, slots=True)
class Skipped:
    folder: str
    why: str


def find_races(places: Iterable[Path]) -> list[Path]:
    """Folders of races among the places and anywhere below them, in order of name."""
    found = {
        path.parent.resolve()
        for place in places
        for path in [place / DATABASE, *place.rglob(DATABASE)]
        if path.is_file()
    }
    return sorted(found)


class History:
    """The index in one DuckDB file. One process at a time has it."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = connect(path, read_only=False)
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS races (folder VARCHAR PRIMARY KEY, stamp VARCHAR, why_not VARCHAR);"
                "CREATE TABLE IF NOT EXISTS marks (folder VARCHAR, mark JSON)"
            )
        except StoreError as error:
            raise HistoryError(f"{path} is in use by another command; try again when that has ended.") from error
        except (duckdb.Error, OSError) as error:
            raise HistoryError(f"{path} cannot be used as an index; delete it, and it is made anew.") from error
        self._path = path

    def __enter__(self) -> History:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()
        if isinstance(error, (duckdb.Error, *UNREADABLE)):
            why = str(error).splitlines()[0]
            raise HistoryError(
                f"{self._path} cannot be used as an index ({why}); delete it, and it is made anew."
            ) from error

    def update(
        self, races: Sequence[Path], *, rebuild: bool = False, tell: Callable[[Path], None] = lambda _: None
    ) -> int:
        """Judge what is new or has changed; how many that were. `tell` hears of each before it is judged."""
        known = dict(self._connection.execute("SELECT folder, stamp FROM races").fetchall())
        definitions = _definitions()
        judged = 0
        for folder in races:
            stamp = _stamp(folder, definitions)
            if rebuild or known.get(str(folder)) != stamp:
                tell(folder)
                self._take(folder, stamp)
                judged += 1
        return judged

    def marks(self, races: Sequence[Path]) -> list[Mark]:
        """What is known of these races, in the order in which they began."""
        rows = self._connection.execute(
            "SELECT mark FROM marks WHERE folder IN (SELECT unnest(?::VARCHAR[]))", [[str(folder) for folder in races]]
        ).fetchall()
        marks = [msgspec.json.decode(mark, type=Mark) for (mark,) in rows]
        return sorted(marks, key=lambda mark: (mark.started_utc, mark.run_id, mark.engine))

    def skipped(self, races: Sequence[Path]) -> list[Skipped]:
        """Races that could not be read, and why."""
        rows = self._connection.execute(
            "SELECT folder, why_not FROM races WHERE why_not IS NOT NULL AND folder IN (SELECT unnest(?::VARCHAR[])) "
            "ORDER BY folder",
            [[str(folder) for folder in races]],
        ).fetchall()
        return [Skipped(*row) for row in rows]

    def _take(self, folder: Path, stamp: str) -> None:
        marks, why_not = _read(folder)
        self._connection.execute("BEGIN")
        try:
            self._connection.execute("DELETE FROM marks WHERE folder = ?", [str(folder)])
            for mark in marks:
                self._connection.execute(
                    "INSERT INTO marks VALUES (?, ?)", [str(folder), msgspec.json.encode(mark).decode()]
                )
            # One that could not be read is tried again the next time.
            self._connection.execute(
                "INSERT OR REPLACE INTO races VALUES (?, ?, ?)", [str(folder), None if why_not else stamp, why_not]
            )
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def _read(folder: Path) -> tuple[list[Mark], str | None]:
    try:
        with Store(folder / DATABASE, read_only=True) as store:
            if not store.query("SELECT 1 FROM runs"):
                return [], "the race ended before it began"
            refuse_nonsense(store, folder / DATABASE)
            result = judge_race(store)
    except StoreError as error:
        return [], str(error)
    except (duckdb.Error, *UNREADABLE) as error:
        return [], f"its store cannot be read: {str(error).splitlines()[0]}"
    return [_mark(engine, result, folder) for engine in result.engines], None


def _mark(engine: EngineResult, result: RaceResult, folder: Path) -> Mark:
    scenario, goodput = result.scenario, engine.goodput
    valid = [cell for cell in engine.cells if cell.is_valid]
    return Mark(
        folder=str(folder),
        run_id=result.run_id,
        started_utc=result.started_utc,
        git_sha=result.git_sha,
        scenario=scenario.name + (" (quick)" if result.notes.quick else ""),
        model=scenario.model,
        question=question_digest(result),
        host=fingerprint(result.host),
        host_words=f"{result.host.get('cpu')}, {result.host.get('cores')} cores",
        engine=engine.name,
        version=engine.version,
        settings=dict(engine.settings),
        goodput_rps=goodput.rate_rps if goodput else None,
        proven=bool(goodput and goodput.proven),
        lo=goodput.lo if goodput else None,
        hi=goodput.hi if goodput else None,
        rank=(engine.rank.lo, engine.rank.hi) if engine.rank else None,
        unranked=engine.unranked,
        outcomes=tuple(cell.outcome() for cell in valid),
        search=scenario.settings,
    )


def question_digest(result: RaceResult) -> str:
    """Names what was asked: races with the same one may be put on one line. Length and order of the cells count too,
    since short cells err upward.
    """
    asked = ("model", "workload", "arrivals", "cache", "slo", "cell", "residency")
    body = msgspec.json.encode({name: getattr(result.scenario, name) for name in asked}, order="sorted")
    return hashlib.sha256(body).hexdigest()[:12]


def _stamp(folder: Path, definitions: str) -> str:
    """Changes when the race's store does, or what would be said of it. A log that was not yet written back counts."""
    parts = [definitions]
    for path in (folder / DATABASE, folder / f"{DATABASE}.wal"):
        if path.exists():
            facts = path.stat()
            parts.append(f"{facts.st_size}.{facts.st_mtime_ns}")
    return "-".join(parts)


def _definitions() -> str:
    digest = hashlib.sha256()
    for package, endings in SETTLED_BY:
        for file in sorted(files(package).iterdir(), key=lambda entry: entry.name):
            if file.name.endswith(endings):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
