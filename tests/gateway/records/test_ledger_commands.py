"""`goodgate usage` and `goodgate why` beside a gateway that runs: figures that equal what the answers told."""

from __future__ import annotations

import csv
import http.client
import io
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from gateway.config import LedgerConfig
from gateway.records.ledger import Ledger
from gateway.records.ledger_files import FOLDER
from gateway.tenants.keys import KeyStore, NewKey
from goodgate import build
from tests.gateway.commands.test_commands import await_ready, running, write_config
from tests.gateway.records.test_ledger_files import NOON, Clock, ended_trace
from tests.gateway.rig import fake, free_port, model

PATIENCE_S = 20
MESSAGES = [{"role": "user", "content": "Tell me three things about rivers."}]
USAGE_KEYS = {"prompt_tokens", "completion_tokens", "input_tokens", "output_tokens"}


class Outcome(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def goodgate(*words: str, home: Path) -> Outcome:
    """The command, in this process: a new one takes a second to start."""
    environment = {"GOODGATE_HOME": str(home), "COLUMNS": "200"}
    result = CliRunner().invoke(build([*words]), words, env=environment, catch_exceptions=False)
    return Outcome(result.exit_code, result.stdout, result.stderr)


def ask(url: str, path: str, body: Mapping[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    """The status and the usage that an answer told, streamed or not, by the ledger's names."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if not body.get("stream"):
        told = json.loads(text).get("usage") or {}
        return response.status, _by_our_names(told)
    told = {}
    for line in text.splitlines():
        if line.startswith("data: {"):
            told.update(_usage_within(json.loads(line.removeprefix("data: "))))
    return response.status, _by_our_names(told)


def _usage_within(event: Mapping[str, Any]) -> dict[str, int]:
    """OpenAI's chunks have it at the top, the events of the other dialects within an object."""
    found: dict[str, int] = {}
    for holder in (event, event.get("message"), event.get("response")):
        if isinstance(holder, dict) and holder.get("usage"):
            found.update({name: count for name, count in holder["usage"].items() if name in USAGE_KEYS})
    return found


def _by_our_names(told: Mapping[str, Any]) -> dict[str, int]:
    return {
        "prompt_tokens": told.get("prompt_tokens", told.get("input_tokens", 0)),
        "completion_tokens": told.get("completion_tokens", told.get("output_tokens", 0)),
    }


def bodies(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ten requests: every dialect, whole and streamed, several choices and prompts, vectors, and refusals."""
    chat = {"model": name, "messages": MESSAGES}
    for stream in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        yield "/v1/chat/completions", {**chat, **stream}
        yield "/v1/completions", {"model": name, "prompt": ["one two", "three"], "max_tokens": 4, "n": 2, **stream}
    for stream in (False, True):
        yield "/v1/messages", {**chat, "max_tokens": 5, "stream": stream}
        yield "/v1/responses", {"model": name, "input": "What is a river?", "stream": stream}
    yield "/v1/embeddings", {"model": name, "input": ["a b c", "d"]}
    yield "/v1/chat/completions", {**chat, "temperature": "hot"}


def usage_of(home: Path, *words: str) -> dict[str, Any]:
    result = goodgate("usage", "--json", *words, home=home)
    assert (result.returncode, result.stderr) == (0, "")
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def await_requests(home: Path, number: int) -> dict[str, Any]:
    """The sums, once so many requests are in the ledger."""
    deadline = time.monotonic() + PATIENCE_S
    while (data := usage_of(home, "--by", "tenant,model"))["total"] is None or data["total"]["requests"] < number:
        assert time.monotonic() < deadline, data
        time.sleep(0.05)
    return data


@pytest.mark.parametrize("words", [[], ["--workers", "2"]], ids=["one process", "two workers"])
def test_the_sums_of_mixed_requests_equal_what_the_answers_told(tmp_path: Path, words: list[str]) -> None:
    secrets = {
        tenant: KeyStore(tmp_path).create(NewKey(name=f"{tenant}-key", tenant=tenant)) for tenant in ("a", "b", "c")
    }
    config = write_config(
        tmp_path,
        model(fake("broken", fail_rate=1), name="small", fallbacks=["big"]),
        model(fake("good", tokens=9), name="big"),
        server={"port": free_port()},
    )
    told: dict[tuple[str, str], Counter[str]] = {}
    with running(config, *words, home=tmp_path) as (process, url):
        await_ready(url)
        for tenant, name in (("a", "big"), ("b", "small"), ("c", "big")):
            for path, body in bodies(name):
                status, usage = ask(url, path, body, Authorization=f"Bearer {secrets[tenant]}")
                # Vectors have no fallback, and a refused request reached no model.
                answered = "big" if status == 200 else name if path == "/v1/embeddings" else ""
                count = told.setdefault((tenant, answered), Counter())
                count.update(usage)
                count.update(requests=1, failed=status != 200)
        data = await_requests(tmp_path, 30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    figures = ("requests", "failed", "prompt_tokens", "completion_tokens")
    kept = {(row["tenant"], row["model"]): {name: row[name] for name in figures} for row in data["rows"]}
    assert kept == {group: {name: count[name] for name in figures} for group, count in told.items()}
    assert data["total"]["requests"] == 30
    assert data["total"]["completion_tokens"] == sum(count["completion_tokens"] for count in told.values()) > 200
    assert (data["total"]["left"], data["total"]["estimated"]) == (0, 0)


def test_what_a_killed_gateway_had_written_is_there_and_the_next_one_goes_on(tmp_path: Path) -> None:
    config = write_config(tmp_path, model(fake(tokens=3)))
    body = {"model": "m", "messages": MESSAGES}
    for number in (1, 2):
        with running(config, home=tmp_path) as (process, url):
            await_ready(url)
            assert ask(url, "/v1/chat/completions", body)[0] == 200
            await_requests(tmp_path, number)
            os.kill(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)
    assert usage_of(tmp_path)["total"]["completion_tokens"] == 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger of two days: ten usual requests, a slow one, one that failed, one that left, and an id used twice."""
    home: Path = tmp_path_factory.mktemp("home")
    clock = Clock(time.time())
    ledger = Ledger(LedgerConfig(), home / FOLDER, clock=clock)
    ledger.open()
    for number in range(10):
        ledger.note(ended_trace(f"usual-{number}", received=clock.now - 100 + number))
    slow = ended_trace("slow", received=clock.now - 10, ended=9.25)
    slow.attempts[0].first_token, slow.attempts[0].ended = 8.0, 9.0
    ledger.note(slow)
    ledger.note(ended_trace("failed", received=clock.now - 9, status=503, code="engine_unavailable", attempts=[]))
    left = ended_trace("left", received=clock.now - 8, status=499, num_pieces=20)
    left.attempts[0].outcome, left.attempts[0].usage = "cancelled", None
    ledger.note(left)
    ledger.note(ended_trace("twice", received=clock.now - 3 * 86_400, completion_tokens=1))
    ledger.note(ended_trace("twice", received=clock.now - 7, completion_tokens=2))
    ledger.close()
    return home


def test_usage_is_a_table_with_a_total(home: Path) -> None:
    result = goodgate("usage", "--by", "model,day", home=home)
    assert (result.returncode, result.stderr) == (0, "")
    title, *rows, line, total, remark = result.stdout.splitlines()
    assert title.split()[:5] == ["model", "day", "requests", "failed", "left"]
    assert len(rows) == 2
    assert set(line) == {"─"}
    assert total.split()[:4] == ["total", "15", "1", "1"]
    assert remark == "Tokens of 1 request are estimated: no engine has counted them."


def test_usage_of_a_time_a_tenant_and_a_model(home: Path) -> None:
    assert usage_of(home, "--since", "1d")["total"]["requests"] == 14
    assert usage_of(home, "--until", "1d")["total"]["requests"] == 1
    assert usage_of(home, "--since", "2000-01-01", "--until", "2000-02-01T12:00") == {
        "by": BY,
        "rows": [],
        "total": None,
    }
    assert usage_of(home, "--tenant", "nobody")["total"] is None
    assert usage_of(home, "--model", "m")["total"]["requests"] == 15
    none = goodgate("usage", "--model", "other", home=home)
    assert (none.returncode, none.stdout) == (0, "")
    assert "There are no such requests in" in none.stderr


BY = ["tenant", "model", "day"]


def test_usage_as_csv_has_a_line_for_its_columns_even_when_it_is_empty(home: Path) -> None:
    result = goodgate("usage", "--by", "replica", "--csv", home=home)
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [(row["replica"], row["requests"], row["failed"]) for row in rows] == [("", "1", "1"), ("e-0", "14", "0")]
    empty = goodgate("usage", "--by", "replica", "--csv", "--tenant", "nobody", home=home)
    assert empty.stdout == result.stdout.splitlines(keepends=True)[0]


def test_why_tells_the_verdict_first(home: Path) -> None:
    result = goodgate("why", "slow", home=home)
    assert (result.returncode, result.stderr) == (0, "")
    first, _, head, *story = result.stdout.splitlines()
    assert first == "Slow to its first token (TTFT): 6.50 s of 7.00 s were prefill on e-0, where 500 ms is usual."
    assert head == "slow  POST /v1/chat/completions  200  whole"
    assert any(line.startswith("  prefill  6.50 s") and "usual: 500 ms (median of 10" in line for line in story)


def test_why_as_json_has_the_whole_record(home: Path) -> None:
    data = json.loads(goodgate("why", "slow", "--json", home=home).stdout)
    assert data["verdict"].startswith("Slow to its first token")
    assert data["usual"] == {"count": 10, "prefill_s": 0.5, "tpot_s": 0.25}
    assert (data["prefill_s"], data["detail"]["attempts"][0]["replica"]) == (6.5, "e-0")


def test_why_last_and_why_slowest(home: Path) -> None:
    assert "twice  POST" in goodgate("why", "--last", home=home).stdout
    lines = goodgate("why", "--slowest", "2", home=home).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["request", "slow", "failed"] or lines[1].startswith("slow")
    assert len(lines) == 3
    assert len(json.loads(goodgate("why", "--slowest", "99", "--json", "--since", "2d", home=home).stdout)) == 14


def test_an_id_that_several_requests_have_is_said_to_be_one(home: Path) -> None:
    result = goodgate("why", "twice", home=home)
    assert result.stderr == "2 requests have this id. This is the newest.\n"
    assert "2 completion tokens" in result.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["why", "nope"], "There is no request 'nope' in {folder}, which goes back to "),
        (["why", "usual"], "There is no request 'usual' in {folder}; ids that begin so: usual-0, usual-1, usual-2, "),
        (["why", "slow", "--tenant", "x"], "There is no request 'slow' of tenant 'x' in {folder}, which goes back to "),
        (["why"], "Name one request by its id, or ask for --last or --slowest NUMBER."),
        (["why", "slow", "--last"], "Name one request by its id, or ask for --last or --slowest NUMBER."),
        (["why", "slow", "--since", "1h"], "--since goes with --slowest."),
        (["usage", "--by", "moon"], "Nothing can be summed by 'moon'; there is: tenant, key, model, "),
        (["usage", "--since", "yesterday"], "'yesterday' is no time; write 2026-11-30, "),
        (["usage", "--since", "0h"], "'0h' is no time; write "),
        (["usage", "--since", "1h", "--until", "2h"], "--until must be after --since;"),
        (["usage", "--json", "--csv"], "Choose one of --json and --csv."),
    ],
)
def test_what_cannot_be_answered_is_one_sentence_and_exit_1(home: Path, words: list[str], sentence: str) -> None:
    result = goodgate(*words, home=home)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(sentence.format(folder=home / FOLDER))
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["why", "--last"], ["why", "x"]])
def test_a_home_without_a_ledger_is_asked_about(tmp_path: Path, words: list[str]) -> None:
    result = goodgate(*words, home=tmp_path)
    assert result.returncode == 1
    assert (
        "is GOODGATE_HOME that of the gateway, and does its configuration say `ledger: {keep: file}`?" in result.stderr
    )
    assert not list(tmp_path.iterdir())


def test_a_broken_file_is_named_and_the_others_are_summed_up(tmp_path: Path) -> None:
    with_one = Ledger(LedgerConfig(), tmp_path / FOLDER, clock=Clock())
    with_one.open()
    with_one.note(ended_trace(received=NOON))
    with_one.close()
    (tmp_path / FOLDER / "2026-11-29.0000.sqlite").write_text("no database " * 100)
    result = goodgate("usage", home=tmp_path)
    assert result.returncode == 0
    assert result.stderr.startswith("Left out 2026-11-29.0000.sqlite, which cannot be read: ")
    assert result.stdout.splitlines()[-1].split()[:2] == ["total", "1"]


@pytest.mark.parametrize("command", ["usage", "why"])
def test_the_commands_have_help_with_an_example(tmp_path: Path, command: str) -> None:
    result = goodgate(command, "--help", home=tmp_path)
    assert result.returncode == 0
    assert f"Example: goodgate {command}" in result.stdout
