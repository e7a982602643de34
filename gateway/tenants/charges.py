"""What a request may use of its caller's limits and budgets while it is open, and what it has used in the end.

    async with charges.held(trace, [of_generation(request)]):     # RateLimited, InsufficientQuota
        ...

Tokens are estimated before (cost.py) and counted by engines afterwards; an engine's seconds are expected to be what the
model's generations took before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from gateway.records.trace import Trace
from gateway.tenants import cost
from gateway.tenants.accounts import Claim
from gateway.tenants.budgets import Amount, microseconds
from gateway.tenants.cost import Cost, EngineSeconds
from gateway.tenants.quotas import Quotas


class Charges:
    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._engine_seconds = EngineSeconds()

    @asynccontextmanager
    async def held(self, trace: Trace, costs: Sequence[Cost]) -> AsyncIterator[None]:
        """Holds the caller's share of what his key and tenant may use, and charges what was used in the end. A client
        that leaves pays for what the engine has done for him, as far as that can be told."""
        if trace.caller is None:
            yield
            return
        expected_s = len(costs) * self._engine_seconds.expected(trace.model)
        expected = Amount(sum(each.prompt_tokens + each.completion_tokens for each in costs), microseconds(expected_s))
        claim = Claim(len(costs), expected)
        async with self._quotas.reserved(trace.caller, claim, tell=trace.limits.update) as reservation:
            try:
                yield
            finally:
                engine_s = cost.engine_s(trace)
                reservation.spent = Amount(cost.spent(trace).tokens, microseconds(engine_s))
            self._engine_seconds.learn(trace.model, engine_s / len(costs))
