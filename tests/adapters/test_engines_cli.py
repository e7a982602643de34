"""`goodgate engines`: the list, the refusals and a start in the foreground, as a person meets them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from adapters.cli import app
from adapters.command_line import parse_options

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("GOODGATE_HOME", str(tmp_path))
    return CliRunner()


def test_the_list_tells_of_every_engine_whether_it_runs_here_and_how_to_get_it(cli: CliRunner) -> None:
    result = cli.invoke(app, ["--json"])
    rows = {row["engine"]: row for row in json.loads(result.stdout)}
    assert result.exit_code == 0
    assert rows["fake"]["local"] is True
    assert rows["vllm"] == {
        "engine": "vllm",
        "local": False,
        "version": "0.32.0",
        "how": "run `goodgate engines install vllm`.",
    }


def test_the_table_names_the_command_that_installs(cli: CliRunner) -> None:
    result = cli.invoke(app, [], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "goodgate engines install openvino" in result.stdout


def test_advice_with_brackets_is_printed_whole(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "goodgate[native]" in cli.invoke(app, [], env={"COLUMNS": "120"}).stdout


def test_an_unknown_engine_is_misuse_and_gets_the_nearest_spelling(cli: CliRunner) -> None:
    result = cli.invoke(app, ["install", "vlm"])
    assert result.exit_code == 2
    assert "Did you mean 'vllm'?" in result.stderr


def test_an_engine_that_is_not_installed_from_here_says_so(cli: CliRunner) -> None:
    result = cli.invoke(app, ["install", "fake"])
    assert result.exit_code == 1
    assert "fake is not installed from here" in result.stderr


def test_up_of_an_engine_that_is_not_installed_names_the_command(cli: CliRunner) -> None:
    result = cli.invoke(app, ["up", "vllm"])
    assert result.exit_code == 1
    assert "goodgate engines install vllm" in result.stderr


@pytest.mark.parametrize("command", [[], ["install"], ["up"]])
def test_every_help_has_an_example(cli: CliRunner, command: list[str]) -> None:
    result = cli.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Example: goodgate engines" in result.stdout


def test_options_are_read_as_yaml_and_checked_for_their_form() -> None:
    read = parse_options(["threads=2", "enforce_eager=true", "quantization=q4_0", "chat_template=a=b"])
    assert read == {"threads": 2, "enforce_eager": True, "quantization": "q4_0", "chat_template": "a=b"}
    with pytest.raises(typer.BadParameter, match="key=value"):
        parse_options(["threads"])
    for value in ("[", "2026-02-31"):
        with pytest.raises(typer.BadParameter, match="quote it"):
            parse_options([f"threads={value}"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_until_it_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", "from adapters.cli import app; app()", "up", "fake", "--model", "small"]
    env = {**os.environ, "GOODGATE_HOME": str(tmp_path), "COLUMNS": "200"}
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
        with urllib.request.urlopen(url + "/models", timeout=10) as response:
            assert [model["id"] for model in json.load(response)["data"]] == ["small"]
        process.send_signal(number)
        assert "fake has stopped" in process.stdout.read()
        assert process.wait(10) == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url + "/models", timeout=10)


def test_up_with_a_wrong_option_fails_with_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from adapters.cli import app; app()", "up", "fake", "-o", "ttft_s=never"]
    env = {**os.environ, "GOODGATE_HOME": str(tmp_path)}
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("A launch option of fake is wrong: ")
    assert "Traceback" not in result.stderr
