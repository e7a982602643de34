"""The block pool: who owns which block of the KV cache, and which blocks can be used again.

The cache is cut into blocks of `block_size` tokens. A sequence holds a table of block ids; several tables may share a
block, so each block counts its references. A block with none is free, but keeps what is written in it until somebody
needs the space: a full block is published under a hash of all tokens up to its end, and a later prompt that begins with
the same tokens takes the block instead of computing it again.

    pool = BlockPool(num_blocks=64, block_size=32)
    extend_chain(chain, token_ids, block_size=32)        # one hash per full block of the prompt
    hits = pool.match_prefix(chain, token_ids)           # a look, no side effect
    table = pool.allocate(5, cached=hits)                # all or nothing: hits first, then five fresh blocks
    pool.publish(table[2], chain[2], token_ids[64:96])   # once its keys and values are really there
    pool.free(table)

    fork = pool.share(table)                             # one more reference to each block
    pool.is_shared(fork[-1])                             # who writes into a shared block takes a fresh one first

Order of reuse: blank blocks first, then published ones, least recently used first, a prefix's tail before its head.

This module knows ids and tokens only. Where the keys and values lie, and when they have been computed, others know.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from native_engine.errors import InvariantBroken, OutOfBlocks, require
from native_engine.sequence import CacheKey

CHAIN_ROOT = hashlib.sha256(b"goodgate: the link before the first block").digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a block, given that of the block before it: equal only where everything up to the block's end is.

    A cryptographic hash, since prompts come from strangers, and a crafted collision would show one tenant's text to
    another. It depends on nothing but its arguments, so every process computes the same.
    """
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def chain_root(keys: Iterable[CacheKey]) -> bytes:
    """The link before the first block. Each part is preceded by its length, so that no two lists of keys read alike."""
    root = CHAIN_ROOT
    for key in keys:
        parts = [part.encode("utf-8", "surrogatepass") for part in key]
        root = hashlib.sha256(root + b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()
    return root


def extend_chain(
    chain: list[bytes], token_ids: Sequence[int], *, block_size: int, keys: Iterable[CacheKey] = ()
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `chain` does not reach yet."""
    parent = chain[-1] if chain else chain_root(keys)
    for end in range((len(chain) + 1) * block_size, len(token_ids) + 1, block_size):
        parent = hash_block(parent, token_ids[end - block_size : end])
        chain.append(parent)


class Published(NamedTuple):
    """What is known to be written in a block."""

    hash: bytes
    token_ids: tuple[int, ...]


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"A pool needs blocks and blocks need tokens, not {num_blocks} blocks of {block_size}.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        # An OrderedDict is a doubly linked list with an index: a block leaves from the middle (a hit) as fast as from
        # the front (the next to be reused).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._published: dict[int, Published] = {}
        self._block_of_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_free_beside(self, cached: Iterable[int]) -> int:
        """How many fresh blocks could be taken together with `cached`, some of which may be free themselves."""
        return len(self._free) - sum(block in self._free for block in cached)

    def match_prefix(self, chain: Sequence[bytes], token_ids: Sequence[int]) -> list[int]:
        """The published blocks that hold the beginning of `token_ids`, as far as an unbroken run of them reaches.

        The answer is good until the pool changes. Tokens are compared as well as hashes: it costs next to nothing, and
        a wrong hit would be another prompt's memory.
        """
        hits: list[int] = []
        for index, digest in enumerate(chain):
            block = self._block_of_hash.get(digest)
            start = index * self.block_size
            if block is None or self._published[block].token_ids != tuple(token_ids[start : start + self.block_size]):
                break
            hits.append(block)
        return hits

    def allocate(self, count: int, cached: Sequence[int] = ()) -> list[int]:
        """A reference to each block of `cached`, then `count` fresh blocks. `OutOfBlocks` leaves all as it was."""
        for block in cached:
            if block not in self._published:
                raise InvariantBroken(f"Block {block} was taken as cached, but nothing is published in it.")
        if count > self.num_free_beside(cached):
            raise OutOfBlocks(f"{count} fresh blocks wanted, {self.num_free_beside(cached)} free.")
        for block in cached:
            self._free.pop(block, None)
            self._references[block] += 1
        return [*cached, *(self._take_fresh() for _ in range(count))]

    def share(self, table: Sequence[int]) -> list[int]:
        """One more reference to each block of a table that is in use."""
        for block in table:
            if self._references[block] == 0:
                raise InvariantBroken(f"Block {block} cannot be shared: nobody owns it.")
        for block in table:
            self._references[block] += 1
        return list(table)

    def num_references(self, block: int) -> int:
        return self._references[block]

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def withdraw(self, block: int) -> None:
        """Offer a block no longer, because an owner is about to write into it."""
        if self._references[block] == 0:
            raise InvariantBroken(f"Block {block} cannot be withdrawn: nobody owns it.")
        if published := self._published.pop(block, None):
            del self._block_of_hash[published.hash]

    def publish(self, block: int, digest: bytes, token_ids: Sequence[int]) -> None:
        """Offer a full, computed block for reuse. Of two blocks with equal contents the first one stays on offer."""
        if self._references[block] == 0 or block in self._published or len(token_ids) != self.block_size:
            raise InvariantBroken(f"Block {block} cannot be published: it must be owned, full and not published yet.")
        if digest not in self._block_of_hash:
            self._block_of_hash[digest] = block
            self._published[block] = Published(digest, tuple(token_ids))

    def free(self, table: Sequence[int]) -> None:
        """Give up one reference to each block. Tails stand first in line for reuse: a head serves more prompts."""
        for block in reversed(table):
            if self._references[block] == 0:
                raise InvariantBroken(f"Block {block} is freed twice.")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._published:
                    self._free.move_to_end(block, last=False)

    def _take_fresh(self) -> int:
        """The next block in line, with whatever was published in it forgotten."""
        block, _ = self._free.popitem(last=False)
        if published := self._published.pop(block, None):
            del self._block_of_hash[published.hash]
        self._references[block] = 1
        return block

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `InvariantBroken` unless the books balance against `tables`, all block tables that are in use."""
        in_tables: Counter[int] = Counter()
        for table in tables:
            require(len(set(table)) == len(table), f"A table holds a block twice: {table}.")
            in_tables.update(table)
        require(in_tables.keys() | self._free.keys() <= set(range(self.num_blocks)), "A block does not exist.")
        for block, references in enumerate(self._references):
            require(references == in_tables[block], f"Block {block}: {references} counted, {in_tables[block]} in use.")
            require((references == 0) == (block in self._free), f"Block {block} is neither free nor owned, or both.")
        require(len(self._published) == len(self._block_of_hash), "Hashes and published blocks are not one to one.")
        for digest, block in self._block_of_hash.items():
            entry = self._published.get(block)
            require(entry is not None and entry.hash == digest, f"A hash points at block {block}, which disowns it.")
