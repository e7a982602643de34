"""Who gives blocks back when memory runs out, what becomes of them, and what a sliding window leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from native_engine.blocks import BlockPool
from native_engine.config import EngineConfig
from native_engine.engine import Engine
from native_engine.errors import InvalidParams, PromptTooLong
from native_engine.loading import make_engine, make_model
from native_engine.memory import NO_BLOCK, Costs
from native_engine.models.decoder import Decoder
from native_engine.sampling_params import SamplingParams
from native_engine.step import StepPlan
from native_engine.weights import open_checkpoint
from tests.native_engine.paged_twin import Bench, generates, prompt
from tests.native_engine.tiny_llama import write_tiny_llama

# ---- just enough


def two_that_outgrow(**changes: Any) -> Bench:
    """ "a" and "b" fill seven blocks together, and want twelve."""
    bench = Bench(**({"num_blocks": 7, "max_num_batched_tokens": 64} | changes))
    for name, seed in (("a", 1), ("b", 2)):
        bench.add(name, prompt(8, seed), max_tokens=16)
    return bench


def assert_both_are_right(bench: Bench) -> None:
    bench.run()
    assert bench.outputs == {"a": generates(prompt(8, 1), 16), "b": generates(prompt(8, 2), 16)}
    assert bench.engine.stats().kv_blocks_used == 0


def test_a_preempted_request_gives_back_no_more_blocks_than_are_needed() -> None:
    held: list[int] = []
    bench = two_that_outgrow(caching=False)

    def watch(plan: StepPlan) -> None:
        held.extend(len(victim.block_table) for victim in plan.preempted)

    bench.twin.before_answer = watch
    assert_both_are_right(bench)
    assert held == [3]  # one is taken when "a" wants its fourth; what comes later is taken from one who waits
    assert bench.engine.stats().num_preemptions == 1


def test_what_a_waiting_request_kept_is_not_computed_again() -> None:
    bench = two_that_outgrow(caching=False)
    assert_both_are_right(bench)
    computed = sum(length for plan in bench.twin.plans for request, _, length, _ in plan if request == "b")
    assert computed == 8 + 15 + bench.engine.stats().lost_tokens
    assert bench.engine.stats().lost_tokens < 8 + 5  # all that it had computed when it was preempted


@pytest.mark.replay("E06")
def test_a_request_that_shares_all_its_blocks_is_not_preempted_for_nothing() -> None:
    """Its blocks would stay where they are, because an older one reads them."""
    bench = Bench(num_blocks=6, max_num_batched_tokens=64, max_num_seqs=3)
    bench.add("parent", prompt(11), seed=1, max_tokens=9)
    bench.add("other", prompt(3, 5), max_tokens=9)
    bench.step()
    assert bench.engine.stats().kv_blocks_used == 4
    bench.engine.fork("parent", "child", SamplingParams(seed=1, max_tokens=9, ignore_eos=True))
    bench.outputs["child"] = list(bench.outputs["parent"])
    bench.run()
    assert bench.outputs["child"] == bench.outputs["parent"]
    assert bench.outputs["other"] == generates(prompt(3, 5), 9)


@pytest.mark.replay("E05")
def test_waiting_requests_that_hold_all_the_memory_do_not_stop_the_oldest() -> None:
    """Several have to wait one after another, each with most of its blocks; the head of the line takes its own."""
    bench = Bench(num_blocks=12, max_num_batched_tokens=64, max_num_seqs=6, caching=False)
    for index in range(6):
        bench.add(str(index), prompt(5, index), max_tokens=30)
    bench.run()
    assert all(bench.outputs[str(index)] == generates(prompt(5, index), 30) for index in range(6))


# ---- swap


@pytest.mark.parametrize("caching", [False, True])
def test_a_swapped_request_computes_nothing_twice(caching: bool) -> None:
    bench = two_that_outgrow(caching=caching, preemption="swap", host_blocks=8)
    assert_both_are_right(bench)
    stats = bench.engine.stats()
    assert stats.num_preemptions >= 1
    assert stats.lost_tokens == 0
    assert stats.swapped_out_blocks == stats.swapped_in_blocks >= 2
    computed = sum(length for plan in bench.twin.plans for request, _, length, _ in plan if request == "b")
    assert computed == 8 + 15


def test_a_host_pool_that_is_full_leaves_the_rest_to_be_computed_again() -> None:
    bench = two_that_outgrow(caching=False, preemption="swap", host_blocks=1)
    assert_both_are_right(bench)
    assert bench.engine.stats().swapped_out_blocks >= 1
    assert bench.engine.stats().lost_tokens > 0


def test_swapped_blocks_of_an_aborted_request_are_free_again() -> None:
    bench = two_that_outgrow(caching=False, preemption="swap", host_blocks=8)
    while not bench.engine.stats().swapped_out_blocks:
        bench.step()
    memory = bench.engine._scheduler.memory
    assert memory.host_pool is not None
    assert memory.host_pool.num_used >= 1
    bench.engine.abort("b")
    bench.engine.check()
    assert memory.host_pool.num_used == 0
    bench.run()
    assert bench.outputs["a"] == generates(prompt(8, 1), 16)


@pytest.mark.parametrize(
    ("prefill_s_per_token", "swap_s_per_block", "is_swapped"),
    [(1e-3, 1e-4, True), (1e-3, 1.9e-3, True), (1e-3, 2.1e-3, False), (0.0, 1e-4, False), (1e-3, 0.0, False)],
)
def test_auto_swaps_only_where_two_copies_cost_less_than_computing(
    prefill_s_per_token: float, swap_s_per_block: float, is_swapped: bool
) -> None:
    """A block of four tokens; what has not been measured yet is not relied on."""
    bench = two_that_outgrow(caching=False, preemption="auto", host_blocks=8)
    bench.engine._scheduler.memory.costs = Costs(prefill_s_per_token, swap_s_per_block)
    assert_both_are_right(bench)
    assert (bench.engine.stats().swapped_out_blocks > 0) == is_swapped


def test_swap_needs_space_and_space_a_use() -> None:
    for bad in ({"preemption": "swap"}, {"preemption": "auto"}, {"swap_space_mib": 5}):
        with pytest.raises(InvalidParams, match="swap_space_mib must be above 0 where preemption is swap or auto"):
            EngineConfig(**bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="preemption must be one of recompute, swap, auto, not 'drop'"):
        EngineConfig(preemption="drop")  # type: ignore[arg-type]


# ---- sliding window


def test_blocks_behind_the_window_are_given_back_and_the_text_is_the_same() -> None:
    bench = Bench(num_blocks=32, window=6, caching=False)
    bench.add("a", prompt(5), max_tokens=40)
    most = 0
    while bench.engine.has_work:
        bench.step()
        most = max(most, bench.engine.stats().kv_blocks_used)
    assert bench.outputs["a"] == generates(prompt(5), 40)
    assert most == 3  # ceil(6 / 4) + 1


@pytest.mark.replay("E12")
def test_a_prompt_longer_than_the_pool_is_admitted_where_its_window_fits() -> None:
    """Charged at its full length it would wait for ever."""
    bench = Bench(num_blocks=6, window=6, max_num_batched_tokens=8, max_model_len=500)
    assert bench.answer("long", prompt(200)) == generates(prompt(200))
    bench.add("a", prompt(60, 1))
    bench.add("b", prompt(70, 2))
    bench.run()
    assert (bench.outputs["a"], bench.outputs["b"]) == (generates(prompt(60, 1)), generates(prompt(70, 2)))


def test_a_window_that_does_not_fit_the_pool_limits_the_prompt_to_the_pool() -> None:
    bench = Bench(num_blocks=6, window=30, max_num_batched_tokens=8, max_model_len=500)
    with pytest.raises(PromptTooLong, match="the KV cache of 24"):
        bench.add("long", prompt(100))


@pytest.mark.replay("E29")
def test_blocks_behind_the_window_stay_until_the_step_that_reads_them_has_ended() -> None:
    """The step in flight was planned with them."""
    bench = Bench(num_blocks=32, window=6, caching=False)
    used: list[tuple[int, int]] = []

    def watch(plan: StepPlan) -> None:
        (chunk,) = plan.chunks
        first = max(0, chunk.start + 1 - 6) // 4
        assert NO_BLOCK not in chunk.sequence.block_table[first:]
        used.append((chunk.start, bench.engine.stats().kv_blocks_used))

    bench.twin.before_answer = watch
    bench.answer("a", prompt(16), max_tokens=12)
    assert used[0] == (0, 4)
    assert used[1] == (16, 3)  # given back at the end of the step, and one has been taken for the next token


@pytest.mark.parametrize("host_blocks", [0, 2, 12])
def test_windows_and_a_tiny_pool_preempt_fork_and_swap_without_a_wrong_token(host_blocks: int) -> None:
    bench = Bench(
        num_blocks=7,
        window=5,
        max_num_batched_tokens=6,
        max_num_seqs=5,
        preemption="swap" if host_blocks else "recompute",
        host_blocks=host_blocks,
    )
    for index in range(5):
        bench.add(str(index), prompt(9, index % 2), max_tokens=25)
    for _ in range(6):
        bench.step()
    bench.engine.fork("0", "fork", SamplingParams(max_tokens=25, ignore_eos=True))
    bench.outputs["fork"] = list(bench.outputs["0"])
    bench.run()
    assert all(bench.outputs[str(index)] == generates(prompt(9, index % 2), 25) for index in range(5))
    assert bench.outputs["fork"] == generates(prompt(9), 25)
    assert bench.engine.stats().num_preemptions > 0


# ---- a real model


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Decoder:
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path_factory.mktemp("tiny"), seed=7))
    return make_model(checkpoint, config_of(request.param), kernel_cache=kernel_cache)


def config_of(dtype: Any, **changes: Any) -> EngineConfig:
    return EngineConfig(dtype=dtype, **({"block_size": 16, "kv_cache_mib": 4, "max_model_len": 200} | changes))


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
def test_preempted_requests_of_a_real_model_answer_as_uninterrupted_ones(model: Decoder, preemption: Any) -> None:
    dtype = "float32" if model.dtype.itemsize == 4 else "bfloat16"
    space = 0 if preemption == "recompute" else 1
    engine = make_engine(model, config_of(dtype, preemption=preemption, swap_space_mib=space, max_num_seqs=4))
    scheduler = engine._scheduler
    tight = Engine(
        engine._config, BlockPool(11, 16), engine._runner, host_pool=scheduler.memory.host_pool, costs=engine._costs
    )
    answers = answer_all(tight)
    assert tight.stats().num_preemptions > 0
    if preemption == "swap":
        assert tight.stats().swapped_in_blocks > 0
    if preemption == "auto":
        assert engine._costs.prefill_s_per_token > 0
        assert engine._costs.swap_s_per_block > 0
    roomy = make_engine(model, config_of(dtype, enable_prefix_caching=False))
    assert answer_all(roomy) == answers
    assert roomy.stats().num_preemptions == 0


def answer_all(engine: Engine) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    for seed in range(4):
        params = SamplingParams(seed=seed, max_tokens=30, ignore_eos=True, temperature=0.8)
        engine.add(str(seed), [3 + seed, *range(10, 50)], params)
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
    return answers
