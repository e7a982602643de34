"""Which replica has read the beginning of a prompt before. Bounded; holds hashes and never text.

    index = PrefixIndex(max_bytes=32 << 20)
    blocks = index.blocks(text, (salt, model))      # hashes of the text's blocks, each with all before it
    index.note(blocks, "m/vllm-a")                  # that replica is about to read it
    index.known(blocks)                             # {"m/vllm-a": 12}: so many blocks from the beginning on

A block's hash is made with a secret of this process, and with whose prompt it is and for which model, so that what one
tenant sends tells nothing about another's. Beyond its bound the index forgets the blocks that were used longest ago,
the last blocks of a prompt before its first ones: what is left of a prompt is always a beginning.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Hashable, Sequence

BLOCK_CHARS = 512  # engines cache by smaller ones, but a finer match would route no better
TOKENS_A_BLOCK = 128  # of 4 characters
MAX_OWNERS = 4  # of a block, those that have read it last
ENTRY_BYTES = 320  # of one block with its owners, measured and rounded up (tests/gateway/routing/test_prefix_index.py)


class PrefixIndex:
    def __init__(self, max_bytes: int) -> None:
        self.num_evicted = 0
        self._max_blocks = max(max_bytes // ENTRY_BYTES, 1)
        self._secret = secrets.token_bytes(16)
        self._owners: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return len(self._owners) * ENTRY_BYTES

    def blocks(self, text: str, domain: Hashable) -> tuple[int, ...]:
        """Of the whole blocks of the text only: what follows them is a small part of a prompt that is worth it."""
        block = hash((self._secret, domain))
        ends = range(BLOCK_CHARS, len(text) + 1, BLOCK_CHARS)
        return tuple(block := hash((block, text[end - BLOCK_CHARS : end])) for end in ends)

    def known(self, blocks: Sequence[int]) -> dict[str, int]:
        """By replica, how many blocks from the first one on it has read, as far as the index remembers."""
        found: dict[str, int] = {}
        for number, block in enumerate(blocks):
            owners = self._owners.get(block)
            if owners is None:
                break
            for owner in owners:
                if found.get(owner, 0) == number:
                    found[owner] = number + 1
        return found

    def note(self, blocks: Sequence[int], owner: str) -> None:
        for block in reversed(blocks):  # the first one is the last to be forgotten
            owners = self._owners.get(block, ())
            if owners[:1] != (owner,):
                others = [each for each in owners if each != owner]
                self._owners[block] = (owner, *others[: MAX_OWNERS - 1])
            self._owners.move_to_end(block)
        while len(self._owners) > self._max_blocks:
            self._owners.popitem(last=False)
            self.num_evicted += 1
