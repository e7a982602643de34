"""The Dockerfile agrees with the project's files, and leaves an image that is small, repeatable and not root."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from typing import NamedTuple

import pytest

from tests.deploy import compose_file
from tests.deploy.compose_file import ROOT
from tests.deploy.test_compose import parsed


class Instruction(NamedTuple):
    stage: str
    word: str
    rest: str


def instructions() -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    stage, found = "", []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            stage = rest.partition(" AS ")[2] or "image"
        if word:
            found.append(Instruction(stage, word, rest))
    return found


ALL = instructions()


def rest_of(word: str, stage: str | None = None) -> list[str]:
    return [each.rest for each in ALL if each.word == word and stage in (None, each.stage)]


def sources() -> set[str]:
    """What is copied from the repository."""
    copies = [rest.split() for rest in rest_of("COPY") if "--from" not in rest]
    return {source for copy in copies for source in copy[:-1]}


def defaults() -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in rest_of("ARG"))


def test_what_is_copied_is_here_tracked_and_let_through() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert "*" in ignore, "everything is left out that is not named"
    assert sources() == allowed
    assert all((ROOT / source).exists() for source in sources())


def test_every_package_and_data_folder_of_the_wheel_is_copied() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {pattern.removesuffix("*") for pattern in tool["packages"]["find"]["include"]}
    data = {path.split("/")[0] for paths in tool["data-files"].values() for path in paths}
    modules = {f"{module}.py" for module in tool["py-modules"]}
    assert packages | data | modules | {"pyproject.toml", "constraints.txt"} <= sources()


def test_both_stages_come_from_one_base_that_a_digest_can_fix() -> None:
    assert [rest.split()[0] for rest in rest_of("FROM")] == ["${PYTHON_IMAGE}"] * 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", defaults()["PYTHON_IMAGE"])
    assert defaults()["PYTHON_IMAGE"].startswith(f"python:{project['requires-python'].removeprefix('>=')}")


def test_the_arguments_that_compose_gives_exist_with_the_same_defaults() -> None:
    given = compose_file.services()["gateway"]["build"]["args"]
    assert given.items() <= defaults().items()


def test_what_is_installed_is_pinned_and_kept_out_of_caches() -> None:
    installs = re.findall(r"(\S*)pip install ([^&]*)", " ".join(rest_of("RUN")))
    assert installs
    for program, arguments in installs:
        assert "--constraint constraints.txt" in arguments
        assert "--no-compile" in arguments or not program.startswith("/opt/goodgate"), "bytecode is made by hash"
    assert "PIP_NO_CACHE_DIR=1" in " ".join(rest_of("ENV", "builder"))
    assert defaults()["TORCH_INDEX"].endswith("/cpu")
    assert int(defaults()["SOURCE_DATE_EPOCH"]) > 315_532_800, "zip files know no time before 1980"


def test_the_image_has_a_compiler_for_the_kernels_and_nothing_else_to_build_with() -> None:
    [install] = [rest for rest in rest_of("RUN", "image") if "apt-get install" in rest]
    packages = re.search(r"--no-install-recommends ([\w\s.-]+?) &&", install)
    assert packages
    assert packages[1].split() == ["gcc", "libc6-dev", "libgomp1"]
    assert "pip" not in " ".join(rest_of("RUN", "image"))


def test_it_runs_as_a_user_that_owns_its_data() -> None:
    [user] = rest_of("USER", "image")
    assert user == compose_file.services()["gateway"]["user"]
    assert user.split(":")[0] != "0"
    assert any(f"--chown={user} /data" in rest for rest in rest_of("COPY", "image"))
    assert rest_of("VOLUME") == ["/data"]
    assert "GOODGATE_HOME=/data" in " ".join(rest_of("ENV", "image"))


def test_it_says_whether_it_is_well_and_stops_when_asked() -> None:
    [check] = rest_of("HEALTHCHECK", "image")
    assert "curl" not in check
    assert "http://127.0.0.1:8080/health" in check
    assert rest_of("STOPSIGNAL") == ["SIGTERM"]


def test_its_command_is_one_of_ours() -> None:
    [command] = rest_of("CMD", "image")
    name, options = parsed([word.strip(",") for word in shlex.split(command.strip("[]").replace(",", " "))])
    assert name == "serve"
    assert options["host"] == "0.0.0.0"
    assert str(options["config_path"]) == "configs/local.yaml"


def test_it_is_labelled_with_the_version_that_is_built() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert defaults()["VERSION"] == version
    assert compose_file.services()["gateway"]["image"] == f"goodgate:{version}"
    labels = " ".join(rest_of("LABEL"))
    assert {"title", "description", "version", "revision"} == set(
        re.findall(r"org\.opencontainers\.image\.(\w+)", labels)
    )


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_builds_for_real() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker engine answers")
    subprocess.run([docker, "build", "--tag", "goodgate:test", "."], cwd=ROOT, check=True, timeout=3000)
    run = [docker, "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "goodgate:test"]
    subprocess.run([*run, "goodgate", "doctor", "--config", "configs/local.yaml"], check=True, timeout=120)
