"""Locust's page shows what the spools say: each request once, no cut-off cool-down as failure, parts not twice."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arena.load.spool import SpoolWriter, worker_file
from arena.load.spool_follower import Follower
from arena.race.web import WebError, web_view
from tests.arena.records.test_store import answer, failure

ROWS = [
    answer(0, ttft_ms=100, gaps_ms=(50, 50)),
    answer(1, ttft_ms=80, gaps_ms=(60, 60)),
    failure(2, done_ns=42_000_000),
]


def written(path: Path, rows: list[Any]) -> SpoolWriter:
    writer = SpoolWriter(path)
    for row in rows:
        writer.write(row)
    return writer


def test_a_growing_spool_is_read_once_and_never_half_a_line(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert list(follower.rows()) == []
    path = tmp_path / "a-8rps-0.jsonl"
    writer = written(path, ROWS[:1])
    with path.open("ab") as file:
        line = msgspec.json.encode(ROWS[1]) + b"\n"
        file.write(line[:40])
        file.flush()
        assert [row.seq for _, row in follower.rows()] == [0]
        file.write(line[40:])
        file.flush()
        assert [(cell, row.seq) for cell, row in follower.rows()] == [("a-8rps-0", 1)]
    writer.close()
    assert list(follower.rows()) == []


def test_a_cell_of_several_processes_is_not_counted_again_when_its_parts_are_merged(tmp_path: Path) -> None:
    follower, path = Follower(tmp_path), tmp_path / "a-8rps-0.jsonl"
    for worker in range(2):
        written(worker_file(path, worker), ROWS[worker : worker + 1]).close()
    assert sorted(row.seq for _, row in follower.rows()) == [0, 1]
    for worker in range(2):
        worker_file(path, worker).unlink()
    written(path, ROWS).close()
    assert list(follower.rows()) == []


def test_the_page_has_the_figures_of_the_rows(tmp_path: Path) -> None:
    cut = failure(3, measured=False, status="cancelled")
    written(tmp_path / "a-8rps-0.jsonl", [*ROWS, cut]).close()
    with web_view(tmp_path, 0) as url:
        deadline = time.monotonic() + 30
        while not (stats := _stats(url))[:-1]:
            assert time.monotonic() < deadline, "the rows never reach the page"
            time.sleep(0.2)
        with urllib.request.urlopen(url, timeout=10) as page:
            assert b"Locust" in page.read()
    entry = stats[0]
    assert (entry["name"], entry["num_requests"], entry["num_failures"]) == ("a-8rps-0", 3, 1)
    assert entry["avg_response_time"] == pytest.approx((200 + 200 + 40) / 3)
    assert entry["median_response_time"] == pytest.approx(200)


def _stats(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/stats/requests", timeout=10) as answered:
        found: list[dict[str, Any]] = json.load(answered)["stats"]
    return found


def test_a_port_that_is_taken_is_told_in_a_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with (
            pytest.raises(WebError, match=r"cannot be served on port \d+: .*in use"),
            web_view(tmp_path, taken.getsockname()[1]),
        ):
            pass
