"""Llama (SmolLM2, TinyLlama, Llama 2 and 3): one forward pass over a flat step of rows.

    model = Llama(checkpoint, torch.bfloat16, backend)
    logits = model.forward(token_ids, batch, cache, sample_rows)   # [len(sample_rows), vocab]; None without sample rows

Decodes and chunks of prompts lie side by side in one [rows, hidden] matrix, so each weight is read once a step. The
residual stream is fp32. After the last attention only the rows that are to be sampled go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from native_engine.attention.base import Backend, KVCache, StepBatch
from native_engine.layers import Linear, make_linear, padded_rows
from native_engine.weights import Checkpoint, ModelConfig


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: Linear
    out: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Llama:
    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, backend: Backend) -> None:
        self.config: ModelConfig = checkpoint.config
        self.dtype = dtype
        self.cache_dtype = backend.cache_dtype
        self.kernels = backend.kernels
        self._backend = backend
        embedding = checkpoint.tensor("model.embed_tokens.weight")
        head = embedding if self.config.tied_embeddings else checkpoint.tensor("lm_head.weight")
        self._embedding = embedding.to(dtype)
        self._head = make_linear(head, dtype)
        self._norm = checkpoint.tensor("model.norm.weight")
        self._layers = [_load_layer(checkpoint, layer, dtype) for layer in range(self.config.num_layers)]

    def forward(
        self, token_ids: torch.Tensor, batch: StepBatch, cache: KVCache, sample_rows: torch.Tensor
    ) -> torch.Tensor | None:
        """`token_ids` and `sample_rows` are int64. Writes keys and values; returns the logits of `sample_rows`."""
        norm, eps = self._backend.add_rms_norm, self.config.rms_norm_eps
        residual = functional.embedding(_pad(token_ids), self._embedding).float()
        delta: torch.Tensor | None = None
        last = len(self._layers) - 1
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(norm(residual, delta, layer.input_norm, eps))
            attended = self._backend.attention(qkv, number, cache, batch)
            if number == last:
                if not len(sample_rows):
                    return None
                rows = _pad(sample_rows)
                attended, residual = attended[rows], residual[rows]
            gate_up = layer.gate_up(norm(residual, layer.out(attended), layer.ffn_norm, eps))
            delta = layer.down(self._backend.silu_mul(gate_up))
        return self._head(norm(residual, delta, self._norm, eps))[: len(sample_rows)]


def _pad(indices: torch.Tensor) -> torch.Tensor:
    """Zeros at the end, up to a row count that the matrix products take. Rows do not touch, so any index would do."""
    return functional.pad(indices, (0, padded_rows(len(indices)) - len(indices)))


def _load_layer(checkpoint: Checkpoint, number: int, dtype: torch.dtype) -> Layer:
    def read(*names: str) -> torch.Tensor:
        tensors = [checkpoint.tensor(f"model.layers.{number}.{name}.weight") for name in names]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]

    return Layer(
        input_norm=read("input_layernorm"),
        qkv=make_linear(read("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), dtype),
        out=make_linear(read("self_attn.o_proj"), dtype),
        ffn_norm=read("post_attention_layernorm"),
        gate_up=make_linear(read("mlp.gate_proj", "mlp.up_proj"), dtype),
        down=make_linear(read("mlp.down_proj"), dtype),
    )
