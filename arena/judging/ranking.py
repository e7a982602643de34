"""From goodput intervals to rank sets. Pure.

An engine's rank is a set: 1 + (engines surely better) .. K - (engines surely worse). Two engines that cannot be told
apart share it, and the table says "1-2" for both. "Surely" is a pairwise statement about where the knees lie, not
about overlapping error bars. It is simultaneous over all pairs by Holm's step-down (1979): the surest pair has to pass
as if all pairs were tested, the next as if it were one pair less, and so on until one does not. That holds whatever
the comparisons have in common, and they have engines in common.

>>> rank_sets(["a", "b", "c"], {("a", "b"): 0.6, ("a", "c"): 0.9999, ("b", "c"): 0.9999})
{'a': RankSet(lo=1, hi=2), 'b': RankSet(lo=1, hi=2), 'c': RankSet(lo=3, hi=3)}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from arena.judging.knee import Knee, probability_better

# What a pair needs, in one direction: 5 % over both. docs/statistics.md has how often equal engines are told apart at
# this level, and how often unequal ones are.
SURE = 0.975


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
    beaten_by = dict.fromkeys(names, 0)
    beats = dict.fromkeys(names, 0)
    for a, b in told_apart(names, better, sure=sure):
        beats[a] += 1
        beaten_by[b] += 1
    return {name: RankSet(1 + beaten_by[name], len(names) - beats[name]) for name in names}


def told_apart(
    names: Sequence[str], better: Mapping[tuple[str, str], float], *, sure: float = SURE
) -> list[tuple[str, str]]:
    """The pairs that are surely not equal, each with the better one first."""
    doubts = sorted((min(better[pair], 1 - better[pair]), pair) for pair in combinations(names, 2))
    found = []
    for index, (doubt, (a, b)) in enumerate(doubts):
        if doubt > (1 - sure) / (len(doubts) - index):
            break
        found.append((a, b) if better[a, b] > 0.5 else (b, a))
    return found


def is_apart(better: float, *, sure: float = SURE) -> bool:
    """Of one pair alone."""
    return not 1 - sure < better < sure


def compare_all(knees: Mapping[str, Knee], forgiving: Mapping[str, Knee] | None = None) -> dict[tuple[str, str], float]:
    """P(first better than second) for each pair. `forgiving` holds each engine's knee without the misses that the
    client's error may have made: nobody is called better for what the other one may owe to the client.
    """
    mild = forgiving or knees
    pairs: dict[tuple[str, str], float] = {}
    for a, b in combinations(knees, 2):
        at_least, at_most = probability_better(knees[a], mild[b]), probability_better(mild[a], knees[b])
        pairs[a, b] = at_least if at_least >= 0.5 else min(at_most, 0.5)
    return pairs
