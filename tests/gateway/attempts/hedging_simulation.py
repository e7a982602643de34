"""What hedging brings and costs where some first tokens are slow for once, in virtual time.

python -m tests.gateway.attempts.hedging_simulation
"""

from __future__ import annotations

import random

from gateway.attempts.hedge_timing import HedgeTiming
from gateway.config import HedgeConfig

NUM_REQUESTS = 20_000
REQUESTS_PER_S = 20
SLOW_SHARE, SLOWER = 0.05, 10.0


def run(hedge: HedgeConfig | None, seed: int = 0) -> tuple[list[float], int]:
    """Seconds to each first token, in order of size, and how many attempts were made beside the first."""
    draw = random.Random(seed)
    timing = None if hedge is None else HedgeTiming(hedge)
    waits: list[float] = []
    num_hedges = 0

    def ttft_s() -> float:
        seconds = 0.1 * draw.lognormvariate(0, 0.2)
        return seconds * SLOWER if draw.random() < SLOW_SHARE else seconds

    for number in range(NUM_REQUESTS):
        now, wait_s = number / REQUESTS_PER_S, ttft_s()
        if timing is not None:
            timing.opened(now)
            delay_s = timing.delay_s()
            if delay_s is not None and wait_s > delay_s and timing.may_hedge(now + delay_s):
                timing.hedged(now + delay_s)
                num_hedges += 1
                wait_s = min(wait_s, delay_s + ttft_s())
            timing.answered(wait_s)
        waits.append(wait_s)
    return sorted(waits), num_hedges


def percentile(waits: list[float], share: float) -> float:
    return waits[int(share * len(waits))]


if __name__ == "__main__":
    print("| hedge | p50 | p95 | p99 | more attempts |\n|---|---|---|---|---|")
    configs = [None, HedgeConfig(), HedgeConfig(budget=0.1), HedgeConfig(after=200), HedgeConfig(after=200, budget=0.1)]
    for each in configs:
        waits, num_hedges = run(each)
        name = "off" if each is None else f"after: {each.after}, budget: {each.budget}"
        figures = " | ".join(f"{percentile(waits, share) * 1e3:.0f} ms" for share in (0.5, 0.95, 0.99))
        print(f"| {name} | {figures} | {num_hedges / NUM_REQUESTS:.1%} |")
