"""Many races in one index: what moved, what surely became worse, and nothing that the races themselves do not say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from arena.commands.cli import app
from arena.judging.trends import Trend, trends
from arena.records.history import History, HistoryError, find_races
from tests.arena.records.races import SCENARIO, Speed, make_race

FAST, SLOW = Speed(capacity_rps=64, version="2"), Speed(capacity_rps=4, version="3")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three races of two engines: `steady` stays, `moving` is better in the second and worse in the third."""
    home = tmp_path_factory.mktemp("home")
    for day, moving in enumerate([Speed(), FAST, SLOW], 1):
        make_race(
            home / "arena" / f"day-{day}",
            {"steady": Speed(), "moving": moving},
            run_id=f"day-{day}",
            seed=day,
            started_utc=f"2026-01-0{day}T00:00:00+00:00",
            rates=(2, 4, 8, 16, 32),
        )
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "home")
    return tmp_path / "home"


def lines(home: Path, *, rebuild: bool = False) -> tuple[dict[str, Trend], int]:
    races = find_races([home / "arena"])
    with History(home / "arena" / "history.duckdb") as history:
        judged = history.update(races, rebuild=rebuild)
        return {trend.engine: trend for trend in trends(history.marks(races))}, judged


def words(trend: Trend) -> list[str | None]:
    return [point.change.words if point.change else None for point in trend.points]


def history(home: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"GOODGATE_HOME": str(home), "COLUMNS": "200"}).invoke(app, ["history", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_what_became_surely_better_and_surely_worse_is_told_and_what_stayed_is_not(home: Path) -> None:
    found, _ = lines(home)
    assert words(found["moving"]) == [None, "surely better", "surely worse"]
    assert words(found["steady"]) == [None, "cannot be told apart", "cannot be told apart"]
    assert [point.mark.run_id for point in found["moving"].regressions] == ["day-3"]
    change = found["moving"].points[1].change
    assert change is not None
    assert change.what == ("version",)


def test_a_race_is_judged_once_until_it_changes_and_the_index_can_be_lost(home: Path) -> None:
    first, judged = lines(home)
    assert judged == 3
    assert lines(home) == (first, 0)
    store = home / "arena" / "day-2" / "arena.duckdb"
    before = store.read_bytes()
    store.touch()
    assert lines(home) == (first, 1)
    assert lines(home, rebuild=True) == (first, 3)
    (home / "arena" / "history.duckdb").unlink()
    assert lines(home) == (first, 3)
    assert store.read_bytes() == before  # races are only read


def test_another_machine_another_question_and_a_quick_race_are_lines_of_their_own(home: Path) -> None:
    other = SCENARIO.replace("ttft_ms: 200", "ttft_ms: 300")
    make_race(home / "arena" / "elsewhere", {"steady": SLOW}, run_id="elsewhere", cpu="another")
    make_race(home / "arena" / "asked", {"steady": SLOW}, run_id="asked", text=other)
    races = find_races([home / "arena"])
    with History(home / "arena" / "history.duckdb") as known:
        known.update(races)
        found = [trend for trend in trends(known.marks(races)) if trend.engine == "steady"]
    assert sorted(len(trend.points) for trend in found) == [1, 1, 3]
    assert not any(trend.regressions for trend in found)


def test_a_race_that_cannot_be_read_is_left_out_with_its_reason_and_tried_again(home: Path) -> None:
    broken = home / "arena" / "broken"
    broken.mkdir()
    (broken / "arena.duckdb").write_bytes(b"not a database, but long enough to be taken for one" * 100)
    code, output = history(home)
    assert code == 0
    assert f"{broken} is left out: its store cannot be read" in " ".join(output.split())
    shutil.copy(home / "arena" / "day-1" / "arena.duckdb", broken / "arena.duckdb")
    code, output = history(home, "--json")
    assert json.loads(output)["skipped"] == []
    assert len(json.loads(output)["trends"][0]["points"]) == 4


def test_the_command_tells_the_regression_in_the_table_in_json_and_on_the_page(home: Path, tmp_path: Path) -> None:
    code, output = history(home, "--html", str(tmp_path / "history.html"))
    assert code == 0
    assert "moving in day-3 (made up): surely worse" in " ".join(output.split())
    page = (tmp_path / "history.html").read_text("utf-8")
    assert "<svg" in page
    assert "surely worse" in page
    code, output = history(home, "--json", "--engine", "moving")
    document = json.loads(output)
    assert [each["run_id"] for each in document["regressions"]] == ["day-3"]
    assert [point["version"] for point in document["trends"][0]["points"]] == ["1", "2", "3"]
    assert [trend["engine"] for trend in document["trends"]] == ["moving"]


def test_a_regression_can_end_a_script(home: Path) -> None:
    assert history(home, "--fail")[0] == 1
    assert history(home, "--fail", "--engine", "steady")[0] == 0


def test_a_folder_without_races_and_a_filter_that_fits_none_are_told(home: Path, tmp_path: Path) -> None:
    code, output = history(tmp_path / "empty")
    assert code == 2
    assert "There is no race in" in output
    code, output = history(home, "--engine", "nobody")
    assert code == 2
    assert "No race has such an engine" in output


def test_an_index_that_is_none_says_that_it_may_be_deleted(home: Path) -> None:
    index = home / "arena" / "history.duckdb"
    index.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(HistoryError, match="delete it, and it is made anew"):
        History(index)


def test_an_index_that_another_command_has_open_is_told(home: Path) -> None:
    index = home / "arena" / "history.duckdb"
    hold = f"import duckdb, sys; c = duckdb.connect({str(index)!r}); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(HistoryError, match="is in use by another command"):
            History(index)
        other.kill()
