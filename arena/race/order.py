"""Who runs in which slot, and who runs twice. Pure.

    in_round(["a", "b", "c"], 1)     # a b c
    in_round(["a", "b", "c"], 2)     # c b a: whatever drifts at a constant pace costs everybody the same
    in_round(["a", "b", "c"], 3)     # b c a, then a c b: and everybody has been first, middle and last

Two rounds are ABBA for every pair of engines; all of them together are a Latin square and its mirror image: each engine
has each place equally often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

TWIN = "-again"


def in_round(entries: Sequence[T], number: int) -> list[T]:
    """The order of round `number`, from 1 on."""
    turned = ((number - 1) // 2) % max(1, len(entries))
    order = [*entries[turned:], *entries[:turned]]
    return order if number % 2 else order[::-1]


def twin_name(name: str, taken: Sequence[str]) -> str:
    """What the second entry of an engine is called in the A/A control."""
    twin = name + TWIN
    while twin in taken:
        twin += TWIN
    return twin
