"""Documentation that drifts from the tree fails here."""

from __future__ import annotations

import importlib
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

import goodgate
from adapters.registry import AdapterClass, adapter_class
from gateway.config import parse_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
PATH = re.compile(r"`((?:gateway|adapters|native_engine|arena|configs|tests|docs|scripts)/[\w./-]*)`")
COMMAND = re.compile(r"(?:`|^|\$ |= ?)goodgate ([a-z][^`\n]*)", re.MULTILINE)
MAKE = re.compile(r"\bmake ([a-z-]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    named = set(PATH.findall(page.read_text()))
    missing = sorted(path for path in named if not (ROOT / path).exists() and "NAME" not in path)
    assert not missing, f"{page.name} names {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    in_code = " ".join(re.findall(r"`[^`]*`|```.*?```", page.read_text(), re.DOTALL))
    missing = sorted(
        target for target in set(MAKE.findall(in_code)) if not re.search(rf"^{target}:", makefile, re.MULTILINE)
    )
    assert not missing, f"{page.name} names make {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_heading_leads_to_one(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    missing = [
        f"{name}#{anchor}" for name, anchor in targets if anchor not in anchors(page.parent / name if name else page)
    ]
    assert not missing, f"{page.name} links to {', '.join(missing)}"


def anchors(page: Path) -> set[str]:
    """What a link can say after `#`, as GitHub makes it of headings: a repeated one is numbered."""
    found: set[str] = set()
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(next(each for n in range(99) if (each := f"{slug}-{n}" if n else slug) not in found))
    return found


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md", ROOT / "tests/reliability.py", ROOT / "tests/reported.py"],
    ids=lambda page: page.name,
)
def test_every_command_that_a_page_names_exists_with_its_options(page: Path) -> None:
    root = typer.main.get_command(goodgate.build([]))
    for line in COMMAND.findall(page.read_text()):
        command, path = root, "goodgate"
        for word in line.partition("#")[0].split():
            if word.startswith("--"):
                known = {option for parameter in command.params for option in parameter.opts} | {"--help", "--version"}
                assert word.partition("=")[0] in known, f"{page.name} names {path} {word}"
            elif isinstance(command, TyperGroup):
                for name in reversed(word.split("|")):
                    assert name in command.commands, f"{page.name} names {path} {name}"
                command, path = command.commands[name], f"{path} {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_configuration_on_a_page_is_valid(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples/acme_engine")
    for secret in re.findall(r"_env: (\w+)", page.read_text()):
        monkeypatch.setenv(secret, "name=value")
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        shown = yaml.safe_load(block)
        if "workload" not in shown:  # a scenario of the arena
            models = {"models": [{"name": "small", "replicas": [{"engine": "fake"}]}]}
            parse_config({**models, **shown}, find_adapter=adapter_of)


def adapter_of(engine: str) -> AdapterClass:
    """The guide for new engines has one that is not installed."""
    if engine != "acme":
        return adapter_class(engine)
    found: AdapterClass = importlib.import_module("acme_goodgate").Adapter
    return found


def test_every_command_has_an_example_and_says_what_it_does() -> None:
    missing = [path for path, command in commands() if "Example: " not in f"{command.help}{command.epilog}"]
    assert not missing, f"an example lacks in the help of {', '.join(missing)}"


def commands(path: str = "goodgate", command: Any = None) -> Iterator[tuple[str, Any]]:
    """Every command and group of commands, with the words that lead to it."""
    command = command or typer.main.get_command(goodgate.build([]))
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(f"{path} {name}", inner)


def test_every_package_that_is_declared_has_an_exact_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    wanted = {canonical(re.split(r"[\[><=!; ]", requirement)[0]) for requirement in declared} - {"goodgate"}
    files = (ROOT / "constraints.txt", ROOT / "constraints-cloud.txt")
    lines = [line for file in files for line in file.read_text().splitlines()]
    pinned = {canonical(line.split("==")[0]) for line in lines if "==" in line}
    assert wanted <= pinned, f"constraints.txt lacks {', '.join(sorted(wanted - pinned))}"


def canonical(name: str) -> str:
    return name.lower().replace("_", "-")


def test_the_changelog_names_the_version_that_is_being_built() -> None:
    assert re.search(r"^## (Unreleased|\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_no_large_file_is_tracked() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    large = [
        name
        for name in listed.stdout.splitlines()
        if (ROOT / name).is_file() and (ROOT / name).stat().st_size > 2_000_000
    ]
    assert not large
