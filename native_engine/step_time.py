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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Four: TypeAlias = tuple[float, float, float, float]  # of a step: the base, rows, context, sampled rows


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, as far as its time depends on it."""

    rows: int  # tokens that pass through the layers
    context: int  # over all rows, the positions that each attends to
    sampled: int  # rows that pass through the head

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(self.rows + other.rows, self.context + other.context, self.sampled + other.sampled)


def chunk_work(start: int, length: int, *, sampled: int) -> StepWork:
    """Of one sequence's chunk: row i attends to start + i + 1 positions."""
    return StepWork(length, length * start + length * (length + 1) // 2, sampled)


class StepTimeModel:
    """Needs `WARM_UP` steps before `is_warm`; until then `predict` says what it can."""

    WARM_UP = 16
    MEMORY = 1000  # steps after which an observation has lost two thirds of its weight
    OCTAVE_WEIGHT = 0.05  # of a new step in the factor of its octave of rows
    # What a small model on a small CPU takes, in units of SCALE: only a beginning, with hardly any weight.
    PRIOR = (1e-3, 1e-4, 1e-7, 1e-4)
    SCALE = (1.0, 0.01, 1e-5, 0.1)  # brings the four features to a like size

    def __init__(self) -> None:
        self._theta = [seconds / scale for seconds, scale in zip(self.PRIOR, self.SCALE, strict=True)]
        self._covariance = [[100.0 * (row == column) for column in range(4)] for row in range(4)]
        self._shares: Four = self.PRIOR  # `_theta` as seconds for each of the four
        self._octaves: dict[int, float] = {}
        self._errors: deque[float] = deque(maxlen=self.MEMORY)  # observed / predicted - 1
        self.num_observed = 0

    @property
    def is_warm(self) -> bool:
        return self.num_observed >= self.WARM_UP

    def observe(self, work: StepWork, seconds: float) -> None:
        """One step that was made. Times that say nothing (0, negative, infinite) are refused with `ValueError`."""
        if not 0 < seconds < math.inf:
            raise ValueError(f"A step takes a time above 0 and below infinity, not {seconds} s.")
        if self.is_warm:
            self._errors.append(seconds / self.predict(work) - 1)
        plain = self._linear(work)
        self._learn(work, seconds)
        octave = work.rows.bit_length()
        factor = self._octaves.get(octave, 1.0)
        self._octaves[octave] = factor + self.OCTAVE_WEIGHT * (min(max(seconds / plain, 0.25), 4.0) - factor)
        self.num_observed += 1

    def predict(self, work: StepWork) -> float:
        """Seconds, above 0."""
        return self._linear(work) * self._octaves.get(work.rows.bit_length(), 1.0)

    def error(self, percentile: float) -> float:
        """That percentile of observed / predicted - 1 over the last steps; 0 before any."""
        ordered = sorted(self._errors)
        return ordered[round((len(ordered) - 1) * percentile / 100)] if ordered else 0.0

    def _learn(self, work: StepWork, seconds: float) -> None:
        """One step of recursive least squares. Features are divided by the time: relative errors are what counts."""
        counts = (1, work.rows, work.context, work.sampled)
        x = [count * scale / seconds for count, scale in zip(counts, self.SCALE, strict=True)]
        forget = 1 - 1 / self.MEMORY
        px = [_dot(row, x) for row in self._covariance]
        norm = forget + _dot(x, px)
        error = 1 - _dot(x, self._theta)
        self._theta = [theta + p / norm * error for theta, p in zip(self._theta, px, strict=True)]
        self._covariance = [
            [(entry - row_px * px[column] / norm) / forget for column, entry in enumerate(row)]
            for row, row_px in zip(self._covariance, px, strict=True)
        ]
        # No part of a step takes less than no time, however the least squares share it out.
        base, row, context, sampled = (max(t * s, 0.0) for t, s in zip(self._theta, self.SCALE, strict=True))
        self._shares = (base, row, context, sampled)

    def _linear(self, work: StepWork) -> float:
        base, row, context, sampled = self._shares
        return max(base + row * work.rows + context * work.context + sampled * work.sampled, 1e-6)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
