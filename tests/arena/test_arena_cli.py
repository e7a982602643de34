"""The command line as a person meets it: exit codes, one-sentence errors, files, Ctrl-C."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from click.testing import Result
from typer.testing import CliRunner

from arena.commands.cli import app
from arena.commands.contenders import merged
from arena.load import scripted_engine
from arena.records.store import Store
from tests.arena.race.test_bakeoff import scripted

SCENARIO = """
name: scripted
model: fake
workload: {kind: synthetic, prompt: {kind: fixed, tokens: 20}, output: {kind: fixed, tokens: 8}}
slo: {ttft_ms: 1000, tpot_ms: 30}
search: {start_rps: 2, step: 2, stride: 1, max_rps: 200, max_cells: 2, max_replicates: 1, burst: 4}
cell: {warmup_s: 0.1, duration_s: 1.0, settle_s: 0}
"""

ARENA = (sys.executable, "-m", "arena.commands.cli")


def arena(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"GOODGATE_HOME": str(home)} if home else {})}
    command = [*ARENA, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with scripted("--ttft-ms", "30", "--itl-ms", "5") as url:
        yield url


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scenario") / "scripted.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture(scope="module")
def finished(server: str, scenario: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished race's folder, and what it printed on stdout."""
    out = tmp_path_factory.mktemp("run") / "race"
    done = arena(
        "run",
        str(scenario),
        "--targets",
        f"one={server}/v1@fake",
        "--out",
        str(out),
        "--json",
        "--seed",
        "3",
        "--no-calibration",
    )
    assert done.returncode == 0, done.stderr
    assert "holds" in done.stderr
    return out, done.stdout


def test_a_race_writes_its_files_and_prints_the_summary_as_json(finished: tuple[Path, str]) -> None:
    out, printed = finished
    assert json.loads(printed) == json.loads((out / "summary.json").read_text())
    assert {"arena.duckdb", "report.html", "summary.json", "evidence.json", "spool"} <= {p.name for p in out.iterdir()}
    engine = json.loads(printed)["engines"][0]
    assert engine["name"] == "one"
    assert engine["goodput_rps"] >= 2
    assert engine["rank"] == [1, 1]
    assert json.loads((out / "evidence.json").read_text())["entries"][0]["slo"]["ttft_ms"] == 1000


def test_the_store_knows_the_clock_the_engines_own_metrics_and_what_was_said_of_each(
    finished: tuple[Path, str],
) -> None:
    with Store(finished[0] / "arena.duckdb", read_only=True) as store:
        assert json.loads(store.query("SELECT clock_json FROM runs")[0]["clock_json"])["resolution_ns"] >= 1
        metrics = {row["metric"] for row in store.query("SELECT DISTINCT metric FROM engine_health")}
        assert "fake:requests_running" in metrics
        verdict = store.query("SELECT est, evidence_sha FROM verdicts")[0]
        assert verdict["est"] == json.loads(finished[1])["engines"][0]["goodput_rps"]
        assert verdict["evidence_sha"] == json.loads((finished[0] / "evidence.json").read_text())["digest"]
        assert store.query("SELECT count(*) AS n FROM search_steps")[0]["n"] >= 1


def test_report_writes_a_lost_report_again_and_check_is_content(finished: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished[0], out)
    (out / "report.html").unlink()
    again = arena("report", str(out))
    assert again.returncode == 0
    assert "one carries" in again.stdout
    assert (out / "report.html").read_bytes() == (finished[0] / "report.html").read_bytes()
    checked = arena("check", str(out))
    assert (checked.returncode, checked.stderr) == (0, "")
    cells = len(list((out / "spool").glob("*.done")))
    assert f"cells verified: {cells};" in checked.stdout


def test_check_finds_a_changed_figure_and_a_damaged_spool(finished: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished[0], out)
    flattering = json.loads((out / "summary.json").read_text())
    flattering["engines"][0]["goodput_rps"] *= 10
    (out / "summary.json").write_text(json.dumps(flattering))
    spool = sorted((out / "spool").glob("*.jsonl"))[0]
    spool.write_bytes(spool.read_bytes()[:-40])
    checked = arena("check", str(out))
    assert checked.returncode == 1
    assert "summary.json does not say what the store says" in checked.stderr
    assert f"{spool.stem}: the spool is damaged" in checked.stderr


def test_a_race_compared_with_itself_has_not_changed(finished: tuple[Path, str]) -> None:
    compared = arena("compare", str(finished[0]), str(finished[0]), "--json")
    assert compared.returncode == 0
    assert json.loads(compared.stdout)[0]["words"] == "cannot be told apart"
    assert "cannot be told apart" in arena("compare", str(finished[0]), str(finished[0])).stdout


def race_command(server: str, scenario: Path, out: Path) -> list[str]:
    """Uncalibrated: a busy machine would refuse the race. With the seed of a race of which the first cells hold."""
    target = ("--targets", f"one={server}", "--out", str(out), "--seed", "3")
    return [sys.executable, "-m", "arena.commands.cli", "run", str(scenario), *target, "--no-calibration"]


def test_ctrl_c_leaves_a_readable_partial_result(server: str, scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "race"
    with subprocess.Popen(
        race_command(server, scenario, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "requests/s" in line and "holds" in line:
                break
        process.send_signal(signal.SIGINT)
        rest, complaint = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "The race was interrupted" in complaint
    assert "Traceback" not in complaint + rest
    document = json.loads((out / "summary.json").read_text())
    assert document["valid"] is False
    assert document["engines"][0]["goodput_rps"] >= 2
    assert arena("check", str(out)).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "chta"], "There is no scenario 'chta'; choose one of: "),
        (["run", "nowhere.yaml"], "There is no file nowhere.yaml"),
        (["run", "chat", "--engines", "vlmm"], "There is no engine 'vlmm'. Did you mean 'vllm'?"),
        (["run", "chat", "--engines", "vllm"], "is not installed: run `goodgate engines install vllm`"),
        (["run", "chat", "--engines", "fake"], "cannot be started from here"),
        (["run", "chat", "--engines", ","], "--engines names no engine"),
        (["run", "chat", "--engines", "native"], "goodgate models pull smollm2-135m-instruct"),
        (["run", "chat", "--targets", "a=localhost:80"], "is not of the form name=http://host:port[@model]"),
        (["run", "chat", "--targets", "a=http://h:1,a=http://h:2"], "Two contenders are called 'a'"),
        (["run", "chat", "--targets", "a b=http://h:1"], "cannot be called 'a b'"),
        (["run", "chat", "--targets", "a=https://h:1"], "measures plain http:// only"),
        (["run", "chat", "--targets", "a=http://"], "is not of the form name=http://host:port[@model]"),
        (["run", "chat", "--targets", "a=http://[::1"], "that is no address; write it as http://host:port"),
        (["run", "chat", "--targets", "a=http://h:99999"], "that is no address"),
        (["run", "chat", "--targets", "a=http://h:0"], "that is no address"),
        (["run", "chat", "--targets", "a=http://a..b:1"], "that is no address"),
        (["run", "chat", "--targets", f"a=http://{'h' * 300}:1"], "that is no address"),
        (["run", "chat", "--targets", "a=http://h:1?key=x"], "a key goes into --api-key-env"),
        (["run", "chat", "--targets", "a=http://h:1@\x1b[31m"], "is the name of a model, and that is none"),
        (["run", "chat", "--targets", ""], "--targets names no endpoint"),
        (["run", "chat", "--targets", "a=http://h:1", "--api-key-env", ""], "holds no key"),
        (["run", "chat", "--engines", "native", "-o", "native.x=*a"], "is not a YAML scalar"),
        (["burst", "--concurrency", "²"], "is not a whole number from 1 to 9999"),
        (["worker", "--master", "h:²"], "is not of the form host:port"),
        (["preview", "chat", "--seed", "-5"], "Invalid value for '--seed'"),
        (["run", "chat", "--targets", "a=http://h:1", "--master", "h"], "--master 'h' is not of the form host:port"),
        (["worker", "--master", "nowhere:port"], "--master 'nowhere:port' is not of the form host:port"),
        (["truth", "--rates", "10,fast"], "--rates 'fast' is not a rate"),
        (["run", "chat", "--targets", "a=http://h:1", "-o", "vllm.x=1"], "does not start 'vllm'"),
        (["run", "chat", "--targets", "a=http://h:1", "-o", "vllm.x=["], "is not a YAML scalar"),
        (["run", "chat", "--targets", "a=http://h:1", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY holds no key"),
        (["report", "nowhere"], "nowhere holds no race"),
        (["check", "nowhere"], "nowhere holds no race"),
        (["compare", "nowhere", "nowhere"], "nowhere holds no race"),
        (["run"], "Missing argument"),
    ],
)
def test_misuse_is_told_in_a_sentence_and_ends_with_2(arguments: list[str], told: str, tmp_path: Path) -> None:
    result = CliRunner(env={"GOODGATE_HOME": str(tmp_path / "empty")}).invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_race_never_overwrites_another(finished: tuple[Path, str], scenario: Path) -> None:
    arguments = ["run", str(scenario), "--targets", "a=http://127.0.0.1:1", "--out", str(finished[0])]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "already holds a race" in result.output


def test_a_file_that_is_no_store_is_told_and_not_traced(tmp_path: Path) -> None:
    (tmp_path / "arena.duckdb").write_text("not a database, but long enough to be taken for one" * 100)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "cannot be read" in result.output


@pytest.mark.parametrize("command", ["run", "report", "compare", "check", "export", "history"])
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: goodgate arena {command}" in result.output


def test_an_option_of_the_command_line_leaves_the_other_options_of_the_scenario_alone() -> None:
    """`-o llama_cpp.threads=2` must not silently put another quantisation into the race."""
    scenario = {"llama_cpp": {"quantization": "q8_0", "threads": 1}, "vllm": {"a": 1}}
    assert merged(scenario, {"llama_cpp": {"threads": 2}, "native": {"b": 3}}) == {
        "llama_cpp": {"quantization": "q8_0", "threads": 2},
        "vllm": {"a": 1},
        "native": {"b": 3},
    }


def test_options_for_an_engine_that_does_not_exist_are_a_typing_error(scenario: Path, tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text(scenario.read_text() + "options: {lama_cpp: {quantization: q8_0}}\n")
    result = CliRunner().invoke(app, ["run", str(path), "--targets", "a=http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "Did you mean 'llama_cpp'" in " ".join(result.output.split())


def test_a_folder_with_somebody_elses_files_is_left_alone(scenario: Path, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    arguments = ["run", str(scenario), "--targets", "a=http://127.0.0.1:1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "is not empty" in " ".join(result.output.split())
    assert (tmp_path / "report.html").read_text() == "mine"


def start_a_race(server: str, scenario: Path, out: Path) -> subprocess.Popen[str]:
    """A race that has one verdict and is in its second cell."""
    process = subprocess.Popen(
        race_command(server, scenario, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "requests/s" in line and "holds" in line:
            break
    return process


def test_a_race_that_was_killed_is_not_called_complete(server: str, scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "a race with spaces"
    with start_a_race(server, scenario, out) as process:
        process.kill()
    reported = arena("report", str(out), "--json")
    assert reported.returncode == 0, reported.stderr
    document = json.loads(reported.stdout)
    assert document["valid"] is False
    assert "interrupted" in document["invalid_reasons"][0]
    assert document["engines"][0]["goodput_rps"] >= 2
    assert arena("check", str(out)).returncode == 0


def test_a_second_ctrl_c_ends_at_once_and_without_a_traceback(server: str, scenario: Path, tmp_path: Path) -> None:
    with start_a_race(server, scenario, tmp_path / "race") as process:
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
        rest, complaint = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in complaint + rest


def change_the_store(out: Path, statement: str) -> Result:
    """Do something to a race's store, make summary and evidence fit, and check the race."""
    with duckdb.connect(str(out / "arena.duckdb")) as connection:
        connection.execute(statement)
    assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0
    return CliRunner().invoke(app, ["check", str(out)])


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("UPDATE requests SET scheduled_ns = scheduled_ns + 5000000", "rows differ between the spool and the store"),
        ("UPDATE requests SET measured = false WHERE seq % 2 = 0", "rows differ between the spool and the store"),
        ("UPDATE token_events SET t_ns = list_transform(t_ns, lambda t: t // 2)", "rows differ between the spool"),
        ("UPDATE plans SET warmup_ns = warmup_ns + 1", "is not the one in the store"),
        ("DELETE FROM cells WHERE slot = 1", "there is a finished spool, but the store has no such cell"),
    ],
)
def test_a_store_that_was_improved_by_hand_is_found_out(
    finished: tuple[Path, str], tmp_path: Path, statement: str, told: str
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished[0], out)
    checked = change_the_store(out, statement)
    assert checked.exit_code == 1
    assert told in checked.stderr


def test_a_cell_that_the_store_has_forgotten_is_taken_in_again_and_told(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished[0], out)
    with duckdb.connect(str(out / "arena.duckdb")) as connection:
        connection.execute("UPDATE cells SET ingested_utc = NULL WHERE slot = 1")
    checked = arena("check", str(out))
    assert checked.returncode == 1
    assert "there is a finished spool, but the store has no such cell" in checked.stderr
    assert "was taken in" in arena("report", str(out)).stderr
    assert arena("check", str(out)).returncode == 0
    assert (out / "summary.json").read_bytes() == (finished[0] / "summary.json").read_bytes()


def test_export_tells_what_it_wrote_and_check_looks_at_it_too(finished: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished[0], out)
    exported = arena("export", str(out))
    assert exported.returncode == 0, exported.stderr
    assert "rows in" in exported.stdout
    assert arena("check", str(out)).returncode == 0
    data = next((out / "parquet" / "requests").rglob("*.parquet"))
    data.write_bytes(data.read_bytes() + b"0")
    checked = arena("check", str(out))
    assert checked.returncode == 1
    assert f"{data.relative_to(out)}: the file has changed" in checked.stderr


@pytest.mark.parametrize(
    "statement",
    ["UPDATE runs SET notes = '{}'", "UPDATE schema_meta SET version = 99", "DROP TABLE requests", "DELETE FROM runs"],
)
@pytest.mark.parametrize("command", ["report", "check"])
def test_a_store_that_makes_no_sense_is_told_and_not_traced(
    finished: tuple[Path, str], tmp_path: Path, command: str, statement: str
) -> None:
    shutil.copy(finished[0] / "arena.duckdb", tmp_path / "arena.duckdb")
    with duckdb.connect(str(tmp_path / "arena.duckdb")) as connection:
        connection.execute(statement)
    result = CliRunner().invoke(app, [command, str(tmp_path)])
    assert result.exit_code == 1, result.exception
    assert "goodgate arena:" in result.output


def test_who_looks_no_longer_ends_the_race_and_keeps_its_result(server: str, scenario: Path, tmp_path: Path) -> None:
    """`goodgate arena run ... | head -1`: no traceback, no race that goes on for nobody, a report of what it has."""
    out = tmp_path / "race"
    command = [*race_command(server, scenario, out), "--events"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "cell_judged" not in process.stdout.readline():
            pass
        process.stdout.close()
        complaint = process.stderr.read()
        assert process.wait(timeout=30) == 1
    assert "Traceback" not in complaint
    assert "BrokenPipe" not in complaint
    document = json.loads((out / "summary.json").read_text())
    assert document["valid"] is False
    assert document["engines"][0]["goodput_rps"] >= 2
    assert arena("check", str(out)).returncode == 0


@pytest.mark.parametrize("arguments", [("report",), ("check",)])
def test_a_reader_that_has_gone_is_no_error_of_the_output_folder(
    finished: tuple[Path, str], arguments: tuple[str, ...]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*ARENA, *arguments, str(finished[0])], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_terminal_without_our_characters_is_shown_others(finished: tuple[Path, str]) -> None:
    command = [sys.executable, "-m", "goodgate", "arena", "report", str(finished[0])]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "20", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_a_race_whose_terminal_is_closed_leaves_its_report(server: str, scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "race"
    with start_a_race(server, scenario, out) as process:
        process.send_signal(signal.SIGHUP)
        rest, complaint = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "The race was interrupted" in complaint
    assert "Traceback" not in complaint + rest
    assert json.loads((out / "summary.json").read_text())["engines"][0]["goodput_rps"] >= 2


@pytest.mark.parametrize("num_bytes", [3_000, 30_000])
def test_a_race_on_a_full_disk_says_what_it_has_kept(
    server: str, scenario: Path, tmp_path: Path, num_bytes: int
) -> None:
    """No file may grow beyond so many bytes."""
    out = tmp_path / "race"
    limits = (num_bytes, num_bytes)
    done = subprocess.run(
        race_command(server, scenario, out),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
    )
    assert done.returncode == 1
    assert f"what had ended is kept, and `goodgate arena report {out}` shows it" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_two_races_in_one_folder_do_not_mix(server: str, scenario: Path, tmp_path: Path) -> None:
    """Started in the same moment, both find the folder empty."""
    out = tmp_path / "race"
    with start_a_race(server, scenario, out) as first:
        second = CliRunner().invoke(app, race_command(server, scenario, out)[3:])
        first.communicate(timeout=60)
    assert first.returncode == 0
    assert second.exit_code == 2
    assert "already holds a race" in second.output
    assert arena("check", str(out)).returncode == 0


def test_a_proxy_of_the_machine_has_no_part_in_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """`http_proxy` is for addresses elsewhere; through it the calibration found nobody."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with scripted_engine.running() as engine:
        assert engine.take_log().requests == {}
