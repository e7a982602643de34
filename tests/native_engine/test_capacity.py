"""The formulas against what is really allocated."""

from __future__ import annotations

import pytest
import torch

from native_engine import capacity
from native_engine.attention.base import KVCache
from native_engine.capacity import MIB
from native_engine.config import Dtype, EngineConfig
from native_engine.errors import InvalidParams
from native_engine.loading import TORCH_DTYPES, pool_blocks
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
