"""`goodgate engines`: the list, the refusals and a start in the foreground, as a person meets them."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from adapters.cli import app
from adapters.command_line import parse_options
from adapters.launching.progress import steps_on
from adapters.launching.recipes import Environment, vllm
from adapters.launching.supervise import descendants

ROOT = Path(__file__).parents[2]

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")


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
    assert "goodgate engines install openvino" in " ".join(result.stdout.split())


def test_advice_with_brackets_is_printed_whole(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "goodgate[native]" in cli.invoke(app, [], env={"COLUMNS": "120"}).stdout


def test_an_unknown_engine_is_misuse_and_gets_the_nearest_spelling(cli: CliRunner) -> None:
    result = cli.invoke(app, ["install", "vlm"])
    assert result.exit_code == 2
    assert "Did you mean 'vllm'?" in result.stderr


def test_an_engine_that_is_not_installed_from_here_says_so(cli: CliRunner) -> None:
    result = cli.invoke(app, ["install", "sglang"])
    assert result.exit_code == 1
    assert (
        result.stderr
        == "sglang is not installed from here: start it yourself and name its `url` in the configuration.\n"
    )


def test_an_engine_that_needs_no_installation_is_said_to_be_there(cli: CliRunner) -> None:
    result = cli.invoke(app, ["install", "fake"])
    assert result.exit_code == 0
    assert result.stdout == "fake is part of what is installed already (built in).\n"


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


@contextmanager
def up(home: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`goodgate engines up fake` as a process."""
    command = [sys.executable, "-c", "from adapters.cli import app; app()", "up", "fake", "--model", "small", *words]
    env = {**os.environ, "GOODGATE_HOME": str(home), "COLUMNS": "200"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=env, cwd=ROOT, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def line_with(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    return next(line for line in process.stdout if words in line)


def url_in(line: str) -> str:
    return next(word for word in line.split() if word.startswith("http://"))


def served(url: str) -> list[str]:
    with urllib.request.urlopen(url + "/models", timeout=10) as response:
        return [model["id"] for model in json.load(response)["data"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_until_it_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    with up(tmp_path) as process:
        line = line_with(process, " is ready after ")
        assert re.match(r"fake is ready after \d+\.\d s and serves small at http://127.0.0.1:\d+/v1 ", line)
        assert served(url_in(line)) == ["small"]
        process.send_signal(number)
        assert process.stdout is not None
        assert "fake has stopped" in process.stdout.read()
        assert process.wait(10) == 0
    with pytest.raises(OSError, match="refused"):
        served(url_in(line))


@linux
def test_up_starts_a_crashed_engine_again_and_says_so_in_one_line(tmp_path: Path) -> None:
    with up(tmp_path) as process:
        first = line_with(process, " is ready after ")
        os.kill(descendants(process.pid)[-1], signal.SIGKILL)
        assert re.fullmatch(
            r"fake was killed by SIGKILL \d+\.\d s after its start\. It is started again in 1 s\.\n",
            line_with(process, "SIGKILL"),
        )
        second = line_with(process, " is ready after ")
        assert url_in(first) == url_in(second)
        assert served(url_in(second)) == ["small"]


@linux
def test_up_without_restart_ends_with_the_reason(tmp_path: Path) -> None:
    with up(tmp_path, "--no-restart") as process:
        line_with(process, " is ready after ")
        os.kill(descendants(process.pid)[-1], signal.SIGTERM)
        _, told = process.communicate(timeout=20)
        assert process.returncode == 1
        assert told.startswith("fake ended with exit code 0 ")  # the fake takes TERM as a request
        assert "Traceback" not in told


def test_installing_what_is_installed_does_nothing_unless_it_is_wanted_again(
    cli: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installs = []

    def install(home: Path, say: Callable[[str], None]) -> None:
        assert not (home / "engines" / "vllm").exists(), "what was there is in the way"
        say("fetching it")
        installs.append(home)

    monkeypatch.setattr(vllm, "install", install)
    folder = tmp_path / "engines" / "vllm"
    folder.mkdir(parents=True)
    Environment(tmp_path, "vllm").finish(vllm.PACKAGES, lambda _: None)
    result = cli.invoke(app, ["install", "vllm"])
    assert (result.exit_code, result.stdout) == (0, "vllm 0.32.0 is installed; --again installs it anew.\n")
    assert installs == []
    result = cli.invoke(app, ["install", "vllm", "--again"])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [f"    0 s  removing {folder}", "    0 s  fetching it"]
    assert installs == [tmp_path]


def test_steps_on_a_terminal_have_a_clock_each_and_the_one_that_fails_is_marked() -> None:
    screen = io.StringIO()

    def install() -> None:
        with steps_on(Console(force_terminal=True, width=80, file=screen, color_system=None)) as say:
            say("fetching")
            say("compiling [all] of it")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        install()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(r"✓ 0:00:0\d fetching *\n. 0:00:0\d compiling \[all\] of it: failed\s*$", text)


@pytest.mark.parametrize("words", [["install", "vllm"], ["up", "fake"], ["up", "vllm"], []])
def test_a_home_that_is_no_folder_is_a_sentence(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", "from adapters.cli import app; app()", *words]
    env = {**os.environ, "GOODGATE_HOME": str(tmp_path / "file"), "COLUMNS": "200"}
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in result.stderr
    assert result.returncode == (1 if words else 0)
    assert ("GOODGATE_HOME" in result.stderr) == (words == ["install", "vllm"])


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("ttft_ms=never", "A launch option of fake is wrong: Expected `float`, got `str` at `ttft_ms`."),
        ("ttft_s=1", "The engine 'fake' has no launch option `ttft_s`; did you mean `ttft_ms`?"),
        ("fail_kinds=[mood]", "at `fail_kinds[0]`; choose one of: error, overloaded, error_event, cut, stall."),
    ],
)
def test_up_with_a_wrong_option_says_what_may_stand_there(tmp_path: Path, option: str, sentence: str) -> None:
    command = [sys.executable, "-c", "from adapters.cli import app; app()", "up", "fake", "-o", option]
    env = {**os.environ, "GOODGATE_HOME": str(tmp_path)}
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith(sentence)
    assert len(result.stderr.splitlines()) == 1
