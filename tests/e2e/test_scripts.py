"""What the Makefile and CI run besides the product's own commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
