"""The example of an engine from another package, installed for real: it is listed, launched, served and conforming.

And its guide: each block of code in docs/adding-an-engine.md that is marked with a file stands in that file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from adapters.launching.launch import free_port
from tests.gateway.commands.test_commands import await_ready, running, write_config

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples/acme_engine"
GUIDE = ROOT / "docs/adding-an-engine.md"
MARKED = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Installed:
    """A folder that holds the installed example, and the source that it was installed from."""

    site: Path
    source: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.site), str(ROOT)])}

    def run(self, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        environment = {**self.environment, "GOODGATE_HOME": str(self.site / "home"), "COLUMNS": "200"}
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False
        )


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("acme")
    source = shutil.copytree(EXAMPLE, folder / "source")  # a build leaves files beside what it builds
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--quiet", "--target", str(folder / "site"), str(source)], check=True)
    return Installed(folder / "site", source)


def test_an_installed_package_adds_its_engine_to_the_list(acme: Installed) -> None:
    rows = json.loads(acme.run("-m", "goodgate", "engines", "--json").stdout)
    assert {"engine": "acme", "local": True, "version": "1.0.0", "how": ""} in rows


@pytest.fixture(scope="module")
def running_acme(acme: Installed) -> Iterator[str]:
    """The url of a running engine."""
    port = free_port()
    command = [sys.executable, "-m", "acme_goodgate.server", "--port", str(port), "--token-ms", "2"]
    engine = subprocess.Popen(command, env=acme.environment, cwd=acme.site, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        await_ready(url, path="/status")
        yield url
    finally:
        engine.terminate()
        engine.wait(10)


def test_a_gateway_launches_it_and_reaches_one_that_runs(acme: Installed, running_acme: str, tmp_path: Path) -> None:
    by_url = {"engine": "acme", "options": {"url": running_acme, "loud": True}}
    launched = {"engine": "acme", "launch": True, "model": "small", "options": {"token_ms": 1}}
    config = write_config(tmp_path, {"name": "loud", "replicas": [by_url]}, {"name": "quiet", "replicas": [launched]})
    with running(config, home=tmp_path, environment=acme.environment) as (process, url):
        await_ready(url)
        ask = ("-m", "goodgate", "chat", "--url", url, "--max-tokens", "3", "--temperature", "0", "Hi", "--model")
        loud, quiet = acme.run(*ask, "loud").stdout.strip(), acme.run(*ask, "quiet").stdout.strip()
        assert len(quiet.split()) == 3
        assert loud == quiet.upper()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_probe_finds_every_declared_capability_honoured(acme: Installed, running_acme: str) -> None:
    done = acme.run("-m", "goodgate", "engines", "probe", running_acme, "--engine", "acme")
    assert done.returncode == 0, done.stdout
    assert "contradicted" not in done.stdout


def test_the_contract_suite_runs_over_it_from_its_own_tests(acme: Installed) -> None:
    done = acme.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=acme.source)
    assert done.returncode == 0, done.stdout
    num_passed = re.search(r"(\d+) passed", done.stdout)
    assert num_passed is not None
    assert int(num_passed[1]) >= 19
    assert "skipped" not in done.stdout


def test_the_same_file_among_the_adapters_is_a_built_in_engine(tmp_path: Path) -> None:
    """One file is all that an engine takes."""
    shutil.copy(EXAMPLE / "acme_goodgate/__init__.py", tmp_path / "acme.py")
    code = (
        f"import adapters; adapters.__path__.append({str(tmp_path)!r})\n"
        "from adapters.registry import adapter_class, engine_names\n"
        "print('acme' in engine_names(), adapter_class('acme').__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "adapters.acme"]


def blocks() -> list[tuple[str, str]]:
    return MARKED.findall(GUIDE.read_text())


def closed_up(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", text)


@pytest.mark.parametrize(("file", "block"), blocks())
def test_every_marked_block_of_the_guide_stands_in_its_file(file: str, block: str) -> None:
    text = closed_up((EXAMPLE / file).read_text())
    # A method stands further left on the page, and formatters of pages keep two functions further apart.
    is_there = any(textwrap.indent(closed_up(block).strip(), "    " * depth) in text for depth in range(3))
    assert is_there, f"{file} does not hold:\n{block}"


def test_the_guide_shows_the_example() -> None:
    assert {file for file, _ in blocks()} == {
        "pyproject.toml", "acme_goodgate/__init__.py", "tests/test_acme.py",
    }  # fmt: skip
