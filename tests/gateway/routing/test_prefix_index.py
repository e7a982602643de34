"""The index of prompts' beginnings: bounded whatever comes, and never wrong about what it remembers."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.prefix_index import BLOCK_CHARS, ENTRY_BYTES, MAX_OWNERS, PrefixIndex

words = st.lists(st.sampled_from(["x" * BLOCK_CHARS, "y" * BLOCK_CHARS]), max_size=6).map("".join)


@pytest.mark.replay("G08")
def test_g08_the_index_of_prefixes_stays_within_its_bound() -> None:
    cap = 2 << 20
    index = PrefixIndex(cap)
    for number in range(200_000):
        index.note(index.blocks(f"{number:08}" * 256, "m"), f"m/r{number % 4}#0")
    assert cap - ENTRY_BYTES < index.num_bytes <= cap
    assert index.num_evicted == 200_000 * 4 - cap // ENTRY_BYTES


def test_what_an_entry_takes_is_not_more_than_is_counted() -> None:
    index = PrefixIndex(8 << 20)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(5_000):
        blocks = index.blocks(f"{number:08}" * 256, "m")
        for replica in range(MAX_OWNERS + 1):
            index.note(blocks, f"m/r{replica}#0")
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.4 * index.num_bytes <= grown <= index.num_bytes


@given(st.lists(st.tuples(words, st.sampled_from("abc")), max_size=20), words)
def test_it_knows_who_read_how_much_of_a_prompt(history: list[tuple[str, str]], text: str) -> None:
    index = PrefixIndex(1 << 20)
    for noted, owner in history:
        index.note(index.blocks(noted, "m"), owner)
    known = index.known(index.blocks(text, "m"))
    for owner in "abc":
        longest = max((common(noted, text) for noted, by in history if by == owner), default=0)
        assert known.get(owner, 0) == longest


def common(one: str, other: str) -> int:
    """Whole blocks that two texts have in common at their beginning."""
    number = 0
    while (end := (number + 1) * BLOCK_CHARS) <= min(len(one), len(other)) and one[:end] == other[:end]:
        number += 1
    return number


def test_what_is_left_of_a_prompt_is_its_beginning() -> None:
    index = PrefixIndex(4 * ENTRY_BYTES)
    blocks = index.blocks("".join(letter * BLOCK_CHARS for letter in "abcdef"), "m")
    index.note(blocks, "r")
    assert (index.known(blocks), index.num_evicted) == ({"r": 4}, 2)


def test_prompts_of_other_tenants_and_models_have_nothing_in_common() -> None:
    index = PrefixIndex(1 << 20)
    text = "x" * BLOCK_CHARS * 3
    domains = [("salt-a", "m"), ("salt-b", "m"), ("salt-a", "n"), (None, "m")]
    assert len({block for domain in domains for block in index.blocks(text, domain)}) == 12
    assert PrefixIndex(1 << 20).blocks(text, domains[0]) != index.blocks(text, domains[0])
