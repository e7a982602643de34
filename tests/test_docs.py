"""Documentation that drifts from the tree fails here."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
PATH = re.compile(r"`((?:gateway|adapters|native_engine|arena|configs|tests|docs|scripts)/[\w./-]*)`")
MAKE = re.compile(r"\bmake ([a-z]+)")


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
