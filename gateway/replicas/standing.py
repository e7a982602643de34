"""How well a replica fares, from what its attempts bring. Pure: they are told with their times, nobody is asked.

    peers = Peers(breaker, outliers, [standing := Standing(), Standing()])
    standing.began(attempt, prompt_tokens)
    standing.answered(attempt, now)            # its first token has come
    standing.ended(attempt, failure, now)
    standing.may_serve(now)                    # False: ejected by its breaker, or set aside
    standing.trust(now)                        # 0..1: one much slower than its peers loses traffic

Three things keep traffic away from a replica that health probes find well. It fails: its breaker ejects it, unless too
many of its peers are out already. It is full and has said for how long: it is set aside. It is many times slower than
its peers, or than it was itself: it is trusted less, and every `probe_s` a live request may show that it is fast again.
A request that waits for its first token tells of slowness before it has one, so a frozen engine is seen at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log

from msgspec import Struct

from adapters.errors import EngineError, GoodgateError, Overloaded, ToolCallInvalid
from gateway.config import BreakerConfig, OutlierConfig
from gateway.records.trace import Attempt
from gateway.replicas.breaker import Breaker
from gateway.replicas.slowness import Tempo, usual

BASE_WORK = 256  # tokens of prompt that cost as much as what every request costs
USUAL_FOR_S = 0.1


class Peers:
    """The standings of one model's replicas: the rules for them, what is usual among them, and how many of them may be
    left out. A standing has peers from the beginning, if only itself, and gets others when the model's replicas change.
    """

    def __init__(self, breaker: BreakerConfig, outliers: OutlierConfig, standings: Sequence[Standing]) -> None:
        self.breaker, self.outliers = breaker, outliers
        self.factor = log(outliers.factor)
        self.min_ttft_s, self.min_tpot_s = outliers.min_ttft_ms / 1000, outliers.min_tpot_ms / 1000
        self._standings = standings
        self._usual: tuple[float | None, float | None] = None, None
        self._usual_at = -inf
        for standing in standings:
            standing.join(self)

    def can_spare(self, standing: Standing) -> bool:
        """May it be ejected beside those that are out already? Never the last one."""
        num, num_out = len(self._standings), 1 + sum(each.is_out for each in self._standings if each is not standing)
        return num_out < num and num_out <= self.outliers.max_ejected * num

    def usual(self, now: float) -> tuple[float | None, float | None]:
        """To the first token, and for a later one; of a moment ago, for it is asked at every answer."""
        if not 0 <= now - self._usual_at < USUAL_FOR_S:
            first = usual(each.to_first for each in self._standings)
            self._usual = first, usual(each.to_next for each in self._standings)
            self._usual_at = now
        return self._usual


class Report(Struct, frozen=True):
    breaker: str  # closed, half_open or open
    ejections: int
    trust: float
    left_out: str  # why it gets no requests, or few


class Standing:
    __slots__ = (
        "_answered_at", "_aside_at", "_aside_until", "_next_test", "_next_try", "_peers", "_waiting", "breaker",
        "failed_at", "is_down", "to_first", "to_next", "was_slow",
    )  # fmt: skip

    def __init__(self) -> None:
        self.breaker = Breaker(BreakerConfig())
        self.is_down = True  # by the word of health probes, or because it has not come up
        self.was_slow = False  # as of the last answer
        self.failed_at = -inf  # the last time that it was its fault
        self.to_first, self.to_next = Tempo(), Tempo()
        self._waiting: dict[int, tuple[float, int]] = {}  # for their first token, the oldest first: start and work
        self._aside_at = self._aside_until = -inf
        self._next_test = self._next_try = self._answered_at = -inf
        self._peers = Peers(BreakerConfig(), OutlierConfig(), [self])

    def join(self, peers: Peers) -> None:
        self._peers, self.breaker.rules = peers, peers.breaker

    # ---------------------------------------------------------------------------------------------- what routing asks

    def may_serve(self, now: float) -> bool:
        return now >= self._aside_until and self.breaker.admits(now)

    def trust(self, now: float) -> float:
        """1 up to `factor` times the usual, `floor` from twice that on, and a straight line between. One that is slow
        has full trust for a moment every `probe_s`: the request that it gets then is its test."""
        waited = self._longest_wait(now)
        if not self.was_slow and waited == -inf:
            return 1.0
        factor, floor = self._peers.outliers.factor, self._peers.outliers.floor
        times = self._times_slower(now, waited)
        if times <= factor or (now >= self._next_test and waited == -inf):
            return 1.0
        return max(floor, 1 - (1 - floor) * (times - factor) / factor)

    def may_try(self, now: float) -> bool:
        """With nothing better left: may one request try it all the same? All may while it answers; otherwise one every
        `probe_s`, so that the others are not kept waiting for what most likely fails."""
        if now < self._next_try and now - self._answered_at > self._peers.breaker.probe_s:
            return False
        self._next_try = now + self._peers.breaker.probe_s
        return True

    def is_aside(self, now: float) -> bool:
        return now < self._aside_until

    def left_out_for_s(self, now: float) -> float:
        return max(self._aside_until - now, self.breaker.opens_for_s(now))

    def why_left_out(self, now: float) -> str:
        """One sentence for whoever asks why it got no request, or few; empty if it is like any other."""
        if now < self._aside_until:
            return f"Set aside for {self._aside_until - now:.1f} s more: it was full and said so (Retry-After)."
        if self.breaker.is_open:
            left_s = self.breaker.opens_for_s(now)
            until = f"for {left_s:.1f} s more" if left_s else "until its next request is answered"
            return f"Ejected {until}: {self.breaker.reason}"
        if (trust := self.trust(now)) < 1:
            times = self._times_slower(now, self._longest_wait(now))
            return f"Trusted to {trust:.0%}: {times:.1f} times as slow as is usual."
        return ""

    def report(self, now: float) -> Report:
        """For operators."""
        position = self.breaker.position(now)
        return Report(position.name.lower(), self.breaker.num_openings, self.trust(now), self.why_left_out(now))

    @property
    def is_out(self) -> bool:
        return self.is_down or self.breaker.is_open

    @property
    def verdict(self) -> str:
        """What the last news has made of it; a change is worth a line in the log."""
        return "ejected" if self.breaker.is_open else "slow" if self.was_slow else "good"

    # --------------------------------------------------------------------------------------------- what attempts tell

    def began(self, attempt: Attempt, prompt_tokens: int) -> None:
        """A generation's; a question has no first token to wait for, and only ends."""
        self._waiting[id(attempt)] = attempt.started, prompt_tokens + BASE_WORK
        self.breaker.began(attempt.started)
        if self.was_slow:
            self._next_test = attempt.started + self._peers.outliers.probe_s

    def answered(self, attempt: Attempt, now: float) -> None:
        """Its first token has come."""
        started, work = self._waiting.pop(id(attempt))
        self._note_first(now - started, work, now)
        self._answered(started, now)

    def ended(self, attempt: Attempt, failure: GoodgateError | None, now: float) -> None:
        """Counts against the replica only what is its fault: no refusal, no full queue, no client that leaves."""
        self._note_unanswered(attempt, now)
        if (seconds := attempt.token_time_s) is not None:
            self._note(self.to_next, self._peers.usual(now)[1], log(max(seconds, self._peers.min_tpot_s)), now)
        if attempt.outcome == "ok":
            self._answered(attempt.started, now)
            self.breaker.completed(attempt.started, now)
        elif isinstance(failure, Overloaded) and failure.retry_after_s:
            self.set_aside(now, failure.retry_after_s)
        elif isinstance(failure, EngineError) and not isinstance(failure, ToolCallInvalid):
            self.failed_at = now
            self.breaker.failed(
                attempt.started, now, failure.code or failure.type, may_open=self._peers.can_spare(self)
            )

    def set_aside(self, now: float, for_s: float) -> None:
        """It has said for how long it takes nothing. The end only moves away, until it answers one again."""
        self._aside_at = now
        self._aside_until = max(self._aside_until, now + for_s)

    def recovered(self, now: float) -> None:
        """A health probe has found it well, and the one before had not: its attempts may show it now."""
        self.breaker.recovered(now)

    def _answered(self, started: float, now: float) -> None:
        self._answered_at = now
        self.breaker.answered(started)
        if started >= self._aside_at:
            self._aside_until = -inf

    def _note_first(self, seconds: float, work: int, now: float) -> None:
        self._note(self.to_first, self._peers.usual(now)[0], log(max(seconds, self._peers.min_ttft_s) / work), now)

    def _note(self, tempo: Tempo, usual: float | None, value: float, now: float) -> None:
        """A slow answer puts off the next test; after one as fast as usual that may follow at once."""
        factor, was_excess = self._peers.factor, tempo.last_excess
        tempo.note(value, usual)
        if value - (tempo.past if usual is None else usual) > factor:
            self._next_test = now + self._peers.outliers.probe_s
        elif was_excess > factor:
            self._next_test = -inf
        self.was_slow = self.to_first.last_excess > factor or self.to_next.last_excess > factor

    def _note_unanswered(self, attempt: Attempt, now: float) -> None:
        """It ended while it waited for its first token. That it would have taken longer still is all that is known."""
        if (waiting := self._waiting.pop(id(attempt), None)) is None:
            return
        started, work = waiting
        waited = log(max(now - started, self._peers.min_ttft_s) / work)
        if self.to_first.excess(self._peers.usual(now)[0], waited) > self._peers.factor:
            self._note_first(now - started, work, now)

    def _longest_wait(self, now: float) -> float:
        """The logarithm of how long, by its work, the oldest of those that wait has waited while nothing else was
        answered; as good as none while that is not long enough to tell."""
        for started, work in self._waiting.values():
            waited_s = now - max(started, self._answered_at)
            return log(waited_s / work) if waited_s > self._peers.min_ttft_s else -inf
        return -inf

    def _times_slower(self, now: float, waited: float) -> float:
        to_first, to_next = self._peers.usual(now)
        return exp(min(max(self.to_first.excess(to_first, waited), self.to_next.excess(to_next)), 700))
