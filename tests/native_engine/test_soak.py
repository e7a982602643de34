"""Some seconds of the soak that `python -m tests.native_engine.soak` runs for as long as one likes."""

from __future__ import annotations

from rich.console import Console

from tests.native_engine.soak import BLOCKS, soak


def test_arrivals_aborts_and_forks_in_a_tiny_pool_leave_no_block_and_change_no_token() -> None:
    run = soak(minutes=0.05, seed=2, console=Console(quiet=True))
    assert run.counts["compared"] > 10
    assert run.counts["aborted"] > 0
    assert run.counts["forks"] > 0
    assert run.counts["branches"] > 0
    assert run.engine.stats().kv_blocks_total == BLOCKS
    assert run.engine.stats().num_preemptions > 0
