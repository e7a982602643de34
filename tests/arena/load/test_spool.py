"""The spool is the truth until it is ingested: it survives a crash at any byte, and is never believed incomplete."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arena.load import spool
from arena.load.loadgen import spool_header
from arena.load.plan import CellPlan, Target
from arena.load.scripted_engine import Script
from arena.load.spool import RequestRow, SpoolError, SpoolFooter, SpoolWriter
from tests.arena.cells import MS, plan_of

PLAN = plan_of([(index, Script(steps=[])) for index in range(5)])
TARGET = Target("http://127.0.0.1:1", "m", "engine")


def row(seq: int, **changes: object) -> RequestRow:
    scheduled_ns = PLAN.requests[seq].scheduled_ns
    base = RequestRow(
        seq=seq, measured=True, prompt_id=f"prompt-{seq}", max_tokens=8, scheduled_ns=scheduled_ns, status="ok"
    )
    return msgspec.structs.replace(base, **changes)


def write(path: Path, *rows: RequestRow) -> SpoolWriter:
    writer = SpoolWriter(path)
    writer.write(spool_header(TARGET, PLAN))
    for each in rows:
        writer.write(each)
    return writer


def footer(requests: int) -> SpoolFooter:
    return SpoolFooter(requests=requests, max_in_flight=1, connections_opened=1, cooldown_exhausted=False)


def request_rows(path: Path) -> list[RequestRow]:
    return [each for each in spool.read_rows(path) if isinstance(each, RequestRow)]


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    full = row(
        1, sent_ns=5, token_ns=[1, 2], token_n=[1, 4], token_kind=[0, 2], status="error", err_message='a "b"\n\u2028'
    )
    writer = write(tmp_path / "s", row(0), full)
    writer.finish(footer(writer.num_requests))
    assert request_rows(tmp_path / "s") == [row(0), full]
    spool.verify(tmp_path / "s")


def test_a_spool_without_its_marker_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path / "s", row(0)).close()
    assert not spool.is_complete(tmp_path / "s")
    with pytest.raises(SpoolError, match="no done marker"):
        spool.verify(tmp_path / "s")


def test_a_spool_changed_after_its_end_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path / "s", row(0)).finish(footer(1))
    content = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(content.replace(b'"seq":0', b'"seq":1'))
    with pytest.raises(SpoolError, match="has changed"):
        spool.verify(tmp_path / "s")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 2000))
def test_a_crash_at_any_byte_leaves_a_row_for_every_request(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "s"
    spool.remove(path)
    write(path, row(0, status="error"), row(3, token_ns=list(range(40)))).close()
    path.write_bytes(path.read_bytes()[:cut])
    spool.account_for_missing(path, PLAN, spool_header(TARGET, PLAN), "killed")
    rows = {each.seq: each for each in request_rows(path)}
    assert set(rows) == set(range(5))
    assert all(rows[seq].status in ("unsent", {0: "error", 3: "ok"}.get(seq)) for seq in rows)
    assert {rows[seq].err_class for seq in (1, 2, 4)} == {"client_died"}
    last = list(spool.read_rows(path))[-1]
    assert isinstance(last, SpoolFooter)
    assert (last.requests, last.aborted) == (5, "killed")
    spool.verify(path)


def test_cool_down_requests_that_never_left_are_nobodys_miss(tmp_path: Path) -> None:
    plan = CellPlan("cell", "constant", 1.0, 0, 2 * MS, PLAN.requests)
    spool.account_for_missing(tmp_path / "s", plan, spool_header(TARGET, plan), "killed")
    assert [each.seq for each in request_rows(tmp_path / "s")] == [0, 1]


def test_an_older_spool_takes_its_marker_and_plan_with_it(tmp_path: Path) -> None:
    write(tmp_path / "s", row(0)).finish(footer(1))
    PLAN.write(spool.plan_file(tmp_path / "s"))
    spool.remove(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
