"""What a key may use: requests and tokens a minute, and requests at once. Pure: use and a time go in, use comes out.

    used = reserve(limits, used, now, requests=1, tokens=300)     # `Refused` when it does not fit
    used = settle(limits, used, now, requests=1, reserved=300, spent=120)

Each rate is a bucket that holds a minute's worth and drains evenly, so an idle key may use a whole minute at once.
Tokens are reserved by what a request may cost and settled by what it did cost. What was not foreseen (an answer without
`max_tokens`) makes a debt that later requests wait for; nothing is forgiven, and nothing is charged twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

from adapters.errors import RequestError

MINUTE_S = 60.0
BUSY_RETRY_AFTER_S = 1.0  # nobody knows when one of the open requests ends


class Limits(Struct, frozen=True, kw_only=True):
    """None is no limit."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrent: int | None = None


class Used(Struct, frozen=True):
    """What stands in the buckets as of `at`. All zeros: nothing was ever used."""

    at: float = 0.0
    requests: float = 0.0
    tokens: float = 0.0
    in_flight: int = 0


class Refused(Struct, frozen=True):
    reason: str
    retry_after_s: float


class Left(NamedTuple):
    """What a caller is told of one bound. `reset` is empty for one that never begins anew."""

    name: str
    limit: int
    remaining: int
    reset: str


class RateLimited(RequestError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


NO_LIMITS = Limits()


def drained(limits: Limits, used: Used, now: float) -> Used:
    """What is left in the buckets at `now`. A clock that went back drains nothing."""
    at, requests, tokens = _levels(limits, used, now)
    return Used(at, requests, tokens, used.in_flight)


def reserve(limits: Limits, used: Used, now: float, *, requests: int, tokens: int) -> Used | Refused:
    """The use with this request in it, or why it has to wait.

    >>> reserve(Limits(requests_per_min=60), Used(at=0.0, requests=60.0), 0.0, requests=1, tokens=0)
    Refused(reason='60 requests a minute', retry_after_s=1.0)
    """
    at, num_requests, num_tokens = _levels(limits, used, now)
    num_requests += requests
    num_tokens += reserved_tokens(limits, tokens)
    in_flight = used.in_flight + requests
    if limits.concurrent is not None and in_flight > limits.concurrent:
        return Refused(f"{limits.concurrent} requests at once", BUSY_RETRY_AFTER_S)
    if limits.requests_per_min is not None and num_requests > limits.requests_per_min:
        return _wait("requests", limits.requests_per_min, num_requests)
    if limits.tokens_per_min is not None and num_tokens > limits.tokens_per_min:
        return _wait("tokens", limits.tokens_per_min, num_tokens)
    return Used(at, num_requests, num_tokens, in_flight)


def settle(limits: Limits, used: Used, now: float, *, requests: int, reserved: int, spent: int) -> Used:
    """The use once the request has ended: its places are free, and its tokens are those that it spent."""
    at, num_requests, num_tokens = _levels(limits, used, now)
    num_tokens += spent - reserved_tokens(limits, reserved)
    in_flight = used.in_flight - requests
    return Used(at, num_requests, num_tokens if num_tokens > 0.0 else 0.0, in_flight if in_flight > 0 else 0)


def _wait(name: str, limit: int, level: float) -> Refused:
    return Refused(f"{limit} {name} a minute", (level - limit) * MINUTE_S / limit)


def reserved_tokens(limits: Limits, tokens: int) -> int:
    """A request that may cost more than a minute's worth waits for an empty bucket, rather than for ever."""
    bound = limits.tokens_per_min
    return tokens if bound is None or tokens <= bound else bound


def too_many_at_once(limits: Limits, requests: int) -> int | None:
    """The limit that so many requests in one body could never meet."""
    least = requests
    for limit in (limits.concurrent, limits.requests_per_min):
        if limit is not None and limit < least:
            least = limit
    return least if least < requests else None


def left(limits: Limits, used: Used) -> list[Left]:
    """What is left of each rate, and when all of it will be there again."""
    found = []
    if limits.requests_per_min is not None:
        found.append(_left("requests", limits.requests_per_min, used.requests))
    if limits.tokens_per_min is not None:
        found.append(_left("tokens", limits.tokens_per_min, used.tokens))
    return found


def _left(name: str, limit: int, level: float) -> Left:
    rest = math.floor(limit - level)
    return Left(name, limit, rest if rest > 0 else 0, f"{level * MINUTE_S / limit:.3f}s")


def headers(found: Iterable[Left]) -> dict[str, str]:
    """OpenAI's `x-ratelimit-*`. Of several bounds on one thing, the one that the caller will meet first."""
    nearest: dict[str, Left] = {}
    for each in found:
        nearer = nearest.get(each.name)
        if nearer is None or each.remaining < nearer.remaining:
            nearest[each.name] = each
    shown: dict[str, str] = {}
    for name, each in nearest.items():
        limit, remaining, reset = _HEADERS[name]
        shown[limit], shown[remaining] = str(each.limit), str(each.remaining)
        if each.reset:
            shown[reset] = each.reset
    return shown


_HEADERS = {
    name: (f"x-ratelimit-limit-{name}", f"x-ratelimit-remaining-{name}", f"x-ratelimit-reset-{name}")
    for name in ("requests", "tokens", "budget-tokens", "budget-gpu-seconds")
}


def _levels(limits: Limits, used: Used, now: float) -> tuple[float, float, float]:
    """The time up to which the buckets are drained, and what stands in them then: requests and tokens. Each request
    passes here twice."""
    at = used.at
    if now > at:
        minutes, at = (now - at) / MINUTE_S, now
    else:
        minutes = 0.0
    requests, tokens = limits.requests_per_min, limits.tokens_per_min
    num_requests = 0.0 if requests is None else used.requests - minutes * requests
    num_tokens = 0.0 if tokens is None else used.tokens - minutes * tokens
    return at, num_requests if num_requests > 0.0 else 0.0, num_tokens if num_tokens > 0.0 else 0.0
