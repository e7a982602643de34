"""One timer for a deadline that moves: how often a timer is made, and when it rings."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.wire.hop.alarm import LAST_LOOK_S, Alarm, patiently


class Clock(asyncio.AbstractEventLoop):
    """A loop of which an alarm needs the time and one kind of timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[asyncio.TimerHandle] = []
        self.num_made = 0

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, _: asyncio.TimerHandle) -> None:
        pass

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        self.num_made += 1
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.timers.append(timer)
        return timer

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        return self.call_at(self.now, callback, *args, context=context)

    def advance(self, until: float) -> None:
        while due := [timer for timer in self.timers if not timer.cancelled() and timer.when() <= until]:
            timer = min(due, key=asyncio.TimerHandle.when)
            self.timers.remove(timer)
            self.now = max(self.now, timer.when())
            timer._run()
        self.now = until


MOVES = st.lists(st.tuples(st.floats(0, 5), st.one_of(st.none(), st.floats(0.01, 10))), max_size=20)


@given(MOVES)
def test_it_rings_once_just_after_the_deadline_that_stands_then(moves: list[tuple[float, float | None]]) -> None:
    clock, rung = Clock(), list[float]()
    alarm = Alarm(clock, lambda: rung.append(clock.time()))
    expected: list[float] = []
    deadline: float | None = None
    for pause, ahead in moves:
        until = clock.now + pause
        if deadline is not None and deadline + LAST_LOOK_S <= until:
            expected.append(deadline + LAST_LOOK_S)
            deadline = None
        clock.advance(until)
        deadline = None if ahead is None else clock.now + ahead
        alarm.clear() if deadline is None else alarm.set(deadline)
    if deadline is not None:
        expected.append(deadline + LAST_LOOK_S)
    clock.advance(clock.now + 100)
    assert rung == expected


def test_a_deadline_that_moves_with_every_token_makes_a_timer_a_minute() -> None:
    clock = Clock()
    alarm = Alarm(clock, lambda: None)
    for token in range(20 * 600):  # ten minutes
        clock.advance(token / 20)
        alarm.set(clock.now + 60)
    assert clock.num_made <= 11


def test_one_that_is_cancelled_never_rings() -> None:
    clock, rung = Clock(), list[bool]()
    alarm = Alarm(clock, lambda: rung.append(True))
    alarm.set(1)
    alarm.cancel()
    clock.advance(10)
    assert not rung


@pytest.mark.replay("F27")
def test_f27_a_loop_that_stood_still_waits_as_long_again_for_what_has_come_meanwhile() -> None:
    clock, rung = Clock(), list[float]()
    alarm = Alarm(clock, lambda: rung.append(clock.time()))
    alarm.set(10)
    clock.now = 12  # nothing ran since before the deadline
    clock.advance(13.9)
    assert not rung
    alarm.set(clock.now + 10)  # what lay in the socket was read
    clock.advance(100)
    assert rung == [23.9 + LAST_LOOK_S]


async def test_a_patient_timeout_is_one_and_leaves_no_timer() -> None:
    loop = asyncio.get_running_loop()
    async with patiently(loop.time() + 60):
        pass
    with pytest.raises(TimeoutError):
        async with patiently(loop.time() + 0.01):
            await asyncio.sleep(60)


@pytest.mark.replay("F27")
async def test_f27_what_was_done_while_the_loop_stood_still_was_in_time() -> None:
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        async with patiently(loop.time() + 0.05):
            reading = asyncio.create_task(loop.sock_recv(here, 10))
            await asyncio.sleep(0)
            there.send(b"x")
            time.sleep(0.1)  # noqa: ASYNC251 - that is the fault
            assert await reading == b"x"


@pytest.mark.replay("F27")
async def test_f27_what_takes_several_turns_is_in_time_where_each_turn_of_the_loop_is_slow() -> None:
    """Two hundred requests that begin at once make turns of half a second; connecting takes four of them."""
    loop = asyncio.get_running_loop()

    def busy() -> None:
        nonlocal handle
        time.sleep(0.05)
        handle = loop.call_soon(busy)

    handle = loop.call_soon(busy)
    try:
        async with patiently(loop.time() + 0.06):
            for _ in range(8):
                await asyncio.sleep(0)
        with pytest.raises(TimeoutError):  # but not for ever
            async with patiently(loop.time() + 0.06):
                await asyncio.sleep(60)
    finally:
        handle.cancel()
