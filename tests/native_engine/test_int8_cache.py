"""Keys and values in 8 bits: half the memory, a bounded error, and still the same tokens whatever happens around."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from native_engine import capacity
from native_engine.attention.base import KVCache, StepBatch
from native_engine.attention.cpu import CPUBackend, load_library
from native_engine.attention.torch_reference import TorchReference, quantise
from native_engine.blocks import BlockPool
from native_engine.config import EngineConfig
from native_engine.engine import Choice, Engine
from native_engine.errors import InvalidParams
from native_engine.loading import TORCH_DTYPES, cache_dtype, make_engine, make_model, pool_blocks
from native_engine.models.config import ModelConfig
from native_engine.models.decoder import Decoder
from native_engine.sampling_params import SamplingParams
from native_engine.weights import Checkpoint, open_checkpoint
from tests.native_engine.test_exactness import STORY
from tests.native_engine.test_kernels import layer_attention
from tests.native_engine.tiny_llama import tiny_config, write_tiny_llama

SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536}
SHAPES: list[tuple[dict[str, Any], int]] = [(SMOLLM2, 32), ({"num_heads": 8, "num_kv_heads": 1, "head_dim": 48}, 64)]
LENGTHS = [1, 17, 64, 65, 150]


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4, 1e30])
def test_no_number_is_off_by_more_than_half_a_step_and_none_is_beyond_127(size: float) -> None:
    heads = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)) * size
    heads[0] = 0.0
    numbers, scales = quantise(heads)
    assert scales.dtype is torch.bfloat16
    assert int(numbers.abs().max()) <= 127  # -128 would be a wrapped 128
    steps = scales.float()[..., None]
    assert bool(((numbers * steps - heads).abs() <= 0.501 * steps).all())
    assert bool((steps <= heads.abs().amax(-1, keepdim=True) / 127 * 1.01).all())
    assert torch.equal(numbers[0] * steps[0], heads[0])


def attention_inputs(config: ModelConfig, block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, StepBatch]:
    """Five sequences whose blocks lie in shuffled order; one value is large, as some channels of real keys are."""
    source = torch.Generator().manual_seed(3)
    width = -(-max(LENGTHS) // block_size)
    tables = torch.randperm(width * len(LENGTHS), generator=source, dtype=torch.int32).view(len(LENGTHS), width)
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in LENGTHS])
    sequences = torch.repeat_interleave(torch.arange(len(LENGTHS), dtype=torch.int32), torch.tensor(LENGTHS))
    slots = (tables[sequences.long(), (positions // block_size).long()] * block_size + positions % block_size).int()
    rows = torch.randn(len(positions), config.q_size + 2 * config.kv_size, generator=source)
    rows[:, config.q_size + 5] *= 20
    return rows.to(dtype), StepBatch(positions, slots, sequences, tables.contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "block_size"), SHAPES)
def test_kernels_write_the_bytes_and_scales_of_the_reference_and_attend_alike(
    kernel_cache: Path, shape: dict[str, Any], block_size: int, dtype: torch.dtype
) -> None:
    config = tiny_config(**shape)
    kernels = CPUBackend(config, dtype, load_library(dtype, kernel_cache, torch.int8), torch.int8)
    reference = TorchReference(config, dtype, torch.int8)
    rows, batch = attention_inputs(config, block_size, dtype)
    mine, other = (KVCache.allocate(config, batch.block_tables.numel(), block_size, torch.int8) for _ in range(2))
    result = kernels.attention(rows.clone(), 1, layer_attention(config), mine, batch).clone()
    expected = reference.attention(rows.clone(), 1, layer_attention(config), other, batch)
    for written, wanted in zip(mine.tensors, other.tensors, strict=True):
        difference = (written.float() - wanted.float()).abs()
        assert float((difference > 0).float().mean()) < 1e-3  # cos and sin are fused differently: a rounding may tip
        assert bool((difference <= 1).all())
    tolerance = {"atol": 2e-2, "rtol": 1e-2} if dtype is torch.bfloat16 else {"atol": 2e-3, "rtol": 2e-3}
    torch.testing.assert_close(result, expected, **tolerance)


@pytest.mark.replay("E35")
def test_an_int8_cache_is_what_attention_without_rounding_would_give_within_four_percent(kernel_cache: Path) -> None:
    """Read without its scales, or with another token's, the result would be of another size. Measured: 2.7 %, with a
    key in every head that is twenty times as large as the others."""
    config = tiny_config(**SMOLLM2)
    rows, batch = attention_inputs(config, 32, torch.float32)
    results = []
    for kind in (torch.int8, torch.float32):
        backend = CPUBackend(config, torch.float32, load_library(torch.float32, kernel_cache, kind), kind)
        cache = KVCache.allocate(config, batch.block_tables.numel(), 32, kind)
        results.append(backend.attention(rows.clone(), 0, layer_attention(config), cache, batch).clone())
    error = (results[0] - results[1]).norm() / results[1].norm()
    assert 1e-4 < float(error) < 0.04


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_formula_is_what_an_int8_cache_allocates(dtype: Any) -> None:
    config = tiny_config()
    settings = EngineConfig(kv_cache_mib=3, block_size=16, dtype=dtype, kv_cache_dtype="int8")
    blocks = pool_blocks(config, settings)
    cache = KVCache.allocate(config, blocks, 16, cache_dtype(settings))
    assert cache.nbytes == blocks * 16 * capacity.bytes_per_token(config, dtype, "int8")


def test_smollm2_needs_11880_bytes_a_token_instead_of_23040() -> None:
    config = tiny_config(**SMOLLM2, num_layers=30)
    assert capacity.bytes_per_token(config, "bfloat16") == 23_040
    assert capacity.bytes_per_token(config, "bfloat16", "int8") == 11_880


@pytest.mark.replay("E35")
def test_copies_take_the_scales_along() -> None:
    cache, host = (KVCache.allocate(tiny_config(), 4, 16, torch.int8) for _ in range(2))
    for tensor in cache.tensors:
        tensor.copy_(torch.arange(4).view(1, 4, *[1] * (tensor.ndim - 2)).expand_as(tensor))
    cache.copy_blocks([(3, 1)])
    host.copy_blocks([(1, 0)], cache)
    assert len(host.tensors) == 4
    for tensor in host.tensors:
        assert bool((tensor[:, 0] == 3).all())


def test_an_engine_refuses_a_model_made_for_another_cache(tmp_path: Path, kernel_cache: Path) -> None:
    settings = EngineConfig(block_size=16, kv_cache_mib=1)
    model = make_model(open_checkpoint(write_tiny_llama(tmp_path)), settings, kernel_cache=kernel_cache)
    with pytest.raises(InvalidParams, match="kv_cache_dtype must be what the model was made for, not 'int8'"):
        make_engine(model, EngineConfig(block_size=16, kv_cache_mib=1, kv_cache_dtype="int8"))
    with pytest.raises(InvalidParams, match="kv_cache_dtype must be one of auto, int8, not 'fp8'"):
        EngineConfig(kv_cache_dtype="fp8")  # type: ignore[arg-type]


# ---- still exact


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cached_chunked_forked_swapped_and_batched_answers_are_those_of_requests_alone(
    tmp_path: Path, kernel_cache: Path, dtype: Any
) -> None:
    def settings(**changes: Any) -> EngineConfig:
        fields = {"block_size": 16, "kv_cache_mib": 1, "max_model_len": 200, "kv_cache_dtype": "int8", "dtype": dtype}
        return EngineConfig(**(fields | changes))

    model = make_model(open_checkpoint(write_tiny_llama(tmp_path, seed=7)), settings(), kernel_cache=kernel_cache)
    prompts = [[3 + index // 2, *range(10, 50)] for index in range(4)]
    params = [SamplingParams(seed=seed, max_tokens=30, ignore_eos=True) for seed in range(2)]
    whole = make_engine(model, settings(preemption="swap", swap_space_mib=1, max_num_seqs=8, max_num_batched_tokens=24))
    host = whole._scheduler.memory.host_pool
    engine = Engine(whole._config, BlockPool(14, 16), whole._runner, host_pool=host)
    for index, prompt in enumerate(prompts):
        engine.add(f"{index}/0", prompt, params[0], others=[Choice(f"{index}/1", params[1])])
    answers = run(engine)
    stats = engine.stats()
    assert min(stats.num_preemptions, stats.swapped_in_blocks, stats.copied_blocks, stats.prefix_hits) > 0
    for index, prompt in enumerate(prompts[::2]):
        for seed in range(2):
            lonely = make_engine(model, settings(enable_prefix_caching=False))
            lonely.add("alone", prompt, params[seed])
            alone = run(lonely)["alone"]
            assert answers[f"{2 * index}/{seed}"] == answers[f"{2 * index + 1}/{seed}"] == alone


def run(engine: Engine) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
    return answers


# ---- drift on the real model


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_models_perplexity_and_choices_hardly_move(
    checkpoint: Checkpoint, model_path: Path, kernel_cache: Path
) -> None:
    """On a fixed text. Measured in bf16: perplexity +0.22 %, and 98.5 % of the likeliest tokens are the same."""
    from native_engine.tokenizer import open_tokenizer

    token_ids = open_tokenizer(model_path).encode(STORY * 2 + "In the morning she found a letter at the door.")
    scores = {kind: log_probabilities(checkpoint, kind, token_ids, kernel_cache) for kind in ("auto", "int8")}
    targets = torch.tensor(token_ids[1:])[:, None]
    nll = {kind: float(-rows.gather(1, targets).mean()) for kind, rows in scores.items()}
    agreement = float((scores["auto"].argmax(-1) == scores["int8"].argmax(-1)).float().mean())
    assert abs(nll["int8"] - nll["auto"]) < 0.01
    assert agreement > 0.95


@torch.inference_mode()
def log_probabilities(checkpoint: Checkpoint, kind: Any, token_ids: list[int], kernel_cache: Path) -> torch.Tensor:
    """Of every next token of the text, [tokens - 1, vocabulary]."""
    settings = EngineConfig(max_model_len=512, kv_cache_mib=32, kv_cache_dtype=kind)
    model: Decoder = make_model(checkpoint, settings, kernel_cache=kernel_cache)
    cache = KVCache.allocate(model.config, 16, 32, model.cache_dtype)
    assert model.dtype is TORCH_DTYPES["bfloat16"]
    positions = torch.arange(len(token_ids), dtype=torch.int32)
    tables = torch.arange(16, dtype=torch.int32)[None].contiguous()
    batch = StepBatch(positions, positions.clone(), torch.zeros_like(positions), tables)
    logits = model.forward(torch.tensor(token_ids), batch, cache, torch.arange(len(token_ids) - 1))
    assert logits is not None
    return torch.log_softmax(logits.float(), dim=-1)
