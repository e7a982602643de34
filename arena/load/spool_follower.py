"""Rows of a race's spools while they are written, each once.

    follower = Follower(folder)
    for cell, row in follower.rows(): ...       # whatever has ended since the last time

Where several load processes share a cell, their parts are followed, and not the spool that is made of them afterwards.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

import msgspec

from arena.load.spool import RequestRow, SpoolRow

_decode = msgspec.json.Decoder(SpoolRow).decode


class Follower:
    def __init__(self, folder: Path, *, cell: str | None = None) -> None:
        """`cell`: of this one alone."""
        self._folder = folder
        self._name = "*" if cell is None else glob.escape(cell)
        self._read: dict[Path, int] = {}  # bytes that were taken of each file
        self._in_parts: set[str] = set()  # cells

    def rows(self) -> Iterator[tuple[str, RequestRow]]:
        """(cell, row) of every request whose line is whole by now."""
        parts = sorted(self._folder.glob(f"{self._name}.jsonl.w[0-9]*"))
        parts = [path for path in parts if path.suffix[2:].isdigit()]  # the markers and plans of parts lie beside them
        self._in_parts |= {_cell(path) for path in parts}
        whole = [path for path in sorted(self._folder.glob(f"{self._name}.jsonl")) if _cell(path) not in self._in_parts]
        for path in [*parts, *whole]:
            for row in self._new(path):
                if isinstance(row, RequestRow):
                    yield _cell(path), row

    def _new(self, path: Path) -> Iterator[SpoolRow]:
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                fresh = file.read()
        except FileNotFoundError:
            return  # parts vanish when the cell's spool has been made of them
        lines = fresh[: fresh.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(lines)
        for line in lines.splitlines():
            yield _decode(line)


def _cell(path: Path) -> str:
    return path.name.partition(".jsonl")[0]
