"""What the terminal shows while a race runs: one bar an engine, live numbers of its cell, one line of verdict for each
cell.

On a terminal the bars are live; into a file or a pipe only the lines go.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from arena.judging.results import CellResult
from arena.judging.stats import Verdict, holds
from arena.load.loadgen import Progress
from arena.reports.wording import milliseconds

MARK = {True: "[green]holds[/]", False: "[red]fails[/]"}


class RaceScreen:
    """Implements `arena.race.bakeoff.Show` on a rich console; a context manager, so that the terminal is given back."""

    def __init__(self, console: Console, names: list[str], percentile: float) -> None:
        self._console = console
        self._percentile = percentile
        self._width = max(map(len, names), default=0)
        self._bars = Bars(
            SpinnerColumn(finished_text=" "),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[words]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {
            name: self._bars.add_task(name.ljust(self._width), total=1.0, start=False, words="[dim]waits[/]")
            for name in names
        }
        self._started = time.monotonic()
        self._rate = 0.0
        self._expected_s = 1.0

    def __enter__(self) -> RaceScreen:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def engine_starting(self, name: str) -> None:
        self._update(name, 0.0, "starts ...")
        self._line(name, "[dim]starts[/]")

    def engine_ready(self, name: str, words: str) -> None:
        self._update(name, 0.0, "ready")
        self._line(name, escape(words))

    def engine_failed(self, name: str, words: str) -> None:
        self._update(name, 0.0, "[red]is out[/]")
        self._line(name, f"[red]is out:[/] {escape(words)}")

    def cell_starting(self, name: str, rate_rps: float, expected_s: float) -> None:
        self._rate, self._expected_s = rate_rps, expected_s
        self._bars.start_task(self._tasks[name])
        self._update(name, 0.0, f"{rate_rps:.2f} requests/s ...")

    def cell_progress(self, name: str, progress: Progress) -> None:
        words = f"{self._rate:.2f} requests/s   in flight {progress.in_flight}, done {progress.done}"
        failed = f", [red]failed {progress.failed}[/]" if progress.failed else ""
        self._update(name, min(0.99, progress.elapsed_s / self._expected_s), words + failed)

    def cell_judged(self, name: str, cell: CellResult) -> None:
        self._update(name, 1.0, "settles")
        self._line(name, f"{cell.rate_rps:7.2f} requests/s  {verdict_words(cell, self._percentile)}")

    def _update(self, name: str, share: float, words: str) -> None:
        self._bars.update(self._tasks[name], completed=share, words=words)

    def _line(self, name: str, markup: str) -> None:
        seconds = f"[dim]{time.monotonic() - self._started:6.1f} s[/]"
        who = f"[bold]{escape(name.ljust(self._width))}[/]"
        self._console.print(f"{seconds}  {who}  {markup}", highlight=False, soft_wrap=True)


def verdict_words(cell: CellResult, percentile: float) -> str:
    """One cell in one line."""
    if not cell.is_valid:
        return f"[yellow]{cell.status}[/]  {escape(cell.reason or '')}"
    held = cell.status == "ok" and holds(cell.requests, cell.misses, percentile=percentile)
    proof = "" if cell.verdict is Verdict.UNKNOWN else " (proven)"
    met = f"{cell.requests - cell.misses}/{cell.requests} in time"
    ttft, tpot = milliseconds(cell.ttft(percentile)), milliseconds(cell.tpot(percentile))
    latencies = f"p{percentile:g} TTFT {ttft}, TPOT {tpot}"
    unstable = f"  [red]{escape(cell.reason or 'unstable')}[/]" if cell.status == "unstable" else ""
    return f"{MARK[held]}{proof}  {met}  {latencies}{unstable}"
