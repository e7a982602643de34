"""Every option with values that nobody means: refused in a sentence, before anything runs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from arena.commands import cli, plan

APPS = {"arena": cli.app, "plan": plan.app}


def options_that_are_floats() -> Iterator[tuple[str, Any, Any]]:
    for room, app in APPS.items():
        for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
            for option in command.params:
                if option.bare_type() == "float":
                    yield f"{room} {name} {option.opts[0]}", command, option


FLOATS = {name: (command, option) for name, command, option in options_that_are_floats()}


def test_the_floats_are_found() -> None:
    assert {"arena truth --duration", "plan traffic --rate", "arena tune --tune-minutes"} <= set(FLOATS)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e400", "", "x"])
@pytest.mark.parametrize("name", FLOATS)
def test_no_option_takes_what_is_no_number(name: str, value: str) -> None:
    """NaN is neither too small nor too large, and infinity is in any range without an upper end."""
    command, option = FLOATS[name]
    with pytest.raises(typer.BadParameter) as caught:
        option.process_value(command.context_class(command), value)
    assert caught.value.format_message()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["arena", "gateway-cost", "a=http://h:1,b=http://h:2"], "names several engines"),
        (["arena", "gateway-cost", ""], "--engines names no engine"),
        (["arena", "gateway-cost", "a=http://h:1", "--scenario", "CLOSED"], "A closed loop"),
        (["arena", "tune", "native", "--scenario", "CLOSED"], "closed loop"),
        (["arena", "tune", "native", "-o", "native.max_num_seqs=many"], "launch option of native is wrong"),
        (["arena", "tune", "native", "-o", "native.max_num_seqs=[1]"], "launch option of native is wrong"),
        (["arena", "run", "chat", "--engines", "native", "-o", "native.max_num_sqs=1"], "did you mean `max_num_seqs`"),
        (["arena", "burst", "--engines", "native,native"], "Two contenders are called 'native'"),
        (["arena", "burst", "--tokens", "1000000000"], "--tokens"),
        (["arena", "burst", "--words", "1000000000"], "--words"),
        (["arena", "truth", "--chunks", "1e12"], "--chunks"),
        (["arena", "truth", "--tokens", "1000000000"], "--tokens"),
        (["arena", "truth", "--rates", ""], "is not a rate"),
        (["arena", "truth", "--rates", "nan"], "is not a rate"),
        (["arena", "calibrate", "--page", "FOLDER"], "There is no page"),
        (["arena", "calibrate", "--page", "PLAIN"], "has no place for calibration"),
        (["arena", "calibrate", "--page", "BINARY"], "is not text in UTF-8"),
        (["arena", "run", "FOLDER", "--targets", "a=http://h:1"], "There is no scenario"),
        (["arena", "run", "", "--targets", "a=http://h:1"], "There is no scenario"),
        (["arena", "run", "chat", "--targets", "a=http://h:1", "--price", "a=nan"], "is not of the form engine=2.5"),
        (["arena", "run", "chat", "--targets", "a=http://h:1", "--out", "PLAIN"], "cannot be made"),
        (["arena", "run", "chat", "--targets", "a=http://h:1", "--out", "PLAIN/below"], "cannot be made"),
        (["arena", "run", "chat", "--targets", "a=http://h:1", "--out", ""], "is not empty"),
        (["arena", "run", "chat", "--targets", "a=http://h:1", "--control", ""], "nobody of that name races"),
        (["arena", "report", "PLAIN"], "holds no race"),
        (["arena", "compare", "FOLDER", "PLAIN"], "holds no race"),
        (["arena", "export", "FOLDER"], "holds no race"),
        (["arena", "history", "PLAIN"], "There is no race"),
        (["arena", "evidence", "FOLDER", "--out", "out"], "There is no"),
        (["arena", "evidence", "PLAIN", "--out", "out"], "is no evidence.json"),
        (["arena", "preview", "chat", "--replicate", "99999999999999999999999"], "--replicate"),
        (["arena", "worker", "--master", "h:0"], "not of the form host:port"),
        (["plan", "traffic", "--evidence", "FOLDER", "--rate", "1"], "There is no"),
        (["plan", "traffic", "--evidence", "BINARY", "--rate", "1"], "is no evidence.json"),
        (["plan", "backtest", "FOLDER"], "cannot be read: Is a directory"),
        (["plan", "backtest", "BINARY"], "is not text in UTF-8"),
        (["plan", "backtest", "TRACE", "--rates", "nan"], "every rate must be above 0"),
    ],
)
def test_misuse_is_told_before_anything_runs(words: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain").write_text("a page without any marks")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2026-01-01 00:{second // 60:02}:{second % 60:02}.0,10,10\n" for second in range(600))
    )
    (tmp_path / "closed.yaml").write_text(CLOSED)
    places = {
        "FOLDER": "folder", "PLAIN": "plain", "BINARY": "binary", "TRACE": "trace.csv", "CLOSED": "closed.yaml",
    }  # fmt: skip
    for name, file in places.items():
        words = [word.replace(name, str(tmp_path / file)) for word in words]
    room, *rest = words
    result = CliRunner().invoke(APPS[room], rest, env={"GOODGATE_HOME": str(tmp_path / "home"), "COLUMNS": "400"})
    assert result.exit_code == 2, (result.output, result.exception)
    assert told in " ".join(result.output.split())


CLOSED = """
name: closed
model: m
workload: {kind: synthetic, prompt: {kind: fixed, tokens: 20}, output: {kind: fixed, tokens: 8}}
slo: {ttft_ms: 1000, tpot_ms: 30}
load: {kind: closed, concurrency: 2}
"""


def test_two_that_wait_at_one_address_are_told_apart(tmp_path: Path) -> None:
    """The page's port is somebody else's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["run", "chat", "--targets", "a=http://127.0.0.1:1", "--web", str(port), "--no-calibration"]
        result = CliRunner().invoke(cli.app, [*words, "--out", str(tmp_path / "out")], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert f"Locust's page cannot be served on port {port}" in result.output
