"""What the Makefile and CI run besides the product's own commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ALONE

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Made:
    """What came of a `make test`, and the words that each pytest was given."""

    status: int
    said: str
    runs: list[list[str]]


def make_test(folder: Path, *words: str, fails: str = "never") -> Made:
    """`make test` in an environment whose Python notes what it is asked for, and fails where `fails` is among it."""
    python, log = folder / "bin" / "python", folder / "log"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {log}\ncase " $* " in *" {fails} "*) exit 1;; esac\n')
    python.chmod(0o755)
    for name in (".installed", ".installed-dev"):  # newer than what they are made from: nothing is set up
        (folder / name).touch()
    clean = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "JOBS", "PYTEST_ARGS"}}
    done = subprocess.run(
        ["make", "test", f"VENV={folder}", *words], cwd=ROOT, env=clean, capture_output=True, text=True, check=False
    )
    return Made(done.returncode, done.stdout + done.stderr, [line.split() for line in log.read_text().splitlines()])


ALL, SOME = ["-m", "pytest", "-q"], ["-m", "pytest", "-q", "tests/x", "-k", "y"]


def test_all_tests_run_in_one_go_and_chosen_ones_too(tmp_path: Path) -> None:
    for number, (words, run) in enumerate([((), ALL), (("PYTEST_ARGS=tests/x -k y", "JOBS=2"), SOME)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert make_test(folder, *words).runs == [run]


@pytest.mark.parametrize("fails", ["never", "not alone", "-m alone"])
def test_in_two_parts_every_test_runs_once_and_either_part_can_fail_the_whole(tmp_path: Path, fails: str) -> None:
    made = make_test(tmp_path, "JOBS=3", fails=fails)
    together = [*ALL, "-m", "not", "alone", "-n", "3", "--dist", "loadscope"]
    assert made.runs == [together, [*ALL, "-m", "alone"]]
    assert (made.status == 0) == ("both parts passed" in made.said) == (fails == "never"), made.said


def test_what_is_to_run_alone_is_marked_and_nothing_else(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        name = item.path.relative_to(ROOT / "tests")
        is_listed = any(name.is_relative_to(each) for each in ALONE)
        assert (item.get_closest_marker("alone") is not None) == is_listed, item.nodeid


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import demo

    return demo


def test_the_demo_finds_the_engines_of_this_machine(demo: ModuleType) -> None:
    engines = demo.installed_engines()
    assert "native" in engines
    assert "fake" not in engines


def check_race(folder: Path, *engines: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "check_race.py"), str(folder), *engines]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def race_folder(tmp_path: Path) -> Path:
    engine = {"requests": 20, "failures": 1, "ttft_p50_ms": 50.0, "tpot_p50_ms": 9.0}
    summary = {"engines": [{"name": "native", **engine}, {"name": "openvino", **engine}]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    for name in ("arena.duckdb", "report.html", "evidence.json"):
        (tmp_path / name).write_text("something")
    return tmp_path


def test_a_complete_race_passes_the_check(race_folder: Path) -> None:
    assert check_race(race_folder, "native", "openvino").returncode == 0


def test_a_race_without_a_wanted_engine_fails_the_check(race_folder: Path) -> None:
    result = check_race(race_folder, "native", "vllm")
    assert result.returncode == 1
    assert "vllm is missing" in result.stdout


def test_a_race_in_which_an_engine_answered_nothing_fails_the_check(race_folder: Path) -> None:
    summary = json.loads((race_folder / "summary.json").read_text())
    summary["engines"][1]["failures"] = summary["engines"][1]["requests"]
    (race_folder / "summary.json").write_text(json.dumps(summary))
    assert "openvino answered nothing" in check_race(race_folder, "native", "openvino").stdout


def test_every_shipped_configuration_passes_its_own_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for secret in ("REMOTE_API_KEY", "QUOTAS_PASSWORD"):  # which the example names
        monkeypatch.setenv(secret, "a-secret")
    for config in sorted((ROOT / "configs").glob("*.yaml")):
        command = [sys.executable, "-m", "goodgate", "serve", "--config", str(config), "--check-config"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{config.name}: {result.stderr}"
