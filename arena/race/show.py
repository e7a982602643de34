"""What a race tells while it runs, and whom: a screen, lines of JSON, or several of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from arena.judging.cells import CellResult
from arena.judging.so_far import SoFar
from arena.load.loadgen import Progress


class Show(Protocol):
    """`words` are for people; names are those of the contenders."""

    def client_calibrating(self, words: str) -> None: ...
    def engine_starting(self, name: str) -> None: ...
    def engine_ready(self, name: str, words: str) -> None: ...
    def engine_failed(self, name: str, words: str) -> None: ...
    def cell_starting(self, name: str, rate_rps: float, expected_s: float) -> None: ...
    def cell_progress(self, name: str, progress: Progress, so_far: SoFar) -> None: ...
    def cell_judged(self, name: str, cell: CellResult) -> None: ...


class Several:
    """One race shown in several ways."""

    def __init__(self, shows: Sequence[Show]) -> None:
        self._shows = tuple(shows)

    def client_calibrating(self, words: str) -> None:
        for show in self._shows:
            show.client_calibrating(words)

    def engine_starting(self, name: str) -> None:
        for show in self._shows:
            show.engine_starting(name)

    def engine_ready(self, name: str, words: str) -> None:
        for show in self._shows:
            show.engine_ready(name, words)

    def engine_failed(self, name: str, words: str) -> None:
        for show in self._shows:
            show.engine_failed(name, words)

    def cell_starting(self, name: str, rate_rps: float, expected_s: float) -> None:
        for show in self._shows:
            show.cell_starting(name, rate_rps, expected_s)

    def cell_progress(self, name: str, progress: Progress, so_far: SoFar) -> None:
        for show in self._shows:
            show.cell_progress(name, progress, so_far)

    def cell_judged(self, name: str, cell: CellResult) -> None:
        for show in self._shows:
            show.cell_judged(name, cell)
