"""The whole engine on a real tiny model, at random: whatever happens around a request, it answers as it does alone.

Prompts share beginnings, pools are so small that requests push one another out, some are aborted at a random step, and
each samples in its own way. The reference has no cache, no neighbours and no chunks.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from native_engine.config import EngineConfig
from native_engine.engine import Engine
from native_engine.loading import make_engine, make_model
from native_engine.logprobs import Logprobs
from native_engine.models.decoder import Decoder
from native_engine.sampling_params import SamplingParams
from native_engine.weights import open_checkpoint
from tests.native_engine.tiny_llama import VOCAB_SIZE, write_tiny_llama

SEEDS = (0, 2, 3)  # of which the last runs without a cache; each of them preempts
LARGE = {"block_size": 16, "kv_cache_mib": 4, "max_model_len": 200, "num_threads": 1}


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Decoder:
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path_factory.mktemp("tiny"), seed=7))
    return make_model(checkpoint, EngineConfig(dtype=request.param, **LARGE), kernel_cache=kernel_cache)


def engine_of(model: Decoder, **changes: Any) -> Engine:
    dtype: Any = "float32" if model.dtype.itemsize == 4 else "bfloat16"
    return make_engine(model, EngineConfig(dtype=dtype, **(LARGE | changes)))


def shrunk(engine: Engine, blocks: int) -> Engine:
    """The same engine with a pool of `blocks`: a mebibyte, the least that a person can choose, holds too much of it."""
    from native_engine.blocks import BlockPool

    return Engine(engine._config, BlockPool(blocks, engine._pool.block_size), engine._runner)


def random_request(source: random.Random, stems: list[list[int]]) -> tuple[list[int], SamplingParams]:
    stem = source.choice(stems)
    prompt = stem[: source.randint(1, len(stem))] + source.choices(range(3, VOCAB_SIZE), k=source.randint(0, 20))
    tokens = source.choice([source.randint(1, 10), source.randint(30, 100)])
    besides = random.Random(sum(prompt))  # what hardly changes who comes when
    return prompt, SamplingParams(
        max_tokens=tokens,
        min_tokens=source.choice([0, 0, tokens // 2, tokens]),
        temperature=source.choice([0.0, 0.0, 0.7, 1.5]),
        top_p=source.choice([1.0, 0.9]),
        top_k=source.choice([0, 5, 40]),
        min_p=source.choice([0.0, 0.1]),
        seed=source.randrange(2**63),
        repetition_penalty=source.choice([1.0, 1.2]),
        presence_penalty=source.choice([0.0, 0.5]),
        frequency_penalty=source.choice([0.0, 0.3]),
        logit_bias=besides.choice([(), ((5, 3.0), (9, -100.0), (VOCAB_SIZE - 1, 1.5))]),
        logprobs=besides.choice([None, 0, 4]),
        prompt_logprobs=besides.choice([None, None, 2]),
        stop_token_ids=tuple(source.choices(range(3, VOCAB_SIZE), k=source.choice([0, 30]))),
        ignore_eos=source.random() < 0.5,
    )


Told = tuple[list[Logprobs], list[Logprobs]]  # of the answer and of the prompt


def alone(model: Decoder, prompt: list[int], params: SamplingParams) -> tuple[list[int], str | None, Told]:
    engine = engine_of(model, enable_prefix_caching=False, max_num_batched_tokens=256)
    engine.add("alone", prompt, params)
    tokens: list[int] = []
    reason = None
    told: Told = ([], [])
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
            told[0].extend(output.logprobs)
            told[1].extend(output.prompt_logprobs)
            reason = output.finish_reason
    return tokens, reason, told


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_around_a_request_it_answers_as_it_does_alone(model: Decoder, seed: int) -> None:
    source = random.Random(seed)
    stems = [source.choices(range(3, VOCAB_SIZE), k=source.randint(16, 90)) for _ in range(3)]
    budget = source.choice([8, 17, 48])
    engine = shrunk(
        engine_of(model, max_num_seqs=8, max_num_batched_tokens=budget, enable_prefix_caching=seed % 4 != 3),
        blocks=source.choice([13, 20]),
    )
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    answers: dict[str, list[int]] = {}
    reasons: dict[str, str | None] = {}
    logprobs: dict[str, Told] = {}
    aborted: set[str] = set()
    to_come = 24
    while to_come or engine.has_work:
        while to_come and source.random() < 0.4:
            to_come -= 1
            name = f"r{to_come}"
            asked[name] = random_request(source, stems)
            answers[name] = []
            logprobs[name] = ([], [])
            engine.add(name, *asked[name])
        if asked and source.random() < 0.05:
            victim = source.choice(sorted(asked))
            if engine.abort(victim):
                aborted.add(victim)
        for output in engine.step():
            assert output.request_id not in aborted
            answers[output.request_id] += output.token_ids
            logprobs[output.request_id][0].extend(output.logprobs)
            logprobs[output.request_id][1].extend(output.prompt_logprobs)
            reasons[output.request_id] = output.finish_reason
        engine.check()
    for name, (prompt, params) in asked.items():
        expected, reason, told = alone(model, prompt, params)
        if name in aborted:
            assert answers[name] == expected[: len(answers[name])]
        else:
            assert (answers[name], reasons[name], logprobs[name]) == (expected, reason, told), (name, params)
        assert len(told[0]) == (0 if params.logprobs is None else len(expected))
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().num_preemptions > 0
