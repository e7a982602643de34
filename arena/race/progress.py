"""What the terminal shows while a race runs: a table that moves, with a row an engine, and a line for each verdict.

    with RaceScreen(console, names, scenario) as screen:      # an `arena.race.show.Show`
        await race(card, screen)

Into a file or a pipe only the lines go. What has been judged is kept in `Standing`, which draws nothing and knows no
clock.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from arena.judging.cells import CellResult
from arena.judging.search import next_probe
from arena.judging.so_far import NOTHING_YET, SoFar
from arena.judging.stats import Verdict, holds
from arena.load.loadgen import Progress
from arena.reports.wording import milliseconds, rate_words, share_words

if TYPE_CHECKING:
    from arena.race.scenario import SLO, Scenario

MARK = {True: "[green]holds[/]", False: "[red]fails[/]"}
BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class Standing:
    """One engine so far."""

    name: str
    state: str = "waits"
    rate_rps: float | None = None  # of the cell that runs
    expected_s: float = 1.0
    progress: Progress | None = None
    so_far: SoFar = NOTHING_YET
    cells: list[CellResult] = field(default_factory=list)
    is_out: bool = False

    @property
    def valid(self) -> list[CellResult]:
        return [cell for cell in self.cells if cell.is_valid]

    def best(self, percentile: float) -> CellResult | None:
        """The cell of the highest rate that held."""
        held = [cell for cell in self.valid if did_hold(cell, percentile)]
        return max(held, key=lambda cell: cell.rate_rps, default=None)

    def next_words(self, scenario: Scenario) -> str:
        """What the search would do next, if this engine were asked now."""
        if self.is_out:
            return "is out"
        if not self.valid:
            return "first rate" if self.rate_rps is None else "its verdict"
        step = next_probe([cell.outcome() for cell in self.valid], scenario.settings)
        if len(self.valid) >= scenario.search.max_cells or step is None:
            return "done"
        again = ", again" if step.replicate else ""
        return f"{rate_words(step.rate_rps)}/s{again}"

    def cells_left(self, scenario: Scenario) -> int:
        """At most: the search may be done before its budget is."""
        if self.is_out or self.next_words(scenario) == "done":
            return 0
        return scenario.search.max_cells - len(self.valid)

    def curve(self, percentile: float) -> Text:
        """The rates in the order they were tried, as bars on a log scale, each with its verdict."""
        rates = [cell.rate_rps for cell in self.valid]
        low, high = (min(rates), max(rates)) if rates else (1.0, 1.0)
        drawn = Text()
        for cell in self.valid:
            height = 1.0 if high == low else math.log(cell.rate_rps / low) / math.log(high / low)
            held = did_hold(cell, percentile)
            drawn.append(BARS[round(height * (len(BARS) - 1))] + ("✓" if held else "✗"), "green" if held else "red")
        return drawn


class RaceConsole(Console):
    """Raises `BrokenPipeError` where nobody reads any more, so that the race ends in its order, and is quiet then."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # what is still held cannot be said either
        os.close(nowhere)
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class RaceScreen:
    """A table that moves where `console` is a terminal; a context manager, so that the terminal is given back."""

    def __init__(self, console: Console, names: Sequence[str], scenario: Scenario) -> None:
        self._console = console
        self._scenario = scenario
        self._percentile = scenario.slo.percentile
        self._width = max(map(len, names), default=0)
        self.standings = {name: Standing(name) for name in names}
        self._started = time.monotonic()
        self._cell_s = 0.0  # what cells took so far, from one verdict to the next
        self._judged_at = self._started
        self._live = Live(console=console, transient=True, refresh_per_second=4, get_renderable=self.picture)

    def __enter__(self) -> RaceScreen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def client_calibrating(self, words: str) -> None:
        self._line("client", escape(words))

    def engine_starting(self, name: str) -> None:
        self.standings[name].state = "starts"
        self._judged_at = time.monotonic()
        self._line(name, "[dim]starts[/]")

    def engine_ready(self, name: str, words: str) -> None:
        self.standings[name].state = "ready"
        self._judged_at = time.monotonic()
        self._line(name, escape(words))

    def engine_failed(self, name: str, words: str) -> None:
        standing = self.standings[name]
        standing.state, standing.is_out, standing.rate_rps = "is out", True, None
        self._line(name, f"[red]is out:[/] {escape(words)}")

    def cell_starting(self, name: str, rate_rps: float, expected_s: float) -> None:
        standing = self.standings[name]
        standing.state, standing.rate_rps, standing.expected_s, standing.progress = "races", rate_rps, expected_s, None
        standing.so_far = NOTHING_YET

    def cell_progress(self, name: str, progress: Progress, so_far: SoFar) -> None:
        standing = self.standings[name]
        standing.progress, standing.so_far = progress, so_far

    def cell_judged(self, name: str, cell: CellResult) -> None:
        standing = self.standings[name]
        standing.state, standing.rate_rps, standing.progress = "judged", None, None
        standing.cells.append(cell)
        now = time.monotonic()
        self._cell_s += now - self._judged_at
        self._judged_at = now
        self._line(name, f"{cell.rate_rps:7.2f} requests/s  {verdict_words(cell, self._percentile)}")

    def picture(self) -> Group:
        """The live part: a row an engine, and a line about time."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=False)
        table.add_column("engine", style="bold", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("now", no_wrap=True, min_width=38)
        table.add_column("search", no_wrap=True)
        table.add_column("held", justify="right", no_wrap=True)
        table.add_column("next", no_wrap=True)
        for standing in self.standings.values():
            best = standing.best(self._percentile)
            held = f"{rate_words(best.rate_rps)}/s, {share_words(best.attainment)}" if best else "-"
            table.add_row(
                escape(standing.name), standing.state, _now_words(standing), standing.curve(self._percentile), held,
                standing.next_words(self._scenario),
            )  # fmt: skip
        live = [words for standing in self.standings.values() if (words := so_far_words(standing, self._scenario.slo))]
        return Group(table, *live, Text(self.time_words(), "dim"))

    def time_words(self) -> str:
        """Time used and left. The rest is an upper bound, for a search may be done before its budget is."""
        used = f"{_clock(time.monotonic() - self._started)} used"
        judged = sum(len(standing.cells) for standing in self.standings.values())
        left = sum(standing.cells_left(self._scenario) for standing in self.standings.values())
        if not judged or not left:
            return used
        return f"{used}, at most about {_clock(left * self._cell_s / judged)} left ({left} cells)"

    def _line(self, name: str, markup: str) -> None:
        seconds = f"[dim]{time.monotonic() - self._started:6.1f} s[/]"
        who = f"[bold]{escape(name.ljust(self._width))}[/]"
        self._console.print(f"{seconds}  {who}  {markup}", highlight=False, soft_wrap=True)


def did_hold(cell: CellResult, percentile: float) -> bool:
    return cell.status == "ok" and holds(cell.requests, cell.misses, percentile=percentile)


def verdict_words(cell: CellResult, percentile: float) -> str:
    """One cell in one line."""
    if not cell.is_valid:
        return f"[yellow]{cell.status}[/]  {escape(cell.reason or '')}"
    proof = "" if cell.verdict is Verdict.UNKNOWN else " (proven)"
    met = f"{cell.requests - cell.misses}/{cell.requests} in time"
    ttft, tpot = milliseconds(cell.ttft(percentile)), milliseconds(cell.tpot(percentile))
    latencies = f"p{percentile:g} TTFT {ttft}, TPOT {tpot}"
    unstable = f"  [red]{escape(cell.reason or 'unstable')}[/]" if cell.status == "unstable" else ""
    return f"{MARK[did_hold(cell, percentile)]}{proof}  {met}  {latencies}{unstable}"


def so_far_words(standing: Standing, slo: SLO) -> Text | None:
    """How the cell that runs stands; None before its first measured request has ended. Judged it is when it is over."""
    so_far = standing.so_far
    if standing.rate_rps is None or not so_far.ended:
        return None
    share = so_far.in_time / so_far.ended
    words = Text(f"{standing.name} at {rate_words(standing.rate_rps)}/s so far: ")
    words.append(
        f"{so_far.in_time}/{so_far.ended} in time ({share_words(share)})",
        "green" if share >= slo.percentile / 100 else "red",
    )
    ttfts = f"{milliseconds(so_far.ttft_p50_ms)}, p99 {milliseconds(so_far.ttft_p99_ms)}"
    words.append(f", TTFT p50 {ttfts}")
    return words.append(f", {standing.progress.in_flight} in flight") if standing.progress else words


def _now_words(standing: Standing) -> Text:
    """The cell that runs: its rate, how far it is, what is open."""
    if standing.rate_rps is None:
        return Text("")
    words = Text(f"{rate_words(standing.rate_rps)}/s ")
    progress = standing.progress
    if progress is None:
        return words.append("begins", "dim")
    share = min(0.99, max(0.0, progress.elapsed_s / standing.expected_s))
    words.append("━" * round(share * 10), "cyan").append("─" * (10 - round(share * 10)), "dim")
    words.append(f" {progress.in_flight} open, {progress.done}/{progress.sent} done")
    if progress.failed:
        words.append(f", {progress.failed} failed", "red")
    return words


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
