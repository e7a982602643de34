"""Every fault that was reported has a test that replays it, or a reason why not; and the page says which."""

from __future__ import annotations

import re

from tests import wire_faults
from tests.arena import faults as arena_faults
from tests.fault_matrix import FAULT_MATRIX, SCENARIOS
from tests.native_engine import faults as engine_faults
from tests.reliability import page
from tests.replays import ROOT, replays
from tests.reported import ATTACKS, FAULTS

KNOWN = {**FAULTS, **ATTACKS, **FAULT_MATRIX, **SCENARIOS}
OF_OTHER_PAGES = {**wire_faults.FAULTS, **arena_faults.FAULTS, **engine_faults.FAULTS}


def test_every_fault_is_replayed_or_open_for_a_reason() -> None:
    replayed = {replay.fault for replay in replays()}
    assert replayed <= {*KNOWN, *OF_OTHER_PAGES}, "a mark names a fault that is in no table"
    assert {number for number, fault in KNOWN.items() if not fault.open} == replayed - set(OF_OTHER_PAGES)


def test_a_test_that_is_named_after_a_fault_is_marked_with_it() -> None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        marked = {(replay.test, replay.fault) for replay in replays() if ROOT / replay.file == path}
        for name, fault in _named_in(path.read_text()):
            assert (name, fault) in marked, f'{path}: mark {name} with @pytest.mark.replay("{fault}")'


def _named_in(source: str) -> list[tuple[str, str]]:
    names = re.findall(r"def (test_\w+)\(", source)
    return [(name, fault.upper()) for name in names for fault in re.findall(r"(?<=_)([afgrs]\d\d)(?=_)", name)]


def test_the_page_lists_the_tests_that_are_marked() -> None:
    told = (ROOT / "docs/reliability.md").read_text()
    assert told == page(), "run: python -m tests.reliability > docs/reliability.md"
