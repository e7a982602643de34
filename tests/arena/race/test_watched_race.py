"""A race that programs and people watch from outside: events on stdout, locust's page on a port."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from arena.commands.cli import app
from arena.load import spool
from arena.load.spool import RequestRow
from tests.arena.race.test_bakeoff import scripted

SCENARIO = """
name: scripted
model: fake
workload: {kind: synthetic, prompt: {kind: fixed, tokens: 20}, output: {kind: fixed, tokens: 8}}
slo: {ttft_ms: 30000, tpot_ms: 500}
search: {start_rps: 4, step: 2, stride: 1, max_rps: 200, max_cells: 2, max_replicates: 1, burst: 4}
cell: {warmup_s: 0.1, duration_s: 1.5, settle_s: 1.5}
"""


@pytest.fixture
def server() -> Iterator[str]:
    with scripted("--ttft-ms", "30", "--itl-ms", "5") as url:
        yield url


@pytest.mark.slow
def test_events_tell_the_race_and_the_page_shows_the_rows_that_were_judged(server: str, tmp_path: Path) -> None:
    scenario, out = tmp_path / "scripted.yaml", tmp_path / "race"
    scenario.write_text(SCENARIO)
    options = ["--targets", f"one={server}", "--out", str(out), "--events", "--web", "0", "--no-calibration"]
    command = [sys.executable, "-m", "arena.commands.cli", "run", str(scenario), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = next(
            found[0] for line in process.stderr if (found := re.findall(r"http://127\.0\.0\.1:\d+$", line.strip()))
        )
        events, shown = [], {}
        for line in process.stdout:
            events.append(json.loads(line))
            if events[-1]["event"] == "cell_judged" and not shown:
                shown = shown_of(url, events[-1]["cell"], len(rows_of(out, events[-1]["cell"])))
        process.stderr.read()
    assert process.returncode == 0, events[-1]
    judged = [event for event in events if event["event"] == "cell_judged"]
    assert [event["engine"] for event in judged] == ["one"] * len(judged)
    assert {event["event"] for event in events} >= {"engine_starting", "engine_ready", "cell_starting", "result"}
    assert events[-1]["summary"] == json.loads((out / "summary.json").read_text())
    ended = rows_of(out, judged[0]["cell"])
    assert shown["num_failures"] == sum(row.status != "ok" for row in ended)
    latencies = [((row.last_gen_ns or row.done_ns or 0) - row.scheduled_ns) / 1e6 for row in ended]
    assert shown["avg_response_time"] == pytest.approx(sum(latencies) / len(latencies), abs=0.01)
    with pytest.raises(OSError, match=r"."):  # the page goes when the race does
        urllib.request.urlopen(url, timeout=5)


def rows_of(out: Path, cell: str) -> list[RequestRow]:
    rows = spool.read_rows(out / "spool" / f"{cell}.jsonl")
    return [row for row in rows if isinstance(row, RequestRow) and row.status != "cancelled"]


def shown_of(url: str, cell: str, expected: int) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/stats/requests", timeout=10) as answered:
            entries = {entry["name"]: entry for entry in json.load(answered)["stats"]}
        if entries.get(cell, {}).get("num_requests") == expected:
            found: dict[str, Any] = entries[cell]
            return found
        time.sleep(0.2)
    raise AssertionError(f"the page never had the {expected} rows of {cell}")


def test_json_and_events_together_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "chat", "--json", "--events", "--targets", "a=http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "--events ends with the summary" in " ".join(result.output.split())
