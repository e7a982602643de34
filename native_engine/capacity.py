"""What a model needs and what a pool holds, as formulas: for sizing the cache, and for plans on paper.

bytes_per_token(config, "bfloat16")            # SmolLM2-135M: 23040
num_blocks(512 * MIB, bytes_per_token, 32)     # blocks that fit into half a GiB
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from native_engine.config import Dtype, KVCacheDtype

if TYPE_CHECKING:
    from native_engine.models.config import ModelConfig

MIB = 2**20
SCALE_BYTES = 2
ITEM_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float32": 4}


def bytes_per_token(config: ModelConfig, dtype: Dtype, kv_cache_dtype: KVCacheDtype = "auto") -> int:
    """Keys and values of one token in all layers; in int8 with a scale for each head."""
    head_bytes = config.head_dim + SCALE_BYTES if kv_cache_dtype == "int8" else config.head_dim * ITEM_BYTES[dtype]
    return 2 * config.num_layers * config.num_kv_heads * head_bytes


def num_blocks(pool_bytes: int, token_bytes: int, block_size: int) -> int:
    """Whole blocks that fit into a pool."""
    return pool_bytes // (token_bytes * block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def max_concurrency(blocks: int, num_tokens: int, block_size: int) -> int:
    """Sequences of `num_tokens` that a pool holds at once, sharing nothing."""
    return blocks // blocks_for(num_tokens, block_size)


def num_parameters(config: ModelConfig) -> int:
    return sum(map(prod, config.shapes().values()))
