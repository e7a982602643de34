"""Every fault of another benchmark that is known has a test that replays it, and the page says which."""

from __future__ import annotations

from tests.arena.faults import FAULTS, page
from tests.replays import ROOT, replays


def test_every_fault_is_replayed_or_open_for_a_reason() -> None:
    replayed = {replay.fault for replay in replays() if replay.fault in FAULTS}
    assert {number for number, fault in FAULTS.items() if not fault.open} == replayed


def test_the_page_lists_the_tests_that_are_marked() -> None:
    told = (ROOT / "docs/arena-faults.md").read_text()
    assert told == page(), "run: python -m tests.arena.faults > docs/arena-faults.md"
