"""The contract between the model and the code that runs on one kind of device.

A step is a flat batch of rows: every decoding sequence adds one, every chunk of a prompt as many as it has tokens.
`StepBatch` says where each row belongs. A `Backend` computes what lies between the matrix products: norms, the
activation, and attention over the paged cache.

What a backend owes the engine: the result for one row depends on that row, its position and its sequence's keys and
values alone - not on what else is in the step, nor on how a prompt was cut into chunks. The exactness tests compare
with `==`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import torch

from native_engine.models.config import ModelConfig, Rope


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Rows of one step; the index tensors are int32 and contiguous. A slot is `block * block_size + offset`."""

    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows]: where the row's own key and value go
    sequences: torch.Tensor  # [rows]: the row's line in `block_tables`
    block_tables: torch.Tensor  # [sequences, width]

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers. Keys lie column by column: scores of neighbouring positions form vectors.

    keys    [layers, blocks, kv_heads, head_dim, block_size]
    values  [layers, blocks, kv_heads, block_size, head_dim]

    An int8 cache has a bf16 scale for each token and head beside each block: scales [layers, blocks, kv_heads,
    block_size]. bf16, not fp16: no scale is too small or too large for it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @classmethod
    def allocate(cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCache:
        # zeros, not empty: the pages are then mapped before the first request pays for them
        lead = (config.num_layers, num_blocks, config.num_kv_heads)
        return cls(
            keys=torch.zeros(*lead, config.head_dim, block_size, dtype=dtype),
            values=torch.zeros(*lead, block_size, config.head_dim, dtype=dtype),
            key_scales=torch.zeros(*lead, block_size, dtype=torch.bfloat16) if dtype is torch.int8 else None,
            value_scales=torch.zeros(*lead, block_size, dtype=torch.bfloat16) if dtype is torch.int8 else None,
        )

    def copy_blocks(self, copies: SequenceOf[tuple[int, int]], source: KVCache | None = None) -> None:
        """(source, target) pairs of blocks, in all layers, from `source` or within this cache. Every source is read
        before any target is written."""
        sources, targets = torch.tensor(copies).unbind(1)
        for target, origin in zip(self.tensors, (source or self).tensors, strict=True):
            target[:, targets] = origin[:, sources]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that a block consists of: [layers, blocks, ...]."""
        scales = (self.key_scales, self.value_scales)
        return (self.keys, self.values, *(each for each in scales if each is not None))

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[4]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin of every position, times the rope's amplitude; fp32 [max_position, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(cls, rope: Rope, head_dim: int, max_position: int) -> RopeTable:
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * rope.inv_freq(head_dim)[None, :]
        return cls((angles.cos() * rope.amplitude).contiguous(), (angles.sin() * rope.amplitude).contiguous())


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer's attention has of its own. A norm's weight is fp32 [head_dim]."""

    rope: RopeTable
    window: int | None = None  # how many positions a row sees, its own included; None: all before it
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None


class Backend(Protocol):
    """For one model and one activation type. A returned tensor is valid until the next call of the same method."""

    name: str
    cache_dtype: torch.dtype
    kernels: str  # equal where the same code computes

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        delta_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`residual` (fp32) += `delta`, in place; returns the normalised sum in the activation type.

        With a `delta_weight`, `delta` is normalised itself before it is added.
        """
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2 * size] -> activation(first half) * second half."""
        ...

    def attention(
        self, qkv: torch.Tensor, layer: int, kind: LayerAttention, cache: KVCache, batch: StepBatch
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys, write keys and values into the cache, attend.
        [rows, q + 2 kv] -> [rows, q].

        `qkv` may be overwritten. It may have more rows than the step: padding, whose result is finite but meaningless.
        """
        ...
