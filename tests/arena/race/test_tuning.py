"""Tuning: what it tries next, what it may spend, and one over processes whose best setting is known."""

from __future__ import annotations

import asyncio
import io
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from adapters.config import goodgate_home
from adapters.launching.knobs import Knob
from adapters.launching.launch import EngineProcess, Launchable, LaunchSpec, free_port
from adapters.option_errors import read_options
from adapters.registry import adapter_class
from arena.commands import tune as tune_command
from arena.commands.cli import app
from arena.commands.common import Failure, Misuse
from arena.commands.tune import budget_of, knobs_of, swept_knob
from arena.judging.results import RaceResult
from arena.race import tuning
from arena.race.bakeoff import race
from arena.race.card import Contender, RaceCard
from arena.race.config import installations
from arena.race.tuning import (
    Bench,
    Budget,
    Trial,
    Tuning,
    next_settings,
    peak_words,
    start_of,
    sweep_of,
    trial_scenario,
    tune,
)
from arena.records.schema import StoreError
from arena.reports.raced import tuning_words
from arena.reports.tuning import tuning_markdown, tuning_picture, tuning_table
from tests.arena.race.test_bakeoff import PACE, SCENARIO, Log, card

DEPTH = Knob(option="depth", meaning="batch depth", values=(1, 2, 4, 8, 16, 32, 64), default=64)
CHUNK = Knob(option="chunk", meaning="chunk size", values=(128, 256, 512), default=256)
Surface = Callable[[Mapping[str, int]], float | None]


def tuning_of(*, knobs: tuple[Knob, ...] = (DEPTH, CHUNK), cells: int = 1000, **start: int) -> Tuning:
    return Tuning(engine="e", knobs=knobs, start=start_of(knobs, start), budget=Budget(cells=cells))


def tuned(tuning: Tuning, surface: Surface, **propose: Any) -> Tuning:
    """Over a known goodput; a trial spends all the cells that it may."""

    async def attempt(settings: dict[str, int], cells: int) -> Trial:
        rate = surface(settings)
        return Trial(
            settings=settings, goodput_rps=rate, lo=None if rate is None else rate * 0.9, seconds=1.0, cells=cells,
            hi=None if rate is None else rate * 1.1, words="" if rate else "It did not start.",
        )  # fmt: skip

    return asyncio.run(tune(tuning, attempt, **propose))


def peaked(settings: Mapping[str, int]) -> float:
    """Best at a depth of 8 and a chunk of 512; the two are not independent."""
    depth = {1: 2.0, 2: 4.0, 4: 7.0, 8: 9.0, 16: 8.0, 32: 5.0, 64: 2.0}[settings["depth"]]
    return depth * {128: 0.8, 256: 1.0, 512: 1.2 if settings["depth"] <= 16 else 0.9}[settings["chunk"]]


def test_the_search_walks_from_the_default_to_an_interior_peak_and_says_so() -> None:
    done = tuned(tuning_of(), peaked)
    assert done.is_finished
    assert done.best is not None
    assert done.best.settings == {"depth": 8, "chunk": 512}
    assert len(done.trials) < len(DEPTH.values) * len(CHUNK.values) / 1.5
    assert "an interior peak" in peak_words(done, DEPTH)
    assert "at 8" in peak_words(done, DEPTH)
    assert "highest at an end" in peak_words(done, CHUNK)


def test_a_flat_top_is_a_peak_only_where_both_sides_fall() -> None:
    plateau = tuned(tuning_of(knobs=(DEPTH,)), lambda s: min(s["depth"], 8) * 1.0, propose=lambda t: sweep_of(t, DEPTH))
    assert [trial.settings["depth"] for trial in plateau.trials] == list(DEPTH.values)
    assert "highest at an end of what was tried, 8 requests/s at 8 to 64" in peak_words(plateau, DEPTH)


def test_a_setting_of_the_user_is_where_the_search_begins_though_it_is_not_on_the_scale() -> None:
    done = tuned(tuning_of(depth=6), lambda s: 10 - abs(s["depth"] - 6))
    assert done.trials[0].settings["depth"] == 6
    assert done.best is not None
    assert done.best.settings["depth"] == 6
    assert {trial.settings["depth"] for trial in done.trials} == {4, 6, 8}


def test_the_budget_ends_the_search_and_no_trial_of_a_single_cell_is_begun() -> None:
    done = tuned(tuning_of(cells=9), peaked)
    assert [trial.cells for trial in done.trials] == [4, 4]
    assert not done.is_finished
    assert tuned(tuning_of(cells=10), peaked).told()["cells"] == 10
    assert Budget(minutes=1).cells_left(0, 59.0)
    assert not Budget(minutes=1).cells_left(0, 60.0)


def test_settings_that_do_not_start_are_told_and_walked_around() -> None:
    done = tuned(tuning_of(knobs=(DEPTH,)), lambda s: None if s["depth"] == 32 else s["depth"] * 1.0)
    assert done.best is not None
    assert done.best.settings["depth"] == 64
    assert [trial.words for trial in done.trials if trial.settings["depth"] == 32] == ["It did not start."]
    nothing = tuned(tuning_of(), lambda s: None)
    assert (len(nothing.trials), nothing.best) == (1, None)


def test_a_stop_keeps_what_was_tried() -> None:
    async def stopped(settings: dict[str, int], cells: int) -> Trial:
        raise asyncio.CancelledError

    done = asyncio.run(tune(tuning_of(), stopped))
    assert (done.is_stopped, done.is_finished, done.trials) == (True, False, ())


def test_what_was_found_reads_as_a_table_a_page_and_a_picture() -> None:
    done = tuned(tuning_of(), peaked)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(tuning_table(done))
    shown = console.export_text()
    assert "best" in shown
    assert "interior peak" in shown
    assert "**10.80**" in tuning_markdown(done)
    told = tuning_words(done.told())
    assert "found depth=8, chunk=512" in told
    assert "interior peak" in told
    assert "no knobs" in tuning_words(tuning_of(knobs=()).told())
    picture = ET.fromstring(tuning_picture(done, DEPTH, "<e>: goodput"))
    circles = picture.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(circles) == len(done.curve(DEPTH))
    assert sum(circle.get("class") == "best" for circle in circles) == 1


def test_every_engine_that_is_started_here_declares_knobs_that_its_launch_takes() -> None:
    for engine in installations(goodgate_home()):
        adapter = adapter_class(engine)
        assert issubclass(adapter, Launchable)
        for knob in adapter.knobs():
            assert list(knob.values) == sorted(set(knob.values))
            for value in knob.values:
                read_options({knob.option: value}, adapter.launch_options(), engine, "launch option")
    assert [knob.meaning for knob in knobs_of("native")] == ["batch depth", "chunk size"]


def test_a_knob_that_an_engine_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(Misuse, match=r"--sweep deep: the knobs of e are depth, chunk\."):
        swept_knob("e", (DEPTH, CHUNK), "deep")
    assert budget_of(None, 5).cells is None
    assert budget_of(None, None).cells == 24


def test_a_trial_differs_from_its_race_in_length_alone() -> None:
    from arena.race.scenario_file import parse

    scenario = parse(SCENARIO + "rounds: 2\nrestart: round\n", source="test")
    trial = trial_scenario(scenario, 3)
    assert (trial.search.max_cells, trial.rounds, trial.restart) == (3, 1, "never")
    same = {"workload", "slo", "cell", "arrivals", "cache", "model"}
    assert all(getattr(trial, name) == getattr(scenario, name) for name in same)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tune", "vlm"], "vllm"),
        (["tune", "sglang"], "cannot be started from here"),
        (["tune", "native", "--sweep", "depth"], "--sweep depth: the knobs of native are max_num_seqs"),
        (["run", "chat", "--tune-cells", "8", "--targets", "x=http://127.0.0.1:1"], "are the budget of --tune"),
        (["run", "chat", "--tune", "--targets", "x=http://127.0.0.1:1"], "knobs of engines that the race starts"),
    ],
)
def test_misuse_is_told_in_a_sentence_before_anything_is_started(
    arguments: list[str], told: str, tmp_path: Path
) -> None:
    """The model need not be there: what can be told without it is."""
    (tmp_path / "models").mkdir()
    ran = CliRunner().invoke(
        app, [*arguments, "--out", str(tmp_path / "out")], env={"GOODGATE_HOME": str(tmp_path), "COLUMNS": "400"}
    )
    assert ran.exit_code == 2, ran.output
    assert told in " ".join(ran.output.split())


@pytest.mark.slow
def test_the_deeper_of_two_batches_is_found_over_processes(tmp_path: Path) -> None:
    """An engine of one place serves 9 requests a second, one of eight 73: both are raced, and it is found."""
    knob = Knob(option="max_concurrent", meaning="batch depth", values=(1, 8), default=1)

    def contender(options: Mapping[str, Any]) -> Contender:
        def process() -> EngineProcess:
            port = free_port()
            command = (sys.executable, "-m", "adapters.servers.fake_server", "--port", str(port), *PACE)
            argv = (*command, "--max-concurrent", str(options["max_concurrent"]))
            return EngineProcess(LaunchSpec(name="solo", argv=argv, port=port, ready_timeout_s=20), tmp_path / "log")

        return Contender(name="solo", process=process, flags=dict(options))

    race_card = card(tmp_path / "race", [contender({"max_concurrent": 1})], text=SCENARIO)
    bench = Bench(card=race_card, contender=contender, options={}, show=Log(), folder=tmp_path / "trials")
    start = Tuning(engine="solo", knobs=(knob,), start=start_of((knob,), {}), budget=Budget(cells=16, per_trial=2))
    done = asyncio.run(tune(start, bench.attempt))
    assert [trial.settings["max_concurrent"] for trial in done.trials] == [1, 8]
    assert done.best is not None
    assert done.best.settings == {"max_concurrent": 8}
    assert {folder.name for folder in (tmp_path / "trials").iterdir()} == {"max_concurrent=1", "max_concurrent=8"}
    assert msgspec.json.decode(msgspec.json.encode(done.told()))["found"] == {"max_concurrent": 8}
    assert next_settings(done) is None


def test_engines_whose_knobs_have_one_name_are_not_tuned_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's trial was judged with the first one's cells beside it, and got the better one's goodput."""
    folders = []

    async def stopped(card: RaceCard, show: object) -> RaceResult:
        folders.append(card.out)
        raise asyncio.CancelledError

    contenders = [Contender(name=name, process=lambda: pytest.fail("it is not started")) for name in ("a", "b")]
    monkeypatch.setattr(tuning, "race", stopped)
    monkeypatch.setattr(tune_command, "launched", lambda names, model, options: contenders)
    monkeypatch.setattr(tune_command, "knobs_of", lambda engine: (DEPTH,))
    race_card = card(tmp_path / "race", contenders, text=SCENARIO)
    for contender in contenders:
        with pytest.raises(Failure, match="The tuning was stopped"):
            tune_command.tuned(race_card, [contender], Budget(cells=2, per_trial=2), Console(file=io.StringIO()))
    assert len(set(folders)) == 2


def test_a_race_is_not_run_into_the_folder_of_another(tmp_path: Path) -> None:
    """Two in one store would be judged as one."""
    (tmp_path / "arena.duckdb").touch()
    with pytest.raises(StoreError, match="holds a race already"):
        asyncio.run(race(card(tmp_path, []), Log()))
    assert (tmp_path / "arena.duckdb").stat().st_size == 0
