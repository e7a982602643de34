"""What a killed race left, brought in order. Doing it again changes nothing.

    settle(folder) -> sentences about what was done

A cell whose spool had ended is taken into the store and judged; one that was stored and not yet judged is judged; one
whose spool has not ended, or is damaged since, stays `planned`, which no figure counts. The verdicts in the store
become those of its rows, and a store of an older schema is brought up to date.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from arena.judging.judge import judge_race
from arena.judging.notes import RunNotes
from arena.load import spool as spools
from arena.load.spool import SpoolError
from arena.race.cell_runner import judge_cell
from arena.records.schema import is_outdated
from arena.records.sense import refuse_nonsense
from arena.records.store import Store
from arena.records.verdicts import search_rows, stored_verdicts, verdict_rows

DATABASE = "arena.duckdb"


def settle(folder: Path) -> list[str]:
    path = folder / DATABASE
    said = []
    if is_outdated(path):
        said.append(f"{path} was brought up to the present schema.")
    else:
        with Store(path, read_only=True) as store:
            refuse_nonsense(store, path)
            if _is_settled(store, folder):
                return []
    with Store(path) as store:
        said += [_take_in(store, cell, folder) for cell in _finished_outside(store, folder)]
        for cell in _unjudged(store):
            judge_cell(store, cell["cell_id"], _notes(store).scenario, aborted=None)
            said.append(f"{cell['cell_id']} was judged; the race ended before it came to that.")
        result = judge_race(store)
        store.record_verdicts(verdict_rows(result), search_rows(result))
    return said


def _is_settled(store: Store, folder: Path) -> bool:
    if not store.query("SELECT 1 FROM runs"):
        return True  # nothing was begun, so there is nothing to finish
    if _finished_outside(store, folder) or _unjudged(store):
        return False
    result = judge_race(store)
    return stored_verdicts(store) == (verdict_rows(result), search_rows(result))


def _finished_outside(store: Store, folder: Path) -> list[str]:
    """Cells whose spool is complete and not in the store."""
    waiting = store.query("SELECT cell_id FROM cells WHERE ingested_utc IS NULL ORDER BY slot")
    return [row["cell_id"] for row in waiting if spools.is_complete(_spool(folder, row["cell_id"]))]


def _take_in(store: Store, cell_id: str, folder: Path) -> str:
    try:
        store.ingest(cell_id, _spool(folder, cell_id))
    except (SpoolError, OSError) as error:
        return f"{cell_id} is left out: {error}"
    return f"{cell_id} was taken in; its spool had ended, and the race before it was stored."


def _unjudged(store: Store) -> list[dict[str, Any]]:
    return store.query("SELECT cell_id FROM cells WHERE ingested_utc IS NOT NULL AND status = 'unjudged' ORDER BY slot")


def _notes(store: Store) -> RunNotes:
    return msgspec.json.decode(store.query("SELECT notes FROM runs")[0]["notes"], type=RunNotes)


def _spool(folder: Path, cell_id: str) -> Path:
    return folder / "spool" / f"{cell_id}.jsonl"
