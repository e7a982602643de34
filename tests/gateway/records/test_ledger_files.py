"""The ledger's files: rotation, bounds, several writers, and disks and files that are not as they should be."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import sqlite3
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from adapters.types import Usage
from gateway.config import LedgerConfig
from gateway.records import ledger as ledger_module
from gateway.records import ledger_files
from gateway.records.ledger import Ledger
from gateway.records.ledger_files import Segment, segment_to_write, segments, segments_to_delete
from gateway.records.ledger_reader import LedgerReader, Span
from gateway.records.record import COLUMNS
from gateway.records.trace import Attempt, Trace

PATIENCE_S = 20
TODAY = date(2026, 11, 30)
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
SMALL = LedgerConfig(max_mib=8)


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "FLUSH_S", 0.02)
    monkeypatch.setattr(ledger_module, "RETRY_S", 0.05)


def ended_trace(request_id: str = "r", **fields: Any) -> Trace:
    attempt = Attempt(model="m", engine="e", replica="e-0", started=1.5, first_token=2.0, ended=3.0, outcome="ok")
    attempt.usage = Usage(3, 5)
    values: dict[str, Any] = {
        "route": "/v1/chat/completions",
        "method": "POST",
        "is_let_in": True,
        "started": 1.0,
        "body_read": 1.25,
        "ended": 3.25,
        "status": 200,
        "asked_model": "m",
        "model": "m",
        "attempts": [attempt],
        "prompt_tokens": 3,
        "completion_tokens": 5,
        **fields,
    }
    return Trace(request_id=request_id, **values)


class Clock:
    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@contextmanager
def open_ledger(folder: Path, config: LedgerConfig = SMALL, clock: Clock | None = None) -> Iterator[Ledger]:
    ledger = Ledger(config, folder, clock=clock or Clock())
    ledger.open()
    try:
        yield ledger
    finally:
        ledger.close()


def await_written(ledger: Ledger, number: int) -> None:
    wait_until(lambda: ledger.num_written == number)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_kept(folder: Path) -> int:
    _, total = LedgerReader(folder).usage((), Span())
    return 0 if total is None else total.requests


def test_what_waits_is_written_when_the_ledger_closes(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        for number in range(1234):
            ledger.note(ended_trace(str(number)))
    assert [path.name for path in tmp_path.iterdir()] == ["2026-11-30.0000.sqlite"]  # nothing of SQLite's beside it
    assert num_kept(tmp_path) == ledger.num_written == 1234


def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with open_ledger(tmp_path / "ledger") as ledger:
            ledger.note(ended_trace())
            await_written(ledger, 1)
            files = list((tmp_path / "ledger").iterdir())
            assert len(files) == 3
            assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
            assert stat.S_IMODE((tmp_path / "ledger").stat().st_mode) == 0o700
    finally:
        os.umask(previous)


def test_each_day_has_a_file_and_old_ones_go_whole(tmp_path: Path) -> None:
    clock = Clock()
    with open_ledger(tmp_path, LedgerConfig(keep_days=2), clock) as ledger:
        for day in range(4):
            clock.now = NOON + day * 86_400
            ledger.note(ended_trace(f"day {day}", received=clock.now))
            await_written(ledger, day + 1)
    assert [str(segment.day) for segment in segments(tmp_path)] == ["2026-12-02", "2026-12-03"]
    assert LedgerReader(tmp_path).find("day 1") is None
    assert LedgerReader(tmp_path).find("day 2") is not None


def test_a_full_day_goes_on_in_another_file_and_all_stay_within_the_bound(tmp_path: Path) -> None:
    reason = [Attempt(model="m", engine="e", replica="e-0", started=1.5, ended=3.0, outcome="x", reason="y" * 500)] * 8
    with open_ledger(tmp_path) as ledger:
        for batch in range(1, 13):
            for number in range(300):
                ledger.note(ended_trace(f"{batch}-{number}", attempts=reason))
            await_written(ledger, batch * 300)
    numbers = [segment.number for segment in segments(tmp_path)]
    assert len(numbers) > 2
    assert numbers[0] > 0  # the first ones had to go
    assert sum(segment.size for segment in segments(tmp_path)) <= SMALL.max_mib << 20
    assert LedgerReader(tmp_path).find("12-299") is not None
    assert LedgerReader(tmp_path).find("1-0") is None


@pytest.mark.replay("G09")
def test_g09_letting_go_of_a_million_records_loads_none_of_them(tmp_path: Path) -> None:
    old = Segment(TODAY - timedelta(days=400), 0)
    with closing(ledger_files.connect_to_write(tmp_path / old.name)) as db:
        db.execute("DROP INDEX by_id")
        db.execute("DROP INDEX by_time")
        db.execute("PRAGMA synchronous = OFF")
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000)"
        db.execute(f"INSERT INTO requests (request_id, received, detail) {numbers} SELECT 'old', 0.0, '' FROM n")
        assert db.execute("SELECT COUNT(*) FROM requests").fetchone() == (1_000_000,)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open_ledger(tmp_path, LedgerConfig()) as ledger:
        ledger.note(ended_trace("new", received=NOON))
        await_written(ledger, 1)
    assert [segment.day for segment in segments(tmp_path)] == [TODAY]
    assert not list(tmp_path.glob(f"{old.name}*"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 16 << 10


def test_what_is_deleted_is_decided_by_age_and_size() -> None:
    part = (SMALL.max_mib << 20) // ledger_files.PARTS
    days = [Segment(TODAY - timedelta(days=age), 0, part) for age in range(9, -1, -1)]
    assert segments_to_delete(days, TODAY, SMALL) == days[:3]  # seven parts are kept, and one may still fill
    assert segments_to_delete(days[-7:], TODAY, SMALL) == []
    assert segments_to_delete(days[-7:], TODAY, LedgerConfig(keep_days=1)) == days[-7:-1]
    assert segments_to_delete([], TODAY, SMALL) == []


def test_the_next_file_is_begun_when_the_last_one_is_full() -> None:
    part = (SMALL.max_mib << 20) // ledger_files.PARTS
    assert segment_to_write([], TODAY, SMALL).name == "2026-11-30.0000.sqlite"
    assert segment_to_write([Segment(TODAY, 3, part - 1)], TODAY, SMALL).number == 3
    assert segment_to_write([Segment(TODAY, 3, part)], TODAY, SMALL).number == 4
    assert segment_to_write([Segment(TODAY - timedelta(days=1), 7)], TODAY, SMALL).number == 0
    assert segment_to_write([Segment(TODAY, ledger_files.MAX_NUMBER, part)], TODAY, SMALL).number == 9999


def test_files_of_strangers_are_left_alone(tmp_path: Path) -> None:
    strangers = ["2026-02-31.0000.sqlite", "notes.txt", "2026-11-30.sqlite"]
    for name in strangers:
        (tmp_path / name).write_text("mine")
    with open_ledger(tmp_path) as ledger:
        ledger.note(ended_trace())
    assert {path.name for path in tmp_path.iterdir()} == {*strangers, "2026-11-30.0000.sqlite"}


@pytest.mark.parametrize("content", [b"no database " * 1000, b""])
def test_a_file_that_is_no_ledger_is_passed_over(tmp_path: Path, content: bytes) -> None:
    broken = tmp_path / "2026-11-30.0000.sqlite"
    broken.write_bytes(content)
    with open_ledger(tmp_path) as ledger:
        ledger.note(ended_trace())
    assert num_kept(tmp_path) == 1
    if content:
        assert broken.read_bytes() == content


def test_a_file_with_other_columns_has_another_layout() -> None:
    assert 0 < ledger_files.LAYOUT < 2**31  # what SQLite has room for
    assert zlib.crc32(",".join((*COLUMNS, "one_more")).encode()) >> 1 != ledger_files.LAYOUT


def test_a_file_that_is_being_made_is_no_broken_one(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        ledger.note(ended_trace())
    (tmp_path / "2026-11-30.0001.sqlite").touch()
    reader = LedgerReader(tmp_path)
    assert reader.newest() is not None
    assert reader.skipped == {}


def test_a_file_of_another_version_is_neither_written_nor_read(tmp_path: Path) -> None:
    path = tmp_path / "2026-11-30.0000.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE requests (what)")
        db.execute("PRAGMA user_version = 99")
    with open_ledger(tmp_path) as ledger:
        ledger.note(ended_trace())
    reader = LedgerReader(tmp_path)
    assert reader.newest() is not None
    assert list(reader.skipped) == [path.name]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT COUNT(*) FROM requests").fetchone() == (0,)


def test_a_file_that_is_damaged_while_it_is_written_is_left_for_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with open_ledger(tmp_path, clock=clock) as ledger:
        ledger.note(ended_trace("before"))
        await_written(ledger, 1)
        clock.now += 86_400  # the file is closed, with nothing beside it
        ledger.note(ended_trace("next day"))
        await_written(ledger, 2)
        clock.now -= 86_400
        path = tmp_path / "2026-11-30.0000.sqlite"
        content = bytearray(path.read_bytes())
        content[4096:] = b"\xff" * (len(content) - 4096)
        path.write_bytes(content)
        ledger.note(ended_trace("after"))
        await_written(ledger, 3)
    assert LedgerReader(tmp_path).find("after") is not None
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert vars(warning)["fields"]["reason"].endswith("another file is begun")


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        ledger.note(ended_trace("before"))
        await_written(ledger, 1)
        for path in tmp_path.iterdir():
            path.unlink()
        ledger.note(ended_trace("after"))
        await_written(ledger, 2)
        assert num_kept(tmp_path) == 1


@pytest.mark.replay("F24")
def test_records_wait_for_a_disk_up_to_a_bound_and_the_rest_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "MAX_WAITING", 10)
    caplog.set_level(logging.INFO)
    folder = tmp_path / "ledger"
    folder.write_text("in the way")
    with open_ledger(folder) as ledger:
        ledger.note(ended_trace())
        wait_until(lambda: "the ledger cannot be written" in caplog.text)
        for number in range(30):
            ledger.note(ended_trace(str(number)))
        assert 19 <= ledger.num_dropped <= 21  # one more may wait in the thread's hands
        folder.unlink()
        wait_until(lambda: ledger.num_written + ledger.num_dropped == 31)
    assert caplog.text.count("the ledger cannot be written") == 1
    assert caplog.text.count("the ledger drops records") == 1
    assert caplog.text.count("the ledger is written again") == 1
    assert num_kept(folder) == ledger.num_written


def test_a_record_that_cannot_be_made_does_not_stop_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_ledger(tmp_path) as ledger:
        ledger.note(ended_trace(attempts=[None]))
        wait_until(lambda: ledger.num_dropped == 1)
        ledger.note(ended_trace("good"))
        await_written(ledger, 1)
    assert "records of requests are lost" in caplog.text
    assert num_kept(tmp_path) == 1


def test_an_engine_that_tells_absurd_counts_breaks_no_sum(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        for count in (2**62, 2**200, -5):
            ledger.note(ended_trace(prompt_tokens=count, cached_tokens=count))
    _, total = LedgerReader(tmp_path).usage((), Span())
    assert total is not None
    assert total.prompt_tokens == total.cached_tokens == 2 * 10**12


def test_text_that_is_not_unicode_is_kept_as_far_as_it_is(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        ledger.note(ended_trace(asked_model="a\ud800b", prompt_tokens=3))
    record = LedgerReader(tmp_path).newest()
    assert record is not None
    assert record.asked_model == "a?b"


def write_many(folder: Path, name: str, number: int) -> None:
    with open_ledger(folder) as ledger:
        for each in range(number):
            ledger.note(ended_trace(f"{name}-{each}"))
            if each % 50 == 0:
                time.sleep(0.01)
    assert ledger.num_dropped == 0


def test_several_processes_write_into_the_same_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(tmp_path, name, 500)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(PATIENCE_S)
        assert writer.exitcode == 0
    assert num_kept(tmp_path) == 1000
    assert [segment.number for segment in segments(tmp_path)] == [0]


def write_until_killed(folder: Path) -> None:
    ledger = Ledger(SMALL, folder, clock=Clock())
    ledger.open()
    ledger.note(ended_trace("kept"))
    await_written(ledger, 1)
    (folder / "written").touch()
    while True:
        ledger.note(ended_trace("perhaps"))
        time.sleep(0.001)


def test_what_was_written_survives_a_killed_gateway(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=write_until_killed, args=(tmp_path,))
    process.start()
    wait_until((tmp_path / "written").exists)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE_S)
    found = LedgerReader(tmp_path).find("kept")
    assert found is not None
    with open_ledger(tmp_path) as ledger:  # and the next one goes on in the same file
        ledger.note(ended_trace("next"))
    assert LedgerReader(tmp_path).find("next") is not None
    assert [segment.number for segment in segments(tmp_path)] == [0]


def test_the_columns_have_the_types_of_the_record(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        ledger.note(ended_trace(cached_tokens=2, code="x"))
    record = LedgerReader(tmp_path).newest()
    assert record is not None
    assert len(COLUMNS) == 32
    assert (record.cached_tokens, record.reasoning_tokens, record.is_stream) == (2, None, False)
    assert record.phases == {
        "receive": 0.25,
        "gateway": 0.5,
        "queue": 0.0,
        "failed": 0.0,
        "prefill": 0.5,
        "decode": 1.0,
        "client": 0.0,
    }
