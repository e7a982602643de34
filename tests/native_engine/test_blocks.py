"""The block pool: references, prefix cache, eviction; and a state machine for what no list of cases covers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from native_engine.blocks import CHAIN_ROOT, BlockPool, chain_root, extend_chain, hash_block
from native_engine.errors import InvariantBroken, OutOfBlocks
from native_engine.sequence import CacheKey

SALT = CacheKey("salt", "tenant")


def chain_of(token_ids: Sequence[int], block_size: int = 4, keys: Sequence[CacheKey] = ()) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, token_ids, block_size=block_size, keys=keys)
    return chain


def compute(pool: BlockPool, token_ids: Sequence[int], keys: Sequence[CacheKey] = ()) -> list[int]:
    """A table for the tokens, with every full block computed and published, as a finished prompt leaves it."""
    chain = chain_of(token_ids, pool.block_size, keys)
    hits = pool.match_prefix(chain, token_ids)
    table = pool.allocate(pool.blocks_for(len(token_ids)) - len(hits), cached=hits)
    for index in range(len(hits), len(chain)):
        start = index * pool.block_size
        pool.publish(table[index], chain[index], token_ids[start : start + pool.block_size])
    return table


# ---- references


@pytest.mark.replay("E25")
def test_a_block_freed_by_two_paths_is_reported_and_not_handed_out_twice() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(2)
    pool.free(table)
    with pytest.raises(InvariantBroken, match="freed twice"):
        pool.free(table)


@pytest.mark.replay("E27")
def test_too_large_a_wish_takes_nothing() -> None:
    """A request that fails must not keep the half it got: neither fresh blocks nor references to cached ones."""
    pool = BlockPool(4, 4)
    pool.free(compute(pool, range(8)))
    hits = pool.match_prefix(chain_of(range(8)), range(8))
    assert len(hits) == 2
    with pytest.raises(OutOfBlocks):
        pool.allocate(3, cached=hits)  # two of the four free blocks are the hits themselves
    pool.check([])
    assert pool.num_free == 4
    assert len(pool.allocate(2, cached=hits)) == 4


def test_a_hit_on_a_block_in_use_costs_no_free_block() -> None:
    pool = BlockPool(4, 4)
    owner = compute(pool, range(8))
    assert pool.num_free_beside(owner) == 2
    assert len(pool.allocate(2, cached=owner)) == 4
    assert pool.num_free == 0


def test_a_shared_block_stays_until_its_last_reader_has_gone() -> None:
    pool = BlockPool(4, 4)
    first = compute(pool, range(8))
    second = compute(pool, range(8))
    assert first == second
    pool.free(first)
    pool.check([second])
    assert pool.num_used == 2
    pool.free(second)
    assert pool.num_used == 0


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError):
        BlockPool(0, 4)
    with pytest.raises(ValueError):
        BlockPool(4, 0)


# ---- the prefix cache


@pytest.mark.replay("E11")
def test_a_lookup_changes_nothing() -> None:
    """Looking for a prefix must not touch references, nor the order of eviction."""
    pool = BlockPool(2, 4)
    pool.free(compute(pool, [1, 1, 1, 1]))
    pool.free(compute(pool, [2, 2, 2, 2]))
    for _ in range(3):
        assert len(pool.match_prefix(chain_of([1, 1, 1, 1]), [1, 1, 1, 1])) == 1
    pool.check([])
    pool.allocate(1)  # evicts the least recently *used* one: the first, although it has been looked at since
    assert pool.match_prefix(chain_of([1, 1, 1, 1]), [1, 1, 1, 1]) == []
    assert len(pool.match_prefix(chain_of([2, 2, 2, 2]), [2, 2, 2, 2])) == 1


def test_a_hit_moves_a_block_to_the_end_of_the_line() -> None:
    pool = BlockPool(2, 4)
    pool.free(compute(pool, [1, 1, 1, 1]))
    pool.free(compute(pool, [2, 2, 2, 2]))
    pool.free(compute(pool, [1, 1, 1, 1]))  # a hit
    pool.allocate(1)
    assert len(pool.match_prefix(chain_of([1, 1, 1, 1]), [1, 1, 1, 1])) == 1
    assert pool.match_prefix(chain_of([2, 2, 2, 2]), [2, 2, 2, 2]) == []


def test_blank_blocks_are_used_before_anything_is_evicted() -> None:
    pool = BlockPool(4, 4)
    blank = pool.allocate(2)
    pool.free(compute(pool, range(8)))
    pool.free(blank)
    pool.allocate(2)
    assert len(pool.match_prefix(chain_of(range(8)), range(8))) == 2


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(3, 4)
    pool.free(compute(pool, range(12)))
    pool.allocate(1)
    assert len(pool.match_prefix(chain_of(range(12)), range(12))) == 2


def test_eviction_leaves_owned_blocks_alone() -> None:
    pool = BlockPool(3, 4)
    owned = compute(pool, range(8))
    pool.free(pool.allocate(1))
    for _ in range(5):
        fresh = pool.allocate(1)
        assert not set(fresh) & set(owned)
        pool.free(fresh)
    assert pool.match_prefix(chain_of(range(8)), range(8)) == owned


@pytest.mark.replay("E17", "E18")
def test_a_recycled_block_takes_its_old_hash_with_it() -> None:
    """Its new contents must neither be found under the old hash nor be refused a new one."""
    pool = BlockPool(1, 4)
    pool.free(compute(pool, [1, 1, 1, 1]))
    pool.free(compute(pool, [2, 2, 2, 2]))
    pool.check([])
    assert pool.match_prefix(chain_of([1, 1, 1, 1]), [1, 1, 1, 1]) == []
    assert pool.match_prefix(chain_of([2, 2, 2, 2]), [2, 2, 2, 2]) == [0]


def test_a_block_is_published_once_owned_and_full() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    digest = chain_of([1, 2, 3, 4])[0]
    with pytest.raises(InvariantBroken):
        pool.publish(block, digest, [1, 2, 3])
    with pytest.raises(InvariantBroken):
        pool.publish(1 - block, digest, [1, 2, 3, 4])
    pool.publish(block, digest, [1, 2, 3, 4])
    with pytest.raises(InvariantBroken):
        pool.publish(block, digest, [1, 2, 3, 4])


def test_of_two_equal_blocks_the_first_stays_on_offer_and_the_books_balance() -> None:
    pool = BlockPool(2, 4)
    first, second = pool.allocate(2)
    digest = chain_of([1, 2, 3, 4])[0]
    pool.publish(first, digest, [1, 2, 3, 4])
    pool.publish(second, digest, [1, 2, 3, 4])
    assert pool.match_prefix([digest], [1, 2, 3, 4]) == [first]
    pool.free([first, second])
    pool.check([])
    pool.allocate(1)  # the duplicate is blank, as far as the cache knows, and goes first
    assert pool.match_prefix([digest], [1, 2, 3, 4]) == [first]


def test_a_stale_hit_is_refused() -> None:
    """A match is good until the pool changes: taking a block that was evicted since would be somebody else's memory."""
    pool = BlockPool(2, 4)
    pool.free(compute(pool, range(8)))
    hits = pool.match_prefix(chain_of(range(8)), range(8))
    pool.free(pool.allocate(2))
    with pytest.raises(InvariantBroken, match="nothing is published"):
        pool.allocate(0, cached=hits)


@pytest.mark.replay("A47")
def test_equal_hashes_of_different_tokens_are_no_hit() -> None:
    """Should a hash ever collide, tokens decide."""
    pool = BlockPool(2, 4)
    digest = chain_of([1, 2, 3, 4])[0]
    (block,) = pool.allocate(1)
    pool.publish(block, digest, [1, 2, 3, 4])
    assert pool.match_prefix([digest], [9, 9, 9, 9]) == []
    assert pool.match_prefix([digest], [1, 2, 3]) == []


def test_a_gap_ends_the_match() -> None:
    pool = BlockPool(3, 4)
    table = compute(pool, range(12))
    chain = chain_of(range(12))
    pool.free(table)
    pool.allocate(1, cached=table[:1])  # the fresh block evicts the tail
    assert pool.match_prefix([chain[1]], range(4, 8)) == table[1:2]  # the middle is still there
    assert pool.match_prefix([chain[2], chain[1]], range(8, 12)) == []


# ---- hashes


def test_a_prompt_of_whole_blocks_has_a_hash_for_each_and_a_shorter_one_has_none() -> None:
    assert len(chain_of(range(8))) == 2
    assert len(chain_of(range(11))) == 2
    assert chain_of(range(3)) == []
    assert chain_of([]) == []


def test_a_chain_grown_token_by_token_equals_the_chain_made_at_once() -> None:
    chain: list[bytes] = []
    for end in range(18):
        extend_chain(chain, range(end), block_size=4, keys=[SALT])
    assert chain == chain_of(range(17), keys=[SALT])


def test_a_block_is_known_by_all_that_comes_before_it() -> None:
    assert chain_of([1, 2, 3, 4, 9, 9, 9, 9])[1] != chain_of([5, 6, 7, 8, 9, 9, 9, 9])[1]


@pytest.mark.replay("E21")
@pytest.mark.replay("A47")
def test_tokens_that_a_rolling_hash_confuses_are_told_apart() -> None:
    assert chain_of([100, 200, 5, 6]) != chain_of([131, 199, 5, 6])


@pytest.mark.replay("E20")
@pytest.mark.replay("A46")
def test_a_salt_equal_to_another_kind_of_key_does_not_open_its_cache() -> None:
    keys = [
        (),
        (CacheKey("salt", ""),),
        (CacheKey("salt", "x"),),
        (CacheKey("lora", "x"),),
        (CacheKey("sal", "tx"),),
        (CacheKey("salt", "x"), CacheKey("lora", "y")),
        (CacheKey("lora", "y"), CacheKey("salt", "x")),
        (CacheKey("salt", "x\0lora"), CacheKey("y", "")),
    ]
    assert len({chain_root(key) for key in keys}) == len(keys)


def test_a_salt_that_is_no_valid_text_still_has_a_hash() -> None:
    assert chain_root([CacheKey("salt", "\ud800")]) != chain_root([CacheKey("salt", "?")])


@pytest.mark.replay("E22")
def test_every_process_computes_the_same_hashes() -> None:
    """The first link is a constant of ours, not the interpreter's hash of None; and no process adds chance."""
    script = (
        "from native_engine.blocks import *\nchain = []\n"
        "extend_chain(chain, range(8), block_size=4, keys=[CacheKey('salt', 'tenant')])\nprint(chain[-1].hex())"
    )
    run = [sys.executable, "-c", script]
    hashes = {
        subprocess.run(run, capture_output=True, text=True, check=True, timeout=60, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }
    assert hashes == {chain_of(range(8), keys=[SALT])[-1].hex() + "\n"}
    assert chain_root(()) == CHAIN_ROOT
    assert hash_block(CHAIN_ROOT, []) != CHAIN_ROOT


# ---- check()


def test_check_finds_a_lost_block_a_foreign_reference_and_a_block_twice_in_a_table() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(2)
    pool.check([table])
    for wrong in ([], [table[:1]], [table, table], [[*table, table[0]]], [[*table, 99]]):
        with pytest.raises(InvariantBroken):
            pool.check(wrong)


# ---- everything at once


class PoolMachine(RuleBasedStateMachine):
    """Owners come, compute, grow and go. The oracle: what was last written in each block, and who holds it."""

    tables: Bundle[int] = Bundle("tables")

    @initialize(num_blocks=st.integers(1, 9), block_size=st.integers(1, 3))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.owned: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.contents: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
        self.names = iter(range(10**9))

    @rule(target=tables, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def enter(self, token_ids: list[int]) -> object:
        chain = chain_of(token_ids, self.pool.block_size)
        hits = self.pool.match_prefix(chain, token_ids)
        for index, block in enumerate(hits):
            assert self.contents[block] == tuple(token_ids[: (index + 1) * self.pool.block_size])
        fresh = self.pool.blocks_for(len(token_ids)) - len(hits)
        free_before = self.pool.num_free
        if fresh > self.pool.num_free_beside(hits):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(fresh, cached=hits)
            assert self.pool.num_free == free_before
            return multiple()
        name = next(self.names)
        self.owned[name], self.tokens[name] = self.pool.allocate(fresh, cached=hits), token_ids
        self.write(name, len(hits))
        return name

    def write(self, name: int, first_block: int) -> None:
        size, tokens = self.pool.block_size, self.tokens[name]
        chain = chain_of(tokens, size)
        for index in range(first_block, len(self.owned[name])):
            block = self.owned[name][index]
            assert sum(block in table for table in self.owned.values()) == 1, "a block that others read is written"
            self.contents[block] = tuple(tokens[: (index + 1) * size])
            if index < len(chain):
                self.pool.publish(block, chain[index], tokens[index * size : (index + 1) * size])

    @rule(name=tables, token=st.integers(0, 1))
    def grow(self, name: int, token: int) -> None:
        if len(self.tokens[name]) % self.pool.block_size or not self.pool.num_free:
            return
        self.tokens[name] = [*self.tokens[name], *[token] * self.pool.block_size]
        self.owned[name] += self.pool.allocate(1)
        self.write(name, len(self.owned[name]) - 1)

    @rule(name=consumes(tables))
    def leave(self, name: int) -> None:
        self.pool.free(self.owned.pop(name))

    @invariant()
    def books_balance(self) -> None:
        self.pool.check(self.owned.values())
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks
        assert self.pool.num_used == len({block for table in self.owned.values() for block in table})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
