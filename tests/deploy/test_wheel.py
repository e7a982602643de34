"""A wheel, alone in an environment and in an empty folder, has all that serving and racing need."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 100
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which may lead to the checkout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files, as a fresh checkout would be: left-over build folders must not help."""
    folder = tmp_path_factory.mktemp("source")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if files.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, files.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("wheel"))


def build(source: Path, target: Path) -> Path:
    """As the Dockerfile does it, without an index."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*command, "--wheel-dir", str(target), str(source)], cwd=target, SOURCE_DATE_EPOCH="1767225600")
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds the wheel, and borrows everything that it depends on from ours."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)])
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run([str(python), "-I", "-c", "import arena, gateway; print(arena.__file__, gateway.__file__)"], cwd=folder)
    assert all(Path(file).is_relative_to(site) for file in where.stdout.split()), "the checkout was imported"
    return folder / "bin"


def run(command: list[str], cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=cwd, env=CLEAN | environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_it_is_the_same_whenever_it_is_built(wheel: Path, source: Path, tmp_path: Path) -> None:
    for file in source.rglob("*"):
        os.utime(file, (0, 0))
    assert build(source, tmp_path).read_bytes() == wheel.read_bytes()


def test_it_carries_every_file_of_the_packages_that_is_no_python(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith(".py")}
    packages = ("gateway", "adapters", "native_engine", "arena")
    tracked = subprocess.run(["git", "ls-files", *packages], cwd=ROOT, capture_output=True, text=True, check=True)
    data = {name for name in tracked.stdout.split() if not name.endswith((".py", ".md"))}
    assert data
    assert data <= packed, f"pyproject.toml packs no {', '.join(sorted(data - packed))}"


def test_it_serves_with_the_configuration_that_it_brings(scripts: Path, tmp_path: Path) -> None:
    done = run([str(scripts / "goodgate"), "serve", "--check-config"], cwd=tmp_path)
    assert "share/goodgate/configs/local.yaml is valid" in done.stderr


def test_it_finds_every_scenario_that_it_brings(scripts: Path, tmp_path: Path) -> None:
    names = sorted(path.stem for path in (ROOT / "configs/scenarios").glob("*.yaml"))
    code = f"""
from arena.race.config import load_scenario, scenario_names
assert scenario_names() == {names!r}, scenario_names()
for name in {names!r}:
    load_scenario(name, quick=True)
"""
    run([str(scripts / "python"), "-I", "-c", code], cwd=tmp_path)


def test_it_can_start_a_race(scripts: Path, tmp_path: Path) -> None:
    """Nobody listens there: the race itself runs, with its store, its SQL and its report, and ranks nobody."""
    command = [
        str(scripts / "goodgate"),
        "arena",
        "run",
        "chat",
        "--quick",
        "--targets",
        "nobody=http://127.0.0.1:9",
        "--no-calibration",
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "race")],
        cwd=tmp_path,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "No engine could be ranked" in done.stderr
    assert {"report.html", "summary.json", "evidence.json"} <= {path.name for path in (tmp_path / "race").iterdir()}
