"""Every fault that is known has a test that replays it, or a reason why not; and the page says which."""

from __future__ import annotations

from tests.replays import ROOT, replays
from tests.wire_faults import FAULTS, page

MARKED = [replay for replay in replays() if replay.fault.startswith("W")]


def test_every_fault_is_replayed_or_open_for_a_reason() -> None:
    replayed = {replay.fault for replay in MARKED}
    assert replayed <= set(FAULTS), f"no such fault: {sorted(replayed - set(FAULTS))}"
    assert {number for number, fault in FAULTS.items() if not fault.open} == replayed


def test_the_page_lists_the_tests_that_are_marked() -> None:
    told = (ROOT / "docs/wire-faults.md").read_text()
    assert told == page(), "run: python -m tests.wire_faults > docs/wire-faults.md"


def test_what_concerns_streams_is_replayed_through_the_gateway_too() -> None:
    """An adapter that gets it right helps nobody whose gateway does not."""
    rooms = {}
    for replay in MARKED:
        rooms.setdefault(replay.fault, set()).add(replay.file.split("/")[1])
    in_sight = {"W02", "W03", "W07", "W08", "W14", "W16", "W17", "W18", "W22", "W23", "W24", "W25"}
    assert not {fault for fault in in_sight if "gateway" not in rooms[fault]}
