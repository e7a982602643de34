"""How long will a step take? Learned from the steps that were made.

    model = StepTimeModel()
    model.observe(StepWork(rows=9, context=1200, sampled=9), seconds=0.011)
    model.predict(StepWork(rows=137, context=9000, sampled=10))      # seconds

A step's time is close to a + b * rows + c * context + d * sampled: what a step costs at all, the linears per row, the
attention per position that a row looks back at, and the head per row that is sampled (the SLO schedulers listed in
Niyama, arXiv 2504.08784 and 2503.22562, use the same form). Kernels round rows up and change their ways with them, so
each octave of rows has a factor of its own on top. Recursive least squares that forgets, over relative errors: a step
of 200 ms must not drown what a hundred steps of 5 ms say. Pure: no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, as far as its time depends on it."""

    rows: int  # tokens that pass through the layers
    context: int  # over all rows, the positions that each attends to
    sampled: int  # rows that pass through the head

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(self.rows + other.rows, self.context + other.context, self.sampled + other.sampled)


def chunk_work(start: int, length: int, *, samples: bool) -> StepWork:
    """Of one sequence's chunk: row i attends to start + i + 1 positions."""
    return StepWork(length, length * start + length * (length + 1) // 2, int(samples))


class StepTimeModel:
    """Needs `WARM_UP` steps before `is_warm`; until then `predict` says what it can."""

    WARM_UP = 16
    MEMORY = 1000  # steps after which an observation has lost two thirds of its weight
    OCTAVE_WEIGHT = 0.05  # of a new step in the factor of its octave of rows
    # What a small model on a small CPU takes, in units of SCALE: only a beginning, with hardly any weight.
    PRIOR = (1e-3, 1e-4, 1e-7, 1e-4)
    SCALE = (1.0, 0.01, 1e-5, 0.1)  # brings the four features to a like size

    def __init__(self) -> None:
        self._scale = np.array(self.SCALE)
        self._theta = np.array(self.PRIOR) / self._scale
        self._shares = self.PRIOR  # of `_theta`, as seconds for each of the four
        self._covariance: NDArray[np.float64] = np.eye(4) * 1e2
        self._octaves: dict[int, float] = {}
        self._errors: list[float] = []  # observed / predicted - 1 of the last steps, a ring
        self.num_observed = 0

    @property
    def is_warm(self) -> bool:
        return self.num_observed >= self.WARM_UP

    def observe(self, work: StepWork, seconds: float) -> None:
        """One step that was made. Times that say nothing (0, negative, infinite) are refused with `ValueError`."""
        if not 0 < seconds < math.inf:
            raise ValueError(f"A step takes a time above 0 and below infinity, not {seconds} s.")
        self._note_error(seconds / self.predict(work) - 1)
        plain = self._linear(work)
        features = self._features(work) / seconds  # divided by the time: the errors that count are relative ones
        forget = 1 - 1 / self.MEMORY
        gain = self._covariance @ features / (forget + features @ self._covariance @ features)
        self._theta += gain * (1 - features @ self._theta)
        self._covariance = (self._covariance - np.outer(gain, features @ self._covariance)) / forget
        # No part of a step takes less than no time, however the least squares share it out.
        base, row, context, sampled = np.maximum(self._theta * self._scale, 0.0).tolist()
        self._shares = (base, row, context, sampled)
        octave = work.rows.bit_length()
        factor = self._octaves.get(octave, 1.0)
        self._octaves[octave] = factor + self.OCTAVE_WEIGHT * (min(max(seconds / plain, 0.25), 4.0) - factor)
        self.num_observed += 1

    def predict(self, work: StepWork) -> float:
        """Seconds, above 0."""
        return self._linear(work) * self._octaves.get(work.rows.bit_length(), 1.0)

    def error(self, percentile: float) -> float:
        """That percentile of observed / predicted - 1 over the last steps; 0 before any."""
        return float(np.percentile(self._errors, percentile)) if self._errors else 0.0

    def _features(self, work: StepWork) -> NDArray[np.float64]:
        features: NDArray[np.float64] = np.array((1.0, work.rows, work.context, work.sampled)) * self._scale
        return features

    def _linear(self, work: StepWork) -> float:
        base, row, context, sampled = self._shares
        return max(base + row * work.rows + context * work.context + sampled * work.sampled, 1e-6)

    def _note_error(self, error: float) -> None:
        if self.is_warm:
            if len(self._errors) == self.MEMORY:
                self._errors[self.num_observed % self.MEMORY] = error
            else:
                self._errors.append(error)
