"""What recent prompts have in common, told from fingerprints that hold none of their text. Pure.

    marks = fingerprint(text, parts, salt)        # hashes of pieces of 40 to 160 characters
    finding = lost_reuse([marks, ...])            # None, or where they begin to differ though most of the rest is alike

A prefix cache reuses what is the same from the first token on, so one varying character at the head of a prompt (a
time, a name, an id) destroys the reuse of everything behind it. That is what is looked for: texts that share most of
their pieces but only a short head. Pieces end at white space or punctuation, so after a difference of any length the
pieces of two texts soon are the same again.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

from msgspec import Struct

MAX_CHARS = 16_384  # of a prompt that are looked at
MIN_LOST_CHARS = 1_000  # some 250 tokens: less is not worth advice
MIN_LOST_SHARE = 0.5  # of what follows the first difference
MIN_PROMPTS = 3

_ENDS = r"\s.,;:!?|{}\[\]()\"。，、！？；："
_PIECE = re.compile(rf"(?s).{{40}}[^{_ENDS}]{{0,119}}[{_ENDS}]?|.{{1,40}}")


class Fingerprint(Struct, frozen=True):
    """Salted hashes of a prompt's pieces with their lengths, and where its parts (tools, messages) begin."""

    hashes: array[int]
    lengths: array[int]
    parts: tuple[tuple[int, str], ...] = ()

    @property
    def num_chars(self) -> int:
        return sum(self.lengths)


class Finding(Struct, frozen=True):
    """Two prompts that lose reuse, in characters: `same` at their head, then a difference that begins before
    `differs_by` in the part named, and behind it `lost`, which is the same again, of `rest` that follow the head."""

    same: int
    differs_by: int
    part: str
    lost: int
    rest: int

    @property
    def sentence(self) -> str:
        return (
            f"Prompts begin to differ between characters {self.same} and {self.differs_by} ({self.part}), while "
            f"{self.lost / self.rest:.0%} of what follows is the same as before; move what varies behind what stays, "
            "and the engine's prefix cache can reuse it."
        )


def fingerprint(text: str, parts: Sequence[tuple[int, str]], salt: str) -> Fingerprint:
    """The marks of a text. `parts` are the offsets and names of what it is made of, the names out of a fixed set."""
    pieces = _PIECE.findall(text, 0, MAX_CHARS)
    return Fingerprint(
        hashes=array("q", [hash(salt + piece) for piece in pieces]),
        lengths=array("B", map(len, pieces)),
        parts=tuple(parts),
    )


def lost_reuse(prompts: Sequence[Fingerprint]) -> Finding | None:
    """The greatest loss, where at least half of the prompts lose reuse that another one of them could give."""
    if len(prompts) < MIN_PROMPTS:
        return None
    losses = [loss for place in range(len(prompts)) if (loss := _loss(prompts, place)) is not None]
    return max(losses, key=lambda loss: loss.lost) if 2 * len(losses) >= len(prompts) else None


def _loss(prompts: Sequence[Fingerprint], place: int) -> Finding | None:
    """What this prompt could have reused of the others, beyond what a prefix cache can."""
    prompt = prompts[place]
    found = [compared(prompt, other) for other in (*prompts[:place], *prompts[place + 1 :])]
    best = max(found, key=lambda each: each.same + each.lost)
    gain = best.same + best.lost - max(each.same for each in found)
    is_worth_it = gain >= MIN_LOST_CHARS and best.lost >= MIN_LOST_SHARE * best.rest
    return best if is_worth_it else None


def compared(prompt: Fingerprint, other: Fingerprint) -> Finding:
    """What the two have in common: at the head, and behind it."""
    num_same = _common_head(prompt.hashes, other.hashes)
    same = sum(prompt.lengths[:num_same])
    elsewhere = set(other.hashes[num_same:])
    rest = zip(prompt.hashes[num_same:], prompt.lengths[num_same:], strict=True)
    first_other = prompt.lengths[num_same] if num_same < len(prompt.lengths) else 0
    return Finding(
        same=same,
        differs_by=same + first_other,
        part=_part_at(prompt, same),
        lost=sum(length for mark, length in rest if mark in elsewhere),
        rest=prompt.num_chars - same,
    )


def _common_head(one: array[int], other: array[int]) -> int:
    for place, (mine, its) in enumerate(zip(one, other, strict=False)):
        if mine != its:
            return place
    return min(len(one), len(other))


def _part_at(prompt: Fingerprint, offset: int) -> str:
    names = [name for begin, name in prompt.parts if begin <= offset]
    return names[-1] if names else "prompt"
