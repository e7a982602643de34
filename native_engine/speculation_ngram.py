"""Drafts out of the request itself: what followed the last tokens where they stood before, in prompt or output.

    lookup([5, 6, 7, 8, 5, 6], longest=3, shortest=2, count=3)      # [7, 8, 5]

Summaries, edits, code and tables repeat what they are about, and small models repeat themselves (prompt lookup, also
in transformers and vLLM). It takes no model and hardly any time: one search through the bytes of the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf

from native_engine.step import Wanted

_BYTES = array("I").itemsize


class NgramDrafter:
    def __init__(self, *, longest: int, shortest: int) -> None:
        """Runs of `longest` to `shortest` last tokens are looked for."""
        self._longest = longest
        self._shortest = shortest

    def propose(self, wanted: SequenceOf[Wanted]) -> list[list[int]]:
        return [
            lookup(chunk.sequence.token_ids, longest=self._longest, shortest=self._shortest, count=count)
            for chunk, count in wanted
        ]


def lookup(token_ids: SequenceOf[int], *, longest: int, shortest: int, count: int) -> list[int]:
    """The `count` tokens that followed the longest run of last tokens where it stood last; none if it never did.

    A run that ends right before the end of the text is a loop: the draft goes round it as often as it takes.
    """
    text = array("I", token_ids).tobytes()
    for length in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        place = _last_place(text, text[-length * _BYTES :])
        if place is not None:
            follows = token_ids[place + length : place + length + count]
            return [follows[number % len(follows)] for number in range(count)]
    return []


def _last_place(text: bytes, run: bytes) -> int | None:
    """The index of the token where `run`, the end of `text`, begins for the last time before."""
    end = len(text) - 1
    while (place := text.rfind(run, 0, end)) >= 0:
        if place % _BYTES == 0:
            return place // _BYTES
        end = place + len(run) - 1  # across tokens: no match
    return None
