"""What a model needs, what a pool holds and how fast a device can decode at best, as formulas: for sizing the cache,
and for plans on paper.

bytes_per_token(config, "bfloat16")            # SmolLM2-135M: 23040
num_blocks(512 * MIB, bytes_per_token, 32)     # blocks that fit into half a GiB
capacity(config, DEVICES["h200"], num_tokens=2048).num_sequences
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """`bytes_per_s`: what can be read of its memory, as its maker says, or as measured."""

    name: str
    memory_bytes: int
    bytes_per_s: float


# Makers' data sheets. What a device really reads is a tenth to a fifth less.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(name="h200", memory_bytes=141 * 10**9, bytes_per_s=4.8e12),
        Device(name="h100", memory_bytes=80 * 10**9, bytes_per_s=3.35e12),
        Device(name="a100", memory_bytes=80 * 10**9, bytes_per_s=2.039e12),
        Device(name="l40s", memory_bytes=48 * 10**9, bytes_per_s=864e9),
        Device(name="rtx4090", memory_bytes=24 * 10**9, bytes_per_s=1008e9),
        Device(name="l4", memory_bytes=24 * 10**9, bytes_per_s=300e9),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """`tokens_per_s`: the most that decoding can give, when all that fit are decoded together and each has its whole
    text; `alone_tokens_per_s`: one sequence by itself. A step reads the weights once and every text's keys and values,
    and takes at least as long as that takes to read. Compute may be the tighter limit where many decode."""

    token_bytes: int
    weight_bytes: int
    pool_bytes: int
    num_sequences: int
    alone_tokens_per_s: float
    tokens_per_s: float


def capacity(
    config: ModelConfig,
    device: Device,
    *,
    num_tokens: int,
    dtype: Dtype = "bfloat16",
    kv_cache_dtype: KVCacheDtype = "auto",
    block_size: int = 32,
    memory_share: float = 0.9,
) -> Capacity:
    """For sequences of `num_tokens`. `memory_share`: of the device's memory, what weights and cache may take."""
    token_bytes = bytes_per_token(config, dtype, kv_cache_dtype)
    weight_bytes = num_parameters(config) * ITEM_BYTES[dtype]
    pool_bytes = max(0, int(device.memory_bytes * memory_share) - weight_bytes)
    held = num_tokens if config.widest_window is None else min(num_tokens, config.widest_window)
    num_sequences = max_concurrency(num_blocks(pool_bytes, token_bytes, block_size), held, block_size)
    # Of embeddings a step reads a row each; where they are tied, the head reads all of them.
    embedding_bytes = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size * ITEM_BYTES[dtype]

    def tokens_per_s(count: int) -> float:
        return count * device.bytes_per_s / (weight_bytes - embedding_bytes + count * held * token_bytes)

    return Capacity(
        token_bytes=token_bytes,
        weight_bytes=weight_bytes,
        pool_bytes=pool_bytes,
        num_sequences=num_sequences,
        alone_tokens_per_s=tokens_per_s(1) if num_sequences else 0.0,
        tokens_per_s=tokens_per_s(num_sequences),
    )


def variants(config: ModelConfig) -> Iterator[tuple[str, ModelConfig, KVCacheDtype]]:
    """What the cache's form changes: as it is, in int8, and with other numbers of heads for keys and values."""
    yield f"{config.num_kv_heads} KV heads, as is", config, "auto"
    yield "as is, in int8", config, "int8"
    if config.num_kv_heads != config.num_heads:
        yield f"{config.num_heads} KV heads (MHA)", replace(config, num_kv_heads=config.num_heads), "auto"
    if config.num_kv_heads != 1:
        yield "1 KV head (MQA)", replace(config, num_kv_heads=1), "auto"
