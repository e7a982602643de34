"""The scheduler, driven through the engine, on a twin of the runner that reads every token through the block tables.

Each test is named after what a client or an operator would care about; most replay a failure that some engine had.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from native_engine.blocks import BlockPool
from native_engine.config import SchedulerConfig
from native_engine.engine import Choice
from native_engine.errors import InvalidParams, InvariantBroken, PromptTooLong, StepFailed
from native_engine.memory import NO_BLOCK
from native_engine.sampling_params import SamplingParams
from native_engine.scheduler import Scheduler
from native_engine.sequence import Sequence, Status
from native_engine.step import StepPlan
from tests.native_engine.paged_twin import EOS, VOCAB_SIZE, Bench, expected_output, generates, prompt

# ---- admission and liveness


@pytest.mark.replay("E01", "E02")
def test_a_prompt_larger_than_the_pool_is_refused_at_once_and_later_requests_run() -> None:
    """It would fit the model's context, so waiting for room would block everybody behind it for ever."""
    bench = Bench(num_blocks=4, block_size=4, max_model_len=1000)
    with pytest.raises(PromptTooLong, match="17 tokens, but the KV cache of 16 leaves room for at most 15"):
        bench.add("large", prompt(17))
    with pytest.raises(PromptTooLong):
        bench.add("as large as the pool", prompt(16))  # no room for an answer
    assert bench.answer("small", prompt(5)) == generates(prompt(5))
    assert len(bench.answer("largest", prompt(15))) == 1


@pytest.mark.replay("E03")
def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths() -> None:
    bench = Bench(num_blocks=100, max_model_len=20)
    with pytest.raises(PromptTooLong, match="20 tokens, but the context of 20 leaves room for at most 19"):
        bench.add("long", prompt(20))
    assert not bench.engine.has_work


@pytest.mark.replay("E05")
def test_an_idle_pool_serves_the_head_of_the_line_in_the_next_step() -> None:
    """Also when every free block still holds somebody's prefix, also for the largest prompt that is accepted."""
    bench = Bench(num_blocks=4, max_num_batched_tokens=64)
    for seed in range(6):
        bench.answer(f"filler {seed}", prompt(9, seed), max_tokens=4)
    bench.add("largest", prompt(15, seed=9))
    bench.step()
    assert len(bench.outputs["largest"]) == 1


def test_a_head_that_must_wait_holds_the_line_and_is_not_overtaken() -> None:
    bench = Bench(num_blocks=6, max_num_batched_tokens=64)
    bench.add("running", prompt(12, 1), max_tokens=12)
    bench.step()
    bench.add("large", prompt(16, 2))
    bench.add("small", prompt(3, 3))
    bench.run()
    first_planned = [request for plan in bench.twin.plans for request, start, _, _ in plan if start == 0]
    assert list(dict.fromkeys(first_planned)) == ["running", "large", "small"]


def test_a_request_id_in_use_is_refused_and_the_first_request_unharmed() -> None:
    bench = Bench(num_blocks=8)
    bench.add("a", prompt(5))
    with pytest.raises(InvalidParams, match="request_id must be unique"):
        bench.engine.add("a", prompt(6), SamplingParams())
    bench.run()
    assert bench.outputs["a"] == generates(prompt(5))
    assert bench.answer("a again", prompt(5)) == generates(prompt(5))


# ---- the token budget


def test_a_long_prompt_is_computed_in_chunks_while_others_decode_in_every_step() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=8)
    bench.add("decoding", prompt(3, 1), max_tokens=20)
    bench.step()
    bench.add("long", prompt(40, 2))
    while not bench.outputs["long"]:
        before = len(bench.outputs["decoding"])
        bench.step()
        assert len(bench.outputs["decoding"]) == before + 1
    long_chunks = [length for plan in bench.twin.plans for request, _, length, _ in plan if request == "long"]
    assert sum(long_chunks) == 40
    assert len(long_chunks) == 6  # seven tokens a step, beside one decode


def test_a_long_prompt_leaves_room_for_a_short_one_behind_it() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=16)
    bench.add("long", prompt(100, 1))
    bench.add("short", prompt(4, 2))
    bench.step()
    assert len(bench.outputs["short"]) == 1
    assert bench.twin.plans[0] == [("long", 0, 12, False), ("short", 0, 4, True)]


def test_a_long_prompt_alone_gets_the_whole_step() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=16)
    bench.add("long", prompt(100, 1))
    bench.step()
    assert bench.twin.plans[0] == [("long", 0, 16, False)]


def test_no_step_is_larger_than_the_budget_and_none_is_wasted_while_prompts_wait() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=10, max_num_seqs=8)
    for index in range(8):
        bench.add(str(index), prompt(5 + 3 * index, index), max_tokens=3)
    bench.run()
    sizes = [sum(length for _, _, length, _ in plan) for plan in bench.twin.plans]
    assert max(sizes) == 10
    last_prefill = max(i for i, plan in enumerate(bench.twin.plans) if any(length > 1 for _, _, length, _ in plan))
    assert set(sizes[:last_prefill]) == {10}


def test_no_more_sequences_run_than_there_are_seats() -> None:
    bench = Bench(num_blocks=64, max_num_seqs=3)
    for index in range(7):
        bench.add(str(index), prompt(2, index))
    while bench.engine.has_work:
        bench.step()
        assert bench.engine.stats().num_running <= 3
    assert bench.outputs == {str(index): generates(prompt(2, index)) for index in range(7)}


@pytest.mark.replay("E26")
def test_books_balance_in_the_middle_of_a_prompt_and_its_third_chunk_arrives() -> None:
    bench = Bench(num_blocks=16, max_num_batched_tokens=8)
    bench.add("a", prompt(24))
    for computed in (8, 16):
        bench.step()  # checks the books
        assert bench.outputs["a"] == []
        assert bench.engine.stats().kv_blocks_used == 6
        assert bench.twin.plans[-1] == [("a", computed - 8, 8, False)]
    bench.run()
    assert bench.outputs["a"] == generates(prompt(24))


def test_many_decodes_go_first_even_where_a_prompt_before_them_could_fill_the_step() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=8)
    bench.add("long", prompt(100, 1))
    for index in range(3):
        bench.add(str(index), prompt(2, 2 + index), max_tokens=30)
    for _ in range(4):
        bench.step()
    for _ in range(5):
        before = {name: len(tokens) for name, tokens in bench.outputs.items()}
        bench.step()
        assert all(len(bench.outputs[name]) == before[name] + 1 for name in "012")
    assert bench.twin.plans[-1][-1][0] == "long"


# ---- preemption


@pytest.mark.replay("E10")
def test_when_memory_runs_out_every_generation_still_finishes() -> None:
    """The smallest case: two requests whose prompts fit, and whose answers do not."""
    bench = Bench(num_blocks=7, block_size=16, max_num_batched_tokens=64)
    for name, seed in (("a", 1), ("b", 2)):
        bench.add(name, prompt(34, seed), max_tokens=35)
    bench.run()
    assert bench.engine.stats().num_preemptions >= 1
    assert bench.outputs == {"a": generates(prompt(34, 1), 35), "b": generates(prompt(34, 2), 35)}


@pytest.mark.replay("E06")
def test_only_as_many_are_preempted_as_the_need_asks_for() -> None:
    preemptions_per_step = []
    bench = Bench(num_blocks=9, block_size=4, max_num_batched_tokens=64)
    for index in range(3):
        bench.add(str(index), prompt(5, index), max_tokens=20)
    bench.twin.before_answer = lambda plan: preemptions_per_step.append(len(plan.preempted))
    bench.run()
    assert max(preemptions_per_step) == 1
    assert all(bench.outputs[str(index)] == generates(prompt(5, index), 20) for index in range(3))


@pytest.mark.replay("E08")
def test_a_preempted_request_keeps_its_place_in_the_line() -> None:
    """Later requests wait in front of a full pool; victims come back before them, and in their old order."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=100,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset(),
            max_num_seqs=4,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
        ),
        BlockPool(9, 2),
    )
    for name in "abc":
        scheduler.add(Sequence(name, [1, 2, 3], SamplingParams(max_tokens=16), seed=0))
    victims: list[str] = []
    for step in range(200):
        if not (plan := scheduler.plan()):
            break
        if step == 1:
            scheduler.add(Sequence("late", [1, 2, 3], SamplingParams(max_tokens=2), seed=0))
        victims += [sequence.request_id for sequence in plan.preempted]
        line = [sequence.request_id for sequence in (*scheduler.running, *scheduler.waiting)]
        assert line == sorted(line)  # a < b < c < late
        scheduler.commit(plan, [[7] * chunk.num_sampled for chunk in plan.chunks])
        scheduler.check()
    assert {"b", "c"} <= set(victims)
    assert "a" not in victims
    assert not scheduler.has_work


@pytest.mark.replay("E04")
def test_a_resumed_request_is_admitted_only_when_all_of_it_fits() -> None:
    """Else it takes blocks for a first chunk, is preempted for want of the second, and so on for ever."""
    bench = Bench(num_blocks=8, block_size=4, max_num_batched_tokens=8, caching=False)
    admissions: list[tuple[str, int]] = []

    def watch(plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if chunk.start == 0:
                assert len(chunk.sequence.block_table) * 4 >= chunk.sequence.num_tokens
                admissions.append((chunk.sequence.request_id, chunk.sequence.num_tokens))

    bench.twin.before_answer = watch
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        bench.add(name, prompt(9, seed), max_tokens=18)
    bench.run(max_steps=80)
    for name in "abc":
        lengths = [length for request, length in admissions if request == name]
        assert lengths == sorted(set(lengths))  # it had grown each time it came back
    assert bench.engine.stats().num_preemptions >= 1


def test_an_admission_is_not_undone_by_the_next_decode() -> None:
    """A block is kept free for each running sequence, so the newcomer gets somewhere before it can be preempted."""
    bench = Bench(num_blocks=6, block_size=4, max_num_batched_tokens=64)
    bench.add("a", prompt(4, 1), max_tokens=8)
    bench.add("b", prompt(4, 2), max_tokens=8)
    bench.step()
    bench.step()  # four of six blocks are taken
    bench.add("c", prompt(4, 3))
    bench.step()
    assert bench.engine.stats().num_waiting == 1  # its block is there, but then a or b could not grow by one each
    bench.run()
    assert bench.outputs["c"] == generates(prompt(4, 3))
    assert bench.engine.stats().num_preemptions == 0


@pytest.mark.replay("E09")
def test_mixed_lengths_are_never_preempted_while_memory_is_free() -> None:
    bench = Bench(num_blocks=64, max_num_seqs=6, max_num_batched_tokens=8)
    for index, length in enumerate([1, 40, 3, 25, 2, 12, 31, 1]):
        bench.add(str(index), prompt(length, index))
    bench.run()
    assert bench.engine.stats().num_preemptions == 0


def test_an_answer_that_fills_the_whole_pool_ends_with_length_instead_of_stalling() -> None:
    bench = Bench(num_blocks=3, block_size=4)
    bench.add("endless", prompt(5), max_tokens=None)
    bench.run()
    assert bench.outputs["endless"] == generates(prompt(5), 7)
    assert bench.finish_reasons["endless"] == "length"


@pytest.mark.replay("E07")
def test_a_victim_is_not_computed_in_the_step_that_preempts_it_and_costs_it_no_budget() -> None:
    """The twin refuses a plan that holds its own victim."""
    bench = Bench(num_blocks=7, block_size=4, max_num_batched_tokens=8)
    seen: list[int] = []

    def watch(plan: StepPlan) -> None:
        if plan.preempted:
            assert not {id(victim) for victim in plan.preempted} & {id(chunk.sequence) for chunk in plan.chunks}
            seen.append(plan.num_tokens)

    bench.twin.before_answer = watch
    for name, seed in (("a", 1), ("b", 2)):
        bench.add(name, prompt(8, seed), max_tokens=16)
    bench.run()
    assert set(seen) == {1}  # the other's token, and nothing in the victim's name


# ---- prefix cache


@pytest.mark.replay("E15", "E16")
def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token() -> None:
    """A multiple of the block size: nothing left to compute would mean no logits, and a step of zero rows."""
    bench = Bench(num_blocks=16)
    first = bench.answer("first", prompt(12))
    assert bench.answer("second", prompt(12)) == first
    assert bench.cached == {"first": 0, "second": 8}
    assert ("second", 8, 4, True) in bench.twin.plans[-8]


@pytest.mark.replay("E17")
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_lengths_around_the_block_size_answer_the_same_cached_and_not(length: int) -> None:
    bench = Bench(num_blocks=16)
    for attempt in range(3):
        assert bench.answer(f"attempt {attempt}", prompt(length)) == generates(prompt(length))


@pytest.mark.replay("E16")
def test_a_full_hit_does_not_break_the_chain_for_what_follows() -> None:
    """What is computed after a full hit can be hit in turn."""
    bench = Bench(num_blocks=32)
    bench.answer("first", prompt(8), max_tokens=1)
    answer = bench.answer("again", prompt(8), max_tokens=20)
    bench.answer("follow-up", [*prompt(8), *answer])
    assert bench.cached == {"first": 0, "again": 4, "follow-up": 24}


def test_answers_are_cached_as_well_as_prompts() -> None:
    bench = Bench(num_blocks=32)
    answer = bench.answer("first", prompt(8))
    bench.answer("follow-up", [*prompt(8), *answer, 3])
    assert bench.cached["follow-up"] == 12  # the answer's last token was sampled, but never computed


@pytest.mark.replay("E13")
def test_a_match_is_not_carried_over_from_an_attempt_that_failed() -> None:
    """The head finds a prefix, does not fit, waits; meanwhile the prefix is evicted. Only what is there now counts."""
    bench = Bench(num_blocks=10, max_num_batched_tokens=64)
    bench.answer("writer", prompt(12, 1), max_tokens=1)
    bench.add("running", prompt(12, 2), max_tokens=28)
    bench.step()
    bench.add("head", [*prompt(12, 1), *prompt(14, 3)])
    bench.run()
    assert bench.cached["head"] < 12
    assert bench.outputs["head"] == generates([*prompt(12, 1), *prompt(14, 3)])


@pytest.mark.replay("E14")
def test_a_resumed_request_finds_cached_blocks_behind_its_own_and_is_sized_after_that() -> None:
    """Both generate the same text, so what the second has to give back is in the first one's blocks."""
    bench = Bench(num_blocks=8, block_size=4, max_num_batched_tokens=64)
    for name in "ab":
        bench.add(name, prompt(8), max_tokens=16)
    bench.run()
    stats = bench.engine.stats()
    assert stats.num_preemptions >= 1
    assert stats.lost_tokens >= 4
    assert stats.prefix_hits_after_preemption >= 4
    assert bench.outputs == dict.fromkeys("ab", generates(prompt(8), 16))


@pytest.mark.replay("E23")
def test_recomputing_after_a_preemption_does_not_look_like_a_useful_cache() -> None:
    bench = Bench(num_blocks=7, block_size=4, max_num_batched_tokens=64)
    for name, seed in (("a", 1), ("b", 2)):
        bench.add(name, prompt(8, seed), max_tokens=16)
    bench.run()
    stats = bench.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (16, 0)
    assert bench.cached == {"a": 0, "b": 0}


@pytest.mark.replay("E24")
def test_the_cached_tokens_of_the_answer_are_those_that_were_not_computed() -> None:
    """One source for the count: where the first chunk starts."""
    bench = Bench(num_blocks=32)
    bench.answer("first", prompt(14))
    bench.answer("second", [*prompt(10), 7, 7, 7, 7])
    start = next(start for plan in bench.twin.plans for request, start, _, _ in plan if request == "second")
    assert bench.cached["second"] == start == 8
    assert bench.engine.stats().prefix_hits == 8


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    bench = Bench(num_blocks=32, max_num_batched_tokens=16)
    for index in range(4):
        bench.add(str(index), [*prompt(12), 3 + index])
    bench.run()
    assert bench.cached == {"0": 0, "1": 12, "2": 12, "3": 12}
    assert all(bench.outputs[str(index)] == generates([*prompt(12), 3 + index]) for index in range(4))
    assert bench.twin.plans[0] == [("0", 0, 13, True)]
    assert [length for _, _, length, _ in bench.twin.plans[1]] == [1, 1, 1, 1]


def test_whoever_waits_for_a_prefix_computes_it_itself_when_its_owner_gives_up() -> None:
    bench = Bench(num_blocks=32, max_num_batched_tokens=4)
    bench.add("owner", prompt(20), max_tokens=2)
    bench.add("waits", prompt(20))
    bench.step()
    bench.step()
    assert bench.engine.stats().num_waiting == 1
    bench.engine.abort("owner")
    bench.run()
    assert bench.cached["waits"] == 8  # what the owner had finished
    assert bench.outputs["waits"] == generates(prompt(20))


def test_a_prompt_does_not_wait_for_a_prefix_that_only_begins_like_its_own() -> None:
    bench = Bench(num_blocks=32, max_num_batched_tokens=16)
    bench.add("first", prompt(30))
    bench.add("second", [*prompt(3), 7, 7, 7])
    bench.step()
    assert [request for request, *_ in bench.twin.plans[0]] == ["first", "second"]


def test_nobody_waits_for_a_block_that_could_not_be_shared_anyway() -> None:
    """The last token is always computed, so a block that ends with it is too."""
    bench = Bench(num_blocks=32, max_num_batched_tokens=16)
    bench.add("first", prompt(4))
    bench.add("second", prompt(4))
    bench.step()
    assert [request for request, *_ in bench.twin.plans[0]] == ["first", "second"]


def test_nobody_waits_for_a_block_that_its_owner_has_computed_without_publishing() -> None:
    """It was a duplicate when it was computed; then the original was evicted."""
    bench = Bench(num_blocks=10, max_num_batched_tokens=32)
    bench.answer("original", prompt(8), max_tokens=1)
    bench.add("duplicate", prompt(8), max_tokens=20)
    bench.step()
    for seed in (5, 6):
        bench.answer_while_others_run(f"evicts {seed}", prompt(20, seed), max_tokens=1)
    bench.add("third", [*prompt(8), 7, 7])
    bench.step()
    assert bench.outputs["third"]
    assert bench.cached["third"] == 4


def test_tenants_with_different_salts_do_not_share_a_prefix() -> None:
    bench = Bench(num_blocks=32)
    for name, salt in (("no salt", None), ("a", "a"), ("b", "b"), ("empty", ""), ("a again", "a")):
        bench.answer(name, prompt(12), cache_salt=salt)
    assert bench.cached == {"no salt": 0, "a": 0, "b": 0, "empty": 0, "a again": 8}


def test_without_prefix_caching_nothing_is_kept_or_counted() -> None:
    bench = Bench(num_blocks=32, caching=False)
    assert bench.answer("first", prompt(12)) == bench.answer("second", prompt(12)) == generates(prompt(12))
    stats = bench.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits, bench.cached["second"]) == (0, 0, 0)


def test_blocks_of_a_step_that_failed_are_never_offered_as_cached() -> None:
    bench = Bench(num_blocks=16)

    def fail(plan: StepPlan) -> None:
        raise OSError("device lost")

    bench.twin.before_answer = fail
    bench.add("a", prompt(12))
    with pytest.raises(StepFailed):
        bench.step()
    bench.engine.check()
    bench.engine.abort("a")
    bench.twin.before_answer = lambda plan: None
    bench.twin.cells.clear()
    assert bench.answer("b", prompt(12)) == generates(prompt(12))
    assert bench.cached["b"] == 0


# ---- ends


def test_end_of_text_stops_an_answer_and_is_part_of_it() -> None:
    bench = Bench(num_blocks=64)
    params = SamplingParams(max_tokens=400)
    answer, reason = expected_output(prompt(3), params, max_len=256)
    assert (answer[-1], reason) == (EOS, "stop")
    assert bench.answer("a", prompt(3), max_tokens=400, ignore_eos=False) == answer
    assert bench.finish_reasons["a"] == "stop"


def test_ignore_eos_goes_on_past_the_end_of_text() -> None:
    bench = Bench(num_blocks=64)
    stopped, _ = expected_output(prompt(3), SamplingParams(), max_len=256)
    answer = bench.answer("a", prompt(3), max_tokens=len(stopped) + 5)
    assert answer[: len(stopped)] == stopped
    assert len(answer) == len(stopped) + 5


def test_a_stop_token_ends_the_answer_even_where_end_of_text_is_ignored() -> None:
    bench = Bench(num_blocks=64)
    full = generates(prompt(3), 8)
    stop = full[4]
    answer = bench.answer("a", prompt(3), stop_token_ids=(stop,))
    assert answer == full[: full.index(stop) + 1]
    assert bench.finish_reasons["a"] == "stop"


def test_stop_tokens_do_not_end_an_answer_below_min_tokens() -> None:
    """Whatever the runner samples: here it samples nothing but end-of-text."""
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=100, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS])), BlockPool(8, 4)
    )
    sequence = Sequence("a", [1, 2, 3], SamplingParams(min_tokens=3, stop_token_ids=(EOS,)), seed=0)
    scheduler.add(sequence)
    while plan := scheduler.plan():
        finished = scheduler.commit(plan, [[EOS]])
    assert finished == [sequence]
    assert (sequence.output_ids, sequence.status) == ([EOS] * 4, Status.FINISHED_STOP)


@pytest.mark.parametrize(("max_tokens", "max_model_len", "length"), [(1, 100, 1), (5, 100, 5), (50, 20, 15)])
def test_the_first_of_max_tokens_and_context_ends_the_answer(max_tokens: int, max_model_len: int, length: int) -> None:
    bench = Bench(num_blocks=64, max_model_len=max_model_len)
    assert bench.answer("a", prompt(5), max_tokens=max_tokens) == generates(prompt(5), length)
    assert bench.finish_reasons["a"] == "length"
    assert bench.engine.stats().kv_blocks_used == 0


def test_stopping_on_the_last_allowed_token_is_a_stop() -> None:
    answer, _ = expected_output(prompt(3), SamplingParams(), max_len=256)
    bench = Bench(num_blocks=64)
    bench.answer("a", prompt(3), max_tokens=len(answer), ignore_eos=False)
    assert bench.finish_reasons["a"] == "stop"


# ---- abort


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_an_aborted_request_gives_everything_back_wherever_it_was(steps: int) -> None:
    """Waiting, in the middle of its prompt, decoding."""
    bench = Bench(num_blocks=16, max_num_batched_tokens=4)
    bench.add("a", prompt(11))
    for _ in range(steps):
        bench.step()
    assert bench.engine.abort("a")
    bench.engine.check()
    assert not bench.engine.has_work
    assert bench.engine.stats().kv_blocks_used == 0
    assert not bench.engine.abort("a")
    assert bench.answer("a", prompt(11)) == generates(prompt(11))


@pytest.mark.replay("E28")
def test_an_abort_while_a_step_is_running_lets_the_step_end_before_blocks_change_hands() -> None:
    bench = Bench(num_blocks=16, max_num_batched_tokens=32)
    bench.add("a", prompt(9, 1))
    bench.add("b", prompt(9, 2))
    used_during_step = []

    def abort(plan: StepPlan) -> None:
        bench.engine.abort("a")
        bench.engine.check()
        used_during_step.append(bench.engine.stats().kv_blocks_used)

    bench.twin.before_answer = abort
    bench.step()
    assert used_during_step == [6]
    assert bench.engine.stats().kv_blocks_used == 3
    assert bench.outputs["a"] == []
    bench.run()
    assert bench.outputs["b"] == generates(prompt(9, 2))


def test_an_id_that_was_aborted_in_a_running_step_can_be_used_again_at_once() -> None:
    bench = Bench(num_blocks=16, max_num_batched_tokens=32)
    bench.add("a", prompt(9, 1))

    def replace(plan: StepPlan) -> None:
        bench.twin.before_answer = lambda plan: None
        bench.engine.abort("a")
        bench.add("a", prompt(9, 2))

    bench.twin.before_answer = replace
    bench.run()
    assert bench.outputs["a"] == generates(prompt(9, 2))


def test_aborting_an_unknown_request_says_so() -> None:
    assert not Bench(num_blocks=4).engine.abort("nobody")


# ---- misuse


def plan_of_two() -> tuple[Scheduler, StepPlan]:
    """One chunk that samples and one that does not."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=100, vocab_size=50, eos_token_ids=frozenset(), max_num_seqs=2, max_num_batched_tokens=8
        ),
        BlockPool(8, 4),
    )
    scheduler.add(Sequence("a", [1, 2], SamplingParams(), seed=0))
    scheduler.add(Sequence("b", [1] * 20, SamplingParams(), seed=0))
    plan = scheduler.plan()
    assert plan is not None
    return scheduler, plan


@pytest.mark.parametrize("answers", [[[3]], [[3], [], []], [[], []], [[3], [4]], [[3, 4], []], [[50], []], [[-1], []]])
def test_a_runner_that_answers_nonsense_is_caught_before_anything_is_counted(answers: list[list[int]]) -> None:
    scheduler, plan = plan_of_two()
    with pytest.raises(InvariantBroken):
        scheduler.commit(plan, answers)
    assert [chunk.sequence.num_computed_tokens for chunk in plan.chunks] == [0, 0]
    scheduler.commit(plan, [[3], []])
    scheduler.check()


def test_a_plan_is_committed_once_and_no_other_is_made_meanwhile() -> None:
    scheduler, plan = plan_of_two()
    with pytest.raises(InvariantBroken, match="in flight"):
        scheduler.plan()
    scheduler.commit(plan, [[3], []])
    with pytest.raises(InvariantBroken, match="not in flight"):
        scheduler.commit(plan, [[3], []])
    with pytest.raises(InvariantBroken, match="not in flight"):
        scheduler.rollback(plan)


@pytest.mark.replay("E27")
def test_a_step_that_was_rolled_back_is_planned_again_as_it_was() -> None:
    scheduler, plan = plan_of_two()
    scheduler.rollback(plan)
    scheduler.check()
    again = scheduler.plan()
    assert again is not None
    assert again.chunks == plan.chunks


# ---- everything at once

prompts = st.lists(st.integers(1, 2), min_size=1, max_size=12)
requests = st.tuples(
    prompts,
    st.builds(
        SamplingParams,
        max_tokens=st.integers(4, 12) | st.none(),
        min_tokens=st.integers(0, 4),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (5, 6, 7)]),
    ),
)


@given(
    st.lists(requests, min_size=2, max_size=8),
    st.integers(3, 12),
    st.integers(1, 4),
    st.integers(4, 12),
    st.integers(1, 3),
    st.integers(0, 4),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.replay("E19")
def test_under_eviction_pressure_every_answer_equals_the_one_without_a_cache(
    load: list[tuple[list[int], SamplingParams]],
    num_blocks: int,
    block_size: int,
    budget: int,
    stride: int,
    num_drafted: int,
) -> None:
    """Few kinds of tokens make many shared prefixes; few blocks make evictions and preemptions."""
    answers = []
    for caching in (True, False):
        bench = Bench(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_model_len=30,
            caching=caching,
            num_drafted=num_drafted,
        )
        for index, (prompt_ids, params) in enumerate(load):
            if len(prompt_ids) < bench.engine.max_len:
                bench.engine.add(str(index), prompt_ids, params)
                bench.outputs[str(index)] = []
            for _ in range(index % stride):
                bench.step()
        bench.run()
        answers.append((bench.outputs, bench.finish_reasons))
        for index, (prompt_ids, params) in enumerate(load):
            if str(index) in bench.outputs:
                expected = expected_output(prompt_ids, params, bench.engine.max_len)
                assert (bench.outputs[str(index)], bench.finish_reasons[str(index)]) == expected
    assert answers[0] == answers[1]


class EngineMachine(RuleBasedStateMachine):
    """Requests come, go and are given up, also in the middle of a step, also when a step fails.

    The oracle is a dict of token lists. `Bench.step` checks the books, the twin checks every cell that is read.
    """

    @initialize(
        num_blocks=st.integers(1, 10),
        block_size=st.integers(1, 4),
        seats=st.integers(1, 4),
        extra_budget=st.integers(0, 8),
        caching=st.booleans(),
        host_blocks=st.sampled_from([0, 0, 1, 4, 20]),
        window=st.sampled_from([None, None, 1, 3, 8]),
        num_drafted=st.integers(0, 4),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        seats: int,
        extra_budget: int,
        caching: bool,
        host_blocks: int,
        window: int | None,
        num_drafted: int,
    ) -> None:
        self.bench = Bench(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=seats,
            max_num_batched_tokens=seats + extra_budget,
            max_model_len=40,
            caching=caching,
            num_drafted=num_drafted,
            preemption="swap" if host_blocks else "recompute",
            host_blocks=host_blocks,
            window=window,
        )
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.num_submitted = 0

    @property
    def alive(self) -> list[str]:
        return [name for name in self.expected if name not in self.bench.finish_reasons]

    @rule(request=requests, salt=st.sampled_from([None, "x"]))
    def submit(self, request: tuple[list[int], SamplingParams], salt: str | None) -> None:
        prompt_ids, params = request
        name = f"request {self.num_submitted}"
        self.num_submitted += 1
        if len(prompt_ids) >= self.bench.engine.max_len:
            with pytest.raises(PromptTooLong):
                self.bench.engine.add(name, prompt_ids, params, cache_salt=salt)
        else:
            self.bench.engine.add(name, prompt_ids, params, cache_salt=salt)
            self.bench.outputs[name] = []
            self.expected[name] = expected_output(prompt_ids, params, self.bench.engine.max_len)
        self.bench.engine.check()

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()

    @rule(request=requests, seeds=st.lists(st.integers(0, 3), min_size=2, max_size=4))
    def submit_choices(self, request: tuple[list[int], SamplingParams], seeds: list[int]) -> None:
        prompt_ids, params = request
        if len(prompt_ids) >= self.bench.engine.max_len:
            return
        names = [f"request {self.num_submitted + index}" for index in range(len(seeds))]
        self.num_submitted += len(seeds)
        choices = [Choice(name, replace(params, seed=seed)) for name, seed in zip(names, seeds, strict=True)]
        first, *others = choices
        self.bench.engine.add(first.request_id, prompt_ids, first.params, others=others)
        for choice in choices:
            self.bench.outputs[choice.request_id] = []
            self.expected[choice.request_id] = expected_output(prompt_ids, choice.params, self.bench.engine.max_len)
        self.bench.engine.check()

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), seed=st.integers(0, 3), more=st.integers(1, 6))
    def fork(self, data: st.DataObject, seed: int, more: int) -> None:
        parent = self.bench.engine._scheduler.get(data.draw(st.sampled_from(self.alive)))
        assert parent is not None
        name = f"request {self.num_submitted}"
        self.num_submitted += 1
        params = SamplingParams(seed=seed, max_tokens=parent.num_output_tokens + more)
        begun = parent.output_ids
        self.bench.engine.fork(parent.request_id, name, params)
        self.bench.outputs[name] = begun
        self.expected[name] = expected_output(parent.prompt_ids, params, self.bench.engine.max_len, begun)
        self.bench.engine.check()

    @precondition(lambda self: self.bench.engine._scheduler.running)
    @rule(num_blocks=st.integers(0, 4))
    def preempt(self, num_blocks: int) -> None:
        """The youngest, as if somebody needed some of its blocks: they go to the host where it has room."""
        scheduler = self.bench.engine._scheduler
        victim = scheduler._preempt(scheduler.running[-1])
        for _ in range(num_blocks):
            if any(block != NO_BLOCK for block in victim.block_table):
                scheduler.memory._take_last(victim)
        self.bench.engine.check()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.give_up(data.draw(st.sampled_from(self.alive)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), fails=st.booleans())
    def abort_in_a_step(self, data: st.DataObject, fails: bool) -> None:
        victim = data.draw(st.sampled_from(self.alive))

        def interrupt(plan: StepPlan) -> None:
            self.give_up(victim)
            if fails:
                raise OSError

        self.during_step(interrupt)
        assert self.bench.outputs[victim] == self.outputs_before[victim]

    @rule(moved=st.booleans())
    def fail_a_step(self, moved: bool) -> None:
        """Before it has moved a block, or after it has computed everything."""

        def fail(plan: StepPlan) -> None:
            raise OSError

        self.during_step(fail, moved=moved)
        assert self.bench.outputs == self.outputs_before

    def during_step(self, interrupt: object, *, moved: bool = True) -> None:
        self.outputs_before = {name: list(tokens) for name, tokens in self.bench.outputs.items()}
        hook = "before_answer" if moved else "before_moves"
        setattr(self.bench.twin, hook, interrupt)
        try:
            self.bench.step()
        except StepFailed:
            self.bench.engine.check()
        finally:
            setattr(self.bench.twin, hook, lambda plan: None)

    def give_up(self, name: str) -> None:
        assert self.bench.engine.abort(name)
        del self.expected[name]
        self.bench.engine.check()

    def teardown(self) -> None:
        """Whoever was not given up gets the answer it would have had alone, in bounded time; then all is free."""
        if not hasattr(self, "bench"):
            return
        # The oldest gets a token's worth of work in every step, so the sum of all tokens bounds the number of steps.
        self.bench.run(max_steps=1 + sum(40 for _ in self.alive))
        answers = {name: (self.bench.outputs[name], self.bench.finish_reasons[name]) for name in self.expected}
        assert answers == self.expected
        assert self.bench.engine.stats().kv_blocks_used == 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestEngineMachineForTenThousandSteps(EngineMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=100, stateful_step_count=100, deadline=None)
