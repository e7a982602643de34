"""A turnstile before an engine in virtual time: the load goes on, what was served in time comes out.

    report = simulate(Turnstile(rules), Engine(), loads=[Load(Priority.HIGH, rps=10)], duration_s=60, seed=1)
    report.goodput_rps, report.share_in_time(Priority.HIGH)

The engine is a continuous batcher: a step costs a fixed time, something for each sequence in it, and something for each
prompt token that it reads; each step gives every sequence a token. What it cannot take waits inside, in order.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.admission.priority import Priority
from gateway.admission.queue import Entry
from gateway.admission.turnstile import Shed, Turnstile


@dataclass(frozen=True)
class Engine:
    step_s: float = 0.010
    per_sequence_s: float = 0.0005
    per_prompt_token_s: float = 0.00005
    max_sequences: int = 64


@dataclass(frozen=True)
class Load:
    priority: Priority
    rps: float
    tenant: str = "t"
    prompt_tokens: int = 200
    completion_tokens: int = 50


@dataclass(eq=False)
class _Generation:
    entry: Entry
    left: int
    started: float
    first_token: float = 0.0
    num_tokens: int = 0


@dataclass
class Report:
    duration_s: float
    ttft_s: float
    tpot_s: float
    offered: Counter[Priority] = field(default_factory=Counter)
    in_time: Counter[Priority] = field(default_factory=Counter)
    in_time_of: Counter[str] = field(default_factory=Counter)
    tokens_of: Counter[str] = field(default_factory=Counter)
    served: int = 0
    late: int = 0
    sheds: Counter[str] = field(default_factory=Counter)
    sheds_of: Counter[Priority] = field(default_factory=Counter)
    shed_after_s: list[float] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)

    @property
    def goodput_rps(self) -> float:
        return sum(self.in_time.values()) / self.duration_s

    def share_in_time(self, priority: Priority) -> float:
        return self.in_time[priority] / max(self.offered[priority], 1)

    @property
    def shed_p99_s(self) -> float:
        times = sorted(self.shed_after_s)
        return times[int(len(times) * 0.99)] if times else 0.0


def simulate(
    turnstile: Turnstile,
    engine: Engine,
    loads: Sequence[Load],
    *,
    duration_s: float = 60.0,
    warm_up_s: float = 20.0,
    seed: int = 0,
) -> Report:
    """Poisson arrivals over a warm-up and the measured time; what arrives in the latter is in the report."""
    rules = turnstile.rules
    report = Report(duration_s, rules.ttft_s or math.inf, rules.tpot_s or math.inf)
    return _Run(turnstile, engine, report, warm_up_s).play(_arrivals(loads, warm_up_s + duration_s, seed))


def _arrivals(loads: Sequence[Load], until_s: float, seed: int) -> list[tuple[float, int, Load, int]]:
    draw = random.Random(seed)
    arrivals: list[tuple[float, int, Load, int]] = []
    for load in loads:
        at = draw.expovariate(load.rps)
        while at < until_s:
            length = max(1, round(draw.gauss(load.completion_tokens, load.completion_tokens / 5)))
            arrivals.append((at, len(arrivals), load, length))
            at += draw.expovariate(load.rps)
    heapq.heapify(arrivals)
    return arrivals


class _Run:
    def __init__(self, turnstile: Turnstile, engine: Engine, report: Report, warm_up_s: float) -> None:
        self.turnstile, self.engine, self.report, self.warm_up_s = turnstile, engine, report, warm_up_s
        self.lengths: dict[Entry, int] = {}
        self.inside: list[_Generation] = []  # waiting in the engine
        self.batch: list[_Generation] = []
        self.expiries: list[tuple[float, int, Entry]] = []

    def play(self, arrivals: list[tuple[float, int, Load, int]]) -> Report:
        now = 0.0
        while arrivals or self.batch or self.inside or len(self.turnstile.queue):
            if not self.batch and not self.inside:
                now = max(now, arrivals[0][0]) if arrivals else self.expiries[0][0]
            step_s = self._step_s()
            self._let_arrive(arrivals, now + step_s)
            now += step_s
            self._step(now)
            self._turn(now)
        return self.report

    def _step_s(self) -> float:
        engine = self.engine
        new, self.inside = (
            self.inside[: max(engine.max_sequences - len(self.batch), 0)],
            self.inside[max(engine.max_sequences - len(self.batch), 0) :],
        )
        self.batch += new
        prompt_tokens = sum(each.entry.prompt_tokens for each in new)
        if not self.batch:
            return 1e-9
        return engine.step_s + engine.per_sequence_s * len(self.batch) + engine.per_prompt_token_s * prompt_tokens

    def _let_arrive(self, arrivals: list[tuple[float, int, Load, int]], until: float) -> None:
        while arrivals and arrivals[0][0] <= until:
            at, number, load, length = heapq.heappop(arrivals)
            self._expire(at)
            entry = Entry(
                load.priority,
                load.tenant,
                load.prompt_tokens,
                load.prompt_tokens + length,
                at,
                self.turnstile.deadline(at, None),
            )
            self.lengths[entry] = length
            if at >= self.warm_up_s:
                self.report.offered[entry.priority] += 1
            if self.turnstile.has_room():
                self.turnstile.enter(entry.priority, at)
                self._begin(entry, at)
                continue
            arrival = self.turnstile.arrive(entry, at)
            for shed in (arrival.shed, arrival.displaced):
                self._note_shed(shed, at)
            if arrival.shed is None:
                heapq.heappush(self.expiries, (entry.deadline, number, entry))
        self._expire(until)

    def _expire(self, now: float) -> None:
        while self.expiries and self.expiries[0][0] <= now:
            at, _, entry = heapq.heappop(self.expiries)
            self._note_shed(self.turnstile.expire(entry, at), at)

    def _begin(self, entry: Entry, now: float) -> None:
        self.inside.append(_Generation(entry, self.lengths.pop(entry), now))

    def _step(self, now: float) -> None:
        for each in self.batch:
            each.num_tokens += 1
            each.left -= 1
            if each.num_tokens == 1:
                each.first_token = now
                self.turnstile.learn(each.started, now, each.entry.prompt_tokens, ttft_s=now - each.started)
            if not each.left:
                self._end(each, now)
        self.batch = [each for each in self.batch if each.left]

    def _end(self, each: _Generation, now: float) -> None:
        tpot_s = (now - each.first_token) / max(each.num_tokens - 1, 1)
        self.turnstile.learn(each.started, now, each.entry.prompt_tokens, tpot_s=tpot_s)
        self.turnstile.release(now)
        if each.entry.arrived < self.warm_up_s:
            return
        self.report.served += 1
        self.report.tokens_of[each.entry.tenant] += each.entry.tokens
        self.report.limits.append(self.turnstile.limit)
        if each.first_token - each.entry.arrived <= self.report.ttft_s and tpot_s <= self.report.tpot_s:
            self.report.in_time[each.entry.priority] += 1
            self.report.in_time_of[each.entry.tenant] += 1
        else:
            self.report.late += 1

    def _turn(self, now: float) -> None:
        turns = self.turnstile.turns(now)
        for entry in turns.entries:
            self._begin(entry, now)
        for shed in turns.sheds:
            self._note_shed(shed, now)

    def _note_shed(self, shed: Shed | None, now: float) -> None:
        if shed is None:
            return
        self.lengths.pop(shed.entry, None)
        if shed.entry.arrived >= self.warm_up_s:
            self.report.sheds[shed.reason] += 1
            self.report.sheds_of[shed.entry.priority] += 1
            self.report.shed_after_s.append(now - shed.entry.arrived)
