"""The formulas against what is really allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from native_engine import capacity
from native_engine.attention.base import KVCache
from native_engine.blocks import BlockPool
from native_engine.capacity import MIB, Capacity, Device
from native_engine.config import Dtype, EngineConfig, KVCacheDtype
from native_engine.errors import InvalidParams, OutOfBlocks
from native_engine.loading import TORCH_DTYPES, pool_blocks
from native_engine.models.config import ModelConfig
from native_engine.this_machine import this_machine
from tests.native_engine.tiny_llama import random_weights, tiny_config

SMOLLM2 = tiny_config(
    hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    vocab_size=49152, tied_embeddings=True,
)  # fmt: skip


def test_smollm2_needs_the_known_bytes_and_parameters() -> None:
    assert capacity.bytes_per_token(SMOLLM2, "bfloat16") == 23_040
    assert capacity.num_parameters(SMOLLM2) == 134_515_008


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_formula_is_what_the_cache_allocates(dtype: Dtype) -> None:
    config = tiny_config()
    blocks = pool_blocks(config, EngineConfig(kv_cache_mib=3, block_size=16, dtype=dtype))
    cache = KVCache.allocate(config, blocks, 16, TORCH_DTYPES[dtype])
    assert cache.nbytes == blocks * 16 * capacity.bytes_per_token(config, dtype)
    assert 3 * MIB - cache.nbytes < 16 * capacity.bytes_per_token(config, dtype), "another block would have fitted"
    assert (cache.num_blocks, cache.block_size) == (blocks, 16)


def test_a_pool_too_small_for_one_block_is_refused() -> None:
    with pytest.raises(InvalidParams, match=r"kv_cache_mib \(1\)"):
        pool_blocks(SMOLLM2, EngineConfig(kv_cache_mib=1, block_size=64))


def test_sequences_take_whole_blocks() -> None:
    assert [capacity.blocks_for(tokens, 32) for tokens in (0, 1, 32, 33)] == [0, 1, 1, 2]
    assert capacity.max_concurrency(100, 33, 32) == 50


def test_parameters_are_counted_as_the_tensors_are() -> None:
    config = tiny_config()
    assert capacity.num_parameters(config) == sum(map(torch.Tensor.numel, random_weights(config).values()))


def test_an_int8_cache_takes_what_the_formula_says() -> None:
    config = tiny_config()
    cache = KVCache.allocate(config, 7, 16, torch.int8)
    assert cache.nbytes == 7 * 16 * capacity.bytes_per_token(config, "bfloat16", "int8")
    assert capacity.bytes_per_token(SMOLLM2, "bfloat16", "int8") == 11_880


def small_device(num_blocks: float, config: ModelConfig = SMOLLM2) -> Device:
    """As much memory as the weights and so many blocks of 32 tokens take."""
    weight_bytes = 2 * capacity.num_parameters(config)
    memory_bytes = int(weight_bytes + num_blocks * 32 * capacity.bytes_per_token(config, "bfloat16"))
    return Device(name="small", memory_bytes=memory_bytes, bytes_per_s=30e9)


def plan(config: ModelConfig, device: Device, num_tokens: int, kv_cache_dtype: KVCacheDtype = "auto") -> Capacity:
    return capacity.capacity(
        config, device, num_tokens=num_tokens, kv_cache_dtype=kv_cache_dtype, memory_share=1.0, block_size=32
    )


def test_as_many_sequences_fit_as_the_pool_has_whole_tables_for() -> None:
    assert plan(SMOLLM2, small_device(6.9), num_tokens=64).num_sequences == 3
    assert plan(SMOLLM2, small_device(6.9), num_tokens=65).num_sequences == 2
    assert plan(SMOLLM2, small_device(6.9), num_tokens=64, kv_cache_dtype="int8").num_sequences == 6


def test_what_fits_is_what_an_engine_of_that_pool_runs_at_once() -> None:
    """The formula's last sequence still runs beside the others, and one more has to wait."""
    config = EngineConfig(block_size=16, kv_cache_mib=1, max_num_seqs=200, max_num_batched_tokens=4096)
    model = tiny_config(num_layers=8, num_kv_heads=6, head_dim=32)
    blocks = pool_blocks(model, config)
    device = Device(name="as the engine", memory_bytes=2 * capacity.num_parameters(model) + MIB, bytes_per_s=1e9)
    fits = capacity.capacity(model, device, num_tokens=32, block_size=16, memory_share=1.0).num_sequences
    pool = BlockPool(blocks, 16)
    tables = [pool.allocate(2) for _ in range(fits)]
    assert len(tables) == fits > 1
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)


def test_a_device_too_small_for_the_weights_holds_and_decodes_nothing() -> None:
    fits = plan(SMOLLM2, Device(name="tiny", memory_bytes=10**8, bytes_per_s=1e12), num_tokens=64)
    assert (fits.pool_bytes, fits.num_sequences, fits.tokens_per_s, fits.alone_tokens_per_s) == (0, 0, 0, 0)


def test_the_ceiling_is_what_a_step_has_to_read() -> None:
    """269 MB of weights at 30 GB/s: 111 tokens/s alone, as the field's rule of thumb says, less what its text takes."""
    alone = plan(SMOLLM2, small_device(100), num_tokens=32)
    assert alone.alone_tokens_per_s == pytest.approx(30e9 / (269_030_016 + 32 * 23_040))
    assert alone.tokens_per_s == pytest.approx(100 * 30e9 / (269_030_016 + 100 * 32 * 23_040))


def test_untied_embeddings_are_held_and_not_read() -> None:
    untied = replace(SMOLLM2, tied_embeddings=False)
    more = 2 * 49_152 * 576
    tied_fits, untied_fits = (plan(config, small_device(10, config), 32) for config in (SMOLLM2, untied))
    assert untied_fits.weight_bytes == tied_fits.weight_bytes + more
    assert untied_fits.alone_tokens_per_s == pytest.approx(tied_fits.alone_tokens_per_s)


def test_a_sliding_window_bounds_what_a_sequence_holds() -> None:
    windowed = replace(SMOLLM2, sliding_window=64, local_layers=(True,))
    assert plan(windowed, small_device(10), 6400).num_sequences == plan(SMOLLM2, small_device(10), 64).num_sequences


def test_forms_of_the_cache_differ_as_their_heads_and_bytes_do() -> None:
    by_form = {
        words: capacity.bytes_per_token(config, "bfloat16", kv_cache_dtype)
        for words, config, kv_cache_dtype in capacity.variants(SMOLLM2)
    }
    assert list(by_form.values()) == [23_040, 11_880, 3 * 23_040, 23_040 // 3]
    assert len(list(capacity.variants(tiny_config(num_heads=2, num_kv_heads=2)))) == 3, "its heads share nothing"


def test_this_machine_reads_its_memory() -> None:
    here = this_machine()
    assert here.memory_bytes > 2**28
    assert 1e8 < here.bytes_per_s < 1e13
