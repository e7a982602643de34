"""Every fault has a test, every mark a fault, and the page says so."""

from __future__ import annotations

from tests.native_engine.faults import FAULTS, page
from tests.replays import ROOT, replays


def test_every_fault_of_other_engines_is_replayed_and_every_mark_names_one() -> None:
    marked = {replay.fault for replay in replays() if replay.fault.startswith("E")}
    assert marked == FAULTS.keys()


def test_the_page_of_engine_faults_is_as_the_tests_are() -> None:
    assert (ROOT / "docs/engine-faults.md").read_text() == page(), "python -m tests.native_engine.faults > docs/..."
