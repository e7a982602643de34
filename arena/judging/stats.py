"""What a handful of latencies allows us to say. Pure: numbers in, judgements out.

A cell is a series of Bernoulli trials: a scheduled request either met both limits (TTFT and TPOT) or it did not, and a
failed, unsent or truncated request did not. "p99 holds" then means: the chance that a request misses is at most 1 %.
Three answers exist, because with few requests neither answer is proven:

    >>> judge(n=300, misses=0)          # nobody missed, and 300 are enough to be sure
    <Verdict.PASS: 'pass'>
    >>> judge(n=30, misses=0)           # nobody missed, but 30 requests cannot show a p99
    <Verdict.UNKNOWN: 'cannot tell'>
    >>> judge(n=30, misses=3)           # three misses in 30 do not happen at a 1 % miss rate
    <Verdict.FAIL: 'fail'>

The rule is the exact binomial tail, free of any assumption about how latencies are distributed. It does assume that
requests miss independently, which is false near the knee, where one queue makes many requests late together.
`design_effect` measures that clumping, and the rule is then fed with the smaller, effective number of requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from scipy.stats import beta, binom, rankdata

MIN_BLOCKS = 10
MIN_BLOCK_SIZE = 20  # below this a block's miss rate is mostly its own sampling noise
MIN_MISSES = 5  # a variance between blocks cannot be read off fewer misses


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "cannot tell"


def judge(n: float, misses: float, *, percentile: float = 99.0, confidence: float = 0.95) -> Verdict:
    """Is the miss rate proven to be below, proven to be above, or not known against `100 - percentile` percent?

    `n` and `misses` may be fractions (effective sizes); each is rounded in the direction that proves less.
    """
    allowed = 1 - percentile / 100
    trials = math.floor(n + 1e-9)
    if trials < 1:
        return Verdict.UNKNOWN
    most, fewest = math.ceil(misses - 1e-9), math.floor(misses + 1e-9)
    if binom.cdf(most, trials, allowed) <= 1 - confidence:
        return Verdict.PASS
    if binom.sf(fewest - 1, trials, allowed) <= 1 - confidence:
        return Verdict.FAIL
    return Verdict.UNKNOWN


Look: TypeAlias = tuple[int, int, int, float]
"""One more cell at a rate: requests, misses, misses beyond the client's error, design effect."""


def judge_looks(
    cells: Sequence[Look], *, max_looks: int, percentile: float = 99.0, confidence: float = 0.95
) -> Verdict:
    """The verdict on cells that were added one by one until they proved something, judged again after each.

    Each of at most `max_looks` looks spends an equal share of the risk that the confidence leaves, so that looking
    often proves nothing by chance more often than looking once (Bonferroni over the looks; alpha spending with equal
    increments). The first proof stands. A pass has to be proven with all misses, a fail with those that the client's
    error cannot explain.
    """
    spent = 1 - (1 - confidence) / max_looks
    effective = misses = certain = 0.0
    for requests, missed, sure, effect in cells[:max_looks]:
        effective += requests / effect
        misses += missed / effect
        certain += sure / effect
        if judge(effective, misses, percentile=percentile, confidence=spent) is Verdict.PASS:
            return Verdict.PASS
        if judge(effective, certain, percentile=percentile, confidence=spent) is Verdict.FAIL:
            return Verdict.FAIL
    return Verdict.UNKNOWN


def holds(n: int, misses: int, *, percentile: float = 99.0) -> bool:
    """The plain observation, with no claim of proof: did at least `percentile` percent of the requests meet the
    limits?
    """
    return n > 0 and misses <= n * (1 - percentile / 100) + 1e-9


def quantile(values: Sequence[float], percentile: float) -> float | None:
    """The order statistic at rank ceil(p n): a value that occurred. Failures are passed as infinity; no values, no
    answer.
    """
    if not values:
        return None
    ordered = sorted(values)
    rank = max(1, math.ceil(len(ordered) * percentile / 100 - 1e-9))
    return ordered[rank - 1]


def attainment_interval(n: int, misses: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson interval of the share of requests that meet the limits."""
    if n == 0:
        return 0.0, 1.0
    tail = (1 - confidence) / 2
    met = n - misses
    low = 0.0 if met == 0 else float(beta.ppf(tail, met, misses + 1))
    high = 1.0 if misses == 0 else float(beta.ppf(1 - tail, met + 1, misses))
    return low, high


def design_effect(missed: Sequence[bool], latencies: Sequence[float]) -> float:
    """How many requests of this cell tell as much as one independent request would. Both series are in schedule order.

    Two readings, and the larger counts: the variance of the miss rate between blocks of the cell, where there are
    misses enough, and the autocorrelation time of the latencies, which shows a shared queue even while nobody misses.
    The second is what stops a lucky stretch below a busy queue from passing as proof.
    """
    return max(_block_variance_ratio(missed), autocorrelation_time(latencies))


def _block_variance_ratio(missed: Sequence[bool]) -> float:
    outcomes = np.asarray(missed, dtype=float)
    blocks = min(20, outcomes.size // MIN_BLOCK_SIZE)
    rate = float(outcomes.mean()) if outcomes.size else 0.0
    if blocks < MIN_BLOCKS or outcomes.sum() < MIN_MISSES or rate == 1.0:
        return 1.0
    means = [float(block.mean()) for block in np.array_split(outcomes, blocks)]
    binomial_variance = rate * (1 - rate) / (outcomes.size / blocks)
    return max(1.0, float(np.var(means, ddof=1)) / binomial_variance)


def autocorrelation_time(latencies: Sequence[float]) -> float:
    """1 + 2 (sum of autocorrelations), cut at the first window of five such times (Sokal).

    Ranks stand in for the latencies, so that failures (infinite) and heavy tails count by their order only.
    """
    count = len(latencies)
    if count < 8:
        return 1.0
    ranks = rankdata(latencies)
    spectrum = np.fft.rfft(ranks - ranks.mean(), 2 * count)
    covariance = np.fft.irfft(spectrum * spectrum.conj())[: count // 2]
    if covariance[0] <= 0:
        return 1.0
    times = 1 + 2 * np.cumsum(covariance[1:] / covariance[0])
    long_enough = np.flatnonzero(np.arange(1, times.size + 1) >= 5 * times)
    return max(1.0, float(times[long_enough[0] if long_enough.size else -1]))


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope and its t value; (0, 0) where there is nothing to fit."""
    if len(times) < 3:
        return 0.0, 0.0
    x, y = np.asarray(times, dtype=float), np.asarray(values, dtype=float)
    spread = float(((x - x.mean()) ** 2).sum())
    if spread == 0:
        return 0.0, 0.0
    gradient = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    residual = y - y.mean() - gradient * (x - x.mean())
    error = math.sqrt(float((residual**2).sum()) / (len(times) - 2) / spread)
    if error == 0:
        return gradient, math.copysign(math.inf, gradient) if gradient else 0.0
    return gradient, gradient / error
