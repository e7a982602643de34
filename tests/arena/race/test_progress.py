"""A race while it runs: a table for people, lines for logs, events for programs."""

from __future__ import annotations

import io
import json
import math

from rich.console import Console

from arena.judging.so_far import SoFar
from arena.load.loadgen import Progress
from arena.race.events import EventLines
from arena.race.progress import RaceScreen
from arena.race.show import Several
from tests.arena.reports.synthetic import SCENARIO, synthetic_race

RESULT = synthetic_race()
NATIVE = next(engine for engine in RESULT.engines if engine.name == "native")


def shown(*, is_terminal: bool) -> tuple[RaceScreen, Console]:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=140, color_system=None)
    return RaceScreen(console, ["native", "vllm"], SCENARIO), console


def text_of(screen: RaceScreen) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(screen.picture())
    return console.export_text()


def play(show: RaceScreen | EventLines | Several) -> None:
    """A race with one verdict, one engine that is out, and a cell that runs."""
    show.engine_starting("native")
    show.engine_ready("native", "up in 2.0 s")
    show.engine_failed("vllm", "It did not start: [no such model]")
    show.cell_starting("native", NATIVE.cells[0].rate_rps, 40)
    show.cell_judged("native", NATIVE.cells[0])
    show.cell_starting("native", 8.0, 40)
    progress = Progress(pid=1, elapsed_s=20, sent=160, done=150, failed=2, in_flight=8)
    show.cell_progress("native", progress, SoFar(120, 119, 80.4, math.inf))


def test_the_table_tells_what_runs_what_held_and_what_comes_next() -> None:
    screen, _ = shown(is_terminal=True)
    assert "waits" in text_of(screen)
    assert "left" not in screen.time_words()  # nothing is known before the first verdict
    play(screen)
    table = text_of(screen)
    assert "8.00/s" in table
    assert "8 open, 150/160 done, 2 failed" in table
    assert "native at 8.00/s so far: 119/120 in time (99.2 %), TTFT p50 80.4 ms, p99 ∞, 8 in flight" in table
    assert "is out" in table
    assert f"{NATIVE.cells[0].rate_rps:.2f}/s, 100 %" in table
    assert f"({SCENARIO.search.max_cells - 1} cells)" in screen.time_words()
    assert screen.standings["native"].next_words(SCENARIO).endswith("/s")
    assert screen.standings["vllm"].cells_left(SCENARIO) == 0


def test_a_search_that_is_over_has_no_next_rate_and_no_time_left() -> None:
    screen, _ = shown(is_terminal=False)
    screen.engine_failed("vllm", "It is not there.")
    for cell in NATIVE.cells * 2:
        screen.cell_judged("native", cell)
    assert screen.standings["native"].next_words(SCENARIO) == "done"
    assert screen.standings["native"].cells_left(SCENARIO) == 0
    bars = screen.standings["native"].curve(99.0)
    assert len(bars.plain) == 2 * len(screen.standings["native"].valid)
    assert set(bars.plain[1::2]) == {"✓", "✗"}  # not by colour alone
    assert "left" not in screen.time_words()


def test_without_a_terminal_there_are_lines_and_no_moving_table() -> None:
    screen, console = shown(is_terminal=False)
    with screen:
        play(screen)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 4
    assert "\x1b" not in console.file.getvalue()
    assert "[no such model]" in lines[2]
    assert "holds" in lines[3]


def test_events_are_one_json_object_a_line_and_reach_every_show() -> None:
    lines: list[str] = []
    screen, _ = shown(is_terminal=False)
    play(Several([EventLines(lines.append), screen]))
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == [
        "engine_starting", "engine_ready", "engine_failed", "cell_starting", "cell_judged", "cell_starting",
        "cell_progress",
    ]  # fmt: skip
    judged = events[4]
    assert (judged["engine"], judged["rate_rps"], judged["status"]) == ("native", NATIVE.cells[0].rate_rps, "ok")
    assert judged["attainment"] == NATIVE.cells[0].attainment
    assert events[6]["in_flight"] == 8
    assert (events[6]["measured"], events[6]["in_time"], events[6]["ttft_p50_ms"]) == (120, 119, 80.4)
    assert events[6]["ttft_p99_ms"] is None  # JSON has no infinity
    assert all(event["t_s"] >= 0 for event in events)
    assert screen.standings["native"].progress is not None
