"""The engine as its callers see it: what it refuses, what it reports, and that one request's trouble stays its own."""

from __future__ import annotations

import pytest

from native_engine.blocks import BlockPool
from native_engine.config import SchedulerConfig
from native_engine.engine import Engine, StepOutput
from native_engine.errors import InvalidParams, StepFailed
from native_engine.sampling_params import SamplingParams
from native_engine.step import StepPlan
from tests.native_engine.paged_twin import VOCAB_SIZE, Bench, PagedTwin, generates, prompt


def test_a_request_in_trouble_leaves_the_others_their_answers() -> None:
    bench = Bench(num_blocks=8)
    bench.add("good", prompt(6))
    bench.step()
    for prompt_ids, field in (([], "prompt_ids"), ([VOCAB_SIZE], "prompt_ids"), ([-1], "prompt_ids")):
        with pytest.raises(InvalidParams, match=field):
            bench.engine.add("bad", prompt_ids, SamplingParams())
    with pytest.raises(InvalidParams, match=r"prompt_ids must hold ids from 0 to 49, not 1\.5"):
        bench.engine.add("bad", [1, 1.5], SamplingParams())  # type: ignore[list-item]
    with pytest.raises(InvalidParams, match="stop_token_ids"):
        bench.engine.add("bad", [1], SamplingParams(stop_token_ids=(VOCAB_SIZE,)))
    bench.run()
    assert bench.outputs["good"] == generates(prompt(6))


def test_the_prompt_of_the_caller_is_copied_and_never_changed() -> None:
    bench = Bench(num_blocks=8)
    mine = prompt(6)
    bench.add("a", mine)
    mine.append(1)
    bench.run()
    assert mine == [*prompt(6), 1]
    assert bench.outputs["a"] == generates(prompt(6))


def test_each_step_reports_one_token_per_request_and_the_last_one_its_end() -> None:
    bench = Bench(num_blocks=8)
    bench.add("a", prompt(6), max_tokens=3)
    expected = generates(prompt(6), 3)
    outputs = [bench.engine.step() for _ in range(3)]
    assert outputs == [
        [StepOutput("a", [expected[0]], None, 6, 0)],
        [StepOutput("a", [expected[1]], None, 6, 0)],
        [StepOutput("a", [expected[2]], "length", 6, 0)],
    ]
    assert bench.engine.step() == []


def test_a_failed_step_can_be_repeated_and_gives_the_same_answer() -> None:
    bench = Bench(num_blocks=8, max_num_batched_tokens=4)
    bench.add("a", prompt(6))

    def fail(plan: StepPlan) -> None:
        raise OSError("device lost")

    while bench.engine.has_work:
        bench.twin.before_answer = fail
        with pytest.raises(StepFailed):
            bench.step()
        bench.engine.check()
        bench.twin.before_answer = lambda plan: None
        bench.step()
    assert bench.outputs["a"] == generates(prompt(6))


def test_stats_tell_the_load_and_the_length_of_the_last_step() -> None:
    ticks = iter([1.0, 2.0, 10.0, 10.25, 20.0, 20.5])  # two come, then two steps begin and end
    pool = BlockPool(8, 4)
    config = SchedulerConfig(max_model_len=99, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset(), max_num_seqs=1)
    engine = Engine(config, pool, PagedTwin(pool), clock=lambda: next(ticks))
    engine.add("a", prompt(6), SamplingParams(max_tokens=2))
    engine.add("b", prompt(6), SamplingParams(max_tokens=2))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.kv_blocks_total, stats.kv_blocks_used) == (8, 2)
    assert (stats.num_steps, stats.last_step_s) == (1, 0.25)
    engine.step()
    assert engine.stats().last_step_s == 0.5
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize(("seed", "resolved"), [(0, 0), (7, 7), (-1, 2**64 - 1), (2**63, 2**63)])
def test_a_given_seed_reaches_the_sampler(seed: int, resolved: int) -> None:
    assert seeds_of([SamplingParams(seed=seed)]) == [resolved]


def test_requests_without_a_seed_draw_different_ones() -> None:
    seeds = seeds_of([SamplingParams()] * 4)
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)


def seeds_of(all_params: list[SamplingParams]) -> list[int]:
    bench = Bench(num_blocks=16, max_num_batched_tokens=32)
    for index, params in enumerate(all_params):
        bench.engine.add(str(index), prompt(3, index), params)
    seen: list[int] = []
    bench.twin.before_answer = lambda plan: seen.extend(chunk.sequence.seed for chunk in plan.chunks)
    bench.engine.step()
    return seen
