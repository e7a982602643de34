"""How often something happens, in events a second: a count that fades. Pure; nobody has to come by with a clock.

>>> rate = Rate(window_s=10)
>>> for second in range(60):
...     rate.note(float(second), 4)
>>> round(rate.at(60.0), 1), round(rate.at(90.0), 1)
(3.8, 0.2)

An event counts in full when it happens and fades with the time constant `window_s`, so a steady rate is told right, and
a step is told to 63 % after one window and to 95 % after three.
"""

from __future__ import annotations

from math import exp


class Rate:
    __slots__ = ("_at", "_per_s", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._per_s = 0.0
        self._at = 0.0

    def note(self, now: float, num: float = 1) -> None:
        """So many events, now."""
        self._per_s = self.at(now) + num / self._window_s
        self._at = now

    def at(self, now: float) -> float:
        """Events a second around `now`, which is no earlier than the last event."""
        return self._per_s * exp((self._at - now) / self._window_s) if self._per_s else 0.0
