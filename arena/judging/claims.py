"""Does an engine's usage fit its text? Pure: counts of some answers of a cell in, findings out.

    claim = Claim(claimed=64, held=62)          # the engine's usage, and what the model's tokenizer counts in its text
    claim_findings([claim, ...])                # of one cell
    claims_disparity("a", [[claim, ...], ...])  # of an engine, over its cells

Lengths, TPOT and tokens a second are only as true as the usage: an engine that says 128 where its text holds 64 halves
its TPOT. Text that is tokenised again need not give the same number. A special token is counted by its engine and is in
no text (an answer that goes on after the model has ended it is full of them), and a model need not cut a word as the
tokenizer would. What honest engines differ by is measured in docs/fairness.md; beyond the tolerance lies no honest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arena.judging.findings import Disparity, Finding

INFLATED, UNCLAIMED = "usage_beyond_text", "text_beyond_usage"
TOLERANCE = 0.10  # of the larger count, over the counted answers of a cell


@dataclass(frozen=True, slots=True)
class Claim:
    """One ok answer, in tokens."""

    claimed: int  # by the engine's usage
    held: int  # in its text, by the model's tokenizer


def excess(claims: Sequence[Claim]) -> float | None:
    """What is claimed beyond what the texts hold, over the larger of the two: about 0.5 for twice as many, -0.5 for
    half. A token an answer is let be: the one that ended it, which is no text. None where there is nothing.
    """
    claimed, held = sum(claim.claimed for claim in claims), sum(claim.held for claim in claims)
    if not claimed and not held:
        return None
    return (max(held, claimed - len(claims)) - held if claimed > held else claimed - held) / max(claimed, held)


def claim_findings(claims: Sequence[Claim]) -> list[Finding]:
    """Of one cell. Notes: the cell's latencies from due to first token are true whatever the usage says."""
    share = excess(claims)
    if share is None:
        return []
    return [
        Finding(INFLATED, share <= TOLERANCE, share, TOLERANCE, "note", ""),
        Finding(UNCLAIMED, -share <= TOLERANCE, -share, TOLERANCE, "note", ""),
    ]


def claims_disparity(engine: str, excesses: Sequence[float]) -> list[Disparity]:
    """`excesses`: of each of its valid cells that was counted. One cell beyond the tolerance is enough."""
    if not excesses:
        return []
    if (most := max(excesses)) > TOLERANCE:
        words = f"It claims tokens that its text does not hold: {most:.0%} of those it counted in a cell."
        return [Disparity(engine, INFLATED, words)]
    if (least := min(excesses)) < -TOLERANCE:
        words = f"Its text holds tokens that it does not claim: {-least:.0%} of those of a cell."
        return [Disparity(engine, UNCLAIMED, words)]
    return []
