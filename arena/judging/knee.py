"""Where the miss rate crosses its limit, with how much certainty: the interval of goodput, and which of two is higher.

    knee = Knee(outcomes, settings)
    knee.interval()                       # (17.1, 19.8) requests/s, at the settings' confidence
    probability_better(knee, other)       # 0.93

Pure. The interval comes from a fit over all cells: it uses how hard each cell held or failed, while a single cell's
verdict would only say yes or no.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from arena.judging.ladder import Outcome, SearchSettings, with_shared_effects


class Knee:
    """A posterior over the log of the rate at which the miss rate crosses its limit.

    Model: -log(share that meets the limits) grows as exp(steepness * (rate / knee - 1)) and equals the allowed miss
    rate at the knee. That is the exponential tail of a queue's waiting time: exact for M/M/1, whose steepness is knee
    times TTFT limit. The likelihood is binomial, over effective numbers of requests. An engine that overflows has left
    that curve: a saturated cell says that the miss rate is at least what it was, and nothing about the slope.

    The prior is flat in log steepness, and falls with the square of the rate. A short cell sees fewer misses than there
    are (most cells at the knee see none, a few see many), so a prior that is flat in the rate, or in its logarithm,
    errs upward. The least steepness says that an engine offered twice its goodput misses the limits for one request in
    fourteen: simulated engines miss all of them there, and with a least steepness of 1 a rate that held with room to
    spare said next to nothing about rates half as high.

    `forgiving` counts only misses that are larger than the client's error. The constants were set on simulated engines
    of known goodput: `goodgate arena calibrate`, docs/statistics.md.
    """

    UNDERREAD = 5.0  # a design effect read off short cells is too small by 2 to 5, against that between many cells
    MIN_DESIGN_EFFECT = 8.0
    STEEPNESS = (2.0, 64.0)
    PRIOR = 2.0  # the power of the rate that the prior falls with, over its logarithm
    GRID = 400
    # The knee is looked for within this factor of the tested rates; of what lies beyond, the data say nothing.
    REACH = 3.0

    def __init__(self, outcomes: Sequence[Outcome], settings: SearchSettings, *, forgiving: bool = False) -> None:
        self._outcomes = [outcome for outcome in with_shared_effects(outcomes) if outcome.requests]
        self._settings = settings
        self._forgiving = forgiving

    @cached_property
    def log_rates(self) -> NDArray[np.float64]:
        rates = [outcome.rate_rps for outcome in self._outcomes] or [self._settings.start_rps]
        return np.linspace(math.log(min(rates) / self.REACH), math.log(max(rates) * self.REACH), self.GRID)

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """Posterior probability of each of `log_rates`."""
        steepness = np.geomspace(*self.STEEPNESS, 25)[:, None]
        knees = np.exp(self.log_rates)
        log_likelihood = np.tile(-self.PRIOR * self.log_rates, (steepness.size, 1))
        for outcome in self._outcomes:
            hazard = -math.log1p(-self._settings.allowed) * np.exp(
                np.minimum(steepness * (outcome.rate_rps / knees - 1), 50.0)
            )
            misses = outcome.certain_misses if self._forgiving else outcome.counted_misses
            met = outcome.requests - misses
            if outcome.is_saturated:  # how far beyond the knee, the model cannot say
                hazard = np.minimum(hazard, -math.log1p(-min(max(misses, 1) / outcome.requests, 1 - 1e-9)))
            weight = 1 / max(self.UNDERREAD * outcome.design_effect, self.MIN_DESIGN_EFFECT)
            log_likelihood += weight * (misses * np.log(-np.expm1(-hazard)) - met * np.minimum(hazard, 50.0))
        posterior = np.exp(log_likelihood - log_likelihood.max()).sum(axis=0)
        normalised: NDArray[np.float64] = posterior / posterior.sum()
        return normalised

    def quantile(self, probability: float) -> float:
        """Requests a second below which the knee lies with that probability."""
        place = int(np.searchsorted(np.cumsum(self.weights), probability))
        return float(np.exp(self.log_rates[min(place, self.GRID - 1)]))

    def interval(self) -> tuple[float, float]:
        """The central `confidence` interval of the knee, in requests a second."""
        tail = (1 - self._settings.confidence) / 2
        return self.quantile(tail), self.quantile(1 - tail)


def probability_better(a: Knee, b: Knee) -> float:
    """P(knee of a > knee of b), ties on the grid counted half."""
    low = min(a.log_rates[0], b.log_rates[0])
    high = max(a.log_rates[-1], b.log_rates[-1])
    grid = np.linspace(low, high, 2 * Knee.GRID)
    cdf_b = np.interp(grid, b.log_rates, np.cumsum(b.weights), left=0.0, right=1.0)
    density_a = np.diff(np.interp(grid, a.log_rates, np.cumsum(a.weights), left=0.0, right=1.0), prepend=0.0)
    middle = (cdf_b + np.concatenate([[0.0], cdf_b[:-1]])) / 2
    return float((density_a * middle).sum() / density_a.sum())
