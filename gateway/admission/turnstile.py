"""The decisions of one model's gate: who is let in, who waits, who is sent away and when to come back. Pure.

    turnstile = Turnstile(Rules(highest=32, max_waiting=256, ttft_s=0.5))
    if turnstile.has_room(): turnstile.enter(priority, now)
    else: arrival = turnstile.arrive(entry, now)             # Arrival(shed, displaced)
    turns = turnstile.turns(now)                             # Turns(entries, sheds), after every change
    turnstile.leave(entry) ; turnstile.release(now)

Whoever can be let in at once is. Anybody else is told at once if his turn would come too late, for then he can still go
elsewhere; or waits in the queue (queue.py) for as long as his deadline can be met. What that depends on is learnt in
forecast.py, and limit.py finds out how many may be open, where nobody has said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from gateway.admission.forecast import FirstToken, Pace
from gateway.admission.limit import FIRST, AdaptiveLimit, LimitRules
from gateway.admission.priority import Priority
from gateway.admission.queue import Entry, FairQueue

MAX_RETRY_AFTER_S = 30.0
UNKNOWN_RETRY_AFTER_S = 1.0

# late: its turn would come after its deadline. full: too many wait. displaced: a higher class wanted its place in the
# queue. expired: it waited, and its turn did not come in time.
Reason: TypeAlias = Literal["late", "full", "displaced", "expired"]


class Rules(Struct, frozen=True, kw_only=True):
    """`highest` bounds what may be open; with `is_adaptive` it is found out below that. Without `ttft_s` nothing is
    too late, and who waits does so for `max_wait_s`."""

    lowest: int = 1
    highest: int = 512
    is_adaptive: bool = False
    max_waiting: int = 256
    max_wait_s: float = 30.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    floor_share: float = 0.05
    weights: Mapping[str, float] = {}


class Shed(NamedTuple):
    entry: Entry
    reason: Reason
    retry_after_s: float


class Arrival(NamedTuple):
    """What came of one that could not be let in at once: it was sent away, or it waits in the place of `displaced`."""

    shed: Shed | None = None
    displaced: Shed | None = None


class Turns(NamedTuple):
    entries: Sequence[Entry]
    sheds: Sequence[Shed]


class Turnstile:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.num_open = 0
        self.queue = FairQueue(rules.weights, rules.floor_share)
        self._pace = Pace()
        self._first_token = FirstToken()
        self._adaptive = _adaptive(rules)
        self._booked_until = 0.0  # until then places are promised to those who were sent away

    def adopt(self, rules: Rules) -> None:
        """Other rules from now on. A limit that adapts goes on from where it is."""
        self._adaptive = _adaptive(rules, self.limit)
        self.rules = rules
        self.queue.adopt(rules.weights, rules.floor_share)

    @property
    def limit(self) -> int:
        return self.rules.highest if self._adaptive is None else self._adaptive.value

    def has_room(self) -> bool:
        """One more can be let in at once, and nobody waits who would be passed over."""
        return self.num_open < self.limit and not len(self.queue)

    def enter(self, priority: Priority, now: float) -> None:
        self.num_open += 1
        self._pace.entered(priority, now)

    def release(self, now: float) -> None:
        """A generation has ended."""
        self.num_open -= 1
        self._pace.left(now)

    def deadline(self, arrived: float, wish_s: float | None) -> float:
        """When the first token is late. A caller can wish for less than the model's target, not for more."""
        target_s = self.rules.max_wait_s if self.rules.ttft_s is None else self.rules.ttft_s
        return arrived + (target_s if wish_s is None else min(target_s, wish_s))

    def arrive(self, entry: Entry, now: float) -> Arrival:
        """Decide on one that cannot be let in at once."""
        if self._adaptive is not None:
            self._adaptive.met()
        late_s = now + self._expected_s(entry, now) - entry.deadline
        if late_s > 0:
            return Arrival(self._shed(entry, "late", late_s, now))
        displaced = None
        if len(self.queue) >= self.rules.max_waiting:
            last = self.queue.last_below(entry) if self.rules.max_waiting else None
            if last is None:
                return Arrival(self._shed(entry, "full", 0.0, now))
            self.queue.remove(last)
            displaced = self._shed(last, "displaced", 0.0, now)
        self.queue.put(entry)
        return Arrival(displaced=displaced)

    def leave(self, entry: Entry) -> bool:
        """It waits no longer. False if it did not wait."""
        return self.queue.remove(entry)

    def expire(self, entry: Entry, now: float) -> Shed | None:
        """Its time is over. None if it did not wait any more."""
        return self._shed(entry, "expired", 0.0, now) if self.queue.remove(entry) else None

    def turns(self, now: float) -> Turns:
        """Those whose turn it is now, and those whose turn comes too late."""
        entries: list[Entry] = []
        sheds: list[Shed] = []
        while self.num_open < self.limit and len(self.queue):
            turn = self.queue.take(lambda entry: self._is_hopeless(entry, now))
            sheds.extend(self._shed(each, "expired", 0.0, now) for each in turn.hopeless)
            if turn.entry is not None:
                self.enter(turn.entry.priority, now)
                entries.append(turn.entry)
        return Turns(entries, sheds)

    def learn(
        self,
        started: float,
        now: float,
        prompt_tokens: int,
        *,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
    ) -> None:
        """What an attempt that began at `started` has measured: at its first token, or at its end."""
        if ttft_s is not None:
            self._first_token.learn(prompt_tokens, ttft_s)
        if self._adaptive is not None:
            self._adaptive.learn(started, now, self.num_open, ttft_s=ttft_s, tpot_s=tpot_s)

    def _expected_s(self, entry: Entry, now: float) -> float:
        """Until its first token, if it begins to wait now."""
        if self.queue.is_owed_a_turn(entry.priority):
            return self._pace.wait_s(1, Priority.HIGH, self.limit, now) + self._first_token_s(entry)
        ahead = self.queue.num_ahead(entry.priority, entry.tenant)
        # Turns come about at random, and the more so the more classes may come in between.
        likely = ahead + (2 * entry.priority - 1) * math.sqrt(ahead + 1)
        wait_s = self._pace.wait_s(likely, entry.priority, self.limit, now)
        return wait_s + self._first_token_s(entry)

    def _is_hopeless(self, entry: Entry, now: float) -> bool:
        """Sooner than not it would be late, though its turn is now."""
        expected_s = 0.0 if self.rules.ttft_s is None else self._first_token.expected_s(entry.prompt_tokens)
        return now + expected_s > entry.deadline

    def _first_token_s(self, entry: Entry) -> float:
        """In the engine. Without a target nobody is sent away for it."""
        return 0.0 if self.rules.ttft_s is None else self._first_token.likely_s(entry.prompt_tokens)

    def _shed(self, entry: Entry, reason: Reason, late_s: float, now: float) -> Shed:
        """Each that is sent away is told to come a turn later than the one before, and no sooner than there may be
        room: those who come back then do not come all at once."""
        rate = self._pace.rate(self.limit, now)
        if rate is None:
            return Shed(entry, reason, UNKNOWN_RETRY_AFTER_S)
        earliest = now + (late_s if reason == "late" else len(self.queue) / rate)
        self._booked_until = min(max(self._booked_until, earliest) + 1 / rate, now + MAX_RETRY_AFTER_S)
        return Shed(entry, reason, min(self._booked_until - now, MAX_RETRY_AFTER_S))


def _adaptive(rules: Rules, first: int = FIRST) -> AdaptiveLimit | None:
    if not rules.is_adaptive:
        return None
    return AdaptiveLimit(
        LimitRules(ttft_s=rules.ttft_s, tpot_s=rules.tpot_s, lowest=rules.lowest, highest=rules.highest), first
    )
