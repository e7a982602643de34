"""Log-probabilities: of the model's own distribution, with the same bits whatever happens around a request, and beside
the text that they belong to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from native_engine.async_engine import AsyncEngine, Delta
from native_engine.blocks import BlockPool
from native_engine.config import EngineConfig
from native_engine.engine import Choice, Engine
from native_engine.errors import InvalidParams, StepFailed
from native_engine.loading import load, make_engine, make_model
from native_engine.logprobs import Logprobs
from native_engine.models.decoder import Decoder
from native_engine.sampling_params import SamplingParams
from native_engine.tokenizer import open_tokenizer
from native_engine.weights import open_checkpoint
from tests.native_engine.test_exactness import FromScratch
from tests.native_engine.tiny_llama import ENGINE_CONFIG, VOCAB_SIZE, write_tiny_llama

BLOCK = 32
ALL = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3, prompt_logprobs=2)


class Told(NamedTuple):
    tokens: list[int]
    logprobs: list[Logprobs]
    prompt: list[Logprobs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(request: pytest.FixtureRequest, folder: Path, kernel_cache: Path) -> Decoder:
    config = EngineConfig(dtype=request.param, block_size=BLOCK, kv_cache_mib=4)
    return make_model(open_checkpoint(folder), config, kernel_cache=kernel_cache)


def engine_of(model: Decoder, **changes: Any) -> Engine:
    dtype: Any = "float32" if model.dtype.itemsize == 4 else "bfloat16"
    return make_engine(
        model, EngineConfig(**{"dtype": dtype, "block_size": BLOCK, "kv_cache_mib": 4, "num_threads": 1, **changes})
    )


def prompt(length: int, seed: int = 1) -> list[int]:
    ids: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def run(engine: Engine, *prompts: list[int], params: SamplingParams = ALL, name: str = "r") -> list[Told]:
    for number, each in enumerate(prompts):
        engine.add(f"{name}-{number}", each, params)
    return finish(engine, [f"{name}-{number}" for number in range(len(prompts))])


def finish(engine: Engine, names: list[str]) -> list[Told]:
    answers = {name: Told([], [], []) for name in names}
    while engine.has_work:
        for output in engine.step():
            told = answers[output.request_id]
            told.tokens.extend(output.token_ids)
            told.logprobs.extend(output.logprobs)
            told.prompt.extend(output.prompt_logprobs)
        engine.check()
    return list(answers.values())


def test_they_are_the_models_own_whatever_changes_the_choice(model: Decoder) -> None:
    """Temperature, penalties and a bias choose other tokens; what is told is the softmax of a full recomputation."""
    params = SamplingParams(
        temperature=1.7, top_p=0.9, seed=5, max_tokens=30, ignore_eos=True, repetition_penalty=1.5,
        frequency_penalty=0.7, logit_bias=((7, 4.0), (9, -100.0)), logprobs=4, prompt_logprobs=4,
    )  # fmt: skip
    (told,) = run(engine_of(model), prompt(40), params=params)
    text = prompt(40) + told.tokens
    logits = FromScratch(model, 256).logits(text, range(len(text) - 1))
    expected = [torch.log_softmax(row, -1) for row in logits]
    everything = [*told.prompt, *told.logprobs]
    assert [each.token_id for each in everything] == text[1:]
    assert len(everything) == 69
    for row, each in zip(expected, everything, strict=True):
        assert each.logprob == float(row[each.token_id])
        assert [float(row[token]) for token, _ in each.top] == [logprob for _, logprob in each.top]
        assert [logprob for _, logprob in each.top] == row.topk(4).values.tolist()
        assert [token for token, _ in each.top] == sorted(
            [token for token, _ in each.top], key=lambda token: (-float(row[token]), token)
        )
    assert any(each.token_id != each.top[0].token_id for each in told.logprobs)


def test_a_greedy_token_is_the_likeliest_and_the_sum_over_the_vocabulary_is_one(model: Decoder) -> None:
    (told,) = run(engine_of(model), prompt(12), params=dataclasses.replace(ALL, logprobs=20))
    for each in told.logprobs:
        assert each.top[0] == (each.token_id, each.logprob)
        assert len({token for token, _ in each.top}) == 20
        assert sum(torch.tensor([logprob for _, logprob in each.top]).exp().tolist()) <= 1.00001


@pytest.mark.replay("E36")
def test_log_probabilities_of_a_prompt_have_the_same_bits_cached_chunked_batched_and_preempted(model: Decoder) -> None:
    stem = prompt(70, seed=2)
    prompts = [stem, stem + prompt(30, seed=4), prompt(1, seed=5), prompt(64, seed=8)]
    lone = [run(engine_of(model, enable_prefix_caching=False), each)[0] for each in prompts]
    assert [[told.token_id for told in each.prompt] for each in lone] == [each[1:] for each in prompts]
    assert [len(each.logprobs) for each in lone] == [40] * len(prompts)
    assert run(engine_of(model), *prompts) == lone, "batched"
    assert run(engine_of(model, max_num_seqs=8, max_num_batched_tokens=17), *prompts) == lone, "chunked"
    warm = engine_of(model)
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    assert [each.tokens for each in run(warm, *prompts, params=plain, name="cold")] == [each.tokens for each in lone]
    assert run(warm, *prompts, name="warm") == lone, "cached"
    hits = warm.stats().prefix_hits
    assert run(warm, stem, params=plain, name="after")[0].tokens == lone[0].tokens
    assert warm.stats().prefix_hits > hits, "what was computed for its log-probabilities is in the cache for others"
    roomy = engine_of(model)
    crowded = Engine(roomy._config, BlockPool(8, BLOCK), roomy._runner)
    assert run(crowded, *prompts) == lone, "preempted"
    assert crowded.stats().num_preemptions > 0


@pytest.mark.replay("E36")
def test_a_step_that_failed_leaves_no_log_probabilities_behind(model: Decoder) -> None:
    (lone,) = run(engine_of(model), prompt(50))
    engine = engine_of(model, max_num_seqs=8, max_num_batched_tokens=20)
    runner: Any = engine._runner
    compute = runner.run
    fails = iter([False, True, False, False, True, True] + [False] * 100)

    def sometimes(plan: Any) -> Any:
        answer = compute(plan)
        if next(fails):
            raise MemoryError("after all was computed")
        return answer

    runner.run = sometimes
    engine.add("r", prompt(50), ALL)
    told = Told([], [], [])
    for _ in range(90):
        try:
            outputs = engine.step()
        except StepFailed:
            continue
        for output in outputs:
            told.tokens.extend(output.token_ids)
            told.logprobs.extend(output.logprobs)
            told.prompt.extend(output.prompt_logprobs)
    assert told == lone


def test_each_answer_to_a_prompt_has_its_own_and_the_prompts(model: Decoder) -> None:
    def seeded(seed: int) -> SamplingParams:
        return dataclasses.replace(ALL, temperature=1.2, seed=seed)

    engine = engine_of(model)
    first, *others = (Choice(str(seed), seeded(seed)) for seed in range(4))
    engine.add(first.request_id, prompt(45), first.params, others=others)
    answers = finish(engine, [str(seed) for seed in range(4)])
    assert answers == [run(engine_of(model), prompt(45), params=seeded(seed))[0] for seed in range(4)]
    assert len({tuple(each.tokens) for each in answers}) == 4


def test_a_fork_goes_on_with_its_parents_log_probabilities(model: Decoder) -> None:
    engine = engine_of(model)
    engine.add("parent", prompt(20), ALL)
    begun = [output for _ in range(5) for output in engine.step()]
    engine.fork("parent", "child")
    parent, child = finish(engine, ["parent", "child"])
    assert child.logprobs == parent.logprobs
    assert child.prompt == parent.prompt == []
    assert len(begun) + len(child.logprobs) == 40
    engine.add("other", prompt(20), ALL)
    with pytest.raises(InvalidParams, match="prompt_logprobs"):
        engine.fork("other", "child", dataclasses.replace(ALL, prompt_logprobs=None))
    with pytest.raises(InvalidParams, match="prompt_logprobs"):
        engine.add("a", prompt(3), ALL, others=[Choice("b", dataclasses.replace(ALL, prompt_logprobs=5))])


def test_who_asks_for_none_gets_none_beside_one_who_does(model: Decoder) -> None:
    engine = engine_of(model)
    engine.add("plain", prompt(20), dataclasses.replace(ALL, logprobs=None, prompt_logprobs=None))
    engine.add("asks", prompt(20, seed=2), dataclasses.replace(ALL, logprobs=0))
    plain, asks = finish(engine, ["plain", "asks"])
    assert (plain.logprobs, plain.prompt) == ([], [])
    assert [each.top for each in asks.logprobs] == [()] * 40
    assert [len(each.top) for each in asks.prompt] == [2] * 19


# --- beside the text


@pytest.fixture(scope="module")
def engine(folder: Path, kernel_cache: Path) -> Iterator[AsyncEngine]:
    loaded = load(folder, dataclasses.replace(ENGINE_CONFIG, num_threads=1), kernel_cache=kernel_cache)
    engine = AsyncEngine(lambda: loaded)
    yield engine
    engine.close()


async def collect(engine: AsyncEngine, params: SamplingParams, name: str) -> list[Delta]:
    return [delta async for delta in engine.generate(prompt(30), params, request_id=name)]


def told_bytes(engine: AsyncEngine, deltas: list[Delta]) -> bytes:
    """Special tokens are no text."""
    table = engine._tokenizer.token_bytes
    told = [placed.of.token_id for delta in deltas for placed in delta.logprobs]
    return b"".join(table[token] for token in told if token < len(table))


SAMPLED = SamplingParams(temperature=1.0, seed=4, max_tokens=120, ignore_eos=True, logprobs=1)


@pytest.mark.replay("E37")
async def test_a_stop_string_cuts_the_log_probabilities_with_the_text(engine: AsyncEngine) -> None:
    """Each token is a byte: what is told makes the text, no byte more, wherever the stop string cuts it."""
    whole = await collect(engine, SAMPLED, "whole")
    text = "".join(delta.text for delta in whole)
    assert sum(len(delta.logprobs) for delta in whole) == 120
    for start in range(3, len(text) - 3, 11):
        stop = text[start : start + 2]
        stopped = await collect(engine, dataclasses.replace(SAMPLED, stop=(stop,)), f"at {start}")
        shown = text[: text.index(stop)]
        assert "".join(delta.text for delta in stopped) == shown
        assert told_bytes(engine, stopped).decode(errors="replace") == shown
        flat = [placed for delta in stopped for placed in delta.logprobs]
        assert flat == [placed for delta in whole for placed in delta.logprobs][: len(flat)]


async def test_each_piece_of_a_stream_has_the_log_probabilities_of_its_text(engine: AsyncEngine) -> None:
    params = dataclasses.replace(SAMPLED, stop=("never to be met", "e!"))
    shown = 0
    for delta in await collect(engine, params, "stream"):
        shown += len(delta.text)
        assert all(placed.offset < shown or delta.finish_reason == "length" for placed in delta.logprobs)
        assert bool(delta.logprobs) == bool(delta.text) or delta.finish_reason is not None


async def test_the_token_that_stops_an_answer_is_counted_in_its_sum_and_not_told(engine: AsyncEngine) -> None:
    whole = await collect(engine, SAMPLED, "whole")
    tokens = [token for delta in whole for token in delta.token_ids]
    stopped = await collect(engine, dataclasses.replace(SAMPLED, stop_token_ids=(tokens[10],)), "stopped")
    first = tokens.index(tokens[10])
    assert sum(len(delta.logprobs) for delta in stopped) == first
    assert stopped[-1].cumulative_logprob == whole[first].cumulative_logprob
    flat = [placed.of.logprob for delta in whole for placed in delta.logprobs]
    assert whole[-1].cumulative_logprob == pytest.approx(sum(flat))


async def test_an_answer_that_ends_inside_a_character_tells_the_bytes_that_came(engine: AsyncEngine) -> None:
    """The text leaves them out, and the number of tokens counts them."""
    for limit in range(1, 40):
        deltas = await collect(engine, dataclasses.replace(SAMPLED, max_tokens=limit), f"{limit} tokens")
        assert sum(len(delta.logprobs) for delta in deltas) == deltas[-1].num_output_tokens == limit
        text = "".join(delta.text for delta in deltas)
        assert told_bytes(engine, deltas).decode(errors="replace").startswith(text)


@pytest.mark.model
def test_the_real_model_is_sure_of_paris_and_the_same_in_company(model_path: Path, kernel_cache: Path) -> None:
    loaded = load(model_path, EngineConfig(kv_cache_mib=64), kernel_cache=kernel_cache)
    text = "The capital of France is"
    ids, paris = loaded.tokenizer.encode(text), loaded.tokenizer.encode(" Paris")[0]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=5, prompt_logprobs=0)
    lone = run(loaded.engine, ids, params=params)
    others = [loaded.tokenizer.encode(each) for each in ("One two three", "The capital of France is a city. " * 4)]
    assert run(loaded.engine, ids, *others, params=params, name="crowd")[:1] == lone
    assert paris in [token for token, _ in lone[0].logprobs[0].top]
    assert len(lone[0].prompt) == len(ids) - 1
    assert open_tokenizer(model_path).spell(paris) == b" Paris"
