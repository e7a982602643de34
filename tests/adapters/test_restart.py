"""An engine that ends by itself comes back, with patience and not for ever, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.errors import EngineUnavailable
from adapters.launching.kept_alive import Change, GaveUp, Ready, Restarting, kept_alive
from adapters.launching.launch import EngineProcess
from adapters.launching.restart import DEFAULT, Crashes, Policy
from tests.adapters.engine_twin import Twin, parent_of, until

AT_ONCE = Policy(first_delay_s=0, last_delay_s=0)
LATER = Policy(first_delay_s=600, last_delay_s=600)

uptimes = st.none() | st.floats(min_value=0, max_value=1e6)


def delays(*lives: float | None, policy: Policy = DEFAULT) -> list[float | None]:
    """The delay after each of the lives, given how long each was up."""
    crashes, told = Crashes(), []
    for uptime_s in lives:
        crashes = crashes.and_one(uptime_s, policy)
        told.append(crashes.delay_s(policy))
    return told


@pytest.mark.parametrize(
    ("lives", "told"),
    [
        ([None] * 5, [1, 2, 4, 8, None]),  # it never becomes ready
        ([9.9] * 5, [1, 2, 4, 8, None]),
        ([10.0] * 6, [1, 2, 4, 8, 16, 30]),  # the limit itself is not quick any more
        ([20.0] * 7, [1, 2, 4, 8, 16, 30, 30]),  # it serves between its crashes: for ever
        ([None, 3, None, 20, None, 3], [1, 2, 4, 8, 16, 30]),  # not quick five times in a row
        ([20, 20, 20, 61, 20], [1, 2, 4, 1, 2]),  # a good while, and the past is forgotten
        ([None] * 4 + [3600.0] + [None] * 4, [1, 2, 4, 8, 1, 2, 4, 8, 16]),
        ([3600.0] + [None] * 5, [1, 2, 4, 8, 16, None]),
    ],
)
def test_the_delays_after_a_history_of_crashes(lives: list[float | None], told: list[float | None]) -> None:
    assert delays(*lives) == told


@settings(deadline=None)
@given(st.lists(uptimes, max_size=200))
def test_delays_are_bounded_and_grow_until_a_good_while(lives: list[float | None]) -> None:
    told = delays(*lives)
    for before, after, uptime_s in zip(told, told[1:], lives[1:], strict=False):
        if before is None or after is None:
            continue
        assert DEFAULT.first_delay_s <= after <= DEFAULT.last_delay_s
        if uptime_s is not None and uptime_s >= DEFAULT.settled_after_s:
            assert after == DEFAULT.first_delay_s
        else:
            assert after == min(2 * before, DEFAULT.last_delay_s)


@settings(deadline=None)
@given(st.lists(uptimes, max_size=60))
def test_only_quick_crashes_in_a_row_are_given_up(lives: list[float | None]) -> None:
    quick = [uptime_s is None or uptime_s < DEFAULT.quick_s for uptime_s in lives]
    for end, delay_s in enumerate(delays(*lives), start=1):
        assert (delay_s is None) == (end >= DEFAULT.max_quick and all(quick[end - DEFAULT.max_quick : end]))


@settings(deadline=None)
@given(st.integers(min_value=1, max_value=10**6))
def test_a_crash_every_twenty_seconds_for_years_still_has_a_delay(count: int) -> None:
    assert Crashes(in_a_row=count).delay_s() is not None


async def collect(changes: AsyncGenerator[Change, None]) -> tuple[list[Change], EngineUnavailable]:
    """All changes until the end, and the end."""
    seen: list[Change] = []
    try:
        async for change in changes:
            seen.append(change)
    except EngineUnavailable as error:
        return seen, error
    raise AssertionError("it ended without an error")


async def test_a_crash_while_serving_is_told_and_the_engine_is_back_on_its_port_after_the_delay(twin: Twin) -> None:
    process = twin.process()
    async with aclosing(kept_alive(process, Policy(first_delay_s=0.3))) as changes:
        assert isinstance(first := await anext(changes), Ready)
        assert 0 < first.after_s < 20
        twin.kill(signal.SIGSEGV)
        end = await anext(changes)
        assert isinstance(end, Restarting)
        assert end.delay_s == 0.3
        assert end.failure.for_records.startswith("twin was killed by SIGSEGV ")
        assert "\n" not in end.failure.for_records
        ended_at = time.monotonic()
        assert isinstance(await anext(changes), Ready)
        assert time.monotonic() - ended_at >= 0.3
        async with aiohttp.ClientSession() as client, client.get(process.url + "/health") as response:
            assert response.status == 200
    assert twin.alive() == []


async def test_a_crash_loop_is_given_up_with_the_code_the_last_lines_and_every_log_of_it(twin: Twin) -> None:
    seen, end = await collect(kept_alive(twin.process("dies"), AT_ONCE))
    assert isinstance(end, GaveUp)
    assert [type(change) for change in seen] == [Restarting] * 4
    assert "not started again after 5 quick crashes in a row" in end.message
    assert "exit code 3" in end.message
    assert "RuntimeError: the weights are not there" in end.message
    assert f"The whole log: {twin.log}" in end.message
    logs = sorted(path.name for path in twin.log.parent.iterdir())
    assert logs == ["twin.log", *(f"twin.log.{age}" for age in range(1, 5))]
    assert all("the weights are not there" in path.read_text() for path in twin.log.parent.iterdir())


async def test_an_engine_killed_in_its_first_start_gets_another(twin: Twin) -> None:
    async with aclosing(kept_alive(twin.process("frail"), AT_ONCE)) as changes:
        assert isinstance(end := await anext(changes), Restarting)
        assert "was killed by SIGKILL" in end.failure.message
        assert "memory runs out" in end.failure.message
        assert isinstance(await anext(changes), Ready)


async def test_an_engine_that_does_not_come_up_again_is_given_up(twin: Twin) -> None:
    changes = kept_alive(twin.process("dies-again"), AT_ONCE)
    assert isinstance(await anext(changes), Ready)
    twin.kill()
    seen, end = await collect(changes)
    assert isinstance(end, GaveUp)
    assert [type(change) for change in seen] == [Restarting] * 4
    assert "exit code 3" in end.message


@pytest.mark.parametrize(("mode", "words"), [("misused", "unrecognized arguments"), ("sick", "was not ready after")])
async def test_a_first_start_that_would_fail_again_is_not_repeated(twin: Twin, mode: str, words: str) -> None:
    seen, end = await collect(kept_alive(twin.process(mode, timeout_s=0.5), AT_ONCE))
    assert seen == []
    assert words in end.message
    assert twin.num_starts() == 1


async def test_a_port_in_somebody_elses_use_is_not_waited_for(twin: Twin) -> None:
    process = twin.process()
    with socket.create_server(("127.0.0.1", process.spec.port)):
        seen, end = await collect(kept_alive(process, AT_ONCE))
    assert seen == []
    assert f"cannot use port {process.spec.port}" in end.message
    if sys.platform == "linux":
        assert f"(pid {os.getpid()})" in end.message


async def test_a_port_that_was_taken_between_two_lives_is_named_and_used_when_it_is_free_again(twin: Twin) -> None:
    process = twin.process()
    async with aclosing(kept_alive(process, Policy(first_delay_s=0.1, last_delay_s=0.1))) as changes:
        assert isinstance(await anext(changes), Ready)
        twin.kill()
        assert isinstance(await anext(changes), Restarting)
        with socket.create_server(("127.0.0.1", process.spec.port)):
            assert isinstance(taken := await anext(changes), Restarting)
        assert f"cannot use port {process.spec.port}" in taken.failure.for_records
        assert isinstance(await anext(changes), Ready)


async def test_the_supervisor_s_death_is_a_crash_like_any_other(twin: Twin) -> None:
    process = twin.process("loyal worker", grace_s=0.3)
    async with aclosing(kept_alive(process, Policy(first_delay_s=0.2))) as changes:
        assert isinstance(await anext(changes), Ready)
        await twin.come_to(2)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert isinstance(await anext(changes), Restarting)
        await twin.come_to(0)
        assert isinstance(await anext(changes), Ready)


async def stopped_after(process: EngineProcess, policy: Policy, num_changes: int) -> float:
    """How long it takes to end a task that keeps the engine alive, once it has told of so many changes and waits."""
    seen = []

    async def keep() -> None:
        async with aclosing(kept_alive(process, policy)) as changes:
            async for change in changes:
                seen.append(change)

    keeping = asyncio.create_task(keep())
    await until(lambda: len(seen) == num_changes)
    await asyncio.sleep(0.3)
    began = time.monotonic()
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    return time.monotonic() - began


async def test_a_stop_does_not_wait_for_a_delay_or_a_start(twin: Twin) -> None:
    assert await stopped_after(twin.process("frail"), LATER, num_changes=1) < 1  # waits for its next start
    assert await stopped_after(twin.process(delay_s=60), LATER, num_changes=0) < 3  # loads
    assert twin.alive() == []


@pytest.mark.skipif(sys.platform != "linux", reason="the twin's processes are counted in /proc")
def test_a_kill_of_the_parent_while_it_waits_for_the_next_start_leaves_nobody(twin: Twin) -> None:
    with parent_of(twin, "worker") as parent:
        parent.await_change()
        twin.wait_for(2)
        twin.kill(signal.SIGKILL)
        assert parent.await_change()[0] == "Restarting"
        parent.process.kill()
        twin.wait_for(0)


@pytest.mark.skipif(sys.platform != "linux", reason="the twin's processes are counted in /proc")
def test_a_kill_of_the_parent_in_the_middle_of_a_start_leaves_nobody(twin: Twin) -> None:
    with parent_of(twin, "worker", delay_s=60) as parent:
        twin.wait_for(2)
        parent.process.kill()
        twin.wait_for(0)


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
async def test_twenty_restarts_leave_no_descriptor_task_or_process_behind(twin: Twin) -> None:
    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(asyncio.all_tasks())

    patient = Policy(first_delay_s=0, last_delay_s=0, max_quick=100)
    changes = kept_alive(twin.process(), patient)
    assert isinstance(await anext(changes), Ready)
    before = held()
    for _ in range(20):
        twin.kill()
        assert isinstance(await anext(changes), Restarting)
        assert isinstance(await anext(changes), Ready)
        assert len(twin.alive()) == 1
    assert held() == before
    await changes.aclose()
    assert twin.alive() == []
