"""What presses a process, by its state alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.pressure import RELIEF, Reading, files_to_drop_at, files_to_shed_at, pressing
from gateway.config import OverloadConfig

CONFIG = OverloadConfig(shed_at=0.8, max_loop_lag_ms=500)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("reading", "resource"),
    [
        (Reading(), None),
        (Reading(resident_bytes=799 * MIB, memory_limit=1000 * MIB), None),
        (Reading(resident_bytes=800 * MIB, memory_limit=1000 * MIB), "memory"),
        (Reading(resident_bytes=800 * MIB), None),  # nobody has said what it may have
        (Reading(open_files=799, files_limit=1000), None),
        (Reading(open_files=800, files_limit=1000), "files"),
        (Reading(open_files=10**6), None),
        (Reading(lag_s=0.499), None),
        (Reading(lag_s=0.5), "loop"),
        (Reading(0.5, 800 * MIB, 1000 * MIB, 800, 1000), "memory"),  # the system would kill it
    ],
)
def test_the_most_deadly_that_is_short_is_named(reading: Reading, resource: str | None) -> None:
    assert pressing(CONFIG, reading, None) == resource


@given(st.lists(st.integers(0, 1000), max_size=50))
def test_it_does_not_flap_about_its_threshold(counts: list[int]) -> None:
    """It begins at the threshold, and goes on until there is clearly room again."""
    was = None
    for count in counts:
        now = pressing(CONFIG, Reading(open_files=count, files_limit=1000), was)
        assert (now == "files") == (count >= 800 * (RELIEF if was == "files" else 1))
        was = now


@given(st.integers(1, 10**6), st.floats(0.01, 1))
def test_new_requests_go_before_new_connections(limit: int, shed_at: float) -> None:
    config = OverloadConfig(shed_at=shed_at)
    assert files_to_shed_at(config, limit) <= files_to_drop_at(config, limit) <= limit
