"""The slow, obvious backend: what attention means, in a few lines of torch, one sequence row after another.

It is the oracle of the kernels' tests, and what runs where no C compiler exists. A row is computed on its own, so its
result cannot depend on the batch.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from native_engine.attention.base import KVCache, LayerAttention, RopeTable, StepBatch
from native_engine.models.config import ModelConfig


class TorchReference:
    name = kernels = "torch"

    def __init__(self, config: ModelConfig, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> None:
        self.cache_dtype = cache_dtype or dtype
        self._config = config
        self._dtype = dtype

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        delta_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if delta is not None:
            residual += delta if delta_weight is None else _rms_norm(delta.float(), delta_weight, eps)
        return _rms_norm(residual, weight, eps).to(self._dtype)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        is_gelu = self._config.activation == "gelu_tanh"
        activated = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
        return (activated * up).to(self._dtype)

    def attention(
        self, qkv: torch.Tensor, layer: int, kind: LayerAttention, cache: KVCache, batch: StepBatch
    ) -> torch.Tensor:
        config, rows = self._config, batch.num_rows
        query, key, value = torch.split(qkv[:rows], [config.q_size, config.kv_size, config.kv_size], dim=-1)
        heads = query.reshape(rows, config.num_heads, config.head_dim).float()
        key_heads = key.reshape(rows, config.num_kv_heads, config.head_dim).float()
        if kind.query_norm is not None and kind.key_norm is not None:
            heads = _rms_norm(heads, kind.query_norm, config.rms_norm_eps)
            key_heads = _rms_norm(key_heads, kind.key_norm, config.rms_norm_eps)
        query, key = (_rotate(each, kind.rope, batch.positions).to(self._dtype) for each in (heads, key_heads))
        self._store(key, value.view(rows, config.num_kv_heads, config.head_dim), layer, cache, batch)
        out = [self._attend_row(query[row], row, layer, kind.window, cache, batch) for row in range(rows)]
        return functional.pad(torch.stack(out), (0, 0, 0, qkv.shape[0] - rows))

    @staticmethod
    def _store(key: torch.Tensor, value: torch.Tensor, layer: int, cache: KVCache, batch: StepBatch) -> None:
        block, offset = batch.slots.long() // cache.block_size, batch.slots.long() % cache.block_size
        if cache.key_scales is not None and cache.value_scales is not None:
            key, cache.key_scales[layer, block, :, offset] = quantise(key)
            value, cache.value_scales[layer, block, :, offset] = quantise(value)
        cache.keys[layer, block, :, :, offset] = key
        cache.values[layer, block, :, offset, :] = value

    def _attend_row(
        self, query: torch.Tensor, row: int, layer: int, window: int | None, cache: KVCache, batch: StepBatch
    ) -> torch.Tensor:
        config = self._config
        known = int(batch.positions[row]) + 1
        first = 0 if window is None else max(0, known - window)
        blocks = batch.block_tables[batch.sequences[row]][: -(-known // cache.block_size)].long()
        # [heads, head_dim, positions] and [heads, positions, head_dim] of this sequence, as if they had been contiguous
        keys = cache.keys[layer, blocks].permute(1, 2, 0, 3).flatten(2)[:, :, first:known].float()
        values = cache.values[layer, blocks].transpose(0, 1).flatten(1, 2)[:, first:known].float()
        if cache.key_scales is not None and cache.value_scales is not None:
            keys = keys * _of_sequence(cache.key_scales[layer, blocks])[:, None, first:known]
            values = values * _of_sequence(cache.value_scales[layer, blocks])[:, first:known, None]
        grouped = query.float().view(config.num_kv_heads, -1, config.head_dim)
        weights = torch.softmax(grouped @ keys * config.score_scale, dim=-1)
        return (weights @ values).flatten().to(self._dtype)


def quantise(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, heads, head_dim] as int8 and bf16 scales [rows, heads]: a head is what its bytes are times its scale.

    The scale is rounded up to bf16, so that no byte is beyond 127.
    """
    largest = heads.float().abs().amax(-1) / 127
    scales = ((largest.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    steps = heads.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return steps.round().to(torch.int8), scales.to(torch.bfloat16)


def _of_sequence(scales: torch.Tensor) -> torch.Tensor:
    """[blocks, heads, block_size] -> [heads, positions]"""
    return scales.transpose(0, 1).flatten(1).float()


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(heads: torch.Tensor, rope: RopeTable, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = rope.cos[positions][:, None], rope.sin[positions][:, None]
    a, b = heads.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
