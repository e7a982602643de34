"""How many replicas a stream of requests needs, by simulating it in virtual time. Pure: a seed gives one answer.

    needed = replicas_needed(arrivals_s, goodput_rps=8.0, patience_s=1.0, allowed=0.01)
    rate = service_rate(goodput_rps=8.0, patience_s=1.0, allowed=0.01)     # what a replica with that goodput does
    kept = attainment(arrivals_s, replicas=3, service_rps=rate, patience_s=1.0)

A replica is the queue whose tail the arena's fit of goodput assumes (`arena/judging/search.py`): work comes one after
the other, service times are exponential, and a request misses when it waits longer than the TTFT limit. Its service
rate is chosen so that at the proven goodput, under Poisson arrivals, exactly the allowed share misses. What that queue
then does with other arrivals (bursts, several replicas) is simulated, since no formula holds for a recorded trace: each
request goes to the replica with the fewest open, as the gateway's `least_load` and `goodput` do with equal replicas.
"""

from __future__ import annotations

import heapq
import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

Seconds = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

ROUNDS = 5  # simulations, each with service times of its own
LEAST_ARRIVALS = 50  # a period with fewer says little about a share of misses
MAX_REPLICAS = 1024


def service_rate(*, goodput_rps: float, patience_s: float, allowed: float) -> float:
    """Requests a second that a busy replica works off, in [goodput, goodput + ln(1 / allowed) / patience].

    P(wait > t) of M/M/1 is `rho * exp(-(mu - lambda) t)` (any text on queues, e.g. Kleinrock 1975, section 3.2).
    """

    def surplus(rate: float) -> float:
        return goodput_rps / rate * math.exp(-(rate - goodput_rps) * patience_s) - allowed

    return float(brentq(surplus, goodput_rps, goodput_rps + math.log(1 / allowed) / patience_s + 1e-9))


def in_time(arrivals_s: Seconds, *, replicas: int, service_rps: float, patience_s: float, seed: int) -> Flags:
    """Of each request, whether it waits no longer than `patience_s`. Arrivals ascend; replicas begin empty."""
    services = np.random.Generator(np.random.PCG64(seed)).exponential(1 / service_rps, len(arrivals_s)).tolist()
    open_at = [0] * replicas
    free_s = [0.0] * replicas
    departures: list[tuple[float, int]] = []
    kept = []
    for at, service in zip(arrivals_s.tolist(), services, strict=True):
        while departures and departures[0][0] <= at:
            open_at[heapq.heappop(departures)[1]] -= 1
        place = open_at.index(min(open_at))
        begins = max(at, free_s[place])
        kept.append(begins - at <= patience_s)
        free_s[place] = begins + service
        open_at[place] += 1
        heapq.heappush(departures, (begins + service, place))
    return np.array(kept)


def attainment(arrivals_s: Seconds, *, replicas: int, service_rps: float, patience_s: float, periods: int = 1) -> float:
    """The share of requests in time in the worst of so many periods of equal length, as the mean of `ROUNDS`. Periods
    with hardly any requests are passed over; where all have hardly any, the whole is judged at once.
    """
    kept = np.mean(
        [
            in_time(arrivals_s, replicas=replicas, service_rps=service_rps, patience_s=patience_s, seed=seed)
            for seed in range(ROUNDS)
        ],
        axis=0,
    )
    judged = [part for part in parts_of(arrivals_s, periods) if is_judged(part)] or [slice(None)]
    return min(float(kept[part].mean()) for part in judged)


def parts_of(arrivals_s: Seconds, parts: int) -> list[slice]:
    """Parts of equal length in time, as slices of the arrivals."""
    edges = np.searchsorted(arrivals_s, np.linspace(arrivals_s[0], arrivals_s[-1], parts + 1)[1:-1])
    return [slice(*edge) for edge in pairwise([0, *edges.tolist(), len(arrivals_s)])]


def is_judged(part: slice) -> bool:
    return int(part.stop - part.start) >= LEAST_ARRIVALS


def replicas_needed(
    arrivals_s: Seconds, *, goodput_rps: float, patience_s: float, allowed: float, periods: int = 1
) -> int | None:
    """The fewest replicas with which every period holds; None where `MAX_REPLICAS` are too few.

    Never fewer than the mean rate by the goodput: a queue that is shared can be filled further before anyone waits too
    long, but what an engine does beyond its goodput (the time for each token above all) nobody has raced.
    """
    service_rps = service_rate(goodput_rps=goodput_rps, patience_s=patience_s, allowed=allowed)

    def holds(replicas: int) -> bool:
        kept = attainment(
            arrivals_s, replicas=replicas, service_rps=service_rps, patience_s=patience_s, periods=periods
        )
        return kept >= 1 - allowed

    low, high = 0, max(1, math.ceil(mean_rate(arrivals_s) / goodput_rps - 1e-9))
    while high <= MAX_REPLICAS and not holds(high):
        low, high = high, 2 * high
    if high > MAX_REPLICAS:
        return None
    while low and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def mean_rate(arrivals_s: Seconds) -> float:
    """Arrivals a second, over the gaps between them."""
    return (len(arrivals_s) - 1) / float(arrivals_s[-1] - arrivals_s[0])
