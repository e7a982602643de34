"""The rate of a Poisson process that changes over time, and arrivals of it by time-rescaling. Pure.

Arrivals of a unit-rate process, sent through the inverse of the cumulated rate, are a Poisson process of that rate,
exactly (Cox & Lewis, The Statistical Analysis of Series of Events, 1966; Brown et al., Neural Computation 14, 2002,
use it backwards as a test, and so does the audit). Nothing is thinned, binned or rescaled, so counts stay random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Piece:
    """The rate goes in a straight line from `start` to `end` over `seconds`."""

    seconds: float
    start: float
    end: float

    @property
    def expected(self) -> float:
        return self.seconds * (self.start + self.end) / 2


@dataclass(frozen=True, slots=True)
class Intensity:
    """Pieces in a row, from time 0 on. Nothing arrives after the last one."""

    pieces: tuple[Piece, ...]

    @property
    def expected(self) -> float:
        """How many arrivals there are on average."""
        return sum(piece.expected for piece in self.pieces)

    def _starts(self) -> tuple[Floats, Floats]:
        """When each piece begins, and how many arrivals are expected until then."""
        times = np.cumsum([0.0, *(piece.seconds for piece in self.pieces)])
        masses = np.cumsum([0.0, *(piece.expected for piece in self.pieces)])
        return times[:-1], masses[:-1]

    def cumulated(self, times_s: Sequence[float] | Floats) -> Floats:
        """Expected arrivals until each of the times, which lie within the pieces."""
        at = np.asarray(times_s, dtype=float)
        times, masses = self._starts()
        index = np.clip(np.searchsorted(times, at, side="right") - 1, 0, len(times) - 1)
        begin, slope = self._lines(index)
        into = at - times[index]
        return np.asarray(masses[index] + begin * into + slope * into * into / 2)

    def inverse(self, expected: Floats) -> Floats:
        """The times at which so many arrivals are expected; each of `expected` lies in [0, self.expected)."""
        times, masses = self._starts()
        index = np.clip(np.searchsorted(masses, expected, side="right") - 1, 0, len(times) - 1)
        begin, slope = self._lines(index)
        rest = expected - masses[index]
        # The root of slope/2 x^2 + begin x = rest, in the form that does not cancel at small slopes.
        denominator = begin + np.sqrt(np.maximum(begin * begin + 2 * slope * rest, 0.0))
        into = np.divide(2 * rest, denominator, out=np.zeros_like(rest), where=denominator > 0)
        return np.asarray(times[index] + into)

    def _lines(self, index: npt.NDArray[np.intp]) -> tuple[Floats, Floats]:
        begin = np.array([piece.start for piece in self.pieces])
        slope = np.array([(p.end - p.start) / p.seconds if p.seconds else 0.0 for p in self.pieces])
        return begin[index], slope[index]


def ramp(start: float, end: float, *, rate: float, before_s: float, window_s: float, after_s: float) -> Intensity:
    """From `start` to `end` (relative) over the window, with `rate` as the window's mean; level before and after."""
    return _around(((1.0, start, end),), rate=rate, before_s=before_s, window_s=window_s, after_s=after_s)


def steps(
    levels: Sequence[float],
    lengths: Sequence[float],
    *,
    rate: float,
    before_s: float,
    window_s: float,
    after_s: float,
) -> Intensity:
    """Levels one after the other over the window, each for its share of it, with `rate` as the window's mean."""
    shares = lengths or [1.0] * len(levels)
    relative = tuple((share / sum(shares), level, level) for share, level in zip(shares, levels, strict=True))
    return _around(relative, rate=rate, before_s=before_s, window_s=window_s, after_s=after_s)


def _around(
    relative: Sequence[tuple[float, float, float]], *, rate: float, before_s: float, window_s: float, after_s: float
) -> Intensity:
    """Shares of the window with their relative rates, made absolute, with what goes on before and after it."""
    scale = rate / sum(share * (start + end) / 2 for share, start, end in relative)
    window = [Piece(share * window_s, start * scale, end * scale) for share, start, end in relative]
    first, last = window[0].start, window[-1].end
    return Intensity((Piece(before_s, first, first), *window, Piece(after_s, last, last)))
