"""Do the engines do the same work? Pure: what each was found to be and the rows of its cells in, disparities out.

    disparities({"a": Work(cells=..., probe=..., weights=...), "b": ...}, weights="same")

Compared are the weights, the tokens of the same prompts, the lengths of the answers, why they ended, what came from
prefix caches, and how the tokens arrive (detectors.py). An engine that does other work than its rivals stays in the
table but gets no rank; a difference that is the engine's own business is told beside it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from scipy.stats import ks_2samp

from arena.judging import detectors
from arena.judging.claims import claims_disparity
from arena.judging.findings import Disparity, Row

WeightsParity: TypeAlias = Literal["same", "any"]

EXACT_SHARE = 0.99
LENGTH_ALPHA = 0.001
PROMPT_PARITY = 0.02
PROBE_PROMPT = "probe"  # which every engine has met, whatever rates it ran
FEWEST_TOKENS = 0.9  # of what a prompt was meant to have
MOST_TOKENS = 1.5
TEMPLATE_TOKENS = 256
CACHE_PARITY = 0.05
FINISH_PARITY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One engine: the rows of each of its valid cells, and what was found out before the first."""

    cells: Sequence[Sequence[Row]]
    probe: Mapping[str, Any] = field(default_factory=dict)  # `Found.to_dict()` of race/probe.py
    weights: Mapping[str, Any] = field(default_factory=dict)  # `Weights.told()` of adapters/launching/weights.py
    excesses: Sequence[float] = ()  # of each cell whose texts were counted (`arena.judging.claims.excess`)

    @property
    def rows(self) -> list[Row]:
        return [row for cell in self.cells for row in cell]

    @property
    def is_exact(self) -> bool:
        return all(_exact_share(cell) >= EXACT_SHARE for cell in self.cells)


def disparities(
    works: Mapping[str, Work], *, weights: WeightsParity = "any", exact_output: bool = True
) -> list[Disparity]:
    """Every difference, the blocking and the told, engine by engine in the order of `works`. Without `exact_output` the
    model ends its answers.
    """
    found = [
        *_weights(works, weights),
        *_prompt_tokens(works),
        *_output_lengths(works, exact_output),
        *_finish_reasons(works),
        *_caches(works),
    ]
    for engine, work in works.items():
        found += [
            *_asked_prompt(engine, work),
            *claims_disparity(engine, work.excesses),
            *detectors.fake_streaming(engine, work.rows),
            *detectors.lumps(engine, work.rows),
            *detectors.even_pace(engine, work.rows),
            *detectors.dropped_load(engine, [[row for row in cell if row.measured] for cell in work.cells]),
        ]
    places = {engine: place for place, engine in enumerate(works)}
    return sorted(found, key=lambda each: (places[each.engine], not each.blocks))


def _weights(works: Mapping[str, Work], allowed: WeightsParity) -> list[Disparity]:
    """`same` asks for one file as the source, and forbids packing it a second time, which makes other numbers of it.
    What an endpoint does not tell cannot be compared, and is told as such.
    """
    blocks = allowed == "same"
    sources = Counter(str(known) for work in works.values() if (known := work.weights.get("source_sha256")))
    usual = sources.most_common(1)[0][0] if sources else None
    found = []
    for engine, work in works.items():
        source, relation = work.weights.get("source_sha256"), work.weights.get("relation")
        if source is None:
            if len(works) > 1:
                words = "It does not tell its weights, so they are taken on trust."
                found.append(Disparity(engine, "weights", words, blocks=False))
        elif source != usual:
            words = f"It serves other weights than its rivals (SHA-256 {source[:12]}, theirs {str(usual)[:12]})."
            found.append(Disparity(engine, "weights", words, blocks=blocks))
        elif relation == "requantised":
            words = f"Its weights are requantised ({work.weights.get('precision')}): other numbers than in the file."
            found.append(Disparity(engine, "weights", words, blocks=blocks and len(works) > 1))
        elif relation == "dequantised":
            words = f"It serves the same weights, dequantised ({work.weights.get('precision')})."
            found.append(Disparity(engine, "weights", words, blocks=False))
    return found


def _prompt_tokens(works: Mapping[str, Work]) -> list[Disparity]:
    """Each engine's prompt tokens against each rival's, over the prompts that both have met. It is off where it differs
    from most of them; of two that differ, the one that counts more is told.
    """
    lengths = {engine: known for engine, work in works.items() if (known := _lengths(work))}
    off = []
    for engine, mine in lengths.items():
        ratios = [_ratio(mine, theirs) for rival, theirs in lengths.items() if rival != engine]
        told = [ratio for ratio in ratios if ratio is not None]
        differing = [ratio for ratio in told if abs(ratio - 1) > PROMPT_PARITY]
        if len(differing) > len(told) / 2 and (len(told) > 1 or differing[0] > 1):
            off.append((engine, statistics.median(differing) - 1))
    return [
        Disparity(
            engine, "prompt_length", f"It counts {share:+.1%} prompt tokens for the same prompts (another template?)."
        )
        for engine, share in off
    ]


def _lengths(work: Work) -> dict[str, int]:
    lengths = {row.prompt_id: row.in_tokens for row in work.rows if row.in_tokens is not None}
    if (probed := work.probe.get("prompt_tokens")) is not None:
        lengths[PROBE_PROMPT] = probed
    return lengths


def _ratio(mine: Mapping[str, int], theirs: Mapping[str, int]) -> float | None:
    shared = mine.keys() & theirs.keys()
    total = sum(theirs[prompt] for prompt in shared)
    return sum(mine[prompt] for prompt in shared) / total if total else None


def _asked_prompt(engine: str, work: Work) -> list[Disparity]:
    """The probe's prompt, by the engine's count, against what it was meant to have: was it cut, or counted many times?
    The chat template adds to it.
    """
    asked, tokens = work.probe.get("prompt_asked"), work.probe.get("prompt_tokens")
    if not asked or tokens is None or FEWEST_TOKENS * asked <= tokens <= MOST_TOKENS * asked + TEMPLATE_TOKENS:
        return []
    words = f"It counts {tokens} tokens in a prompt of about {asked}: it may cut prompts, or count wrongly."
    return [Disparity(engine, "prompt_length", words)]


def _output_lengths(works: Mapping[str, Work], exact: bool) -> list[Disparity]:
    """Answers must have the length that was asked for. Where no engine keeps to that, or none is to, they must be as
    long as each other's in their distribution (Kolmogorov-Smirnov).
    """
    found, inexact = [], {}
    for engine, work in works.items():
        answered = [row for row in work.rows if row.status == "ok"]
        counted = [row.out_tokens for row in answered if row.out_tokens is not None]
        if answered and not counted:
            words = "It reports no token usage, so its output length is unknown."
            found.append(Disparity(engine, "output_length", words))
        elif counted and not (exact and work.is_exact):
            inexact[engine] = counted
    alike = len(inexact) == len(works) and _are_alike(list(inexact.values()))
    if alike and not exact:
        return found
    if alike and len(works) > 1:
        words = "Its answers are not as long as was asked for, and neither are its rivals': as long as each other's."
        return [Disparity(engine, "output_length", words, blocks=False) for engine in inexact]
    for engine in inexact:
        if not exact:
            words = "Its answers and a rival's differ in length more than chance lets them."
            found.append(Disparity(engine, "output_length", words))
            continue
        share = min(_exact_share(cell) for cell in works[engine].cells)
        words = f"Only {share:.0%} of a cell's answers have the length that was asked for (no ignore_eos?)."
        found.append(Disparity(engine, "output_length", words))
    return found


def _exact_share(cell: Sequence[Row]) -> float:
    counted = [row for row in cell if row.status == "ok" and row.out_tokens is not None]
    return sum(row.out_tokens == row.max_tokens for row in counted) / len(counted) if counted else 1.0


def _are_alike(lengths: Sequence[Sequence[int]]) -> bool:
    return all(float(ks_2samp(lengths[0], each).pvalue) >= LENGTH_ALPHA for each in lengths[1:])


def _finish_reasons(works: Mapping[str, Work]) -> list[Disparity]:
    """Why answers ended. With equal lengths another reason is another word for the same end, so it is only told."""
    shares = {}
    for engine, work in works.items():
        reasons = Counter(row.finish_reason or "none" for row in work.rows if row.status == "ok")
        if reasons:
            shares[engine] = {reason: count / reasons.total() for reason, count in reasons.items()}
    found = []
    for engine, mine in shares.items():
        others = [theirs for rival, theirs in shares.items() if rival != engine]
        for reason, share in sorted(mine.items()):
            usual = statistics.median(theirs.get(reason, 0.0) for theirs in others) if others else share
            if share - usual > FINISH_PARITY:
                words = f"{share:.0%} of its answers end with the reason {reason!r}, of its rivals' {usual:.0%}."
                found.append(Disparity(engine, "finish_reason", words, blocks=False))
    return found


def _caches(works: Mapping[str, Work]) -> list[Disparity]:
    """The share of prompt tokens from prefix caches, where told. A cell that is meant to be cold and is not has already
    been thrown out; what is left is the head that all prompts share, or what the scenario wants.
    """
    shares = {}
    for engine, work in works.items():
        told = [(row.cached_tokens, row.in_tokens) for row in work.rows if row.cached_tokens is not None]
        total = sum(tokens for _, tokens in told if tokens is not None)
        if total:
            shares[engine] = sum(cached for cached, _ in told) / total
    if len(shares) < 2:
        return []
    least = min(shares.values())
    return [
        Disparity(
            engine,
            "cached_tokens",
            f"{share:.0%} of its prompt tokens came from its prefix cache, of a rival's {least:.0%}.",
            blocks=False,
        )
        for engine, share in shares.items()
        if share - least > CACHE_PARITY
    ]
