"""How long a request would wait for its first token, learnt from those before it. Pure; every time is handed in.

    pace.entered(Priority.DEFAULT, now) ; pace.left(now)      # a place is taken, and given back
    pace.wait_s(num_ahead=12, Priority.DEFAULT, limit=32, now)

    first_token.learn(prompt_tokens=800, ttft_s=0.21)
    first_token.expected_s(400)

What is learnt from is how often places change hands, and the time from an attempt's begin to its first token. The time
of whole answers is not: it says how much was written, and not how busy an engine is.
"""

from __future__ import annotations

import math

from gateway.admission.priority import Priority

MEMORY_S = 15.0  # what happened so long ago counts for a third in the pace
MIN_TURNS = 3.0  # with fewer the pace is not known
LEAST_SHARE = 0.05  # of the turns that the lowest class is expected to have
MEMORY_TOKENS = 50.0  # first tokens that the line is drawn through, the latest ones first


class Pace:
    """How often a place is given back for the time that places are held, and which classes take them. It is learnt
    whether anybody waits or not, so that a forecast which kept everybody away is found wrong by itself."""

    def __init__(self) -> None:
        self._num_open = 0
        self._num_left = 0.0  # places given back, those long ago fading
        self._open_s = 0.0  # and for how long places were held, all together
        self._taken = dict.fromkeys(Priority, 0.0)
        self._last = 0.0

    def entered(self, priority: Priority, now: float) -> None:
        self._pass(now)
        self._num_open += 1
        self._taken[priority] += 1

    def left(self, now: float) -> None:
        self._pass(now)
        self._num_open -= 1
        self._num_left += 1

    def wait_s(self, num_ahead: float, priority: Priority, limit: int, now: float) -> float:
        """Until the turn of one that has so many before it. Turns that its betters will take meanwhile are none of its
        own. Zero where nothing is known yet."""
        rate = self.rate(limit, now)
        return 0.0 if rate is None else (num_ahead + 1) / (rate * self._open_share(priority))

    def rate(self, limit: int, now: float) -> float | None:
        """Turns a second while all places are taken. Time that passes without one slows it; None where nothing is known
        yet."""
        if self._num_left < MIN_TURNS:
            return None
        open_s = self._open_s + self._num_open * max(now - self._last, 0.0)
        return limit * self._num_left / max(open_s, 1e-6)

    def _open_share(self, priority: Priority) -> float:
        """The share of the turns that higher classes leave."""
        taken = sum(self._taken.values())
        if taken < MIN_TURNS:
            return 1.0
        return max(1 - sum(self._taken[each] for each in Priority if each < priority) / taken, LEAST_SHARE)

    def _pass(self, now: float) -> None:
        elapsed_s = max(now - self._last, 0.0)
        self._last = now
        if not self._num_open:
            return  # nothing could be learnt meanwhile, so nothing is forgotten
        kept = math.exp(-elapsed_s / MEMORY_S)
        self._num_left *= kept
        self._open_s = self._open_s * kept + self._num_open * elapsed_s
        for each in self._taken:
            self._taken[each] *= kept


class FirstToken:
    """The time to an engine's first token as a line over the prompt's length: least squares, old points fading. What
    the engine makes requests wait is in it."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._error_s = 0.0  # mean distance from the line

    def learn(self, prompt_tokens: int, ttft_s: float) -> None:
        if self._weight:
            self._error_s += (abs(ttft_s - self.expected_s(prompt_tokens)) - self._error_s) / 16
        kept = 1 - 1 / MEMORY_TOKENS
        self._weight = self._weight * kept + 1
        self._x = self._x * kept + prompt_tokens
        self._y = self._y * kept + ttft_s
        self._xx = self._xx * kept + prompt_tokens * prompt_tokens
        self._xy = self._xy * kept + prompt_tokens * ttft_s

    def expected_s(self, prompt_tokens: int) -> float:
        """Zero where nothing is known yet."""
        if not self._weight:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = (self._xy / self._weight - mean_x * mean_y) / spread if spread > 1 else 0.0
        return max(mean_y + max(slope, 0.0) * (prompt_tokens - mean_x), 0.0)

    def likely_s(self, prompt_tokens: int) -> float:
        """What it will hardly exceed."""
        return self.expected_s(prompt_tokens) + 2 * self._error_s
