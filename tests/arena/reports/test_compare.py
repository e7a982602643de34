"""Two races side by side: what is the same is not called a change, and what changed shows request by request."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from arena.commands.cli import app
from tests.arena.records.races import SCENARIO, Speed, make_race

RATES = (2, 4, 8, 16, 32)


def races(
    folder: Path,
    before: Speed,
    after: Speed,
    *,
    seed: int = 1,
    text: str = SCENARIO,
    rates: Sequence[float] = RATES,
) -> tuple[str, str]:
    for name, speed, its_seed, its_text in (("monday", before, 1, SCENARIO), ("tuesday", after, seed, text)):
        make_race(folder / name, {"a": speed}, run_id=name, seed=its_seed, rates=rates, text=its_text)
    return str(folder / "monday"), str(folder / "tuesday")


def compared(*folders: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["compare", *folders, "--json"])
    assert result.exit_code == 0, result.output
    change = json.loads(result.stdout)[0]
    return {"words": change["words"], **{row["metric"]: row for row in change["paired"]}}


def printed(*folders: str) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["compare", *folders])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_five_milliseconds_show_where_goodput_cannot_tell(tmp_path: Path) -> None:
    """Each request against itself: the noise of the plan cancels."""
    folders = races(tmp_path, Speed(ttft_ms=80, capacity_rps=64), Speed(ttft_ms=85, capacity_rps=64))
    found = compared(*folders)
    assert found["words"] == "cannot be told apart"
    ttft = found["ttft_ms"]
    assert isinstance(ttft, dict)
    assert ttft["lo"] <= 5 <= ttft["hi"]
    assert ttft["hi"] - ttft["lo"] < 5
    assert ttft["apart"]
    words = printed(*folders)
    assert re.search(r"TTFT\W+\+[3-7]\.\d\d ms", words)
    assert "surely worse" in words


def test_races_that_differ_by_chance_alone_are_not_told_apart(tmp_path: Path) -> None:
    found = compared(*races(tmp_path, Speed(), Speed()))
    assert found["words"] == "cannot be told apart"
    assert not any(row["apart"] for row in found.values() if isinstance(row, dict))


def test_a_share_that_fell_is_surely_worse(tmp_path: Path) -> None:
    folders = races(tmp_path, Speed(capacity_rps=64), Speed(capacity_rps=4))
    found = compared(*folders)
    assert found["words"] == "surely worse"
    in_time = found["in_time"]
    assert isinstance(in_time, dict)
    assert in_time["hi"] < 0


def test_other_seeds_say_how_to_compare_request_by_request(tmp_path: Path) -> None:
    folders = races(tmp_path, Speed(), Speed(), seed=2, rates=[4, 16])
    assert "paired" not in compared(*folders)
    assert compared(*folders) == {"words": "cannot be told apart"}
    assert "a race with `--seed 1` can be compared request by request" in printed(*folders)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("ttft_ms: 200", "ttft_ms: 300", "slo"),
        ("tokens: 20}", "tokens: 21}", "workload"),
        ("model: m", "model: n", "model"),
    ],
)
def test_other_questions_are_not_compared(tmp_path: Path, old: str, new: str, what: str) -> None:
    folders = races(tmp_path, Speed(), Speed(), text=SCENARIO.replace(old, new), rates=[4])
    result = CliRunner().invoke(app, ["compare", *folders])
    assert result.exit_code == 1
    assert f"The races cannot be compared: they differ in `{what}`" in result.output
