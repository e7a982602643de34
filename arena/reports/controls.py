"""What the race says of what cannot differ (A/A and drift), and its engines side by side on equal plans. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from arena.judging.controls import Control, Reading
from arena.judging.differences import Paired
from arena.judging.results import RaceResult
from arena.reports.axes import log_axis
from arena.reports.document import Axis, Block, Cell, Chart, Charts, Point, Section, Series, Table, Text
from arena.reports.plots import legend
from arena.reports.wording import figure

NAMES = {"aa": "one engine, entered twice (A/A)", "drift": "a fixed task before each cell (drift)"}
METRICS = {"in_time": "requests in time", "ttft_ms": "TTFT, median", "tpot_ms": "TPOT, median"}


def controls_section(result: RaceResult) -> Iterator[Section]:
    """Nothing where the race had no controls."""
    blocks: list[Block] = []
    if result.controls:
        blocks.append(Table(("control", "result", "what it says"), tuple(map(_control, result.controls))))
    if result.drift:
        blocks.append(Charts((_drift_chart(result),), legend(result)))
    if blocks:
        yield Section(
            "controls",
            "Does the race tell apart what is the same?",
            tuple(blocks),
            "Two things cannot differ: an engine from itself, and a fixed task from one slot to the next. A race in "
            "which they do proves nothing.",
        )


def _control(control: Control) -> tuple[Cell, ...]:
    words = {True: Text("as it must be", "good"), False: Text("FAILED", "bad"), None: Text("cannot tell", "soft")}
    return NAMES[control.kind], words[control.ok], control.words


def _drift_chart(result: RaceResult) -> Chart:
    places = {engine.engine_id: place for place, engine in enumerate(result.engines)}
    times = [reading.task_ms for reading in result.drift]
    slots = [reading.slot for reading in result.drift]
    first, last = min(slots), max(slots)
    low, high = min(times) / 1.05, max(times) * 1.05
    numbered = range(first, last + 1, max(1, (last - first) // 6))
    return Chart(
        title="The fixed task, slot by slot",
        alt="Time of an equal task before each cell. A slope, or engines that differ, is the machine's doing.",
        x=Axis("slot", first - 1, last + 1, tuple((slot, str(slot)) for slot in numbered)),
        y=log_axis("ms", low, high, figure),
        series=tuple(_readings(result, engine_id, place) for engine_id, place in places.items()),
    )


def _readings(result: RaceResult, engine_id: str, place: int) -> Series:
    mine = [reading for reading in result.drift if reading.engine == engine_id]
    points = tuple(Point(reading.slot, reading.task_ms, _reading_words(reading)) for reading in mine)
    return Series(result.engines[place].name, place, points, has_line=False)


def _reading_words(reading: Reading) -> str:
    return f"slot {reading.slot}, before {reading.engine}: {figure(reading.task_ms)} ms"


def pairs_table(result: RaceResult) -> Table | None:
    """Differences on equal plans, request by request; None where no two engines met one plan."""
    if not result.paired:
        return None
    places = {engine.engine_id: (place, engine.name) for place, engine in enumerate(result.engines)}
    rows = tuple(_pair(pair, places) for pair in result.paired if pair.difference is not None)
    head = ("engine", "minus", "metric", "difference", "interval", "apart", "requests")
    return Table(head, rows, numeric=(3, 4, 6)) if rows else None


def _pair(pair: Paired, places: dict[str, tuple[int, str]]) -> tuple[Cell, ...]:
    words = _points if pair.metric == "in_time" else _milliseconds
    known = pair.lo is not None and pair.hi is not None
    return (
        Text(places[pair.first][1], engine=places[pair.first][0]),
        Text(places[pair.second][1], engine=places[pair.second][0]),
        METRICS[pair.metric],
        words(pair.difference),
        f"{words(pair.lo)} to {words(pair.hi)}" if known else "too few",
        Text("yes", "good") if pair.apart else Text("no", "soft"),
        str(pair.requests),
    )


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f} ms"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} points"
