"""What kind of work a race was: the class of its prompts, of its answers, and of the beginnings that prompts share.

    shape = measured_shape(store)       # over the measured rows of valid cells, by the engines' own counts
    shape.bucket                        # Bucket(prompt=512, output=64, prefix="fresh")
    str(shape.bucket)                   # "prompt<=512 output<=64 fresh"

Figures of one bucket say something about other loads of that bucket, and hardly anything about the rest. Classes are
powers of four, so that neighbours differ by more than machines do. Means classify, not medians: what an engine has to
do goes with the sum of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from arena.judging.audit import CACHED_SHARE
from arena.records.store import Store

PROMPT_CLASSES = (128, 512, 2048, 8192, 32_768)
OUTPUT_CLASSES = (16, 64, 256, 1024, 4096)
MOSTLY_SHARED = 0.7

PrefixClass: TypeAlias = Literal["fresh", "partly", "mostly", "untold"]
LIGHTNESS: tuple[PrefixClass, ...] = ("fresh", "untold", "partly", "mostly")  # what is cached need not be read


class Bucket(Struct, frozen=True, order=True):
    """Upper bounds of the classes in tokens, 0 for what is beyond the last one; and how much of prompts is shared."""

    prompt: int
    output: int
    prefix: PrefixClass

    def __str__(self) -> str:
        return f"prompt{_bound(self.prompt, PROMPT_CLASSES)} output{_bound(self.output, OUTPUT_CLASSES)} {self.prefix}"

    def is_as_heavy_as(self, other: Bucket) -> bool:
        """Whoever carries this carries the other: its prompts and answers are no shorter, and no more of it is
        shared.
        """
        lightness = LIGHTNESS.index(self.prefix) <= LIGHTNESS.index(other.prefix)
        return _size(self.prompt) >= _size(other.prompt) and _size(self.output) >= _size(other.output) and lightness


class Shape(Struct, frozen=True, kw_only=True):
    """Means over requests, in tokens; `cached_share` is what the engine with the best prefix cache had not to read.

    None: no engine tells.
    """

    prompt_tokens: float | None = None
    output_tokens: float | None = None
    cached_share: float | None = None

    @property
    def bucket(self) -> Bucket | None:
        if self.prompt_tokens is None or self.output_tokens is None:
            return None
        return bucket_of(self.prompt_tokens, self.output_tokens, self.cached_share)


UNTOLD = Shape()


def bucket_of(prompt_tokens: float, output_tokens: float, cached_share: float | None) -> Bucket:
    return Bucket(
        _class(prompt_tokens, PROMPT_CLASSES), _class(output_tokens, OUTPUT_CLASSES), prefix_class(cached_share)
    )


def prefix_class(cached_share: float | None) -> PrefixClass:
    """Below the audit's limit for cold caches nothing but a chat template is shared."""
    if cached_share is None:
        return "untold"
    if cached_share <= CACHED_SHARE:
        return "fresh"
    return "partly" if cached_share <= MOSTLY_SHARED else "mostly"


def measured_shape(store: Store) -> Shape:
    rows = store.query(
        "SELECT c.engine_id, sum(in_tok_usage) AS prompt, count(in_tok_usage) AS n_prompt, sum(n_out) AS output, "
        "count(n_out) AS n_output, sum(cached_tok) AS cached, "
        "sum(in_tok_usage) FILTER (WHERE cached_tok IS NOT NULL) AS could_be_cached "
        "FROM v_measured AS r JOIN cells AS c USING (cell_id) "
        "WHERE r.ok AND c.status IN ('ok', 'unstable') GROUP BY c.engine_id"
    )
    prompts, outputs = sum(row["n_prompt"] for row in rows), sum(row["n_output"] for row in rows)
    shares = [row["cached"] / row["could_be_cached"] for row in rows if row["could_be_cached"]]
    return Shape(
        prompt_tokens=round(sum(row["prompt"] or 0 for row in rows) / prompts, 1) if prompts else None,
        output_tokens=round(sum(row["output"] or 0 for row in rows) / outputs, 1) if outputs else None,
        cached_share=round(max(shares), 3) if shares else None,
    )


def _class(tokens: float, classes: Sequence[int]) -> int:
    return next((bound for bound in classes if tokens <= bound), 0)


def _size(bound: int) -> float:
    return bound or float("inf")


def _bound(bound: int, classes: Sequence[int]) -> str:
    return f"<={bound}" if bound else f">{classes[-1]}"
