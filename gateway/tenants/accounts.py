"""Whose limits and budgets a request has to meet: its key's, and its tenant's, both or none. Pure.

    outcome = reserve(accounts, states, now, claim)            # the states with the request in them, or the refusal
    states = settle(accounts, states, now, claim, spent)

Stores keep a `State` for each `Account` and know nothing of what stands in it; what is decided is decided here, for all
of them (see gateway/tenants/quotas.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from msgspec import Struct

from adapters.errors import RequestError
from gateway.tenants import budgets, limits
from gateway.tenants.budgets import HELD_RETRY_AFTER_S, NO_BUDGET, Amount, Budget, Exhausted, Spending
from gateway.tenants.limits import NO_LIMITS, Left, Limits, RateLimited, Refused, Used

NO_RETRY = {"x-should-retry": "false"}  # OpenAI's and Anthropic's clients obey; a 429 alone they would try again


class Account(Struct, frozen=True, kw_only=True):
    """A key or a tenant, with what it may use."""

    kind: Literal["key", "tenant"]
    id: int
    name: str
    limits: Limits = NO_LIMITS
    budget: Budget = NO_BUDGET

    @property
    def is_bounded(self) -> bool:
        return self.limits != NO_LIMITS or self.budget != NO_BUDGET

    @property
    def title(self) -> str:
        return "This key" if self.kind == "key" else f"The tenant {self.name!r}"


class State(Struct, frozen=True):
    used: Used = Used()
    spending: Spending = Spending()


class Now(NamedTuple):
    """One moment on two clocks: minutes are measured on one that nobody sets, days and months on the wall's."""

    steady: float
    wall: float


class Claim(NamedTuple):
    """What a request asks for: so many generations, which may cost so much."""

    requests: int
    amount: Amount


class InsufficientQuota(RequestError):
    """A budget does not hold the request. `is_final`: another try is of no use before the budget begins anew."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"

    def __init__(self, message: str, *, retry_after_s: float | None, is_final: bool) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.is_final = is_final


NEW = State()


def reserve(
    accounts: Sequence[Account], states: Sequence[State], now: Now, claim: Claim
) -> list[State] | RateLimited | InsufficientQuota:
    """All states with the request in them, or why it has to wait for one of them."""
    outcome = []
    for account, state in zip(accounts, states, strict=True):
        spending = budgets.reserve(account.budget, state.spending, now.wall, wanted=claim.amount)
        if isinstance(spending, Exhausted):
            return _exhausted(account, spending, now)
        used = limits.reserve(
            account.limits, state.used, now.steady, requests=claim.requests, tokens=claim.amount.tokens
        )
        if isinstance(used, Refused):
            return RateLimited(
                f"{account.title} may use {used.reason}; try again in {used.retry_after_s:.1f} s.",
                retry_after_s=used.retry_after_s,
            )
        outcome.append(State(used, spending))
    return outcome


def settle(accounts: Sequence[Account], states: Sequence[State], now: Now, claim: Claim, spent: Amount) -> list[State]:
    """All states once the request has ended."""
    return [
        State(
            limits.settle(
                account.limits,
                state.used,
                now.steady,
                requests=claim.requests,
                reserved=claim.amount.tokens,
                spent=spent.tokens,
            ),
            budgets.settle(account.budget, state.spending, now.wall, held=claim.amount, spent=spent),
        )
        for account, state in zip(accounts, states, strict=True)
    ]


def current(accounts: Sequence[Account], states: Sequence[State], now: Now) -> list[State]:
    """What is left of the states by now."""
    return [
        State(
            limits.drained(account.limits, state.used, now.steady),
            budgets.current(account.budget, state.spending, now.wall),
        )
        for account, state in zip(accounts, states, strict=True)
    ]


def headers(accounts: Sequence[Account], states: Sequence[State], now: Now) -> dict[str, str]:
    """What the caller is told of all his bounds."""
    found: list[Left] = []
    for account, state in zip(accounts, states, strict=True):
        found += limits.left(account.limits, state.used)
        found += budgets.left(account.budget, state.spending, now.wall)
    return limits.headers(found)


def too_many_at_once(accounts: Iterable[Account], requests: int) -> int | None:
    """The limit that so many requests in one body could never meet."""
    found = [limits.too_many_at_once(account.limits, requests) for account in accounts]
    return min([bound for bound in found if bound is not None], default=None)


def _exhausted(account: Account, found: Exhausted, now: Now) -> InsufficientQuota:
    if found.is_held:
        advice, retry_after_s = "open requests hold the rest, so try again shortly", HELD_RETRY_AFTER_S
    elif found.begins_anew is None:
        advice, retry_after_s = "the budget does not begin anew, so ask for a larger one", None
    else:
        anew = datetime.fromtimestamp(found.begins_anew, UTC)
        advice, retry_after_s = f"the budget begins anew on {anew:%Y-%m-%d} at 00:00 UTC", found.begins_anew - now.wall
    message = f"{account.title} has {found.reason}; {advice}."
    return InsufficientQuota(message, retry_after_s=retry_after_s, is_final=not found.is_held)
