"""The only module of the arena, besides the command line, that reads files of the user and facts of the machine."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from adapters.launching.launch import Installation, Launchable
from adapters.registry import adapter_class, engine_names
from arena.load.spec import ScenarioError
from arena.load.workloads.material import Material, gather
from arena.race.scenario import Scenario
from arena.race.scenario_file import parse

# Of the working folder, of a checkout, and of an installed wheel.
SCENARIO_FOLDERS = tuple(
    root / "configs" / "scenarios"
    for root in (Path(), Path(__file__).resolve().parents[2], Path(sys.prefix) / "share" / "goodgate")
)


@dataclass(frozen=True, slots=True)
class LoadedScenario:
    scenario: Scenario
    material: Material  # what the files that it names hold


def load_scenario(name: str, *, quick: bool, model: str | None = None) -> LoadedScenario:
    """`name` is a path to a YAML file, or the name of a scenario in configs/scenarios."""
    path = scenario_path(name)
    scenario = parse(text_of(path), source=str(path), quick=quick)
    if model is not None:
        scenario = scenario.with_model(model)
    return LoadedScenario(scenario, _material(scenario, path))


def text_of(path: Path) -> str:
    """What a file of the user says; `ScenarioError` where it cannot be read as text."""
    if path.is_char_device():  # /dev/zero has no end
        raise ScenarioError(f"{path} is a device; name a file.")
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ScenarioError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path} is not text in UTF-8; unpack it, or save it as that.") from error


def scenario_path(name: str) -> Path:
    if Path(name).suffix in (".yaml", ".yml"):
        if Path(name).is_file():
            return Path(name)
        raise ScenarioError(f"There is no file {name}; scenarios here: {', '.join(scenario_names()) or 'none'}.")
    for folder in SCENARIO_FOLDERS:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise ScenarioError(f"There is no scenario {name!r}; choose one of: {', '.join(scenario_names()) or 'none'}.")


def scenario_names() -> list[str]:
    return sorted({path.stem for folder in SCENARIO_FOLDERS for path in folder.glob("*.yaml")})


def _material(scenario: Scenario, scenario_file: Path) -> Material:
    """A broken line is told now, not when the first engine is up."""

    def read(path: str) -> str:
        try:
            return text_of(scenario_file.parent / path)
        except ScenarioError as error:
            raise ScenarioError(f"A file of {scenario_file}: {error}") from error

    return gather(scenario.workload, scenario.arrivals, read)


def installations(home: Path) -> dict[str, Installation]:
    """Every engine that can be started from here, and whether it is installed. The scripted fake takes no part in
    races.
    """
    found = {}
    for name in engine_names():
        if name == "fake":
            continue
        adapter = adapter_class(name)
        if issubclass(adapter, Launchable):
            found[name] = adapter.installed(home)
    return found


def host_facts() -> dict[str, Any]:
    """What a reader must know to judge the figures. Names no user and no host."""
    return {
        "os": platform.platform(),
        "cpu": _cpu_model(),
        **gpu_facts(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "goodgate": _version("goodgate"),
        "locust": _version("locust"),
        "duckdb": _version("duckdb"),
    }


def gpu_facts(folder: Path = Path("/proc/driver/nvidia/gpus")) -> dict[str, str]:
    """NVIDIA's cards as their driver names them; nothing where there is no driver."""
    lines = [line for file in sorted(folder.glob("*/information")) for line in file.read_text().splitlines()]
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    counted = [f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    return {"gpu": ", ".join(counted)} if counted else {}


def clock_facts() -> dict[str, Any]:
    """What all stamps of a race are read from."""
    facts = time.get_clock_info("monotonic")
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    return {
        "clock": facts.implementation,
        "resolution_ns": round(facts.resolution * 1e9),
        "source": source.read_text().strip() if source.exists() else None,
    }


def git_sha() -> str | None:
    """The commit of the working folder, with a plus sign when files differ from it; None outside a repository."""
    try:
        sha = _git("rev-parse", "--short=12", "HEAD")
        return sha + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    folder = Path(__file__).resolve().parent
    command: Sequence[str] = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or "unknown"  # not Linux
    return platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def fingerprint(host: Mapping[str, Any]) -> str:
    """Short name of a kind of machine: evidence from another kind says little about this one."""
    parts = [host.get("cpu"), host.get("cores"), host.get("memory_gib"), *filter(None, [host.get("gpu")])]
    identity = "|".join(map(str, parts))
    return hashlib.sha256(identity.encode()).hexdigest()[:12]
