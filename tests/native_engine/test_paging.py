"""The figures of paging against small cases counted by hand, and against what the engine really holds."""

from __future__ import annotations

import pytest

from native_engine.paging import Reserved, paging_figures
from tests.native_engine.paged_twin import Bench, prompt


def figures(requests: list[Reserved]) -> dict[str, tuple[int, int, int]]:
    counted = paging_figures(requests, block_size=4, max_model_len=64, token_bytes=10)
    return {each.name: (each.reserved, each.used, each.wasted) for each in counted}


def test_a_contiguous_cache_reserves_the_longest_answer_for_everybody() -> None:
    assert figures([Reserved(prompt(5), 2), Reserved(prompt(9, 1), 3)]) == {
        "contiguous": (1280, 190, 1090),
        "paged": (200, 190, 10),
        "paged+prefix": (200, 190, 10),
    }


def test_equal_beginnings_are_held_once_and_the_last_token_of_a_prompt_never_is() -> None:
    same = [Reserved(prompt(8), 4), Reserved(prompt(8), 4), Reserved([*prompt(8), 3], 3)]
    assert figures(same)["paged"] == (360, 360, 0)
    assert figures(same)["paged+prefix"] == (240, 240, 0)  # one block of the second, two of the third


def test_the_waste_of_paging_is_less_than_a_block_for_each_request() -> None:
    requests = [Reserved(prompt(1 + 7 * index % 31, index), index % 5) for index in range(20)]
    for each in paging_figures(requests, block_size=4, max_model_len=64, token_bytes=1)[1:]:
        assert 0 <= each.wasted <= 3 * len(requests)
        assert each.waste_share == each.wasted / each.reserved


def test_no_requests_take_nothing_and_one_that_is_too_long_is_refused() -> None:
    assert figures([]) == dict.fromkeys(("contiguous", "paged", "paged+prefix"), (0, 0, 0))
    assert paging_figures([], block_size=4, max_model_len=64, token_bytes=1)[0].waste_share == 0
    with pytest.raises(ValueError, match="60 tokens, but max_model_len is 50"):
        paging_figures([Reserved(prompt(30), 30)], block_size=4, max_model_len=50, token_bytes=1)


@pytest.mark.parametrize("caching", [False, True])
def test_the_figures_are_the_blocks_that_the_engine_holds(caching: bool) -> None:
    """Answers of one token: nothing but prompts is held, while the first is kept from ending."""
    prompts = [prompt(14), [*prompt(9), 7, 7, 7], prompt(14), prompt(6, 2)]
    bench = Bench(num_blocks=40, max_num_batched_tokens=64, caching=caching)
    for index, prompt_ids in enumerate(prompts):
        bench.add(str(index), prompt_ids, max_tokens=3)
        bench.step() if index == 0 else None
    bench.step()  # everybody has one token, which is not computed yet
    by_name = {
        each.name: each.reserved // 4
        for each in paging_figures(
            [Reserved(each, 0) for each in prompts], block_size=4, max_model_len=64, token_bytes=1
        )
    }
    assert bench.engine.stats().kv_blocks_used == by_name["paged+prefix" if caching else "paged"]
