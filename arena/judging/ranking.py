"""From goodput intervals to rank sets. Pure.

An engine's rank is a set: 1 + (engines surely better) .. K - (engines surely worse). Two engines that cannot be told
apart share it, and the table says "1-2" for both. "Surely" is a pairwise statement about where the knees lie, not
about overlapping error bars: P(knee of a > knee of b) must pass a threshold that is shared out over all pairs
(Bonferroni).

>>> rank_sets(["a", "b", "c"], {("a", "b"): 0.6, ("a", "c"): 0.9999, ("b", "c"): 0.9999})
{'a': RankSet(lo=1, hi=2), 'b': RankSet(lo=1, hi=2), 'c': RankSet(lo=3, hi=3)}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from arena.judging.search import Knee, probability_better

# At this level a pair of equal engines was told apart in 0 to 1 % of simulated races (M/M/1, M/D/1, M/M/4, continuous
# batching without and with a noisy neighbour; cells of 4 and 30 s; arrivals of their own), at 0.975 in 0 to 5.6 %.
# Where misses come from rare slow requests and not from a queue, it is not enough: see docs/arena.md.
SURE = 0.99


@dataclass(frozen=True, slots=True)
class RankSet:
    lo: int
    hi: int

    def __str__(self) -> str:
        return str(self.lo) if self.lo == self.hi else f"{self.lo}\N{EN DASH}{self.hi}"


def rank_sets(
    names: Sequence[str], better: Mapping[tuple[str, str], float], *, sure: float = SURE
) -> dict[str, RankSet]:
    """`better[a, b]` is P(a better than b) for each pair in the order of `names`."""
    pairs = list(combinations(names, 2))
    threshold = 1 - (1 - sure) / max(1, len(pairs))
    beaten_by = dict.fromkeys(names, 0)
    beats = dict.fromkeys(names, 0)
    for a, b in pairs:
        if better[a, b] >= threshold:
            beats[a] += 1
            beaten_by[b] += 1
        elif better[a, b] <= 1 - threshold:
            beats[b] += 1
            beaten_by[a] += 1
    return {name: RankSet(1 + beaten_by[name], len(names) - beats[name]) for name in names}


def compare_all(knees: Mapping[str, Knee]) -> dict[tuple[str, str], float]:
    return {(a, b): probability_better(knees[a], knees[b]) for a, b in combinations(knees, 2)}
