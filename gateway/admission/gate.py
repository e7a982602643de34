"""Where requests wait for their turn: a gate for each model that has one, before its replicas.

    if gates.guards(served):
        with await gates.let_in(served, trace, ask, on_late):      # Overloaded for one that would come too late
            ...                                                    # one open generation
    gates.note_first_token(attempt) ; gates.note_end(attempt)      # what forecasts and limits are learnt from
    gates.num_waiting("m") ; gates.num_shed("m")

Who is let in and who is not decides turnstile.py, which is pure; here are the futures of those that wait. Nothing
polls: whatever changes (a generation ends, a limit grows) is followed by `_turn`, on the one event loop. Whoever leaves
while he waits leaves nothing behind. A model without an `slo` and without `admission` has no gate, and costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TypeAlias

from adapters.errors import Overloaded
from gateway.admission.priority import Priority
from gateway.admission.queue import Entry
from gateway.admission.turnstile import Reason, Rules, Shed, Turnstile
from gateway.config import AdmissionConfig, GroupConfig, Live, ModelConfig
from gateway.records.metrics import Metrics
from gateway.records.trace import Attempt, Trace
from gateway.replicas.replica import ServedModel
from gateway.routing.ask import Ask

_WHY: Mapping[Reason, str] = {
    "late": "the first token would come too late",
    "full": "too many wait already",
    "displaced": "requests of a higher priority took the place",
    "expired": "its turn did not come in time",
}

OnLate: TypeAlias = Callable[[], Awaitable[None]]
Named: TypeAlias = ModelConfig | GroupConfig


def rules_of(named: Named, max_in_flight: int) -> Rules | None:
    """What the configuration says of a model's gate; None where it has none."""
    slo, admission = named.slo, named.admission
    has_target = slo.ttft_ms is not None or slo.tpot_ms is not None
    if admission is None and not has_target:
        return None
    admission = admission or AdmissionConfig()
    return Rules(
        lowest=admission.min_running,
        highest=admission.max_running or max_in_flight,
        is_adaptive=has_target and admission.is_adaptive,
        max_waiting=admission.max_waiting,
        max_wait_s=admission.max_wait_s,
        floor_share=admission.floor_share,
        weights=admission.weights,
        ttft_s=None if slo.ttft_ms is None else slo.ttft_ms / 1e3,
        tpot_s=None if slo.tpot_ms is None else slo.tpot_ms / 1e3,
    )


class Gate:
    """One model's. Times are seconds of `time.perf_counter`, as in traces."""

    def __init__(self, named: Named, rules: Rules, live: Live, metrics: Metrics) -> None:
        self.named = named
        self.turnstile = Turnstile(rules)
        self.num_shed: Counter[tuple[str, Reason]] = Counter()  # by class and reason
        self._live = live
        self._metrics = metrics
        self._tickets: dict[Entry, asyncio.Future[Shed | None]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self.turnstile.queue)

    def adopt(self, named: Named, rules: Rules) -> None:
        """Other rules from now on."""
        if rules != self.turnstile.rules:
            self.turnstile.adopt(rules)
            self._turn()
        self.named = named

    async def let_in(self, trace: Trace, ask: Ask, on_late: OnLate | None) -> AbstractContextManager[None]:
        """Waits for a turn. Raises `Overloaded` at once where that would come too late, and later if it does."""
        now = time.perf_counter()
        if self.turnstile.has_room():
            self.turnstile.enter(trace.priority, now)
            return _Place(self)
        entry = self._entry(trace, ask)
        arrival = self.turnstile.arrive(entry, now)
        if arrival.displaced is not None:
            self._send_away(arrival.displaced)
        if arrival.shed is not None:
            raise self._refusal(arrival.shed)
        try:
            shed = await self._ticket(entry, now, on_late)
        finally:
            trace.note_queued(now, time.perf_counter())
        if shed is not None:
            raise self._refusal(shed)
        self._metrics.observe(
            "goodgate_admission_wait_seconds", time.perf_counter() - now, self.named.name, entry.priority.label
        )
        return _Place(self)

    def leave(self) -> None:
        self.turnstile.release(time.perf_counter())
        self._turn()

    def learn(self, attempt: Attempt, *, ttft_s: float | None = None, tpot_s: float | None = None) -> None:
        self.turnstile.learn(
            attempt.started, time.perf_counter(), attempt.expected_prompt_tokens, ttft_s=ttft_s, tpot_s=tpot_s
        )
        if self._tickets:
            self._turn()  # the limit may have grown

    def _entry(self, trace: Trace, ask: Ask) -> Entry:
        # A body that was long on its way, and a model that had to be loaded, are no fault of this queue's.
        arrived = (trace.body_read or trace.started) + trace.waited_s - trace.queued_s
        return Entry(
            priority=trace.priority,
            tenant="" if trace.caller is None else trace.caller.tenant,
            prompt_tokens=ask.prompt_tokens,
            tokens=ask.tokens,
            arrived=arrived,
            deadline=self.turnstile.deadline(arrived, trace.ttft_wish_s),
        )

    async def _ticket(self, entry: Entry, now: float, on_late: OnLate | None) -> Shed | None:
        loop = asyncio.get_running_loop()
        ticket = self._tickets[entry] = loop.create_future()
        timer = loop.call_later(entry.deadline - now, self._expire, entry)
        try:
            heartbeat_s = self._live.server.heartbeat_s
            if on_late is not None and entry.deadline - now > heartbeat_s:
                await asyncio.wait({ticket}, timeout=heartbeat_s)
                if not ticket.done():
                    await on_late()
            shed: Shed | None = await ticket
            return shed
        except BaseException:
            self.turnstile.leave(entry)
            if ticket.done() and not ticket.cancelled() and ticket.result() is None:
                self.leave()  # it was let in, and had no time to notice
            raise
        finally:
            self._tickets.pop(entry, None)
            timer.cancel()

    def _turn(self) -> None:
        """Let in whoever's turn it is."""
        now = time.perf_counter()
        turns = self.turnstile.turns(now)
        for shed in turns.sheds:
            self._send_away(shed)
        for entry in turns.entries:
            ticket = self._tickets.pop(entry)
            if not ticket.done():
                ticket.set_result(None)
            else:  # its client left a moment ago
                self.leave()

    def _expire(self, entry: Entry) -> None:
        shed = self.turnstile.expire(entry, time.perf_counter())
        if shed is not None:
            self._send_away(shed)

    def _send_away(self, shed: Shed) -> None:
        ticket = self._tickets.pop(shed.entry)
        if not ticket.done():
            ticket.set_result(shed)

    def _refusal(self, shed: Shed) -> Overloaded:
        self.num_shed[shed.entry.priority.label, shed.reason] += 1
        return Overloaded(
            f"Model {self.named.name!r} has no room ({_WHY[shed.reason]}); try again in {shed.retry_after_s:.1f} s.",
            retry_after_s=shed.retry_after_s,
        )


class _Place(AbstractContextManager[None]):
    """One open generation, for as long as the block lasts."""

    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __exit__(self, *_: object) -> None:
        self._gate.leave()


class Gates:
    """The gates of all models and groups. A group has one of its own: what is routed within it waits there."""

    def __init__(self, live: Live, metrics: Metrics) -> None:
        self._live = live
        self._metrics = metrics
        self._gates: dict[str, Gate] = {}
        self._learners: dict[str, list[Gate]] = {}  # by the model whose replica was asked
        self.adopt()
        metrics.watch("goodgate_admission_waiting", self._waiting)
        metrics.watch("goodgate_admission_open", lambda: self._each(lambda gate: gate.turnstile.num_open))
        metrics.watch("goodgate_admission_limit", lambda: self._each(lambda gate: gate.turnstile.limit))
        metrics.watch("goodgate_admission_shed", self._shed)

    def adopt(self) -> None:
        """The gates that the configuration asks for by now. One that was there stays, with who waits at it; at one that
        is not wanted any more they have their turns all the same."""
        former, self._gates, self._learners = self._gates, {}, {}
        config = self._live.config
        every: tuple[Named, ...] = (*config.models, *config.groups)
        for named in every:
            rules = rules_of(named, config.server.max_in_flight)
            if rules is None:
                continue
            gate = former.get(named.name) or Gate(named, rules, self._live, self._metrics)
            gate.adopt(named, rules)
            self._gates[named.name] = gate
            for model in named.models if isinstance(named, GroupConfig) else (named.name,):
                self._learners.setdefault(model, []).append(gate)

    def guards(self, served: ServedModel) -> bool:
        return served.name in self._gates

    async def let_in(
        self, served: ServedModel, trace: Trace, ask: Ask, on_late: OnLate | None = None
    ) -> AbstractContextManager[None]:
        """Waits for a turn at the gate of a model that has one."""
        return await self._gates[served.name].let_in(trace, ask, on_late)

    def num_waiting(self, model: str | None = None) -> int:
        """How many wait for the model or group; for all of them without a name."""
        if model is None:
            return sum(gate.num_waiting for gate in self._gates.values())
        gate = self._gates.get(model)
        return 0 if gate is None else gate.num_waiting

    def num_shed(self, model: str) -> int:
        """How many were sent away, ever."""
        gate = self._gates.get(model)
        return 0 if gate is None else gate.num_shed.total()

    def note_first_token(self, attempt: Attempt) -> None:
        for gate in self._learners.get(attempt.model, ()):
            assert attempt.first_token is not None
            gate.learn(attempt, ttft_s=attempt.first_token - attempt.started)

    def note_end(self, attempt: Attempt) -> None:
        gates = self._learners.get(attempt.model)
        if gates and (tpot_s := attempt.token_time_s) is not None:
            for gate in gates:
                gate.learn(attempt, tpot_s=tpot_s)

    def _each(self, read: Callable[[Gate], float]) -> Iterator[tuple[tuple[str, ...], float]]:
        for name, gate in self._gates.items():
            yield (name,), read(gate)

    def _waiting(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for name, gate in self._gates.items():
            for priority in Priority:
                yield (name, priority.label), gate.turnstile.queue.num_waiting(priority)

    def _shed(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for name, gate in self._gates.items():
            for (priority, reason), count in gate.num_shed.items():
                yield (name, priority, reason), count
