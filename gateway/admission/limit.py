"""How many generations a model may have open at once, found out by the times to tokens. Pure.

    limit = AdaptiveLimit(LimitRules(ttft_s=0.5, tpot_s=0.05, lowest=1, highest=256))
    limit.learn(started, now, num_open=12, ttft_s=0.2)      # a first token; with `tpot_s` an answer that has ended
    limit.value

The more an engine has open, the later come its tokens. The limit follows what is left of the targets: of each window of
answers that began after its last change, the slow end (p90) is compared with the target, and so many may be open as
were open then, times their ratio. It grows only while it is in the way, and only by what all targets have room for. An
engine may spend `SHARE_OF_TTFT` of the time to the first token; the rest is for the queue in front of it, where it is
still open who goes first. The time of whole answers plays no part: it says how much was written.
"""

from __future__ import annotations

import math
from collections import deque

from msgspec import Struct

SHARE_OF_TTFT = 0.5
SHARE_OF_TPOT = 0.9  # at the target itself half of the answers would miss it
SLOW_END = 0.9
MIN_SAMPLES = 8
MAX_SAMPLES = 32
FIRST = 8
SHRINK, GROW = 0.6, 1.5
STEADY = 0.8


class LimitRules(Struct, frozen=True, kw_only=True):
    """The targets, of which one at least is there, and the bounds."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    lowest: int = 1
    highest: int = 512


class AdaptiveLimit:
    def __init__(self, rules: LimitRules, first: int = FIRST) -> None:
        self._rules = rules
        self._exact = float(min(max(first, rules.lowest), rules.highest))
        self._changed_at = 0.0
        self._is_in_the_way = False
        self._opens: deque[int] = deque(maxlen=2 * MAX_SAMPLES)
        self._ttfts: deque[float] = deque(maxlen=MAX_SAMPLES)  # an engine that counts no tokens never fills the other
        self._tpots: deque[float] = deque(maxlen=MAX_SAMPLES)

    @property
    def value(self) -> int:
        return int(self._exact)

    def met(self) -> None:
        """Somebody had to wait because of it."""
        self._is_in_the_way = True

    def learn(
        self, started: float, now: float, num_open: int, *, ttft_s: float | None = None, tpot_s: float | None = None
    ) -> None:
        """A measurement of an attempt that began at `started`. Those from before the last change say nothing of it."""
        if started < self._changed_at:
            return
        rules = self._rules
        self._opens.append(num_open)
        if ttft_s is not None and rules.ttft_s is not None:
            self._ttfts.append(ttft_s / (rules.ttft_s * SHARE_OF_TTFT))
        if tpot_s is not None and rules.tpot_s is not None:
            self._tpots.append(tpot_s / (rules.tpot_s * SHARE_OF_TPOT))
        self._judge(now)

    def _judge(self, now: float) -> None:
        wanted = min(max(self.value // 2, MIN_SAMPLES), MAX_SAMPLES)
        windows = [
            window
            for target, window in ((self._rules.ttft_s, self._ttfts), (self._rules.tpot_s, self._tpots))
            if target is not None
        ]
        loads = [_slow_end(window) for window in windows if len(window) >= wanted]
        has_all = len(loads) == len(windows)
        worst = max(loads, default=0.0)
        if worst > 1 or (has_all and self._is_in_the_way):
            self._change(min(max(1 / worst if worst else GROW, SHRINK), GROW), now)
        elif has_all:
            self._forget()

    def _change(self, factor: float, now: float) -> None:
        # Near the target by half of the way: while a limit shrinks nobody has a turn, and whoever waits may be late.
        factor = math.sqrt(factor) if STEADY < factor < 1 / STEADY else factor
        fitting = factor * sum(self._opens) / len(self._opens)
        # One of few grows by one at least: its ratio alone would be lost in rounding.
        least = self._exact + (factor >= 1 / STEADY)
        wanted = max(fitting, least) if factor > 1 else min(fitting, self._exact)
        self._exact = min(max(wanted, self._rules.lowest), self._rules.highest)
        self._changed_at = now
        self._forget()

    def _forget(self) -> None:
        self._is_in_the_way = False
        self._opens.clear()
        self._ttfts.clear()
        self._tpots.clear()


def _slow_end(window: deque[float]) -> float:
    return sorted(window)[int(len(window) * SLOW_END)]
