"""Does a replica keep its promise while it has no more to do than is proven? Pure: attempts and times go in.

    attainment.asked(rate_rps, promise, now)     # one more request goes to it, which makes it so many a second
    attainment.note(missed(attempt, promise.slo, has_failed=False), attempt.started, now)
    attainment.is_broken(now)                    # live requests contradict the promise

A promise is broken by three late requests or more, if they are a tenth of all. What happened fades with time, so a
replica that gets no requests any more is believed again after a minute or two, and then has to stand the test.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct

from gateway.config import SloConfig
from gateway.records.trace import CANCELLED, Attempt
from gateway.replicas.rate import Rate

WINDOW_S = 30.0
MIN_MISSES = 3.0
BROKEN_SHARE = 0.1  # of the judged requests; a race allows for a hundredth
KEPT_SHARE = 0.05
FORGOTTEN_MISSES = 1.0
JUDGED_AFTER_S = 10.0  # requests that came so soon after too many had come may wait for those


class Promise(Struct, frozen=True):
    """Up to so many requests a second, each is answered within these limits."""

    rps: float
    slo: SloConfig


class Attainment:
    __slots__ = ("_is_broken", "_judged", "_missed", "_overfull_at")

    def __init__(self) -> None:
        self._judged = Rate(WINDOW_S)
        self._missed = Rate(WINDOW_S)
        self._overfull_at = -inf
        self._is_broken = False

    def asked(self, rate_rps: float, promise: Promise, now: float) -> None:
        """While more is asked of the replica than was promised, what comes late says nothing against it."""
        if rate_rps > promise.rps:
            self._overfull_at = now

    def note(self, is_missed: bool | None, started: float, now: float) -> None:
        if is_missed is None or started < self._overfull_at + JUDGED_AFTER_S:
            return
        self._judged.note(now)
        if is_missed:
            self._missed.note(now)

    def is_broken(self, now: float) -> bool:
        least, share = (FORGOTTEN_MISSES, KEPT_SHARE) if self._is_broken else (MIN_MISSES, BROKEN_SHARE)
        misses = self._missed.at(now) * WINDOW_S
        self._is_broken = misses >= least and misses > share * self._judged.at(now) * WINDOW_S
        return self._is_broken


def missed(attempt: Attempt, slo: SloConfig, *, has_failed: bool) -> bool | None:
    """Did the replica break the promise? None where the attempt does not tell: its client left early, or it is a
    question that has no first token. Only whole answers tell the time for each token: a stream's is its client's too.
    """
    assert attempt.ended is not None
    if has_failed:
        return True
    has_waited = attempt.first_token is not None or attempt.outcome == CANCELLED
    until = attempt.ended if attempt.first_token is None else attempt.first_token
    if has_waited and slo.ttft_ms is not None and (until - attempt.started) * 1000 > slo.ttft_ms:
        return True
    if attempt.first_token is None:
        return None
    token_s = None if attempt.is_stream else attempt.token_time_s
    return slo.tpot_ms is not None and token_s is not None and token_s * 1000 > slo.tpot_ms
