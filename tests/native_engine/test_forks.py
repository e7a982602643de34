"""Forks: several texts that share what has been computed of them, and copy a block only when they write into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from native_engine.attention.base import KVCache
from native_engine.blocks import BlockPool
from native_engine.config import EngineConfig
from native_engine.engine import Choice, Engine
from native_engine.errors import InvalidParams, InvariantBroken, PromptTooLong, StepFailed
from native_engine.loading import make_engine, make_model
from native_engine.models.decoder import Decoder
from native_engine.sampling_params import Grammar, SamplingParams
from native_engine.step import StepPlan
from native_engine.weights import open_checkpoint
from tests.native_engine.paged_twin import Bench, expected_output, prompt
from tests.native_engine.tiny_llama import tiny_config, write_tiny_llama


def seeded(seed: int, max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)


def add_choices(bench: Bench, prompt_ids: list[int], count: int, max_tokens: int = 8) -> list[str]:
    """Requests "0", "1", ... of one prompt, each with its number for a seed."""
    names = [str(index) for index in range(count)]
    first, *others = (Choice(name, seeded(int(name), max_tokens)) for name in names)
    bench.engine.add(first.request_id, prompt_ids, first.params, others=others)
    bench.outputs |= {name: [] for name in names}
    return names


def alone(prompt_ids: list[int], seed: int, max_tokens: int = 8) -> list[int]:
    return expected_output(prompt_ids, seeded(seed, max_tokens), max_len=10_000)[0]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_each_choice_is_what_its_seed_gives_alone_and_the_prompt_is_computed_once(length: int, caching: bool) -> None:
    """Around the block size: the last token of a prompt may end a block, which is full and published then."""
    bench = Bench(num_blocks=32, caching=caching)
    names = add_choices(bench, prompt(length), 4)
    bench.run()
    assert [bench.outputs[name] for name in names] == [alone(prompt(length), seed) for seed in range(4)]
    assert len({tuple(answer) for answer in bench.outputs.values()}) == 4
    computed = sum(size for plan in bench.twin.plans for _, _, size, _ in plan)
    assert computed == length + 3 + 4 * 7  # the others compute the prompt's last token again: if length is 1, all of it


def test_choices_share_the_prompts_blocks_and_copy_only_the_one_they_write_into() -> None:
    bench = Bench(num_blocks=32, max_num_batched_tokens=64)
    add_choices(bench, prompt(18), 4)
    bench.step()
    assert bench.engine.stats().kv_blocks_used == 5
    bench.step()
    assert bench.engine.stats().kv_blocks_used == 5 + 3  # a copy for each writer but the last
    assert bench.engine.stats().copied_blocks == 3
    bench.run()
    assert bench.engine.stats().kv_blocks_used == 0


def test_a_fork_in_the_middle_of_a_text_goes_on_from_there() -> None:
    bench = Bench(num_blocks=32)
    bench.add("parent", prompt(6), seed=1, max_tokens=12)
    for _ in range(5):
        bench.step()
    begun = list(bench.outputs["parent"])
    bench.engine.fork("parent", "same", seeded(1, 12))
    bench.engine.fork("parent", "other", seeded(2, 12))
    bench.outputs |= {"same": list(begun), "other": list(begun)}
    bench.run()
    assert bench.outputs["same"] == bench.outputs["parent"] == alone(prompt(6), 1, 12)
    assert bench.outputs["other"] == expected_output(prompt(6), seeded(2, 12), 10_000, begun)[0]
    assert bench.engine.stats().num_forks == 2


def test_a_fork_of_a_fork_and_one_that_outlives_its_parent() -> None:
    bench = Bench(num_blocks=32)
    bench.add("a", prompt(6), seed=1, max_tokens=4)
    bench.step()
    bench.engine.fork("a", "b", seeded(2, 20))
    bench.engine.fork("b", "c", seeded(3, 20))
    begun = list(bench.outputs["a"])
    bench.outputs |= {"b": list(begun), "c": list(begun)}
    bench.run()
    for name, seed in (("b", 2), ("c", 3)):
        assert bench.outputs[name] == expected_output(prompt(6), seeded(seed, 20), 10_000, begun)[0]


@pytest.mark.parametrize("victims", [["0"], ["1"], ["0", "1"], ["0", "1", "2", "3"]])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_aborting_some_choices_leaves_the_others_their_answers(steps: int, victims: list[str]) -> None:
    """Before the prompt is computed, in the middle of it, at the first token and after it."""
    bench = Bench(num_blocks=32, max_num_batched_tokens=8)
    names = add_choices(bench, prompt(17), 4)
    for _ in range(steps):
        bench.step()
    for victim in victims:
        assert bench.engine.abort(victim)
        bench.engine.check()
        assert not bench.engine.abort(victim)
    bench.run()
    for name in set(names) - set(victims):
        assert bench.outputs[name] == alone(prompt(17), int(name))
    assert bench.engine.stats().kv_blocks_used == 0
    computed = sum(size for plan in bench.twin.plans for _, start, size, _ in plan if start < 16)
    assert computed <= 17  # what had been computed of the prompt is not computed again


def test_choices_of_an_aborted_first_one_go_on_while_its_step_is_running() -> None:
    bench = Bench(num_blocks=32, max_num_batched_tokens=8)
    add_choices(bench, prompt(17), 3)

    def abort(plan: StepPlan) -> None:
        bench.twin.before_answer = lambda plan: None
        bench.engine.abort("0")
        bench.engine.check()

    bench.twin.before_answer = abort
    bench.run()
    assert (bench.outputs["1"], bench.outputs["2"]) == (alone(prompt(17), 1), alone(prompt(17), 2))


@pytest.mark.parametrize("num_blocks", [3, 4, 5, 7])
def test_many_choices_in_a_tiny_pool_push_one_another_out_and_all_finish(num_blocks: int) -> None:
    bench = Bench(num_blocks=num_blocks, max_num_seqs=8)
    names = add_choices(bench, prompt(6), 8, max_tokens=6)
    bench.run()
    assert [bench.outputs[name] for name in names] == [alone(prompt(6), seed, 6) for seed in range(8)]


def test_more_choices_than_seats_wait_their_turn_before_whoever_came_later() -> None:
    bench = Bench(num_blocks=32, max_num_seqs=2)
    add_choices(bench, prompt(6), 5)
    bench.step()
    bench.add("later", prompt(3, 1))
    bench.run()
    assert [bench.outputs[str(seed)] for seed in range(5)] == [alone(prompt(6), seed) for seed in range(5)]
    order = [request for plan in bench.twin.plans for request, *_ in plan]
    assert list(dict.fromkeys(order)) == ["0", "1", "2", "3", "4", "later"]


def test_a_step_that_failed_copies_again_from_a_block_that_is_still_there() -> None:
    """Nobody knows what a failed step had copied, and its neighbours may be gone before the next one."""
    bench = Bench(num_blocks=32, max_num_batched_tokens=64)
    add_choices(bench, prompt(6), 3)
    bench.step()
    run, bench.twin.run = bench.twin.run, lambda plan: (_ for _ in ()).throw(OSError("device lost"))  # type: ignore
    with pytest.raises(StepFailed):
        bench.step()
    bench.engine.check()
    bench.twin.run = run  # type: ignore[method-assign]
    bench.engine.abort("1")
    bench.answer_while_others_run("neighbour", prompt(20, 3))
    bench.run()
    assert (bench.outputs["0"], bench.outputs["2"]) == (alone(prompt(6), 0), alone(prompt(6), 2))


def test_what_cannot_be_forked_is_refused_and_changes_nothing() -> None:
    bench = Bench(num_blocks=8)
    bench.add("a", prompt(5), max_tokens=3)
    for others in ([Choice("a", SamplingParams())], [Choice("b", SamplingParams()), Choice("b", SamplingParams())]):
        with pytest.raises(InvalidParams, match="request_id must be unique"):
            bench.engine.add("c", prompt(5), SamplingParams(), others=others)
    with pytest.raises(PromptTooLong):
        bench.engine.add("c", prompt(40), SamplingParams(), others=[Choice("d", SamplingParams())])
    with pytest.raises(InvalidParams, match="request_id must be unique"):
        bench.engine.fork("a", "a")
    with pytest.raises(InvalidParams, match="request_id must be that of a request in the engine, not 'c'"):
        bench.engine.fork("c", "d")
    with pytest.raises(InvalidParams, match="grammar must be None"):
        bench.engine.fork("a", "d", SamplingParams(grammar=Grammar("regex", "a+")))
    bench.step()
    with pytest.raises(InvalidParams, match="max_tokens must be above the 1 tokens"):
        bench.engine.fork("a", "d", SamplingParams(max_tokens=1))
    bench.run()
    assert list(bench.finish_reasons) == ["a"]


def test_a_block_that_nobody_owns_can_be_neither_shared_nor_withdrawn() -> None:
    pool = BlockPool(4, 2)
    with pytest.raises(InvariantBroken, match="cannot be shared"):
        pool.share([1])
    with pytest.raises(InvariantBroken, match="cannot be withdrawn"):
        pool.withdraw(1)


# ---- on a real model


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Decoder:
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path_factory.mktemp("tiny"), seed=7))
    return make_model(checkpoint, config_of(request.param), kernel_cache=kernel_cache)


def config_of(dtype: Any, **changes: Any) -> EngineConfig:
    return EngineConfig(dtype=dtype, **({"block_size": 16, "kv_cache_mib": 4, "max_model_len": 200} | changes))


def engine_of(model: Decoder, **changes: Any) -> Engine:
    return make_engine(model, config_of("float32" if model.dtype.itemsize == 4 else "bfloat16", **changes))


def run(engine: Engine, outputs: dict[str, list[int]]) -> dict[str, list[int]]:
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
    return outputs


@pytest.mark.parametrize("caching", [False, True])
def test_choices_of_a_real_model_are_bit_for_bit_those_of_requests_alone(model: Decoder, caching: bool) -> None:
    source = torch.Generator().manual_seed(1)
    for length in (16, 37):
        prompt_ids: list[int] = torch.randint(3, 250, (length,), generator=source).tolist()
        choices = [Choice(str(seed), SamplingParams(seed=seed, max_tokens=20, ignore_eos=True)) for seed in range(3)]
        together = engine_of(model, enable_prefix_caching=caching)
        together.add("0", prompt_ids, choices[0].params, others=choices[1:])
        answers = run(together, {})
        assert together.stats().num_forks == 2
        for choice in choices:
            lonely = engine_of(model, enable_prefix_caching=False)
            lonely.add(choice.request_id, prompt_ids, choice.params)
            assert run(lonely, {})[choice.request_id] == answers[choice.request_id]


def test_a_fork_of_a_real_model_repeats_its_parent_when_it_has_its_seed(model: Decoder) -> None:
    engine = engine_of(model)
    params = SamplingParams(seed=5, max_tokens=60, ignore_eos=True)
    engine.add("parent", list(range(10, 47)), params)
    outputs: dict[str, list[int]] = {"parent": []}
    for _ in range(20):
        outputs["parent"] += engine.step()[0].token_ids
    engine.fork("parent", "child", params)
    outputs["child"] = list(outputs["parent"])
    run(engine, outputs)
    assert len(outputs["child"]) == 60
    assert outputs["child"] == outputs["parent"]


def test_copies_read_every_source_before_they_write() -> None:
    """A block that one copy frees may be another's target."""
    cache = KVCache.allocate(tiny_config(), 5, 16, torch.float32)
    for tensor in cache.tensors:
        tensor.copy_(torch.arange(5.0).view(1, 5, 1, 1, 1).expand_as(tensor))
    cache.copy_blocks([(0, 3), (1, 0), (3, 4)])
    for tensor in cache.tensors:
        assert tensor[1, :, 1, 2, 3].tolist() == [1, 1, 2, 0, 3]
