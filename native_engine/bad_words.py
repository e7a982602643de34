"""Words that must not come: which tokens would complete one of them, given the text so far.

    vocabulary = Vocabulary(tokenizer.token_bytes)
    words = BadWords(("cat", "dog"), vocabulary)
    words.completed_by(output_ids)          # token ids that may not come next

A word is a run of bytes in the output, wherever it stands and however tokens fall into it: `cat` is in "concatenate".
So a text without these tokens at each step never holds one of the words. It depends on the output alone: nothing is
remembered that a preemption or a fork could lose.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids: TypeAlias = NDArray[np.int64]

NO_TEXT = b"\xff"  # is in no text: UTF-8 has no such byte


class Vocabulary:
    """Tokens by their bytes. Sorting takes tens of milliseconds, once, when it is first asked."""

    def __init__(self, token_bytes: SequenceOf[bytes]) -> None:
        self._token_bytes = token_bytes

    def __len__(self) -> int:
        return len(self._token_bytes)

    def bytes_of(self, token_id: int) -> bytes:
        """A model's vocabulary may be padded beyond the tokenizer's: such ids have no text."""
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def starting_with(self, part: bytes) -> Ids:
        """Tokens that begin with `part`, a piece of UTF-8 that is not empty."""
        sorted_bytes, ids = self._sorted
        after = part[:-1] + bytes([part[-1] + 1])  # the last byte is below 255
        return ids[bisect_left(sorted_bytes, part) : bisect_left(sorted_bytes, after)]

    def containing(self, part: bytes) -> Ids:
        """Tokens with `part` anywhere in them."""
        text, starts = self._joined
        found: list[int] = []
        at = text.find(part)
        while at >= 0:
            token = int(np.searchsorted(starts, at, side="right")) - 1
            found.append(token)
            at = text.find(part, int(starts[token + 1])) if token + 1 < len(starts) else -1
        return np.array(found, np.int64)

    @cached_property
    def _sorted(self) -> tuple[list[bytes], Ids]:
        order = sorted(range(len(self._token_bytes)), key=self._token_bytes.__getitem__)
        return [self._token_bytes[token] for token in order], np.array(order, np.int64)

    @cached_property
    def _joined(self) -> tuple[bytes, Ids]:
        """All tokens in one text, and where each begins."""
        lengths = [len(raw) + len(NO_TEXT) for raw in self._token_bytes]
        return NO_TEXT.join(self._token_bytes), np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64)


class BadWords:
    def __init__(self, words: SequenceOf[str], vocabulary: Vocabulary) -> None:
        """`words`: none of them empty."""
        self._vocabulary = vocabulary
        self._words = [word.encode() for word in words]
        self._whole = np.concatenate([vocabulary.containing(word) for word in self._words])
        self._longest_start = max(map(len, self._words)) - 1

    def completed_by(self, output_ids: SequenceOf[int]) -> Ids:
        """Ids of the tokens after which the text would hold a word; some more than once."""
        tail = self._tail(output_ids)
        ends = [
            self._vocabulary.starting_with(word[length:])
            for word in self._words
            for length in range(1, min(len(word), len(tail) + 1))
            if tail.endswith(word[:length])
        ]
        return np.concatenate([self._whole, *ends])

    def _tail(self, output_ids: SequenceOf[int]) -> bytes:
        """As much of the text's end as may be the beginning of a word."""
        pieces: list[bytes] = []
        missing = self._longest_start
        for token_id in reversed(output_ids):
            if missing <= 0:
                break
            pieces.append(self._vocabulary.bytes_of(token_id))
            missing -= len(pieces[-1])
        return b"".join(reversed(pieces))
