"""What a request may use of its caller's limits and budgets while it is open, and what it has used in the end.

    async with charges.held(trace, [of_generation(request)]):     # RateLimited, InsufficientQuota
        ...

Tokens are estimated before (cost.py) and counted by engines afterwards; an engine's seconds are expected to be what the
model's generations took before.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from gateway.records.trace import Trace
from gateway.tenants import cost
from gateway.tenants.accounts import Claim
from gateway.tenants.budgets import Amount, microseconds
from gateway.tenants.cost import Cost, EngineSeconds
from gateway.tenants.quotas import Quotas, Reservation


class Charges:
    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._engine_seconds = EngineSeconds()

    def held(self, trace: Trace, costs: Sequence[Cost]) -> Charge:
        """Holds the caller's share of what his key and tenant may use, and charges what was used in the end. A client
        that leaves pays for what the engine has done for him, as far as that can be told."""
        reservation = None
        if trace.caller is not None:
            expected_s = len(costs) * self._engine_seconds.expected(trace.model)
            tokens = sum([each.prompt_tokens + each.completion_tokens for each in costs])
            claim = Claim(len(costs), Amount(tokens, microseconds(expected_s)))
            reservation = self._quotas.reserved(trace.caller, claim, tell=trace.limits.update)
        return Charge(trace, reservation, len(costs), self._engine_seconds)


class Charge:
    """What one request may use while it is open."""

    __slots__ = ("_engine_seconds", "_num_generations", "_reservation", "_trace")

    def __init__(
        self, trace: Trace, reservation: Reservation | None, num_generations: int, engine_seconds: EngineSeconds
    ) -> None:
        self._trace = trace
        self._reservation = reservation
        self._num_generations = num_generations
        self._engine_seconds = engine_seconds

    async def __aenter__(self) -> None:
        if self._reservation is not None:
            await self._reservation.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reservation is None:
            return
        engine_s = cost.engine_s(self._trace)
        self._reservation.spent = Amount(cost.spent(self._trace).tokens, microseconds(engine_s))
        await self._reservation.__aexit__(kind, error, trace)
        if error is None:
            self._engine_seconds.learn(self._trace.model, engine_s / self._num_generations)
