"""Speculation: drafts save steps and change nothing, whoever guesses, however wrong, whatever goes on around them."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native_engine.async_engine import AsyncEngine, Delta
from native_engine.blocks import BlockPool
from native_engine.config import EngineConfig, SchedulerConfig
from native_engine.engine import Choice, Engine
from native_engine.errors import InvalidParams, StepFailed
from native_engine.loading import LoadedModel, load, make_engine, make_model
from native_engine.models.decoder import Decoder
from native_engine.runner import lay_out, sampled_rows
from native_engine.sampling_params import Grammar, SamplingParams
from native_engine.sequence import Sequence
from native_engine.speculation import (
    FIRST_REST,
    LONGEST_REST,
    Candidate,
    DraftRecord,
    choose,
    verified,
)
from native_engine.speculation_model import DraftModel
from native_engine.speculation_ngram import lookup
from native_engine.step import ScheduledChunk, StepPlan, Wanted
from native_engine.step_time import StepTimeModel, StepWork, chunk_work
from native_engine.weights import open_checkpoint
from tests.native_engine.paged_twin import (
    EOS,
    VOCAB_SIZE,
    Bench,
    Guesser,
    PagedTwin,
    expected_output,
    generates,
    prompt,
)
from tests.native_engine.tiny_llama import tiny_config, write_tiny_llama

# ---- n-grams


def slow_lookup(token_ids: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """The same as a definition: the longest run first, its last place first, token by token."""
    for length in range(longest, shortest - 1, -1):
        for place in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[place : place + length] == token_ids[-length:]:
                text = list(token_ids)
                for number in range(count):
                    text.append(text[place + length + number])
                return text[len(token_ids) :]
    return []


# Tokens whose bytes, read across two of them, look like another's.
confusable = st.sampled_from([0, 1, 256, 257, 65536, 16777216])


@given(st.lists(confusable, max_size=24), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6))
def test_a_run_of_last_tokens_is_found_where_it_stood_last(
    text: list[int], longest: int, shortest: int, k: int
) -> None:
    longest = max(longest, shortest)
    assert lookup(text, longest=longest, shortest=shortest, count=k) == slow_lookup(text, longest, shortest, k)


def test_a_loop_is_drafted_as_often_round_as_it_takes() -> None:
    assert lookup([9, 1, 2, 1, 2, 1, 2], longest=4, shortest=2, count=5) == [1, 2, 1, 2, 1]
    assert lookup([7, 7, 7], longest=4, shortest=2, count=3) == [7, 7, 7]


def test_a_text_that_repeats_nothing_has_no_draft() -> None:
    assert lookup(list(range(50)), longest=4, shortest=1, count=4) == []
    assert lookup([5], longest=4, shortest=1, count=4) == []


# ---- what is decided


@pytest.mark.parametrize(
    ("draft", "sampled", "held"),
    [
        ([], [5], [5]),
        ([7], [7, 8], [7, 8]),
        ([7], [6, 8], [6]),
        ([7, 9, 4], [7, 9, 5, 8], [7, 9, 5]),
        ([7, 9, 4], [7, 9, 4, 8], [7, 9, 4, 8]),
        ([7, 9, 4], [1, 9, 4, 8], [1]),  # what follows a wrong guess holds by no chance
    ],
)
def test_tokens_hold_up_to_the_first_that_was_not_guessed(
    draft: list[int], sampled: list[int], held: list[int]
) -> None:
    assert verified(draft, sampled) == held


def cpu(rows_free: int = 0) -> StepTimeModel:
    """A warm model of a machine on which a row costs as much as a tenth of a step, after so many that cost nothing."""
    model, source = StepTimeModel(), random.Random(1)
    for _ in range(400):
        work = sum((chunk_work(source.randint(10, 400), 1, sampled=1) for _ in range(source.randint(1, 64))), NOTHING)
        work += chunk_work(0, source.choice([0, 0, 32, 100]), sampled=0)
        model.observe(work, 0.01 + 0.001 * max(0, work.rows - rows_free))
    return model


NOTHING = StepWork(0, 0, 0)


def decodes(count: int) -> StepWork:
    return StepWork(count, 200 * count, count)


def test_one_request_gets_a_draft_and_a_deep_batch_none() -> None:
    """A draft of a likely request brings three tokens for four rows: worth it while the step itself is what costs."""
    likely = Candidate(chance=0.8, length=4, context=200)
    model = cpu()
    assert choose([likely], decodes(1), 60, model, 0.0) == [4]
    assert choose([likely] * 60, decodes(60), 60, model, 0.0) == [0] * 60
    hopeless = Candidate(chance=0.16, length=4, context=200)
    assert choose([hopeless], decodes(1), 60, model, 0.0) == [0]
    assert choose([hopeless, likely], decodes(2), 60, model, 0.0) == [0, 4]


def test_where_rows_cost_nothing_even_an_unlikely_request_gets_a_draft() -> None:
    unlikely = Candidate(chance=0.2, length=4, context=200)
    assert choose([unlikely] * 8, decodes(8), 56, cpu(rows_free=1000), 0.0) == [4] * 8


def test_drafts_that_take_longer_to_make_than_they_save_are_not_made() -> None:
    likely = Candidate(chance=0.8, length=4, context=200)
    assert choose([likely], decodes(1), 60, cpu(rows_free=1000), 0.001) == [4]
    assert choose([likely], decodes(1), 60, cpu(rows_free=1000), 0.1) == [0]


def test_rows_go_to_the_likeliest_and_never_beyond_what_is_free() -> None:
    candidates = [Candidate(chance, 4, 200) for chance in (0.3, 0.9, 0.6)]
    assert choose(candidates, decodes(3), 6, StepTimeModel(), 0.0) == [0, 4, 2]
    assert choose(candidates, decodes(3), 0, StepTimeModel(), 0.0) == [0, 0, 0]


def test_a_request_whose_drafts_are_refused_rests_longer_each_time_and_one_good_draft_does_not_end_that() -> None:
    record, now, rests = DraftRecord(), 0, []
    while len(rests) < 8:
        if record.rests(now):
            rests.append(record.rests_until - now)
            now = record.rests_until
        now += 1
        record.note(4, 0, now)
    assert rests == [FIRST_REST, 32, 64, 128, LONGEST_REST, LONGEST_REST, LONGEST_REST, LONGEST_REST]
    for _ in range(4):
        record.note(4, 4, now)
    assert record.chance > 0.5
    assert record.rest == FIRST_REST


def test_tokens_behind_a_wrong_one_are_not_held_against_the_request() -> None:
    late, early = DraftRecord(), DraftRecord()
    late.note(4, 3, 10)
    early.note(4, 0, 10)
    assert late.chance == 0.5 + 0.25 * (3 / 4 - 0.5)
    assert early.chance == 0.5 - 0.25 * 0.5


# ---- in the engine, on the twin that reads every token through the block tables


@pytest.mark.replay("E32")
@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("num_drafted", [1, 2, 3, 4])
def test_drafts_save_steps_and_change_no_token(num_drafted: int, block_size: int) -> None:
    """The twin checks that every row of a draft reads the right tokens, the one after the draft included."""
    bench = Bench(num_blocks=200, block_size=block_size, num_drafted=num_drafted)
    for index in range(3):
        bench.add(str(index), prompt(3 + index, index), max_tokens=40)
    bench.run()
    assert bench.outputs == {str(index): generates(prompt(3 + index, index), 40) for index in range(3)}
    stats = bench.engine.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.num_steps < 40


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_in_the_middle_of_a_draft_ends_the_text_there(max_tokens: int) -> None:
    bench = Bench(num_blocks=64, num_drafted=4)
    assert bench.answer("a", prompt(5), max_tokens=max_tokens) == generates(prompt(5), max_tokens)
    assert bench.finish_reasons["a"] == "length"
    assert bench.engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize("seed", range(8))
def test_an_end_of_text_in_the_middle_of_a_draft_ends_the_text_there(seed: int) -> None:
    params = SamplingParams(max_tokens=400, seed=seed)
    expected = expected_output(prompt(3), params, max_len=256)
    bench = Bench(num_blocks=64, num_drafted=4)
    answer = bench.answer("a", prompt(3), max_tokens=400, seed=seed, ignore_eos=False)
    assert (answer, bench.finish_reasons["a"]) == expected
    assert answer[-1] == EOS


def test_a_text_with_drafts_fills_the_whole_pool_and_not_more() -> None:
    bench = Bench(num_blocks=3, block_size=4, num_drafted=4)
    bench.add("endless", prompt(5), max_tokens=None)
    bench.run()
    assert bench.outputs["endless"] == generates(prompt(5), 7)
    assert bench.finish_reasons["endless"] == "length"


def test_a_refused_draft_leaves_no_trace_in_blocks_or_in_the_prefix_cache() -> None:
    bench = Bench(num_blocks=32, block_size=2, num_drafted=4)
    bench.add("a", prompt(5), max_tokens=24)
    while bench.engine.has_work:
        bench.step()
        known = 5 + len(bench.outputs["a"])
        if bench.engine.has_work:
            # of the last token, which is not computed yet, there may be a block or not
            assert bench.engine.stats().kv_blocks_used in (-(-known // 2), known // 2)
    text = [*prompt(5), *bench.outputs["a"]]
    blocks = {tuple(text[start : start + 2]) for start in range(0, len(text) - 2, 2)}
    published = {entry.token_ids for entry in bench.pool._published.values()}
    assert published == blocks
    assert bench.engine.stats().draft_tokens > bench.engine.stats().accepted_draft_tokens


def test_what_is_cached_of_a_text_with_drafts_is_what_is_cached_of_one_without() -> None:
    cached = []
    for num_drafted in (0, 4):
        bench = Bench(num_blocks=64, num_drafted=num_drafted)
        answer = bench.answer("first", prompt(8), max_tokens=20)
        bench.answer("follow-up", [*prompt(8), *answer, 3])
        cached.append(bench.cached["follow-up"])
    assert cached[0] == cached[1] > 8


class Held:
    """A matcher that notes what it is told."""

    allowed = None

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


@pytest.mark.replay("E31")
def test_a_preempted_request_has_no_draft_and_its_grammar_goes_on_where_it_stood() -> None:
    """Drafts are taken from nobody, so they never preempt; and who is preempted holds blocks of known tokens only."""
    bench = Bench(num_blocks=9, block_size=2, num_drafted=4, max_num_batched_tokens=16)
    grammar, matcher = Grammar("regex", "a+"), Held()
    bench.add("free", prompt(4, 1), max_tokens=12)
    bench.engine.add("held", prompt(4, 2), SamplingParams(max_tokens=12, grammar=grammar, seed=0), matcher=matcher)
    bench.outputs["held"] = []
    preempted: list[str] = []

    def watch(plan: StepPlan) -> None:
        for sequence in plan.preempted:
            preempted.append(sequence.request_id)
            assert len(sequence.block_table) <= -(-sequence.num_tokens // 2)
        for chunk in plan.chunks:
            assert not (chunk.draft_ids and chunk.sequence.request_id == "held")

    bench.twin.before_answer = watch
    bench.run()
    assert "held" in preempted
    assert bench.outputs["free"] == generates(prompt(4, 1), 12)
    assert matcher.accepted == bench.outputs["held"][: len(matcher.accepted)]
    assert len(matcher.accepted) >= len(bench.outputs["held"]) - 1  # the token that ends it need not be told
    assert bench.engine.stats().draft_tokens > 0


def test_drafts_preempt_nobody_and_keep_nobody_waiting() -> None:
    counts = []
    for num_drafted in (0, 4):
        bench = Bench(num_blocks=9, block_size=4, num_drafted=num_drafted)
        for index in range(3):
            bench.add(str(index), prompt(5, index), max_tokens=7)
        bench.run()
        counts.append(bench.engine.stats().num_preemptions)
    assert counts == [0, 0]


def test_a_step_with_drafts_that_failed_is_made_again() -> None:
    bench = Bench(num_blocks=16, block_size=2, num_drafted=4)

    def fail(plan: StepPlan) -> None:
        raise OSError("device lost")

    bench.add("a", prompt(6), max_tokens=20)
    while bench.engine.has_work:
        used = bench.engine.stats().kv_blocks_used
        bench.twin.before_answer = fail
        with pytest.raises(StepFailed):
            bench.step()
        bench.engine.check()
        assert bench.engine.stats().kv_blocks_used <= max(used + 1, 3)
        bench.twin.before_answer = lambda plan: None
        bench.step()
    assert bench.outputs["a"] == generates(prompt(6), 20)
    assert bench.engine.stats().accepted_draft_tokens > 0


@pytest.mark.parametrize("choices", [2, 4])
def test_choices_with_drafts_are_what_their_seeds_give_alone(choices: int) -> None:
    bench = Bench(num_blocks=64, num_drafted=3)
    params = [SamplingParams(seed=seed, max_tokens=20, ignore_eos=True) for seed in range(choices)]
    first, *others = (Choice(str(each.seed), each) for each in params)
    bench.engine.add("0", prompt(9), first.params, others=others)
    bench.outputs |= {str(each.seed): [] for each in params}
    bench.run()
    assert bench.outputs == {str(each.seed): expected_output(prompt(9), each, 10_000)[0] for each in params}
    assert bench.engine.stats().accepted_draft_tokens > 0


class Wrong:
    """Guesses what no text says."""

    def __init__(self) -> None:
        self.num_rows = 0

    def propose(self, wanted: SequenceOf[Wanted]) -> list[list[int]]:
        drafts = []
        for chunk, count in wanted:
            sequence = chunk.sequence
            (right,) = expected_output(sequence.token_ids, SamplingParams(max_tokens=1, ignore_eos=True), 10**6)[0]
            drafts.append([(right + 1) % VOCAB_SIZE] * count)
            self.num_rows += count
        return drafts


def test_a_request_whose_drafts_are_always_wrong_soon_has_none() -> None:
    bench = Bench(num_blocks=200, num_drafted=4)
    bench.engine._drafter = wrong = Wrong()
    assert bench.answer("a", prompt(5), max_tokens=600) == generates(prompt(5), 600)
    assert bench.engine.stats().accepted_draft_tokens == 0
    assert 0 < wrong.num_rows < 60


def note_rows(rows: list[int], plan: StepPlan) -> None:
    if any(chunk.draft_ids for chunk in plan.chunks):
        rows.append(plan.num_rows)


def test_a_step_with_drafts_has_no_more_rows_than_the_limit_and_the_budget_allow() -> None:
    for budget, limit in ((16, 64), (64, 10)):
        pool = BlockPool(200, 4)
        config = SchedulerConfig(
            max_model_len=400,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset(),
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            num_speculative_tokens=4,
            speculation_max_rows=limit,
        )
        engine = Engine(config, pool, twin := PagedTwin(pool), drafter=Guesser(), clock=lambda: 0.0)
        rows: list[int] = []
        twin.before_answer = partial(note_rows, rows)
        for index in range(7):
            engine.add(str(index), prompt(2, index), SamplingParams(max_tokens=30))
        while engine.has_work:
            engine.step()
        assert max(rows) == min(budget, limit)


def counting(place: int) -> int:
    """The token at this place of any text."""
    return 1 + place % 97


class Machine:
    """Takes time by the row, and counts."""

    def __init__(self, row_s: float) -> None:
        self.now = 0.0
        self._row_s = row_s

    def run(self, plan: StepPlan) -> list[list[int]]:
        self.now += 0.01 + self._row_s * plan.num_rows
        return [[counting(chunk.end + row) for row in range(chunk.num_sampled)] for chunk in plan.chunks]


class Erring:
    """Guesses that two tokens of three bear out."""

    def propose(self, wanted: SequenceOf[Wanted]) -> list[list[int]]:
        drafts = []
        for chunk, count in wanted:
            places = range(chunk.end, chunk.end + count)
            drafts.append([counting(place) if place % 3 else 0 for place in places])
        return drafts


def seconds(num_requests: int, *, row_s: float, drafts: bool) -> float:
    machine = Machine(row_s)
    config = SchedulerConfig(
        max_model_len=4096,
        vocab_size=100,
        eos_token_ids=frozenset(),
        enable_prefix_caching=False,
        num_speculative_tokens=4 if drafts else 0,
    )
    drafter = Erring() if drafts else None
    engine = Engine(config, BlockPool(2000, 32), machine, drafter=drafter, clock=lambda: machine.now)
    for index in range(num_requests):
        engine.add(str(index), [50] * (30 + index), SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return machine.now


def test_speculation_is_fast_alone_and_steps_aside_in_a_deep_batch() -> None:
    """Virtual time. A row costs a twentieth of a step that computes nothing: alone that is little for the tokens that
    it may bring, beside 48 others it is more than they are worth."""
    assert seconds(1, row_s=0.0005, drafts=True) < 0.65 * seconds(1, row_s=0.0005, drafts=False)
    assert seconds(48, row_s=0.0005, drafts=True) < 1.02 * seconds(48, row_s=0.0005, drafts=False)


# ---- on a real model

LARGE = {"block_size": 16, "kv_cache_mib": 4, "max_model_len": 200}
DTYPES = ("bfloat16", "float32")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), seed=7)


@pytest.fixture(scope="module", params=DTYPES)
def model(request: pytest.FixtureRequest, folder: Path, kernel_cache: Path) -> Decoder:
    return make_model(open_checkpoint(folder), EngineConfig(dtype=request.param, **LARGE), kernel_cache=kernel_cache)


@pytest.fixture(scope="module")
def half(folder: Path, kernel_cache: Path) -> Decoder:
    return make_model(open_checkpoint(folder), EngineConfig(**LARGE), kernel_cache=kernel_cache)


def config_of(model: Decoder, **changes: Any) -> EngineConfig:
    return EngineConfig(**({"dtype": "float32" if model.dtype.itemsize == 4 else "bfloat16"} | LARGE | changes))


class Recall:
    """Knows the answers, and forgets a token now and then."""

    def __init__(self, answers: dict[str, list[int]], every: int) -> None:
        self._answers = answers
        self._every = every

    def propose(self, wanted: SequenceOf[Wanted]) -> list[list[int]]:
        drafts = []
        for chunk, count in wanted:
            begun = chunk.sequence.num_output_tokens
            draft = self._answers[chunk.sequence.request_id][begun : begun + count]
            drafts.append([3 if (begun + place) % self._every == 0 else token for place, token in enumerate(draft)])
        return drafts


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """Greedy and sampled, with and without penalties, some with a common beginning."""
    source = random.Random(5)
    stem = source.choices(range(3, 250), k=40)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 20, "ignore_eos": False},
        {"temperature": 0, "presence_penalty": 0.8, "frequency_penalty": 0.4},
        {"temperature": 0.9, "top_p": 0.9, "seed": 11},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "seed": 12, "frequency_penalty": 0.3},
        {"temperature": 0, "stop_token_ids": tuple(range(40, 60))},
    ]
    return {
        f"r{number}": (
            stem[: 10 + 6 * number] + source.choices(range(3, 250), k=5),
            SamplingParams(**({"max_tokens": 32, "ignore_eos": True} | kind)),
        )
        for number, kind in enumerate(kinds)
    }


def run(engine: Engine, asked: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {name: [] for name in asked}
    for name, (prompt_ids, params) in asked.items():
        engine.add(name, prompt_ids, params)
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        engine.check()
    return answers


def timeless(engine: Engine) -> Engine:
    """Nothing takes time there, so drafts are always worth theirs."""
    engine._clock = lambda: 0.0
    return engine


def with_drafter(engine: Engine, drafter: Any, k: int, *, blocks: int | None = None) -> Engine:
    """The same model and cache under a scheduler that drafts."""
    config = replace(engine._config, num_speculative_tokens=k)
    pool = BlockPool(blocks or engine._pool.num_blocks, engine._pool.block_size)
    return Engine(config, pool, engine._runner, drafter=drafter, clock=lambda: 0.0)


@pytest.fixture(scope="module")
def plain(model: Decoder) -> dict[str, list[int]]:
    """Without drafts, cache and chunks."""
    return run(make_engine(model, config_of(model, enable_prefix_caching=False)), requests())


@pytest.mark.replay("E32")
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_with_drafts_every_text_is_bit_for_bit_the_one_without(
    model: Decoder, plain: dict[str, list[int]], k: int
) -> None:
    """Together, cached, in chunks, and where they push one another out; greedy, sampled, penalised."""
    engine = make_engine(model, config_of(model, max_num_seqs=6, max_num_batched_tokens=18))
    engine = with_drafter(engine, Recall(plain, every=7), k, blocks=10)
    assert run(engine, requests()) == plain
    stats = engine.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.num_preemptions > 0
    assert stats.kv_blocks_used == 0


def test_log_probabilities_are_those_of_a_text_without_drafts(model: Decoder, plain: dict[str, list[int]]) -> None:
    """Those of rows behind a refused guess are told to nobody."""
    asked = {name: (ids, replace(params, logprobs=2)) for name, (ids, params) in requests().items()}
    told = []
    for engine in (
        make_engine(model, config_of(model)),
        with_drafter(make_engine(model, config_of(model)), Recall(plain, every=7), 4),
    ):
        logprobs: dict[str, list[Any]] = {name: [] for name in asked}
        for name, (prompt_ids, params) in asked.items():
            engine.add(name, prompt_ids, params)
        while engine.has_work:
            for output in engine.step():
                logprobs[output.request_id] += output.logprobs
        told.append(logprobs)
    assert told[0] == told[1]
    assert {name: [each.token_id for each in logprobs] for name, logprobs in told[0].items()} == plain
    assert engine.stats().accepted_draft_tokens > 0


@pytest.mark.replay("E34")
def test_rows_of_a_draft_stand_at_the_positions_of_their_own_step() -> None:
    """Two steps with drafts of one length, at places that differ: nothing of the first may be left in the second."""
    sequence = Sequence("a", list(range(30)), SamplingParams(), seed=0)
    sequence.block_table = [5, 2, 9]
    other = Sequence("b", [1, 2, 3], SamplingParams(), seed=0)
    other.block_table = [7]
    for start in (13, 14, 29):
        sequence.token_ids = list(range(start + 1))
        first = ScheduledChunk(sequence, start, 1, samples=True, draft_ids=[8, 8, 8])
        chunks = [first, ScheduledChunk(other, 0, 3, samples=True)]
        batch = lay_out(chunks, 16)
        places = range(start, start + 4)
        assert batch.positions.tolist() == [*places, 0, 1, 2]
        assert batch.slots.tolist() == [*([5, 2, 9][p // 16] * 16 + p % 16 for p in places), 112, 113, 114]
        assert batch.sequences.tolist() == [0, 0, 0, 0, 1, 1, 1]
        assert sampled_rows(chunks).tolist() == [0, 1, 2, 3, 6]


def test_ngrams_change_no_token_of_a_real_model_and_guess_what_it_repeats(half: Decoder) -> None:
    asked = {
        name: (prompt_ids, SamplingParams(**GREEDY, repetition_penalty=0.5))
        for name, (prompt_ids, _) in requests().items()
    }
    answers = []
    for speculation in ("off", "ngram"):
        engine = timeless(make_engine(half, config_of(half, speculation=speculation)))
        answers.append(run(engine, asked))
    assert answers[0] == answers[1]
    assert engine.stats().accepted_draft_tokens > 0


# ---- a draft model


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one layer: it guesses as anybody would."""
    return write_tiny_llama(tmp_path_factory.mktemp("small"), tiny_config(num_layers=1, max_model_len=90), seed=8)


def test_a_draft_model_changes_no_token_and_one_that_is_the_model_itself_is_always_right(
    half: Decoder, folder: Path, small: Path, kernel_cache: Path
) -> None:
    asked = requests()
    some = {name: asked[name] for name in ("r0", "r2", "r3")}
    for path, wanted in ((small, some), (folder, {"r0": asked["r0"]})):
        config = config_of(half, speculation="draft", draft_model=path)
        draft_config = EngineConfig(dtype=config.dtype, block_size=16)
        draft = make_model(open_checkpoint(path), draft_config, kernel_cache=kernel_cache)
        engine = timeless(make_engine(half, config, draft))
        assert run(engine, wanted) == run(make_engine(half, config_of(half)), wanted)
        assert engine.stats().draft_tokens > 0
        drafter = engine._drafter
        assert isinstance(drafter, DraftModel)
        assert not drafter._engine.has_work
    assert engine.stats().accepted_draft_tokens == engine.stats().draft_tokens
    assert engine.stats().num_steps < 12  # 32 tokens, five a step


def test_a_draft_model_that_fails_leaves_nothing_behind_and_the_step_is_made_again(
    folder: Path, kernel_cache: Path
) -> None:
    config = EngineConfig(**LARGE, speculation="draft", draft_model=folder)
    engine = timeless(load(folder, config, kernel_cache=kernel_cache).engine)
    drafter = engine._drafter
    assert isinstance(drafter, DraftModel)
    runner: Any = drafter._engine._runner
    compute, failures = runner.run, iter([True, False, True])

    def sometimes(plan: StepPlan) -> list[list[int]]:
        if next(failures, False):
            raise MemoryError("no room for the draft")
        tokens: list[list[int]] = compute(plan)
        return tokens

    runner.run = sometimes
    engine.add("a", list(range(10, 40)), SamplingParams(**GREEDY))
    answer: list[int] = []
    num_failed = 0
    while engine.has_work:
        try:
            answer += [token for output in engine.step() for token in output.token_ids]
        except StepFailed:
            num_failed += 1
        engine.check()
        assert not drafter._engine.has_work
        assert drafter._engine.stats().kv_blocks_used == 0
    assert num_failed == 2
    undisturbed = load(folder, EngineConfig(**LARGE), kernel_cache=kernel_cache).engine
    assert answer == run(undisturbed, {"a": (list(range(10, 40)), SamplingParams(**GREEDY))})["a"]


def test_a_draft_model_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path, kernel_cache: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", tiny_config(vocab_size=352))
    with pytest.raises(InvalidParams, match="draft_model must have the vocabulary of the model"):
        load(folder, EngineConfig(**LARGE, speculation="draft", draft_model=other), kernel_cache=kernel_cache)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculation": "magic"}, "speculation must be one of off, ngram, draft, not 'magic'"),
        ({"speculation": "draft"}, "draft_model must be given where speculation is draft"),
        ({"draft_model": Path("x")}, "draft_model must be given where speculation is draft"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1"),
        ({"ngram_min": 0}, "ngram_min must be at least 1"),
        ({"ngram_min": 3, "ngram_max": 2}, r"ngram_max must be at least ngram_min \(3\), not 2"),
        ({"speculation_max_rows": 0}, "speculation_max_rows must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParams, match=message):
        EngineConfig(**fields)


# ---- as text


def nothing_to_load(loaded: LoadedModel) -> LoadedModel:
    return loaded


async def collect(engine: AsyncEngine, params: SamplingParams) -> list[Delta]:
    return [delta async for delta in engine.generate(list(range(10, 40)), params, request_id="a")]


def joined(deltas: list[Delta]) -> tuple[str, list[int], str | None, str | None, int]:
    text = "".join(delta.text for delta in deltas)
    tokens = [token for delta in deltas for token in delta.token_ids]
    last = deltas[-1]
    return text, tokens, last.finish_reason, last.stop_string, last.num_output_tokens


@pytest.mark.replay("E37")
async def test_a_stop_string_inside_a_draft_cuts_text_and_tokens_where_it_does_without(
    folder: Path, kernel_cache: Path
) -> None:
    """Also one that spans several steps, one that ends with the text, and one that comes before `min_tokens`."""
    off = EngineConfig(**LARGE)
    on = EngineConfig(**LARGE, speculation="draft", draft_model=folder)
    loaded = [load(folder, config, kernel_cache=kernel_cache) for config in (off, on)]
    timeless(loaded[1].engine)
    engines = [AsyncEngine(partial(nothing_to_load, each)) for each in loaded]
    try:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        whole, *_ = joined(await collect(engines[0], params))
        stops = [(whole[start : start + length],) for start in range(0, len(whole) - 6, 4) for length in (1, 6)]
        for stop in (*stops, ("never",), (whole[-1],), (whole[4:6], whole[3:9])):
            for min_tokens in (0, 9):
                held = replace(params, stop=stop, min_tokens=min_tokens)
                plain, drafted = [await collect(engine, held) for engine in engines]
                assert joined(drafted) == joined(plain)
                assert joined(drafted)[4] == len(joined(drafted)[1])
        assert max(len(delta.token_ids) for delta in await collect(engines[1], params)) == 5
        assert engines[1].stats().kv_blocks_used == 0
        grammar = Grammar("regex", "[a-f]{12}")
        texts = [
            joined(await collect(engine, SamplingParams(seed=3, max_tokens=30, grammar=grammar))) for engine in engines
        ]
        assert texts[0] == texts[1]
        assert texts[0][2] == "stop"
    finally:
        for engine in engines:
            engine.close()
