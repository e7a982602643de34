"""When a second replica is asked before the first has begun to answer, and how often that may happen. Pure.

    timing = HedgeTiming(HedgeConfig(after="p95", budget=0.05))
    timing.opened(now)                                 # a request that could be hedged
    timing.delay_s()                                   # None as long as too little is known
    timing.may_hedge(now) ; timing.hedged(now)         # at most a share of the requests of the last ten seconds
    timing.answered(0.31)                              # seconds to a first token; or to its end, of one that lost

The delay follows the last answers. One that lost counts with the time it was given: it is at least that slow, and were
it left out, the delay would sink with every hedge.
"""

from __future__ import annotations

from collections import deque

from gateway.attempts.retry_budget import Recent
from gateway.config import HedgeConfig

NUM_KEPT = 128
NUM_NEEDED = 20  # before a 95th percentile says anything
NEW_EVERY = 16  # answers


class HedgeTiming:
    def __init__(self, config: HedgeConfig) -> None:
        self._config = config
        self._seconds: deque[float] = deque(maxlen=NUM_KEPT)
        self._num_since = 0
        self._p95: float | None = None
        self._requests, self._hedges = Recent(), Recent()

    def opened(self, now: float) -> None:
        self._requests.add(now)

    def delay_s(self) -> float | None:
        return self._p95 if self._config.after == "p95" else self._config.after / 1e3

    def may_hedge(self, now: float) -> bool:
        return self._hedges.total(now) + 1 <= max(1.0, self._config.budget * self._requests.total(now))

    def hedged(self, now: float) -> None:
        self._hedges.add(now)

    def answered(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._num_since += 1
        if len(self._seconds) >= NUM_NEEDED and (self._p95 is None or self._num_since >= NEW_EVERY):
            self._p95 = sorted(self._seconds)[int(0.95 * len(self._seconds))]
            self._num_since = 0
