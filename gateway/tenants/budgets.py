"""What a key or a tenant may spend in a day, in a month or ever: tokens and GPU-seconds. Pure, like the limits.

    spending = reserve(budget, spending, now, wanted=Amount(300, 500_000))     # or `Exhausted`
    spending = settle(budget, spending, now, held=..., spent=Amount(120, 210_000))

Days and months are those of UTC. What open requests hold is no less gone than what was spent, so however many come at
once, only what a request costs beyond its estimate can overspend a budget. A request that lasts beyond the end of a
period is charged to the one it ends in. GPU time is counted in whole microseconds, so that what comes in goes out.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from gateway.tenants.limits import Left

Period: TypeAlias = Literal["day", "month", "life"]

DAY_S = 86_400
US = 1_000_000
HELD_RETRY_AFTER_S = 1.0  # what open requests hold may come back any moment


class Amount(NamedTuple):
    tokens: int
    gpu_us: int


class Budget(Struct, frozen=True, kw_only=True):
    """None is no bound. `per` "life" never begins anew."""

    tokens: int | None = None
    gpu_seconds: int | None = None
    per: Period = "month"


class Spending(Struct, frozen=True):
    """What was spent since `period`, the second in which the day or the month began, and what open requests hold."""

    period: int = 0
    tokens: int = 0
    gpu_us: int = 0
    tokens_held: int = 0
    gpu_us_held: int = 0


class Exhausted(Struct, frozen=True):
    """`begins_anew` is the second in which the budget does, if ever; `is_held`: open requests may give enough back."""

    reason: str
    begins_anew: float | None
    is_held: bool


NO_BUDGET = Budget()
PERIODS: dict[Period, str] = {"day": "a day", "month": "a month", "life": "in all"}


def microseconds(seconds: float) -> int:
    return round(seconds * US)


def begin_of(per: Period, now: float) -> int:
    """The first second of the period around `now`.

    >>> begin_of("month", 1_796_000_000.0) == datetime(2026, 11, 1, tzinfo=UTC).timestamp()
    True
    """
    if per == "life":
        return 0
    if per == "day":
        return int(now // DAY_S) * DAY_S
    return _month_of(int(now // DAY_S))[0]


@lru_cache(maxsize=64)  # each request asks, and mostly about today
def _month_of(day: int) -> tuple[int, int]:
    """The first seconds of the month in which this day since 1970 lies, and of the next."""
    today = datetime.fromtimestamp(day * DAY_S, UTC)
    begin = datetime(today.year, today.month, 1, tzinfo=UTC)
    later = begin + timedelta(days=32)
    return int(begin.timestamp()), int(datetime(later.year, later.month, 1, tzinfo=UTC).timestamp())


def end_of(per: Period, now: float) -> float | None:
    """The first second of the next period; None where there is none."""
    if per == "life":
        return None
    if per == "day":
        return begin_of(per, now) + DAY_S
    return _month_of(int(now // DAY_S))[1]


def current(budget: Budget, spending: Spending, now: float) -> Spending:
    """Nothing is spent yet in a new period. A clock that went back begins none."""
    period, tokens, gpu_us = _spent(budget, spending, now)
    return Spending(period, tokens, gpu_us, spending.tokens_held, spending.gpu_us_held)


def _spent(budget: Budget, spending: Spending, now: float) -> tuple[int, int, int]:
    """The period of now, and what was spent in it. Each request passes here twice."""
    begin = begin_of(budget.per, now)
    return (begin, 0, 0) if begin > spending.period else (spending.period, spending.tokens, spending.gpu_us)


def reserve(budget: Budget, spending: Spending, now: float, *, wanted: Amount) -> Spending | Exhausted:
    """The spending with this request's share held in it, or why there is none left for it."""
    period, tokens, gpu_us = _spent(budget, spending, now)
    tokens_held, gpu_us_held = spending.tokens_held, spending.gpu_us_held
    # With nothing left, not even what may cost nothing comes in.
    if (bound := budget.tokens) is not None and (wanted.tokens or 1) > bound - tokens - tokens_held:
        return _exhausted(budget, now, bound, bound - tokens, tokens_held, wanted.tokens, 1)
    if (bound := budget.gpu_seconds) is not None and (wanted.gpu_us or 1) > bound * US - gpu_us - gpu_us_held:
        return _exhausted(budget, now, bound, bound * US - gpu_us, gpu_us_held, wanted.gpu_us, US)
    return Spending(period, tokens, gpu_us, tokens_held + wanted.tokens, gpu_us_held + wanted.gpu_us)


def _exhausted(budget: Budget, now: float, bound: int, left: int, held: int, want: int, scale: int) -> Exhausted:
    unit = "tokens" if scale == 1 else "GPU-seconds"
    rest, whole = _shown(max(left - held, 0), scale), f"{bound:,} {unit} {PERIODS[budget.per]}"
    reason = f"{rest} of {whole} left, and this request may take {_shown(want, scale)}"
    return Exhausted(reason, end_of(budget.per, now), max(want, 1) <= left)


def settle(budget: Budget, spending: Spending, now: float, *, held: Amount, spent: Amount) -> Spending:
    """The spending once the request has ended: what it held is free, and what it spent is gone."""
    period, tokens, gpu_us = _spent(budget, spending, now)
    tokens_held, gpu_us_held = spending.tokens_held - held.tokens, spending.gpu_us_held - held.gpu_us
    return Spending(
        period,
        tokens + spent.tokens,
        gpu_us + spent.gpu_us,
        tokens_held if tokens_held > 0 else 0,
        gpu_us_held if gpu_us_held > 0 else 0,
    )


def left(budget: Budget, spending: Spending, now: float) -> list[Left]:
    """What is left of the budget, and when all of it will be there again."""
    if budget.tokens is None and budget.gpu_seconds is None:
        return []
    end = end_of(budget.per, now)
    reset = "" if end is None else f"{math.ceil(end - now)}s"
    found = []
    if (bound := budget.tokens) is not None:
        gone = spending.tokens + spending.tokens_held
        found.append(Left("budget-tokens", bound, max(bound - gone, 0), reset))
    if (bound := budget.gpu_seconds) is not None:
        gone = spending.gpu_us + spending.gpu_us_held
        found.append(Left("budget-gpu-seconds", bound, max(bound * US - gone, 0) // US, reset))
    return found


def _shown(amount: int, scale: int) -> str:
    return f"{amount:,}" if scale == 1 else f"{amount / scale:,.1f}"
